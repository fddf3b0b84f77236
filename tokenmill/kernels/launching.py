"""What kernels are chosen by, beside their operands: whether launches are recorded to be replayed, when
it does not matter what one costs the host; whether rows must get the same bits beside any others; whether
a step is run to see how much memory steps may take; how many multiprocessors there are for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

_Value = TypeVar("_Value")
_REPLAYED = ContextVar("replayed", default=False)
_INVARIANT = ContextVar("invariant", default=False)
_MEASURED = ContextVar("measured", default=False)
_PROCESSORS = ContextVar("processors", default=0)


def replayed() -> AbstractContextManager[None]:
    """What is launched inside, on this thread, goes into a graph (or is compiled for one)."""
    return _within(_REPLAYED, True)


def are_replayed() -> bool:
    """Whether kernels that are slow to launch, but quick, are the better choice."""
    return _REPLAYED.get()


def invariant(wanted: bool = True) -> AbstractContextManager[None]:
    """What is computed inside, on this thread, is summed in an order that no other row has a say in."""
    return _within(_INVARIANT, wanted)


def is_invariant() -> bool:
    """Whether rows must be computed as if each were alone; ways that are only quick are shut."""
    return _INVARIANT.get()


def measured() -> AbstractContextManager[None]:
    """What is launched inside, on this thread, tells how much memory a step of no more rows may take."""
    return _within(_MEASURED, True)


def is_measured() -> bool:
    """Whether ways that take less memory are shut, where other numbers of rows would not go them."""
    return _MEASURED.get()


def on_processors(count: int) -> AbstractContextManager[None]:
    """What is launched inside, on this thread, has only so many multiprocessors of its device."""
    return _within(_PROCESSORS, count)


def given_processors() -> int:
    """How many multiprocessors there are for what is launched; 0: all of the device."""
    return _PROCESSORS.get()


@contextmanager
def _within(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
