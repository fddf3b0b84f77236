"""Tensors that go into fused kernels together. D head size, I inputs of a product, T tokens, R half of the
rotated dimensions; caches are [N, B, K, D]: pages, tokens of a page, key heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [T, R] of the step's positions


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm in front of a product: its weight [I] and epsilon."""

    weight_I: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each query head and of each key head: weights [D] and epsilon."""

    query_D: torch.Tensor
    key_D: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class CacheSlots:
    """Where a step's keys and values go: token t to slot `slots_T[t]` (int64, page * B + offset)."""

    key_cache_NBKD: torch.Tensor
    value_cache_NBKD: torch.Tensor  # same strides as the keys
    slots_T: torch.Tensor
