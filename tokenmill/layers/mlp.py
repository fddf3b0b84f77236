"""The gated feed-forward layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.layers.linear import Hidden, Linear
from tokenmill.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """Feed-forward layer with the gate and the up projection in one product. F is the inner size."""

    def __init__(self, hidden_size: int, inner_size: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            hidden_size,
            2 * inner_size,
            bias=bias,
            dtype=dtype,
            parts={"gate_proj": inner_size, "up_proj": inner_size},
        )
        self.down_proj = Linear(inner_size, hidden_size, bias=bias, dtype=dtype)

    def forward(
        self, hidden_TD: Hidden, residual_TD: torch.Tensor, norm: RMSNorm
    ) -> tuple[Hidden, torch.Tensor]:
        """The layer behind a norm of `hidden + residual`: its output, and that sum; all [T, D]."""
        inner_TF, residual_TD = self.gate_up_proj.after_norm(norm, hidden_TD, residual_TD, gated=True)
        return self.down_proj.addend(inner_TF), residual_TD
