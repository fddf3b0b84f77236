"""What kernels are chosen by, beside their operands: whether launches are recorded to be replayed, when
it does not matter what one costs the host; whether rows must get the same bits beside any others; whether
a step is run to see how much memory steps may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_REPLAYED = ContextVar("replayed", default=False)
_INVARIANT = ContextVar("invariant", default=False)
_MEASURED = ContextVar("measured", default=False)


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


@contextmanager
def invariant(wanted: bool = True) -> Iterator[None]:
    """What is computed inside, on this thread, is summed in an order that no other row has a say in."""
    before = _INVARIANT.set(wanted)
    try:
        yield
    finally:
        _INVARIANT.reset(before)


def is_invariant() -> bool:
    """Whether rows must be computed as if each were alone; ways that are only quick are shut."""
    return _INVARIANT.get()


@contextmanager
def measured() -> Iterator[None]:
    """What is launched inside, on this thread, tells how much memory a step of no more rows may take."""
    before = _MEASURED.set(True)
    try:
        yield
    finally:
        _MEASURED.reset(before)


def is_measured() -> bool:
    """Whether ways that take less memory are shut, where other numbers of rows would not go them."""
    return _MEASURED.get()
