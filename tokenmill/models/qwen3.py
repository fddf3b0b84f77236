"""Qwen3 (dense): Qwen2's decoder with normalised queries and keys instead of biases."""

from __future__ import annotations

from typing import Any

import torch

from tokenmill.layers.attention import Attention, NormedAttention
from tokenmill.models.decoder import CausalDecoder
from tokenmill.models.spec import FamilyFacts, ModelSpec, windows_by_layer_type


class Qwen3ForCausalLM(CausalDecoder):
    """Each head's queries and keys are normalised before they are rotated."""

    @staticmethod
    def read_facts(config: Any) -> FamilyFacts:
        """From transformers' `Qwen3Config`."""
        return FamilyFacts(
            windows=windows_by_layer_type(config),
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
        )

    @classmethod
    def make_attention(cls, spec: ModelSpec, *, layer: int, dtype: torch.dtype) -> Attention:
        """Attention with its two norms."""
        return NormedAttention(
            spec.attention[layer],
            spec.hidden_size,
            layer=layer,
            qkv_bias=spec.family.qkv_bias,
            output_bias=spec.family.output_bias,
            epsilon=spec.norm_epsilon,
            dtype=dtype,
        )
