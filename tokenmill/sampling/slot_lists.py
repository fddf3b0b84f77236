"""Lists of different lengths, one for each slot, in tables on the device.

A step reads as many columns as its own rows fill, whatever the lists of other slots need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_FIRST_COLUMNS = 16


class SlotLists:
    """A list for each of S slots, empty at first. Columns behind the end of a list are 0.

    Columns come in blocks, each as wide as all before it, when the first list reaches so far. A block stays
    where it is, so a captured step goes on reading it.
    """

    def __init__(self, num_slots: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._num_slots = num_slots
        self._dtype = dtype
        self._device = device
        self._blocks: list[torch.Tensor] = []  # [S, columns] each
        self._lengths_S = np.zeros(num_slots, dtype=np.int32)

    def width(self, slots: NDArray[Any], *, least: int = 1) -> int:
        """Columns that a step of these slots reads: a power of two, not below `least`; 0 if all are empty."""
        longest = int(self._lengths_S[slots].max(initial=0))
        return max(least, 1 << (longest - 1).bit_length()) if longest else 0

    def gather(self, slots_R: torch.Tensor, width: int) -> torch.Tensor:
        """The first `width` (above 0) columns of these slots, [R, width]."""
        parts, start = [], 0
        for block in self._blocks:
            if start < width:
                parts.append(block[slots_R, : width - start])
            start += block.shape[1]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def set(self, slots: Sequence[int], lists: Sequence[Sequence[float]]) -> None:
        """Give slots these lists instead of theirs."""
        lengths_N = np.array([len(each) for each in lists], dtype=np.int32)
        slots_N = np.array(slots, dtype=np.int64)
        self._reach(int(lengths_N.max(initial=0)))
        reached_N = np.maximum(lengths_N, self._lengths_S[slots_N])  # what was there before is cleared
        start = 0
        for block in self._blocks:
            rows_M = np.flatnonzero(reached_N > start)
            if not len(rows_M):
                break
            columns = np.zeros((len(rows_M), block.shape[1]))
            for place, row in enumerate(rows_M.tolist()):
                part = lists[row][start : start + block.shape[1]]
                columns[place, : len(part)] = part
            block[to_device(slots_N[rows_M], self._device)] = to_device(columns, self._device, self._dtype)
            start += block.shape[1]
        self._lengths_S[slots_N] = lengths_N

    def clear(self, slots: Sequence[int]) -> None:
        """Empty the lists of these slots."""
        filled = [slot for slot in slots if self._lengths_S[slot]]
        if filled:
            self.set(filled, [()] * len(filled))

    def _reach(self, length: int) -> None:
        """Make the blocks that a list of this length needs."""
        while (have := sum(block.shape[1] for block in self._blocks)) < length:
            shape = (self._num_slots, have or _FIRST_COLUMNS)
            self._blocks.append(torch.zeros(shape, dtype=self._dtype, device=self._device))


def to_device(array: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The array on the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    if device.type == "cpu":
        return tensor
    # Pinned, so that the copy does not make the host wait for the steps in flight.
    return tensor.pin_memory().to(device, non_blocking=True)
