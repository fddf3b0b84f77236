"""The attention module: projections, rotation, and the call of a backend that knows the cache.

Letters: T tokens, E hidden size, H query heads, K key/value heads, D head size, R half of the rotated part.
"""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.attention.base import AttentionSpec, Backend
from tokenmill.kernels.rotary import rotate
from tokenmill.layers.linear import Linear
from tokenmill.layers.norm import RMSNorm

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [T, R] of the step's positions


class Attention(nn.Module):
    """Self-attention of layer number `layer`; queries, keys and values come from one product."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        *,
        layer: int,
        qkv_bias: bool,
        output_bias: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer = layer
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self._shape = (-1, sum(self._heads), spec.head_dim)
        query_size, key_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size}
        self.qkv_proj = Linear(hidden_size, sum(parts.values()), bias=qkv_bias, dtype=dtype, parts=parts)
        self.o_proj = Linear(query_size, hidden_size, bias=output_bias, dtype=dtype)

    def forward(
        self,
        hidden_TE: torch.Tensor,
        rotation: Rotation,
        backend: Backend,
        needed_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, E] -> [T, E], or [N, E] of the needed tokens (int64).

        The backend must have planned the step, and stores the keys and values of all tokens.
        """
        q_THD, k_TKD, v_TKD = self.project(hidden_TE)
        q_THD, k_TKD = rotate(q_THD, k_TKD, *rotation)
        attended_THD = backend.run(q_THD, k_TKD, v_TKD, self.layer)
        attended_TF = attended_THD.flatten(1)
        output_TE: torch.Tensor = self.o_proj(attended_TF if needed_N is None else attended_TF[needed_N])
        return output_TE

    def project(self, hidden_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, H, D], keys and values [T, K, D] before the rotation: views of one product."""
        q_THD, k_TKD, v_TKD = self.qkv_proj(hidden_TE).view(self._shape).split(self._heads, dim=1)
        return q_THD, k_TKD, v_TKD


class NormedAttention(Attention):
    """Attention whose queries and keys are normalised head by head before the rotation."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        *,
        layer: int,
        qkv_bias: bool,
        output_bias: bool,
        epsilon: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(
            spec, hidden_size, layer=layer, qkv_bias=qkv_bias, output_bias=output_bias, dtype=dtype
        )
        self.q_norm = RMSNorm(spec.head_dim, epsilon=epsilon, dtype=dtype)
        self.k_norm = RMSNorm(spec.head_dim, epsilon=epsilon, dtype=dtype)

    def project(self, hidden_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Attention.project`, with normalised queries and keys."""
        q_THD, k_TKD, v_TKD = super().project(hidden_TE)
        return self.q_norm(q_THD), self.k_norm(k_TKD), v_TKD
