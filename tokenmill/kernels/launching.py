"""Whether launches are recorded to be replayed. Then it does not matter what a launch costs the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_REPLAYED = ContextVar("replayed", default=False)


@contextmanager
def replayed() -> Iterator[None]:
    """What is launched inside, on this thread, goes into a graph (or is compiled for one)."""
    before = _REPLAYED.set(True)
    try:
        yield
    finally:
        _REPLAYED.reset(before)


def are_replayed() -> bool:
    """Whether kernels that are slow to launch, but quick, are the better choice."""
    return _REPLAYED.get()
