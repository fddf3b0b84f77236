"""Mistral: Llama's decoder without biases, with one sliding window for all layers in its first versions."""

from __future__ import annotations

from typing import Any

from tokenmill.models.decoder import CausalDecoder
from tokenmill.models.spec import FamilyFacts


class MistralForCausalLM(CausalDecoder):
    """Every layer sees `sliding_window` tokens, or all of them where that is null."""

    @staticmethod
    def read_facts(config: Any) -> FamilyFacts:
        """From transformers' `MistralConfig`."""
        return FamilyFacts(windows=(config.sliding_window,) * config.num_hidden_layers)
