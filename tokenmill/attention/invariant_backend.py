"""Attention on the GPU that gives a token the same bits whatever else a step holds; one kernel for all.

The mathematics are in `kernels/triton_invariant.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.attention.base import AttentionSpec, StepLayout
from tokenmill.attention.triton_backend import TritonBackend
from tokenmill.kernels import triton_invariant
from tokenmill.kernels.operands import HeadNorms, Rotation


class InvariantBackend(TritonBackend):
    """A `TritonBackend` that attends to all rows in one order, keys of this step among those of the cache."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        key_caches: Sequence[torch.Tensor],
        value_caches: Sequence[torch.Tensor],
        page_size: int,
    ) -> None:
        super().__init__(specs, key_caches, value_caches, page_size)
        self.sharing = None  # a prefix read for several rows at once would be summed apart from the rest
        self._decode_starts = torch.empty(0, dtype=torch.int32)

    def plan(self, layout: StepLayout) -> None:
        """See `TritonBackend.plan`."""
        super().plan(layout)
        device = layout.query_starts.device
        self._decode_starts = torch.arange(layout.num_decodes + 1, dtype=torch.int32, device=device)

    def _are_few(self, needed_N: torch.Tensor) -> bool:
        """Never: tokens of prompts do not go the way of rows that decode."""
        return False

    def decoding(self, rotation: Rotation, norms: HeadNorms | None, layer: int) -> None:
        """Never, for the same reason."""

    def _attend(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Attention over keys and values that are stored, also over those of this step."""
        assert self._work is not None, "plan() comes first"
        layout, split = self._work.layout, self._work.layout.num_decodes
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        # In graphs some rows that decode may be padding, whose tokens belong to prompts: those go last.
        if split:
            self._attend_rows(q_THD[:split], layer, slice(0, split), self._decode_starts, out_THD)
        if self._work.longest_query:
            self._attend_rows(q_THD, layer, slice(split, None), layout.query_starts[split:], out_THD)
        return out_THD

    def _attend_rows(
        self, q_THD: torch.Tensor, layer: int, rows: slice, query_starts: torch.Tensor, out_THD: torch.Tensor
    ) -> None:
        assert self._work is not None, "plan() comes first"
        spec = self._specs[layer]
        triton_invariant.attend(
            q_THD,
            self._rows(self._work.layout, layer, rows),
            query_starts=query_starts,
            scale=spec.scale,
            window=spec.window,
            out_THD=out_THD,
        )
