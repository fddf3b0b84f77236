"""Attention on a CPU in C: rows that decode and short prompts. Long prompts go the way of `torch`.

The kernel reads pages where they lie, so a step gathers and masks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tokenmill.attention.base import AttentionSpec, StepLayout
from tokenmill.attention.torch_backend import TorchBackend
from tokenmill.kernels import native, native_calls
from tokenmill.kernels.operands import HeadNorms, Rotation
from tokenmill.kernels.rotary import heads_of_product
from tokenmill.kernels.sharing import SharingCosts

# A prompt with at most this many pairs of query and key is attended to query by query. Above it the matrix
# products of `TorchBackend` win over the calls that they take.
SHORT_PAIRS = 128 * 128
# A row of at most this many tokens goes query by query, too, whatever part of it a step computes: products
# round otherwise, and its answer would depend on what was in the cache.
SHORT_ROW = 256


@dataclass(frozen=True, slots=True)
class _Queries:
    """Tokens [start, stop) of the step, each with its page table (int32) and the keys it sees (int32)."""

    start: int
    stop: int
    page_table_QP: torch.Tensor
    lengths_Q: torch.Tensor


class NativeBackend:
    """See `base.Backend`. Keys and values of a layer have equal strides; float32 or bfloat16."""

    _all_are_short = False  # whether every prompt is attended to query by query

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        key_caches: Sequence[torch.Tensor],
        value_caches: Sequence[torch.Tensor],
        page_size: int,
    ) -> None:
        kernels = native.library(key_caches[0].dtype)
        assert kernels is not None, "whoever chooses this backend has asked for the kernels"
        self.sharing: SharingCosts | None = None
        self._specs = tuple(specs)
        self._caches = [
            native_calls.PagedCaches(kernels, *pair) for pair in zip(key_caches, value_caches, strict=True)
        ]
        self._products = TorchBackend(specs, key_caches, value_caches, page_size)
        self._layout: StepLayout | None = None
        self._queries: dict[int, list[_Queries]] = {}  # by page group

    def plan(self, layout: StepLayout) -> None:
        """Say which tokens go which way."""
        rows = range(layout.num_decodes, len(layout.host_lengths))
        short = [
            row
            for row in rows
            if self._all_are_short
            or layout.host_lengths[row] <= SHORT_ROW
            or layout.host_query_lengths[row] * layout.host_lengths[row] <= SHORT_PAIRS
        ]
        self._layout = layout
        self._queries = {
            group: _queries(layout, group, short) for group in {spec.group for spec in self._specs}
        }
        self._products.plan_prefills(layout, sorted(set(rows).difference(short)))

    def run(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int) -> torch.Tensor:
        """Store keys and values, then attend; inputs may be strided views, the result is contiguous."""
        assert self._layout is not None, "plan() comes first"
        spec, caches = self._specs[layer], self._caches[layer]
        caches.store(k_TKD, v_TKD, self._layout.slot_mapping_T[spec.group])
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        for queries in self._queries[spec.group]:
            tokens = slice(queries.start, queries.stop)
            caches.decode(
                q_THD[tokens],
                queries.page_table_QP,
                queries.lengths_Q,
                window=spec.window,
                scale=spec.scale,
                out_RHD=out_THD[tokens],
            )
        self._products.attend_prefills(q_THD, k_TKD, v_TKD, layer, out_THD=out_THD)
        return out_THD

    def run_product(
        self,
        product_TSD: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        layer: int,
        needed_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `base.Backend`."""
        num_kv_heads = self._specs[layer].num_kv_heads
        out_THD = self.run(*heads_of_product(product_TSD, rotation, norms, num_kv_heads), layer)
        return out_THD if needed_N is None else out_THD[needed_N]

    def decoding(self, rotation: Rotation, norms: HeadNorms | None, layer: int) -> None:
        """See `base.Backend`; nothing would be gained."""


class InvariantNativeBackend(NativeBackend):
    """One that gives a token the same bits whatever else a step holds; long prompts take longer."""

    _all_are_short = True


def _queries(layout: StepLayout, group: int, short_rows: list[int]) -> list[_Queries]:
    """The decoding rows in one piece, then the short prompts, whose tokens share their row's pages."""
    page_table_RP, num_decodes = layout.page_table_RP[group], layout.num_decodes
    found = []
    if num_decodes:
        found.append(_Queries(0, num_decodes, page_table_RP[:num_decodes], layout.lengths_R[:num_decodes]))
    if not short_rows:
        return found
    starts = list(accumulate(layout.host_query_lengths, initial=0))
    keys_seen_T = (layout.positions_T + 1).to(torch.int32)
    for row in short_rows:
        tokens = slice(starts[row], starts[row + 1])
        table_QP = page_table_RP[row : row + 1].expand(tokens.stop - tokens.start, -1)
        found.append(_Queries(tokens.start, tokens.stop, table_QP, keys_seen_T[tokens]))
    return found
