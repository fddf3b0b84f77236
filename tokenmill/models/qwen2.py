"""Qwen2 and Qwen2.5: Llama's decoder with biases on queries, keys and values, and windows by layer."""

from __future__ import annotations

from typing import Any

from tokenmill.models.decoder import CausalDecoder
from tokenmill.models.spec import FamilyFacts, windows_by_layer_type


class Qwen2ForCausalLM(CausalDecoder):
    """The output projection has no bias."""

    @staticmethod
    def read_facts(config: Any) -> FamilyFacts:
        """From transformers' `Qwen2Config`."""
        return FamilyFacts(windows=windows_by_layer_type(config), qkv_bias=True)
