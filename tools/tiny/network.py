"""The network as it is trained: Qwen2 in plain torch, with parameter names as transformers expects them.

Letters: B rows, T positions, D hidden size, H heads, K key/value heads, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tools.tiny.recipe import Shape


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        wide = hidden_BTD.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return (scaled * self.weight).to(hidden_BTD.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; documents of a row do not see each other."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        query_size = shape.num_heads * shape.head_size
        key_size = shape.num_kv_heads * shape.head_size
        self._head_size = shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, query_size)
        self.k_proj = nn.Linear(shape.hidden_size, key_size)
        self.v_proj = nn.Linear(shape.hidden_size, key_size)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(
        self, hidden_BTD: Tensor, rotary_TE: tuple[Tensor, Tensor], mask: BlockMask | Tensor
    ) -> Tensor:
        query_BHTE, key_BKTE, value_BKTE = (
            projection(hidden_BTD).unflatten(-1, (-1, self._head_size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query_BHTE = _rotate(query_BHTE, rotary_TE).to(value_BKTE.dtype)
        key_BKTE = _rotate(key_BKTE, rotary_TE).to(value_BKTE.dtype)
        if isinstance(mask, BlockMask):
            mixed = flex_attention(query_BHTE, key_BKTE, value_BKTE, block_mask=mask, enable_gqa=True)
            assert isinstance(mixed, Tensor)
        else:
            mixed = functional.scaled_dot_product_attention(
                query_BHTE, key_BKTE, value_BKTE, attn_mask=mask, enable_gqa=True
            )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.hidden_size, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        gated = functional.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD)
        return self.down_proj(gated)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward layer, each behind a norm and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.mlp = MLP(shape)

    def forward(
        self, hidden_BTD: Tensor, rotary_TE: tuple[Tensor, Tensor], mask: BlockMask | Tensor
    ) -> Tensor:
        hidden_BTD = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD), rotary_TE, mask)
        forward_BTD: Tensor = self.mlp(self.post_attention_layernorm(hidden_BTD))
        return hidden_BTD + forward_BTD


class Network(nn.Module):
    """Token ids in, logits or loss out. The output layer is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that write to the stream start smaller, so that depth does not blow it up.
                depth = (2 * shape.num_layers) ** 0.5 if "o_proj" in name or "down_proj" in name else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids_BT: Tensor, mask: BlockMask | Tensor) -> Tensor:
        """Logits [B, T, vocabulary]."""
        hidden_BTD = self.embed_tokens(ids_BT)
        rotary_TE = self._rotary(ids_BT.shape[1], ids_BT.device)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, rotary_TE, mask)
        logits: Tensor = functional.linear(self.norm(hidden_BTD), self.embed_tokens.weight)
        return logits

    def loss(self, ids_BT: Tensor, targets_BT: Tensor, mask: BlockMask | Tensor) -> Tensor:
        """Mean cross entropy in nats over the targets that are not negative."""
        logits = self(ids_BT, mask)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=-100)

    def _rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        size = self._shape.head_size
        exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
        angles_TE = torch.outer(
            torch.arange(length, device=device).float(), self._shape.rope_theta**-exponents
        )
        angles_TE = torch.cat((angles_TE, angles_TE), dim=-1)
        return angles_TE.cos(), angles_TE.sin()


def _rotate(heads: Tensor, rotary_TE: tuple[Tensor, Tensor]) -> Tensor:
    cosine_TE, sine_TE = rotary_TE
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine_TE + torch.cat((-second, first), dim=-1) * sine_TE


def document_mask(documents_BT: Tensor) -> BlockMask | Tensor:
    """Who sees whom: earlier positions of the same document.

    On a GPU a block mask for flex attention, elsewhere a boolean tensor [B, 1, T, T] (flex attention has no
    backward pass on CPUs).
    """
    num_rows, length = documents_BT.shape
    if documents_BT.is_cuda:

        def visible(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (documents_BT[row, query] == documents_BT[row, key])

        return create_block_mask(visible, num_rows, None, length, length, device="cuda", _compile=True)
    causal_TT = torch.ones(length, length, dtype=torch.bool).tril()
    return (causal_TT & (documents_BT[:, :, None] == documents_BT[:, None, :]))[:, None]
