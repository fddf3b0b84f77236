"""Root-mean-square normalisation with its weight; the arithmetic is in `kernels/norm.py`."""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.kernels.linear import Hidden, computed
from tokenmill.kernels.norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Norm over the last dimension, of `size` elements, in the dtype of the input."""

    def __init__(self, size: int, *, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape that ends in `size`; the result has the same shape."""
        return rms_norm(x, self.weight, self.epsilon)

    def add(self, hidden: Hidden, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(norm(hidden + residual), hidden + residual)`: the end of one sub-layer, the start of the next."""
        return add_rms_norm(computed(hidden), residual, self.weight, self.epsilon)
