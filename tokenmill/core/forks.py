"""A core in a process that was forked from the one that opened it: refused, instead of waited for.

Such a process has neither the core's thread nor its answers, yet all that it would send reaches the core.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tokenmill.errors import check_process
from tokenmill.messages import AnswerSink, Core, EngineFacts, Need, Request


class OwnCore:
    """A core for the process that opened it alone. See `Core`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._process_id = os.getpid()

    @property
    def facts(self) -> EngineFacts:
        """See `Core`."""
        return self._core.facts

    @property
    def need(self) -> Need:
        """See `Core`."""
        return self._core.need

    def submit(self, requests: Sequence[Request]) -> None:
        """See `Core`. Raises `WrongState` in another process."""
        check_process(self._process_id)
        self._core.submit(requests)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """See `Core`. In another process, a copy of a stream that comes to its end ends nothing."""
        if self._is_here:
            self._core.cancel(request_ids)

    def call(self, name: str, *, answered: AnswerSink | None = None, **arguments: Any) -> Any:
        """See `Core`. Raises `WrongState` in another process."""
        check_process(self._process_id)
        return self._core.call(name, answered=answered, **arguments)

    def close(self) -> None:
        """See `Core`. What ends in another process is a copy of the engine."""
        if self._is_here:
            self._core.close()

    @property
    def _is_here(self) -> bool:
        return os.getpid() == self._process_id
