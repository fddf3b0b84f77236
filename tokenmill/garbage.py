"""Python's collector of garbage, held back where it would only look through what stays.

It looks through everything in the process every few thousand rows, for a quarter of a second each time, in
which no other thread gets on.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time

_COLLECTION_SECONDS = 60.0
_MANY_YOUNG = 1000  # objects, through which it looks in some tenths of a millisecond
_MANY_ASIDE = 1000  # objects; Python itself begins with some, 375 of version 3.12


class _Holds:
    """The blocks of all threads in which the collector is to be off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_on = False
        self._due = 0.0

    def add(self) -> None:
        with self._lock:
            is_first = self._count == 0
            if is_first:
                self._was_on = gc.isenabled()
                self._due = time.monotonic() + _COLLECTION_SECONDS
            self._count += 1  # before it is off: a process that is forked between the two knows of it
            if is_first:
                gc.disable()

    def remove(self) -> None:
        with self._lock:
            if self._count == 1 and self._was_on:
                gc.enable()
            self._count = max(0, self._count - 1)  # 0 already if the process was forked within the block

    def forget(self) -> None:
        """In a forked process: the other threads are gone with their blocks, and whoever held the lock."""
        self._lock = threading.Lock()
        if self._count and self._was_on:
            gc.enable()
        self._count = 0

    def collect_if_due(self) -> None:
        if not self._was_on:
            return
        if time.monotonic() > self._due:
            self._due = time.monotonic() + _COLLECTION_SECONDS
            gc.collect()
        elif gc.get_count()[0] > _MANY_YOUNG:
            gc.collect(0)


_holds = _Holds()
if hasattr(os, "register_at_fork"):  # else this system forks no processes
    os.register_at_fork(after_in_child=_holds.forget)


class uncollected(contextlib.ContextDecorator):
    """While many objects are made that stay or have no cycles. Blocks may overlap, also in other threads.

    No generator: some rows pass several of these blocks, and a generator takes a microsecond in each.
    """

    def __enter__(self) -> None:
        _holds.add()

    def __exit__(self, *_: object) -> None:
        _holds.remove()


def collect_if_due() -> None:
    """To be called now and then in a long `uncollected` block: collects once in a minute after all.

    Others may make garbage meanwhile. Where the collector was off already, it stays off. Young objects are
    looked through whenever they are many: at the end of the block the collector would look through all that
    were made in it, while the caller waits.
    """
    _holds.collect_if_due()


def make_old() -> None:
    """Count all objects that there are among the oldest, through which the collector looks most seldom.

    It would find that out by looking through all of them three times.
    """
    if gc.get_freeze_count() < _MANY_ASIDE:  # else somebody else has put them aside for good
        gc.freeze()
        gc.unfreeze()
