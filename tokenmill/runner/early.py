"""What a start does before torch is imported."""

from __future__ import annotations

from tokenmill.config import EngineConfig
from tokenmill.kernels.compilers import Compilers, start_compilers

# What decides which kernels a start compiles. (The seed, for one, is another one each time.)
_CHOOSE_KERNELS = (
    "model_path",
    "revision",
    "json_model_override_args",
    "context_length",
    "dtype",
    "attention_backend",
    "page_size",
    "max_running_requests",
    "chunked_prefill_size",
    "enable_deterministic_inference",
    "skip_tokenizer_init",
)


def early_compilers(config: EngineConfig) -> Compilers:
    """Processes that get ready while this one imports torch; none where no kernels have to be compiled."""
    if config.device == "cpu":
        return Compilers()
    return start_compilers(repr([getattr(config, name) for name in _CHOOSE_KERNELS]))
