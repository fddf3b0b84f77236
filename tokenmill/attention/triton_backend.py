"""Attention on the GPU by our own Triton kernels; the mathematics are in `kernels/triton_*.py`.

Only upper bounds are taken from the host's numbers. A step planned from persistent tensors can therefore be
captured in a CUDA graph and replayed after those tensors change, as long as the bounds still hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmill.attention.base import AttentionSpec, Decoding, StepLayout
from tokenmill.kernels import triton_attention, triton_balanced, triton_decode, triton_prefill
from tokenmill.kernels.operands import CacheSlots, HeadNorms, Heads, Rotation
from tokenmill.kernels.runs import Runs, RunShape
from tokenmill.kernels.sharing import SharingCosts
from tokenmill.kernels.spare_rows import empty_rows
from tokenmill.kernels.triton_rotary import rotate_and_store

# The kernels that a step with shared prefixes launches in addition cost about as much as reading this, row by
# row: measured on an H200, where most of it comes out of the L2 cache.
SHARING_BYTES = 54_000_000
SHORTEST_SHARED_SPLIT = 128
# Steps of fewer tokens gain nothing from leaving attention out where it is not needed.
MANY_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class _Work:
    """A planned step: views of the layout's tensors, and bounds for the launches."""

    layout: StepLayout
    longest_decode: int
    longest_query: int
    longest_row: int  # of those with more than one query
    prefill_starts: torch.Tensor  # int32 [prefill rows + 1], their first tokens in the step
    runs: dict[RunShape, Runs]  # of the decoding rows; made when the first layer needs them


class TritonBackend:
    """See `base.Backend`. Keys and values of a layer have equal strides; head sizes from 16 to 256."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        key_caches: Sequence[torch.Tensor],
        value_caches: Sequence[torch.Tensor],
        page_size: int,
    ) -> None:
        for keys, values in zip(key_caches, value_caches, strict=True):
            assert keys.stride() == values.stride(), "keys and values of a layer must be laid out alike"
            assert keys.shape[1] == page_size
        self._specs = tuple(specs)
        self._key_caches = tuple(key_caches)
        self._value_caches = tuple(value_caches)
        # For programs of prompts, which take their tiles from a counter. No two steps with prompts overlap.
        self._taken_2 = torch.zeros(2, dtype=torch.int32, device=key_caches[0].device)
        self._work: _Work | None = None
        # The first layer that attends to whole sequences.
        self._first_whole = next((at for at, spec in enumerate(self._specs) if spec.window is None), None)
        self.sharing = _sharing_costs(self._specs, self._key_caches, self._value_caches)

    def plan(self, layout: StepLayout) -> None:
        """Take note of the step; nothing is copied to or from the device."""
        num_decodes = layout.num_decodes
        self._work = _Work(
            layout=layout,
            longest_decode=max(layout.host_lengths[:num_decodes], default=0),
            longest_query=max(layout.host_query_lengths[num_decodes:], default=0),
            longest_row=max(layout.host_lengths[num_decodes:], default=0),
            prefill_starts=layout.query_starts[num_decodes:],
            runs={},
        )

    def run(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int) -> torch.Tensor:
        """Store keys and values, then attend; inputs may be strided views, the result is contiguous."""
        cache = self._cache_slots(layer)
        triton_attention.store(
            k_TKD,
            v_TKD,
            slots_T=cache.slots_T,
            key_cache_NBKD=cache.key_cache_NBKD,
            value_cache_NBKD=cache.value_cache_NBKD,
        )
        return self._attend(q_THD, k_TKD, v_TKD, layer)

    def run_product(
        self,
        product_TSD: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        layer: int,
        needed_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `base.Backend`; one kernel does everything up to attention."""
        q_THD, k_TKD = rotate_and_store(product_TSD, rotation, norms, self._cache_slots(layer))
        if needed_N is not None and self._are_few(needed_N):
            return self._attend_few(q_THD, needed_N, layer)
        v_TKD = product_TSD[:, -self._specs[layer].num_kv_heads :]
        out_THD = self._attend(q_THD, k_TKD, v_TKD, layer)
        return out_THD if needed_N is None else out_THD[needed_N]

    def decoding(self, rotation: Rotation, norms: HeadNorms | None, layer: int) -> Decoding | None:
        """See `base.Backend`; only where no row computes a prompt."""
        assert self._work is not None, "plan() comes first"
        if self._work.longest_query:
            return None

        def attend(q_THD: torch.Tensor) -> torch.Tensor:
            out_THD = empty_rows(*q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
            self._decode(q_THD, layer, out_RHD=out_THD)
            return out_THD

        return Decoding(Heads(rotation, norms, self._cache_slots(layer)), attend)

    def _cache_slots(self, layer: int) -> CacheSlots:
        assert self._work is not None, "plan() comes first"
        slots_T = self._work.layout.slot_mapping_T[self._specs[layer].group]
        return CacheSlots(self._key_caches[layer], self._value_caches[layer], slots_T)

    def _attend(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Attention over keys and values that are stored; those of this step are given as well."""
        assert self._work is not None, "plan() comes first"
        spec, work, layout = self._specs[layer], self._work, self._work.layout
        out_THD = empty_rows(*q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        split = layout.num_decodes
        if split:
            self._decode(q_THD[:split], layer, out_RHD=out_THD[:split])
        if work.longest_query:
            triton_prefill.prefill(
                q_THD,
                k_TKD,
                v_TKD,
                self._rows(layout, layer, slice(split, None)),
                query_starts=work.prefill_starts,
                longest_query=work.longest_query,
                longest_row=work.longest_row,
                scale=spec.scale,
                window=spec.window,
                out_THD=out_THD,
                taken_2=self._taken_2,
            )
        return out_THD

    def _are_few(self, needed_N: torch.Tensor) -> bool:
        """Whether a long step needs so few tokens of its prompts that each can be a row of its own."""
        assert self._work is not None, "plan() comes first"
        layout = self._work.layout
        num_prompts = len(layout.host_lengths) - layout.num_decodes
        return len(layout.positions_T) >= MANY_TOKENS and len(needed_N) <= layout.num_decodes + num_prompts

    def _attend_few(self, q_THD: torch.Tensor, needed_N: torch.Tensor, layer: int) -> torch.Tensor:
        """As `_attend`, for the needed tokens only: those of prompts read keys as decoding rows do."""
        assert self._work is not None, "plan() comes first"
        spec, work, layout = self._specs[layer], self._work, self._work.layout
        split = layout.num_decodes
        out_NHD = empty_rows(len(needed_N), *q_THD.shape[1:], dtype=q_THD.dtype, device=q_THD.device)
        if split:
            self._decode(q_THD[:split], layer, out_RHD=out_NHD[:split])
        tokens_M = needed_N[split:]
        if len(tokens_M):
            row_M = torch.searchsorted(work.prefill_starts, tokens_M, right=True) - 1
            rows = triton_attention.PagedRows(
                self._key_caches[layer],
                self._value_caches[layer],
                layout.page_table_RP[spec.group][split:][row_M],
                (layout.positions_T[tokens_M] + 1).to(torch.int32),
            )
            triton_decode.decode(
                q_THD[tokens_M],
                rows,
                scale=spec.scale,
                window=spec.window,
                longest=work.longest_row,
                out_RHD=out_NHD[split:],
            )
        return out_NHD

    def _decode(self, q_RHD: torch.Tensor, layer: int, *, out_RHD: torch.Tensor) -> None:
        """Attention of the rows that decode."""
        assert self._work is not None, "plan() comes first"
        spec, work, layout = self._specs[layer], self._work, self._work.layout
        rows = self._rows(layout, layer, slice(0, len(q_RHD)))
        if spec.window is None and layout.shared is None:
            shape = triton_balanced.choose_shape(q_RHD, rows, work.longest_decode)
            if shape is not None:
                self._decode_in_runs(q_RHD, rows, shape, scale=spec.scale, out_RHD=out_RHD)
                return
        triton_decode.decode(
            q_RHD,
            rows,
            scale=spec.scale,
            window=spec.window,
            longest=work.longest_decode,
            out_RHD=out_RHD,
            shared=layout.shared,
            are_new=layer == self._first_whole,
        )

    def _decode_in_runs(
        self,
        q_RHD: torch.Tensor,
        rows: triton_attention.PagedRows,
        shape: RunShape,
        *,
        scale: float,
        out_RHD: torch.Tensor,
    ) -> None:
        """The same, by runs that all layers of this shape share."""
        assert self._work is not None, "plan() comes first"
        planned, longest = self._work.runs, self._work.longest_decode
        are_new = shape not in planned
        if are_new:
            planned[shape] = triton_balanced.plan_runs(rows.lengths_R, shape, longest=longest)
        triton_balanced.decode(q_RHD, rows, planned[shape], scale=scale, out_RHD=out_RHD, are_new=are_new)

    def _rows(self, layout: StepLayout, layer: int, rows: slice) -> triton_attention.PagedRows:
        return triton_attention.PagedRows(
            self._key_caches[layer],
            self._value_caches[layer],
            layout.page_table_RP[self._specs[layer].group][rows],
            layout.lengths_R[rows],
        )


def _sharing_costs(
    specs: tuple[AttentionSpec, ...],
    key_caches: tuple[torch.Tensor, ...],
    value_caches: tuple[torch.Tensor, ...],
) -> SharingCosts | None:
    """What sharing costs the layers that attend to whole sequences; None if there are none."""
    layers = [
        _layer_costs(spec, keys, values)
        for spec, keys, values in zip(specs, key_caches, value_caches, strict=True)
        if spec.window is None
    ]
    if not layers:
        return None
    return SharingCosts(
        rows_per_item=min(layer.rows_per_item for layer in layers),
        key_heads=min(layer.key_heads for layer in layers),
        programs=max(layer.programs for layer in layers),
        shortest_split=SHORTEST_SHARED_SPLIT,
        piece_keys=max(layer.piece_keys for layer in layers),
        worthwhile_keys=max(layer.worthwhile_keys for layer in layers),
    )


def _layer_costs(spec: AttentionSpec, keys_NBKD: torch.Tensor, values_NBKD: torch.Tensor) -> SharingCosts:
    group = spec.num_heads // spec.num_kv_heads
    element_size = keys_NBKD.element_size()
    queries, programs = triton_decode.shared_work(keys_NBKD, values_NBKD, group)
    return SharingCosts(
        rows_per_item=max(1, queries // group),
        key_heads=spec.num_kv_heads,
        programs=programs,
        shortest_split=SHORTEST_SHARED_SPLIT,
        # A piece is written and read again, with 4 bytes for each number of each query head; it counts
        # twice, because it is one more thing to do, too.
        piece_keys=8 * group // element_size,
        worthwhile_keys=-(-SHARING_BYTES // (2 * spec.num_kv_heads * spec.head_dim * element_size)),
    )
