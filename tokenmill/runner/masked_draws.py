"""Draws under masks as CUDA graphs: the second half of a late decode step, once the host knows its masks.

Host and device take turns in such a step, so the host's part has to be short: one graph, which reads the
masks where the host has written them. Where the host has time, it copies them beside the forward pass.
"""

from __future__ import annotations

import contextlib
import logging

import numpy as np
import torch

from tokenmill.messages import IntArray, TokenMasks
from tokenmill.runner.batch import Rows
from tokenmill.runner.drawing import Changes, Sampled, Unsampled, draw_tokens
from tokenmill.runner.recorder import Graph, Recorder
from tokenmill.sampling import SamplingNeeds
from tokenmill.sampling.masks import apply_host_masks

_log = logging.getLogger("tokenmill")
_EVERYTHING = -1  # 32 bits set
# How long the host waits for a step if it has time to copy masks, and if it still has while it does.
_SECONDS_TO_BEGIN = 2.5e-4
_SECONDS_LEFT = 5e-5


class MaskedDraws:
    """Captures and replays the draws of one runner. Not thread-safe."""

    def __init__(self, rows: Rows, *, vocab_size: int, most_rows: int, recorder: Recorder) -> None:
        self._rows = rows
        self._num_words = -(-vocab_size // 32)
        self._most_rows = most_rows
        self._recorder = recorder
        self._may_capture = True
        self._graphs: dict[tuple[int, SamplingNeeds], Graph[Sampled]] = {}
        self._masks = _HostMasks(rows.device)
        self._copies = _EarlyCopies((most_rows, self._num_words), rows.device)
        self._staged = torch.empty((0, self._num_words), dtype=torch.int32)  # pinned; grows
        self._masks_memory = _KnownMemory(rows.device)

    def note_wait(self, seconds: float) -> None:
        """How long the host has waited for the step that it collected last."""
        self._copies.waited_seconds = seconds

    def replay(
        self, made: Unsampled, needs: SamplingNeeds, slots: IntArray, masks: TokenMasks | None
    ) -> Sampled | None:
        """Queue the draw of a step that a graph made; its first rows are those of `slots`.

        The draw before must be done. What it gives is valid until the next replay. None: there is no
        memory for a graph.
        """
        graph = self._graph(made, needs)
        if graph is None:
            return None
        bits = self._readable(slots, masks)
        self._masks.are_at(self._copies.address(bits), bits)
        graph.replay()
        return graph.made

    def expect(self, made: Unsampled, needs: SamplingNeeds) -> None:
        """Have a graph for such a draw before it comes, if there is memory for it."""
        self._graph(made, needs)

    def close(self) -> None:
        """Let go of the host's memory, once no draw reads it any more."""
        if self._masks_memory.is_known:
            with contextlib.suppress(RuntimeError):  # the device is lost, then, and reads nothing
                torch.cuda.synchronize(self._rows.device)
            self._masks_memory.release()

    def _graph(self, made: Unsampled, needs: SamplingNeeds) -> Graph[Sampled] | None:
        key = id(made), needs  # the graph that made it keeps it, so there is no other with its identity
        if key not in self._graphs and self._may_capture:
            try:
                self._graphs[key] = self._capture(made, needs)
            except torch.OutOfMemoryError:
                _log.warning("no memory is left to capture draws under masks; no more graphs are captured")
                self._may_capture = False
        return self._graphs.get(key)

    def _capture(self, made: Unsampled, needs: SamplingNeeds) -> Graph[Sampled]:
        size = len(made.logits_QV)
        return self._recorder.record(
            lambda: draw_tokens(self._rows, made.logits_QV, made.slots_Q, made.columns, needs, self._masks),
            f"the draw of {size} rows, {needs}",
            may_run=False,  # on the rows of the step at hand; kernel by kernel it may, if this fails
        )

    def _readable(self, slots: IntArray, masks: TokenMasks | None) -> IntArray:
        """The masks of these rows, in their order, in memory that the device can read."""
        if masks is not None and np.array_equal(masks.slots, slots) and self._masks_memory.knows(masks.bits):
            return masks.bits
        staged = self._staging(len(slots))
        _fill(staged, slots, masks)
        return staged

    def _staging(self, num_rows: int) -> IntArray:
        """Pinned memory for the masks of so many rows. For all that there can be it would take 20 ms."""
        if len(self._staged) < num_rows:
            shape = (min(2 * num_rows, self._most_rows), self._num_words)
            self._staged = torch.empty(shape, dtype=torch.int32).pin_memory()
        staged: IntArray = self._staged[:num_rows].numpy()
        return staged


class _HostMasks(Changes):
    """The masks of a step's first rows, wherever they are when a graph runs."""

    def __init__(self, device: torch.device) -> None:
        self._known = (0, 0, 0)
        self._place_3 = torch.tensor(self._known, dtype=torch.int64, device=device)

    def mask(self, logits_QV: torch.Tensor) -> torch.Tensor:
        """See `Changes`."""
        return apply_host_masks(logits_QV, self._place_3)

    def are_at(self, address: int, bits: IntArray) -> None:
        """For the draws that are queued from now on; mostly they are where they were before."""
        place = (address, bits.strides[0] // bits.itemsize, len(bits))
        if place != self._known:
            self._place_3.copy_(torch.tensor(place, dtype=torch.int64).pin_memory(), non_blocking=True)
            self._known = place


class _EarlyCopies:
    """Masks on the device, copied while it computes what they will be applied to.

    Reading them over the bus takes a draw as long as copying them takes (2.4 MB for 128 rows of 151,936
    tokens, some 50 microseconds); beside the forward pass that is hidden. But a copy costs the host three
    times as much, so it is made only where the host waits for the device, and not the other way round.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._room: _Room | None = None
        self._can_copy = True
        self._are_made = False
        self.waited_seconds = 0.0  # see `MaskedDraws.note_wait`

    def address(self, bits: IntArray) -> int:
        """Where what is queued next in the usual stream had better read them: a copy, or where they are.

        What read the copy before must be done, and `bits` stay as they are until what reads this one is.
        Masks that are wider than the model's vocabulary are not copied: they do not lie side by side.
        """
        # The host waits less where it copies.
        has_time = self.waited_seconds > (_SECONDS_LEFT if self._are_made else _SECONDS_TO_BEGIN)
        self._are_made = False
        if has_time and self._can_copy and bits.flags.c_contiguous:
            try:
                self._room = self._room or _Room(self._shape, self._device)
                address = self._room.copy(bits)
            except RuntimeError:  # want of memory, mostly: they can be read all the same
                self._can_copy = False
            else:
                self._are_made = True
                return address
        return bits.ctypes.data


class _Room:
    """Memory of the device for masks, and a stream that fills it."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._bits = torch.empty(shape, dtype=torch.int32, device=device)
        self._device = device
        # None of those that are captured: torch has 32 of a priority, and hands them out again and again.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._copied = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which may use this memory yet

    def copy(self, bits: IntArray) -> int:
        """The address where they are for what comes next in the current stream."""
        with torch.cuda.stream(self._stream):
            self._bits[: len(bits)].copy_(torch.from_numpy(bits), non_blocking=True)
            self._copied.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self._bits.data_ptr()


class _KnownMemory:
    """The memory of an array that somebody else fills, made known to the device, which can read it then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._array: IntArray | None = None
        self.is_known = False

    def knows(self, bits: IntArray) -> bool:
        """Whether the device can read them; the array that they are part of is kept alive."""
        whole: IntArray = bits if bits.base is None else bits.base
        if whole is not self._array:
            self.release()
            self._array = whole
            cudart = torch.cuda.cudart()
            found = cudart.cudaHostRegister(whole.ctypes.data, whole.nbytes, 0)
            self.is_known = found == cudart.cudaError.success
            if not self.is_known:
                with contextlib.suppress(RuntimeError):  # the next launch is told of it, whoever launches
                    torch.ones(1, device=self._device)
        return self.is_known

    def release(self) -> None:
        """Forget the array; no draw must read it any more."""
        if self._array is not None and self.is_known:
            torch.cuda.cudart().cudaHostUnregister(self._array.ctypes.data)
        self._array, self.is_known = None, False


def _fill(out: IntArray, slots: IntArray, masks: TokenMasks | None) -> None:
    """The masks of the rows in their order; rows without one may draw everything."""
    out[:] = _EVERYTHING
    if masks is not None:
        row_of_slot = {slot: row for row, slot in enumerate(slots.tolist())}
        for slot, bits in zip(masks.slots.tolist(), masks.bits, strict=True):
            if slot in row_of_slot:
                out[row_of_slot[slot]] = bits
