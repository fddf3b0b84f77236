"""Llama 1 to 3 and the many checkpoints that carry its architecture."""

from __future__ import annotations

from typing import Any

from tokenmill.models.decoder import CausalDecoder
from tokenmill.models.spec import FamilyFacts


class LlamaForCausalLM(CausalDecoder):
    """The plain decoder: one switch for the biases of all attention projections, one for those of the MLP."""

    @staticmethod
    def read_facts(config: Any) -> FamilyFacts:
        """From transformers' `LlamaConfig`."""
        return FamilyFacts(
            windows=(None,) * config.num_hidden_layers,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )
