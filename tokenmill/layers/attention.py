"""The attention module: projections, rotation, and the call of a backend that knows the cache.

Letters: T tokens, E hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.attention.base import AttentionSpec, Backend
from tokenmill.kernels.operands import HeadNorms, Rotation
from tokenmill.layers.linear import Hidden, Linear
from tokenmill.layers.norm import RMSNorm


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
        self._shape = (-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        query_size, key_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size}
        self.qkv_proj = Linear(hidden_size, sum(parts.values()), bias=qkv_bias, dtype=dtype, parts=parts)
        self.o_proj = Linear(query_size, hidden_size, bias=output_bias, dtype=dtype)

    def forward(
        self,
        hidden_TE: Hidden,
        residual_TE: torch.Tensor,
        norm: RMSNorm,
        rotation: Rotation,
        backend: Backend,
        needed_N: torch.Tensor | None = None,
    ) -> tuple[Hidden, torch.Tensor]:
        """Attention behind a norm of `hidden + residual`: its output, and that sum; both [T, E], or [N, E] of
        the needed tokens (int64: all that decode, then any others).

        The backend must have planned the step, and stores the keys and values of all tokens.
        """
        decoding = None
        if needed_N is None and self.qkv_proj.gives_queries:
            decoding = backend.decoding(rotation, self.head_norms(), self.layer)
        if decoding is not None:
            q_THD, residual_TE = self.qkv_proj.queries_after_norm(
                norm, hidden_TE, residual_TE, decoding.heads
            )
            return self.o_proj.addend(decoding.attend(q_THD).flatten(1)), residual_TE
        product_TO, residual_TE = self.qkv_proj.after_norm(norm, hidden_TE, residual_TE)
        attended_TF = backend.run_product(
            product_TO.view(self._shape), rotation, self.head_norms(), self.layer, needed_N
        ).flatten(1)
        return self.o_proj.addend(attended_TF), residual_TE if needed_N is None else residual_TE[needed_N]

    def head_norms(self) -> HeadNorms | None:
        """What normalises queries and keys head by head before the rotation; None: nothing."""
        return None


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

    def head_norms(self) -> HeadNorms:
        """See `Attention.head_norms`."""
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.epsilon)
