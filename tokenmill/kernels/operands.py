"""Tensors that go into fused kernels together. S slots (persistent rows), B rows of a step, G page groups, C
columns of a page table; D head size, I inputs of a product, T tokens, R half of the
rotated dimensions; caches are [N, B, K, D]: pages, tokens of a page, key heads.
Letters are [N, L] and [N, B]: letters, numbers of one, rows of a step."""

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
class UnscaledRows:
    """What a norm is of, up to a factor of each row: numbers [N, I] times the norm's weight, sums of the
    squares of C parts of each row without it (float32), and the norm's epsilon."""

    numbers_NI: torch.Tensor
    squares_CN: torch.Tensor
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


@dataclass(frozen=True, slots=True)
class Heads:
    """What becomes of a product: queries and keys are normalised, if there are norms, and rotated; keys and
    values are stored."""

    rotation: Rotation
    norms: HeadNorms | None
    cache: CacheSlots

    @property
    def head_dim(self) -> int:
        return self.cache.key_cache_NBKD.shape[3]


@dataclass(frozen=True, slots=True)
class RowState:
    """What the device holds of every slot between steps."""

    last_token_S: torch.Tensor  # int64
    page_table_GSC: torch.Tensor  # int32
    temperature_S: torch.Tensor  # float32
    top_k_S: torch.Tensor  # int32
    top_p_S: torch.Tensor  # float32
    min_p_S: torch.Tensor  # float32
    seed_S: torch.Tensor  # int64


@dataclass(frozen=True, slots=True)
class StepRows:
    """The same of the rows of a step that compute one token each."""

    slot_B: torch.Tensor  # int64
    token_id_B: torch.Tensor  # int64
    position_B: torch.Tensor  # int64, of the token to compute
    length_B: torch.Tensor  # int32, with that token
    page_table_GBC: torch.Tensor  # int32
    cache_slot_GB: torch.Tensor  # int64, page * page size + offset: where the token's key and value go
    temperature_B: torch.Tensor
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_p_B: torch.Tensor
    seed_B: torch.Tensor
    drawn_position_B: torch.Tensor  # int64, of the token that the step draws


@dataclass(frozen=True, slots=True)
class Letters:
    """What host and device leave each other for a step, taken one after the other, from the first again after
    the last."""

    inputs_NL: torch.Tensor  # int32, of the host's memory, where the device can read it
    answers_NB: torch.Tensor  # int64, the same
    turn_1: torch.Tensor  # int64, of the device: how many letters were taken
