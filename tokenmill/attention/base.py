"""The one interface of attention: a `Backend` plans a step once and then runs every layer of it.

Shapes: T tokens of the step, R rows (sequences) of the step, S slots (persistent rows), H query heads,
K key/value heads, D head size, P pages of a row's table, N pages in the pool, B tokens per page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill.kernels.operands import HeadNorms, Heads, Rotation
from tokenmill.kernels.sharing import SharedPrefixes, SharingCosts


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The facts of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a token sees itself and the `window - 1` tokens before it
    group: int = 0  # page group whose page table and pool the layer uses


@dataclass(slots=True)
class StepLayout:
    """Where each token of a step stands. Tensors are on the model's device, `host_*` are plain numbers.

    Rows that decode (one query token) come first: rows and tokens [0, num_decodes).
    """

    positions_T: torch.Tensor  # int64, position of each token in its sequence
    # One entry per page group:
    slot_mapping_T: tuple[torch.Tensor, ...]  # int64, page * B + offset: where the token's key and value go
    page_table_RP: tuple[torch.Tensor, ...]  # int32, pages of each row; columns past the length are undefined
    query_starts: torch.Tensor  # int32 [R + 1], first token of each row in the step
    lengths_R: torch.Tensor  # int32, tokens of the row including this step's (keys to attend to)
    num_decodes: int
    host_query_lengths: list[int]  # [R]
    host_lengths: list[int]  # [R]
    # Keys that decoding rows share, for backends with `sharing`. They may be ignored: nothing else changes.
    shared: SharedPrefixes | None = None


class Backend(Protocol):
    """Writes keys and values into the paged pool and attends to them. Stateless between steps.

    Constructed as `Backend(specs, key_caches, value_caches, page_size)`: one entry per layer,
    caches of shape [N, B, K, D] (any strides with the last dimension contiguous).
    """

    # When reading a shared prefix once for several rows pays; None: the backend does not do that.
    sharing: SharingCosts | None

    def plan(self, layout: StepLayout) -> None:
        """Prepare for one step; called once before the layers run."""

    def run(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int) -> torch.Tensor:
        """Store this step's keys and values, then return the attention output [T, H, D]."""

    def run_product(
        self,
        product_TSD: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        layer: int,
        needed_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`run` on queries, keys and values still to be normalised and rotated: [T, H + 2K, D].

        With `needed_N` (int64) the answer is [N, H, D], for these tokens: all that decode, then any others.
        """

    def decoding(self, rotation: Rotation, norms: HeadNorms | None, layer: int) -> Decoding | None:
        """For a product that normalises, rotates and stores heads itself. None: `run_product` has to."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """What is to become of a product of queries, keys and values where each row computes one token."""

    heads: Heads
    # From queries [T, H, D] to the attention output [T, H, D], once `heads` have been stored.
    attend: Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Step:
    """What a model sees of a step: positions, and a planned attention backend. Blind to requests."""

    positions_T: torch.Tensor  # int64
    attention: Backend
    # Tokens whose final hidden states are asked for (int64); None: all. What the last layer does after its
    # attention is computed for them only.
    needed_N: torch.Tensor | None = None
    # The keys and values of each layer; without them a captured step runs all of its layers.
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    # The last layer alone: what comes out means nothing, but the kernels of all layers have been launched.
    is_rehearsal: bool = False
