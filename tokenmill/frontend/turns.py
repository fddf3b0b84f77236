"""How a thread does much for many rows: letting the core's thread in between."""

from __future__ import annotations

import time
from collections.abc import Callable

from tokenmill.messages import Need

# Longest that a thread works on rows before the core's thread gets a turn; it would wait 5 ms for one.
_TURN_SECONDS = 0.0002
# While a device waits for that thread, this one sleeps so long and so often at most before its next turn.
_NAP_SECONDS = 0.0002
_MOST_NAPS = 16


class Turns:
    """The turns of one piece of work."""

    def __init__(self, core_need: Callable[[], Need]) -> None:
        """`core_need` tells how much the core's thread needs the interpreter."""
        self._core_need = core_need
        self._due = time.perf_counter() + _TURN_SECONDS

    def give_way(self) -> None:
        """Called between two rows: lets go of the interpreter if it was held for long enough."""
        if time.perf_counter() > self._due:
            if self._core_need() != "none":
                time.sleep(0)
                self._let_core_finish()
            self._due = time.perf_counter() + _TURN_SECONDS

    def _let_core_finish(self) -> None:
        for _ in range(_MOST_NAPS):
            if self._core_need() != "now":
                return
            time.sleep(_NAP_SECONDS)
