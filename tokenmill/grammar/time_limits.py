"""Tells when work takes longer than it may: one thread for all that is under way, asleep while nothing is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Generic, TypeVar

_Work = TypeVar("_Work")


class TimeLimits(Generic[_Work]):
    """The same limits for every piece of work. Thread-safe; its own thread starts with the first piece."""

    def __init__(self, *limits: tuple[float, Callable[[_Work], None]]) -> None:
        """Each limit: seconds from the begin of a piece, and what is called with it then, in that thread."""
        self._limits = limits
        # Of the work that is under way: when it passes a limit, and the call that is due then.
        self._alarms: set[tuple[float, partial[None]]] = set()
        self._changed = threading.Condition()
        self._has_thread = False
        self._waits_for_work = False
        self._is_closed = False

    @contextlib.contextmanager
    def watch(self, work: _Work) -> Iterator[None]:
        """The block does this work. If no thread can be had, nobody is told how long it takes."""
        began = time.monotonic()
        alarms = {(began + seconds, partial(call, work)) for seconds, call in self._limits}
        with self._changed:
            self._alarms |= alarms
            if not self._has_thread:
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._tell, name="tokenmill-time-limits", daemon=True).start()
                    self._has_thread = True
            elif self._waits_for_work:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._alarms -= alarms

    def close(self) -> None:
        """Tell nobody any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _tell(self) -> None:
        while calls := self._wait_for_calls():
            for call in calls:
                with contextlib.suppress(RuntimeError):  # it could not have a thread
                    call()

    def _wait_for_calls(self) -> list[partial[None]]:
        """What is due now; nothing any more: nobody is to be told."""
        with self._changed:
            while not self._is_closed:
                alarms, now = sorted(self._alarms, key=itemgetter(0)), time.monotonic()
                due = [alarm for alarm in alarms if alarm[0] <= now]
                if due:
                    self._alarms.difference_update(due)
                    return [call for _, call in due]
                self._waits_for_work = not alarms
                self._changed.wait(alarms[0][0] - now if alarms else None)
                self._waits_for_work = False
        return []
