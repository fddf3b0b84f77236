"""How a thread does much for many rows: letting the core's thread in between, and without the collector."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

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


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """While many objects are made that stay and have no cycles: looking through them is for nothing."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()
