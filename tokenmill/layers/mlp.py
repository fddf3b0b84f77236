"""The gated feed-forward layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.kernels.activation import gated_silu
from tokenmill.layers.linear import Linear


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

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D]"""
        output_TD: torch.Tensor = self.down_proj(gated_silu(self.gate_up_proj(hidden_TD)))
        return output_TD
