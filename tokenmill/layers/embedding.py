"""Token ids to vectors, and their positions to rotations."""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.kernels.lookup import look_up_both
from tokenmill.layers.rotary import Rotary, Rotation


class Embedding(nn.Module):
    """A table [V, D] of one vector per token id."""

    def __init__(self, vocab_size: int, size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size, dtype=dtype), requires_grad=False)

    def forward(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, Rotation]:
        """int32 or int64 [T] each -> the tokens' vectors [T, D], and the rotation of their positions"""
        hidden_TD, both_TW = look_up_both(self.weight, tokens_T, rotary.cosines_and_sines_PW, positions_T)
        return hidden_TD, rotary.halves(both_TW)
