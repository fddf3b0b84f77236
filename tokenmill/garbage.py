"""Python's collector of garbage, held back where it would only look through what stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[bool]:
    """While many objects are made that stay and have no cycles: looking through them is for nothing.

    Gives whether the collector was on.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield is_collecting
    finally:
        if is_collecting:
            gc.enable()


def make_old() -> None:
    """Count all objects that there are among the oldest, through which the collector looks most seldom.

    It would find that out by looking through all of them three times.
    """
    if gc.get_freeze_count() == 0:  # else somebody else has put some aside for good
        gc.freeze()
        gc.unfreeze()
