"""How a thread with much to do for many rows lets the core's thread have the interpreter in between."""

from __future__ import annotations

import time

# Longest that a thread works on rows before the core's thread gets a turn; it would wait 5 ms for one.
_TURN_SECONDS = 0.0002


class Turns:
    """The turns of one piece of work."""

    def __init__(self) -> None:
        self._due = time.perf_counter() + _TURN_SECONDS

    def give_way(self) -> None:
        """Called between two rows: lets go of the interpreter if it was held for long enough."""
        if time.perf_counter() > self._due:
            time.sleep(0)
            self._due = time.perf_counter() + _TURN_SECONDS
