"""The one table of architectures: what a checkpoint calls itself -> the class that runs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tokenmill.errors import UnsupportedModel, did_you_mean

MODELS = {
    "LlamaForCausalLM": "tokenmill.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "tokenmill.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "tokenmill.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "tokenmill.models.qwen3:Qwen3ForCausalLM",
}


def model_class(architecture: str) -> Any:
    """The class of an architecture, imported now; `UnsupportedModel` if the table lacks it."""
    if architecture not in MODELS:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported.{did_you_mean(architecture, MODELS)} "
            f"Supported: {', '.join(MODELS)}"
        )
    module_name, class_name = MODELS[architecture].split(":")
    return getattr(import_module(module_name), class_name)
