"""A step recorded as the calls of C kernels that it makes, to be made again in one.

The CPU's counterpart of a CUDA graph: a replay reads and writes the tensors of the recorded step, so whoever
records puts new inputs where the old ones were. It spares the host the calls one by one, which in a step of
few rows take as long as a third of the kernels.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_char, c_long, c_void_p
from itertools import repeat
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Functions and methods of torch that a replay need not call again: what takes memory, what looks at a tensor,
# and what shows it in another shape, unless it has to copy for that.
_TAKES_MEMORY = frozenset({"empty", "empty_like"})
_LOOKS = frozenset({
    "__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride",
    "zeros_like",
})  # fmt: skip
_RESHAPES = frozenset({
    "__getitem__", "contiguous", "expand", "flatten", "reshape", "select", "split", "squeeze", "unflatten",
    "unsqueeze", "view",
})  # fmt: skip
_RECORDABLE = _TAKES_MEMORY | _LOOKS | _RESHAPES


class NotRecordable(Exception):
    """Something ran that no tape holds."""


class TapeMemory:
    """Memory for what recorded steps compute on their way, given again when nobody has the tensor any more.

    Steps that never run at the same time may share one.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []  # uint8
        self._free: list[torch.Tensor] = []
        self._given: dict[int, weakref.ref[Any]] = {}  # by address

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        address = tensor.data_ptr()
        return any(0 <= address - block.data_ptr() < block.nbytes for block in self._blocks)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this memory, with the shape and dtype of a contiguous one; its numbers are not set."""
        block = self._block(tensor.nbytes)
        address, free = block.data_ptr(), self._free  # and not this object, which holds what is given
        # Whoever holds the tensor, or a view of it, holds this array.
        array = (c_char * tensor.nbytes).from_address(address)
        self._given[address] = weakref.ref(array, lambda _: free.append(block))
        return torch.frombuffer(array, dtype=tensor.dtype).view(tensor.shape)

    def _block(self, num_bytes: int) -> torch.Tensor:
        """The smallest free block that is large enough, or a new one."""
        fitting = [
            place for place, block in enumerate(self._free) if num_bytes <= block.nbytes <= 2 * num_bytes
        ]
        if fitting:
            return self._free.pop(min(fitting, key=lambda place: self._free[place].nbytes))
        self._blocks.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self._blocks[-1]


def run(kernels: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call a function of cpu.c, as an event of the profile if there is one."""
    function = getattr(kernels, name)
    if torch.autograd.profiler._is_profiler_enabled and recorded() is None:
        with torch.profiler.record_function(f"tokenmill::{name}"):
            function(*arguments)
    else:
        function(*arguments)


class _Call(ctypes.Structure):
    """`struct call` of cpu.c."""

    _fields_ = [("run", c_void_p), ("arguments", c_void_p)]


class Tape:
    """Calls in the order in which they were made. Keeps alive what they read and write."""

    def __init__(self, memory: TapeMemory) -> None:
        self._memory = memory
        self._calls: list[_Call] = []
        self._kept: list[object] = []
        self._kernels: ctypes.CDLL | None = None
        self._array: ctypes.Array[_Call] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, kernels: ctypes.CDLL, name: str, arguments: bytes, kept: Sequence[object]) -> None:
        """A call that was made: its function, its struct, and what that points to."""
        struct = ctypes.create_string_buffer(arguments)
        address = ctypes.cast(getattr(kernels, name), c_void_p).value
        self._calls.append(_Call(address, ctypes.addressof(struct)))
        self._kept.append(struct)
        for each in kept:
            if not isinstance(each, torch.Tensor) or not self._memory.owns(each):
                self._kept.append(each)
        self._kernels = kernels

    def replay(self) -> None:
        """Make all calls again."""
        assert self._kernels is not None, "an empty tape"
        if self._array is None:
            self._array = (_Call * len(self._calls))(*self._calls)
        run(self._kernels, "replay", self._array, c_long(len(self._array)))


class _OnlyKernels(TorchFunctionMode):
    """Nothing of torch may compute while a tape is recorded: a replay would leave it out."""

    def __init__(self, memory: TapeMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        if name not in _RECORDABLE:
            raise NotRecordable(name)
        made = function(*arguments, **(keywords or {}))
        if name in _TAKES_MEMORY:
            return self._memory.like(made) if made.is_contiguous() and made.nbytes else made
        if name in _RESHAPES and any(map(_is_elsewhere, _tensors(made), repeat(arguments[0]))):
            raise NotRecordable(f"{name} copies")
        return made


def _tensors(made: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [made] if isinstance(made, torch.Tensor) else made


def _is_elsewhere(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


class _Recording(threading.local):
    """The tape of a thread. It is state of a module, as a capture of CUDA's is of a stream: the calls that it
    is about are made far below whoever asks for it."""

    tape: Tape | None = None


_recording = _Recording()


def recorded() -> Tape | None:
    """The tape to which this thread's calls are to be added."""
    return _recording.tape


@contextmanager
def recording(memory: TapeMemory) -> Iterator[Tape]:
    """Record what runs inside, while it runs; raises `NotRecordable` at what cannot be."""
    tape = Tape(memory)
    _recording.tape = tape
    try:
        with _OnlyKernels(memory):
            yield tape
    finally:
        _recording.tape = None
