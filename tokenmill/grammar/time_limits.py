"""Tells when work takes longer than it may: one thread for all that is under way, asleep while nothing is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_Work = TypeVar("_Work")


class TimeLimits(Generic[_Work]):
    """The same limits for every piece of work. Thread-safe; its own thread starts with the first piece."""

    def __init__(self, *limits: tuple[float, Callable[[_Work], None]]) -> None:
        """Each limit: seconds from the begin of a piece, and what is called with it then, in that thread."""
        self._limits = sorted(limits, key=lambda limit: limit[0])
        self._under_way: list[_UnderWay[_Work]] = []
        self._changed = threading.Condition()
        self._has_thread = False
        self._waits_for_work = False
        self._is_closed = False

    @contextlib.contextmanager
    def watch(self, work: _Work) -> Iterator[None]:
        """The block does this work. If no thread can be had, nobody is told how long it takes."""
        entry = _UnderWay(work)
        with self._changed:
            self._under_way.append(entry)
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
                self._under_way.remove(entry)

    def close(self) -> None:
        """Tell nobody any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _tell(self) -> None:
        while late := self._wait_for_late():
            for call, work in late:
                with contextlib.suppress(RuntimeError):  # it could not have a thread
                    call(work)

    def _wait_for_late(self) -> list[tuple[Callable[[_Work], None], _Work]]:
        """What is to be called now; nothing any more: nobody is to be told."""
        with self._changed:
            while not self._is_closed:
                if late := self._take_late():
                    return late
                seconds = self._seconds_left()
                self._waits_for_work = seconds is None
                self._changed.wait(seconds)
                self._waits_for_work = False
        return []

    def _take_late(self) -> list[tuple[Callable[[_Work], None], _Work]]:
        """The limits that were passed since the last time."""
        late, now = [], time.monotonic()
        for entry in self._under_way:
            for seconds, call in self._limits[entry.num_passed :]:
                if entry.began + seconds <= now:
                    entry.num_passed += 1
                    late.append((call, entry.work))
        return late

    def _seconds_left(self) -> float | None:
        """Until the next limit is passed, if no work ends before; None: there is none left to pass."""
        passed = [
            entry.began + self._limits[entry.num_passed][0]
            for entry in self._under_way
            if entry.num_passed < len(self._limits)
        ]
        return max(0.0, min(passed) - time.monotonic()) if passed else None


class _UnderWay(Generic[_Work]):
    """A piece of work, since when it is under way, and how many limits it has passed."""

    def __init__(self, work: _Work) -> None:
        self.work = work
        self.began = time.monotonic()
        self.num_passed = 0
