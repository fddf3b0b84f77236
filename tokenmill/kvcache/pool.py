"""The tensors that hold keys and values, by page; who owns a page is written in the books (`cache.py`).

The only file of this folder that knows torch. Pages of a group have the same numbers in each of its layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for a token: keys and values of `num_kv_heads` heads of `head_dim` numbers."""

    num_kv_heads: int
    head_dim: int
    group: int = 0

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


class PagePool:
    """Keys and values of all layers: `keys[layer]` and `values[layer]` have shape
    [pages, page_size, num_kv_heads, head_dim] and share one allocation per layer.

    Zeroed at first, so that reading a slot that nobody wrote gives finite numbers (masked attention
    multiplies them by zero).
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self._shapes = [(2, num_pages, page_size, layer.num_kv_heads, layer.head_dim) for layer in layers]
        self._dtype = dtype
        self._device = device
        self._storage: list[torch.Tensor] = []
        self.allocate()

    def allocate(self) -> None:
        """Take the memory, zeroed, in place of what was there."""
        self._storage = [_zeros(shape, dtype=self._dtype, device=self._device) for shape in self._shapes]
        self.keys = [storage[0] for storage in self._storage]
        self.values = [storage[1] for storage in self._storage]

    def release(self) -> None:
        """Give the memory back, as soon as nobody else holds `keys` and `values`; until `allocate`."""
        self._storage, self.keys, self.values = [], [], []

    @property
    def num_bytes(self) -> int:
        return sum(storage.numel() * storage.element_size() for storage in self._storage)


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As `torch.zeros`; on a CPU the system gives zeroed memory when it is first touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
    )
