"""A step recorded as the calls of C kernels that it makes, to be made again in one.

The CPU's counterpart of a CUDA graph: a replay reads and writes the tensors of the recorded step, so whoever
records puts new inputs where the old ones were. It spares the host the calls one by one, which in a step of
one row take as long as the kernels.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_long, c_void_p
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# What takes memory or looks at a tensor in another way: nothing that a replay would have to do again.
_HARMLESS = frozenset(
    f"aten.{name}"
    for name in (
        "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh",
        "select", "slice", "split", "split_with_sizes", "squeeze", "unsqueeze", "view", "zeros_like",
    )
)  # fmt: skip


class NotRecordable(Exception):
    """Something ran that no tape holds."""


class _Call(ctypes.Structure):
    """`struct call` of cpu.c."""

    _fields_ = [("run", c_void_p), ("arguments", c_void_p)]


class Tape:
    """Calls in the order in which they were made. Keeps their tensors alive."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._kept: list[object] = []
        self._kernels: ctypes.CDLL | None = None
        self._array: ctypes.Array[_Call] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(
        self, kernels: ctypes.CDLL, name: str, arguments: ctypes.Structure, kept: Sequence[object]
    ) -> None:
        """A call that was made, and what its arguments point to."""
        function = getattr(kernels, name)
        address = ctypes.cast(function, c_void_p).value
        self._calls.append(_Call(address, ctypes.addressof(arguments)))
        self._kept += (arguments, *kept)
        self._kernels = kernels

    def replay(self) -> None:
        """Make all calls again."""
        assert self._kernels is not None, "an empty tape"
        if self._array is None:
            self._array = (_Call * len(self._calls))(*self._calls)
        self._kernels.replay(self._array, c_long(len(self._array)))


class _OnlyKernels(TorchDispatchMode):
    """Nothing of torch may compute while a tape is recorded: a replay would leave it out."""

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = keywords or {}
        if str(function.overloadpacket) in _HARMLESS:
            return function(*arguments, **keywords)
        with self:  # under inference mode, operations made of others come whole
            made = function.decompose(*arguments, **keywords)
        if made is NotImplemented:
            raise NotRecordable(str(function))
        return made


class _Recording(threading.local):
    """The tape of a thread. It is state of a module, as a capture of CUDA's is of a stream: the calls that it
    is about are made far below whoever asks for it."""

    tape: Tape | None = None


_recording = _Recording()


def recorded() -> Tape | None:
    """The tape to which this thread's calls are to be added."""
    return _recording.tape


@contextmanager
def recording() -> Iterator[Tape]:
    """Record what runs inside, while it runs; raises `NotRecordable` at what cannot be."""
    tape = Tape()
    _recording.tape = tape
    try:
        with _OnlyKernels():  # type: ignore[no-untyped-call]
            yield tape
    finally:
        _recording.tape = None
