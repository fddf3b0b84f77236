"""Token ids to vectors."""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.kernels.lookup import look_up


class Embedding(nn.Module):
    """A table [V, D] of one vector per token id."""

    def __init__(self, vocab_size: int, size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size, dtype=dtype), requires_grad=False)

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """int32 or int64 [T] -> [T, D]"""
        return look_up(self.weight, tokens_T)
