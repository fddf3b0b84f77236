"""Draws under masks as CUDA graphs: the second half of a late decode step, once the host knows its masks.

Host and device take turns in such a step, so the host's part has to be short: one copy, one graph. The copy
has a stream of its own, for it takes longer than the draw, and the forward pass need not end before it.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from tokenmill.messages import IntArray, TokenMasks
from tokenmill.runner.batch import Rows
from tokenmill.runner.drawing import Changes, Sampled, Unsampled, draw_tokens
from tokenmill.runner.recorder import Graph, Recorder
from tokenmill.sampling import SamplingNeeds
from tokenmill.sampling.masks import apply_masks

_log = logging.getLogger("tokenmill")
_EVERYTHING = -1  # 32 bits set


class MaskedDraws:
    """Captures and replays the draws of one runner. Not thread-safe."""

    def __init__(self, rows: Rows, *, vocab_size: int, most_rows: int, recorder: Recorder) -> None:
        self._rows = rows
        self._num_words = -(-vocab_size // 32)
        self._most_rows = most_rows
        self._recorder = recorder
        self._may_capture = True
        self._graphs: dict[tuple[int, SamplingNeeds], Graph[Sampled]] = {}
        self._masks: _DeviceMasks | None = None
        self._staged = torch.empty((0, self._num_words), dtype=torch.int32)  # pinned; grows
        self._masks_memory = _KnownMemory()

    def replay(self, made: Unsampled, slots: IntArray, masks: TokenMasks | None) -> Sampled | None:
        """Queue the draw of a step that a graph made; its first rows are those of `slots`.

        The draw before must be done. What it gives is valid until the next replay. None: there is no
        memory for a graph.
        """
        graph = self._graph(made, self._rows.sampling_needs(slots))
        if graph is None:
            return None
        if masks is not None and np.array_equal(masks.slots, slots):
            source = self._masks_memory.tensor(masks.bits)
        else:
            source = self._staging(len(slots))
            _fill(source.numpy(), slots, masks)
        self._device_masks().write(source)
        graph.replay()
        self._device_masks().were_read()
        return graph.made

    def expect(self, made: Unsampled, needs: SamplingNeeds) -> None:
        """Have a graph for such a draw before it comes, if there is memory for it."""
        self._graph(made, needs)

    def close(self) -> None:
        """Let go of the host's memory; all copies must be done."""
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
        changes = _Masks(self._device_masks().bits_SW[:size])
        return self._recorder.record(
            lambda: draw_tokens(self._rows, made.logits_QV, made.slots_Q, made.columns, needs, changes),
            f"the draw of {size} rows, {needs}",
            may_run=False,  # on the rows of the step at hand; kernel by kernel it may, if this fails
        )

    def _device_masks(self) -> _DeviceMasks:
        if self._masks is None:
            self._masks = _DeviceMasks(self._most_rows, self._num_words, self._rows.device)
        return self._masks

    def _staging(self, num_rows: int) -> torch.Tensor:
        """Pinned memory for the masks of so many rows. For all that there can be it would take 20 ms."""
        if len(self._staged) < num_rows:
            shape = (min(2 * num_rows, self._most_rows), self._num_words)
            self._staged = torch.empty(shape, dtype=torch.int32).pin_memory()
        return self._staged[:num_rows]


class _Masks(Changes):
    """The masks in a buffer of the device, one for each row of the step."""

    def __init__(self, bits_QW: torch.Tensor) -> None:
        self._bits_QW = bits_QW

    def mask(self, logits_QV: torch.Tensor) -> torch.Tensor:
        """See `Changes`."""
        rows_Q = torch.arange(len(self._bits_QW), device=self._bits_QW.device)
        return apply_masks(logits_QV, rows_Q, self._bits_QW)


class _DeviceMasks:
    """Where all graphs look for the masks of their rows. They are copied there on a stream of their own."""

    def __init__(self, num_rows: int, num_words: int, device: torch.device) -> None:
        self.bits_SW = torch.full((num_rows, num_words), _EVERYTHING, dtype=torch.int32, device=device)
        self._usual_stream = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)
        self._written = torch.cuda.Event()
        self._read = torch.cuda.Event()
        self.were_read()

    def write(self, bits_QW: torch.Tensor) -> None:
        """Copy the masks of the first rows; what the usual stream does next finds them there."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._read)
            self.bits_SW[: len(bits_QW)].copy_(bits_QW, non_blocking=True)
            self._written.record(self._stream)
        self._usual_stream.wait_event(self._written)

    def were_read(self) -> None:
        """They are not needed after all that the usual stream has been given so far."""
        self._read.record(self._usual_stream)


class _KnownMemory:
    """The memory of an array that somebody else fills, made known to the device: no copy takes a detour."""

    def __init__(self) -> None:
        self._array: IntArray | None = None

    def tensor(self, bits: IntArray) -> torch.Tensor:
        """The same memory as a tensor; the array that it is part of is kept alive."""
        whole: IntArray = bits if bits.base is None else bits.base
        if whole is not self._array:
            self.release()
            torch.cuda.cudart().cudaHostRegister(whole.ctypes.data, whole.nbytes, 0)
            self._array = whole
        return torch.from_numpy(bits)

    def release(self) -> None:
        """Forget the array."""
        if self._array is not None:
            torch.cuda.cudart().cudaHostUnregister(self._array.ctypes.data)
            self._array = None


def _fill(out: IntArray, slots: IntArray, masks: TokenMasks | None) -> None:
    """The masks of the rows in their order; rows without one may draw everything."""
    out[:] = _EVERYTHING
    if masks is not None:
        row_of_slot = {slot: row for row, slot in enumerate(slots.tolist())}
        for slot, bits in zip(masks.slots.tolist(), masks.bits, strict=True):
            if slot in row_of_slot:
                out[row_of_slot[slot]] = bits
