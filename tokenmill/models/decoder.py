"""The decoder that the Llama lineage shares: norm, attention, norm, gated MLP, and the residual between.

A family's file says what is its own (see `FamilyFacts`) and may exchange a part by overriding a method.
Letters: T tokens, D hidden size, N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import cast

import torch
from torch import nn

from tokenmill.attention.base import Backend, Step
from tokenmill.layers.attention import Attention
from tokenmill.layers.embedding import Embedding
from tokenmill.layers.linear import Addend, Hidden, Linear, TiedLinear
from tokenmill.layers.mlp import GatedMLP
from tokenmill.layers.norm import RMSNorm
from tokenmill.layers.rotary import Rotary, Rotation
from tokenmill.layers.stack import run_layers
from tokenmill.models.spec import ModelSpec


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm. Adding to the residual, normalising it and the product that
    follows are one operation, so what a layer puts out is added by the next one."""

    def __init__(self, attention: Attention, spec: ModelSpec, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, epsilon=spec.norm_epsilon, dtype=dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, epsilon=spec.norm_epsilon, dtype=dtype)
        self.mlp = GatedMLP(spec.hidden_size, spec.inner_size, bias=spec.family.mlp_bias, dtype=dtype)

    def forward(
        self,
        hidden_TD: Hidden,
        residual_TD: torch.Tensor,
        rotation: Rotation,
        backend: Backend,
        needed_N: torch.Tensor | None = None,
    ) -> tuple[Hidden, torch.Tensor]:
        """(output of the previous layer, residual) -> (output, residual that it is to be added to)

        With `needed_N` both results are [N, D], for those tokens; the keys and values of all are stored.
        """
        hidden_TD, residual_TD = self.self_attn(
            hidden_TD, residual_TD, self.input_layernorm, rotation, backend, needed_N
        )
        output_TD, residual_TD = self.mlp(hidden_TD, residual_TD, self.post_attention_layernorm)
        return output_TD, residual_TD

    def output_for(self, hidden_TD: Hidden) -> Hidden:
        """The output of this layer, from that of another one that computed this one's."""
        return self.mlp.down_proj.addend(hidden_TD.x_NI) if isinstance(hidden_TD, Addend) else hidden_TD


class CausalDecoder(nn.Module):
    """A decoder with an output layer; see `models.Model` for the contract of its methods.

    Modules are named as in checkpoints, except that stacked projections are one module.
    The weights are uninitialised until they are loaded.
    """

    no_residual_D: torch.Tensor  # zeros

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        with device:
            self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype)
            self.layers = nn.ModuleList(
                DecoderLayer(self.make_attention(spec, layer=layer, dtype=dtype), spec, dtype=dtype)
                for layer in range(spec.num_layers)
            )
            self.norm = RMSNorm(spec.hidden_size, epsilon=spec.norm_epsilon, dtype=dtype)
            self.lm_head: nn.Module = (
                TiedLinear(self.embed_tokens.weight)
                if spec.tied_embeddings
                else Linear(spec.hidden_size, spec.vocab_size, bias=False, dtype=dtype)
            )
        self.rotary = Rotary(spec.rope, num_positions=spec.context_length, dtype=dtype, device=device)
        # Whether a captured layer tells how all others are computed.
        self._are_alike = len(set(spec.attention)) == 1
        no_residual_D = torch.zeros(spec.hidden_size, dtype=dtype, device=device)
        self.register_buffer("no_residual_D", no_residual_D, persistent=False)

    @classmethod
    def make_attention(cls, spec: ModelSpec, *, layer: int, dtype: torch.dtype) -> Attention:
        """The attention of one layer; a family with another kind overrides this."""
        return Attention(
            spec.attention[layer],
            spec.hidden_size,
            layer=layer,
            qkv_bias=spec.family.qkv_bias,
            output_bias=spec.family.output_bias,
            dtype=dtype,
        )

    def forward(self, tokens_T: torch.Tensor, step: Step) -> torch.Tensor:
        """[T] -> [T, D], or [N, D] where `step` needs only some tokens"""
        hidden_TD, rotation = self.embed_tokens(tokens_T, step.positions_T, self.rotary)
        # On a GPU one row of zeros stands for all tokens, so that nothing is launched for them.
        is_one_row = hidden_TD.is_cuda
        residual_TD = self.no_residual_D.expand_as(hidden_TD) if is_one_row else torch.zeros_like(hidden_TD)
        if not step.is_rehearsal:
            hidden_TD, residual_TD = self._all_but_last(hidden_TD, residual_TD, rotation, step)
        hidden_TD, residual_TD = self.layers[-1](
            hidden_TD, residual_TD, rotation, step.attention, step.needed_N
        )
        normed_TD, _ = self.norm.add(hidden_TD, residual_TD)
        return normed_TD

    def _all_but_last(
        self, hidden_TD: Hidden, residual_TD: torch.Tensor, rotation: Rotation, step: Step
    ) -> tuple[Hidden, torch.Tensor]:
        """The layers before the last one."""
        layers = cast("list[DecoderLayer]", list(self.layers)[:-1])

        def run(at: int, state: tuple[Hidden, torch.Tensor]) -> tuple[Hidden, torch.Tensor]:
            hidden_TD, residual_TD = layers[at](*state, rotation, step.attention)
            return hidden_TD, residual_TD

        may_repeat = self._are_alike and bool(step.caches) and residual_TD.is_cuda
        return run_layers(
            len(layers),
            (hidden_TD, residual_TD),
            run,
            as_output=lambda at, hidden_TD: layers[at].output_for(hidden_TD),
            own_tensors=partial(self._own_tensors, step) if may_repeat else None,
        )

    def _own_tensors(self, step: Step) -> list[tuple[torch.Tensor, ...]]:
        """Weights, keys and values of each layer but the last."""
        return [(*own, *caches) for own, caches in zip(self._weights, step.caches[:-1], strict=True)]

    @cached_property
    def _weights(self) -> list[tuple[nn.Parameter, ...]]:
        """Of each layer but the last; to look for them takes a millisecond."""
        return [tuple(layer.parameters()) for layer in self.layers[:-1]]

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, V]"""
        logits_NV: torch.Tensor = self.lm_head(hidden_ND)
        return logits_NV

    def weight_slots(self) -> Mapping[str, torch.Tensor]:
        """See `Model.weight_slots`."""
        slots: dict[str, torch.Tensor] = {}
        for name, module in self.named_modules():
            prefix = name if name == "lm_head" else f"model.{name}"
            if isinstance(module, Linear) and module.parts:
                parent = prefix.rpartition(".")[0]
                slots.update((f"{parent}.{part}.{kind}", view) for part, kind, view in module.slots())
            else:
                slots.update(
                    (f"{prefix}.{kind}", parameter)
                    for kind, parameter in module.named_parameters(recurse=False)
                )
        return slots
