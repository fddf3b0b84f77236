"""Attention on the GPU that gives a token the same bits whatever else a step holds; one kernel for all.

The mathematics are in `kernels/triton_invariant.py`. Like `triton_backend.py` it can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.attention.base import AttentionSpec, StepLayout
from tokenmill.kernels import triton_attention, triton_invariant
from tokenmill.kernels.operands import CacheSlots, HeadNorms, Rotation
from tokenmill.kernels.sharing import SharingCosts
from tokenmill.kernels.triton_rotary import rotate_and_store


class InvariantBackend:
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
        self._layout: StepLayout | None = None
        self._decode_starts = torch.empty(0, dtype=torch.int32)
        # A prefix read for several rows at once would be summed apart from the rest.
        self.sharing: SharingCosts | None = None

    def plan(self, layout: StepLayout) -> None:
        """Take note of the step; nothing is copied to or from the device."""
        self._layout = layout
        device = layout.query_starts.device
        self._decode_starts = torch.arange(layout.num_decodes + 1, dtype=torch.int32, device=device)

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
        return self._attend(q_THD, layer)

    def run_product(
        self,
        product_TSD: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        layer: int,
        needed_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `base.Backend`; one kernel does everything up to attention."""
        q_THD, _ = rotate_and_store(product_TSD, rotation, norms, self._cache_slots(layer))
        out_THD = self._attend(q_THD, layer)
        return out_THD if needed_N is None else out_THD[needed_N]

    def _cache_slots(self, layer: int) -> CacheSlots:
        assert self._layout is not None, "plan() comes first"
        slots_T = self._layout.slot_mapping_T[self._specs[layer].group]
        return CacheSlots(self._key_caches[layer], self._value_caches[layer], slots_T)

    def _attend(self, q_THD: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention over keys and values that are stored."""
        assert self._layout is not None, "plan() comes first"
        layout = self._layout
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        split = layout.num_decodes
        # In graphs some rows that decode may be padding, whose tokens belong to prompts: those go last.
        if split:
            self._attend_rows(q_THD[:split], layer, slice(0, split), self._decode_starts, out_THD)
        if len(layout.host_lengths) > split:
            self._attend_rows(q_THD, layer, slice(split, None), layout.query_starts[split:], out_THD)
        return out_THD

    def _attend_rows(
        self,
        q_THD: torch.Tensor,
        layer: int,
        rows: slice,
        query_starts: torch.Tensor,
        out_THD: torch.Tensor,
    ) -> None:
        assert self._layout is not None, "plan() comes first"
        spec, layout = self._specs[layer], self._layout
        triton_invariant.attend(
            q_THD,
            triton_attention.PagedRows(
                self._key_caches[layer],
                self._value_caches[layer],
                layout.page_table_RP[spec.group][rows],
                layout.lengths_R[rows],
            ),
            query_starts=query_starts,
            scale=spec.scale,
            window=spec.window,
            out_THD=out_THD,
        )
