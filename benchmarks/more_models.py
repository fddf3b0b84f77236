"""More shapes of public models, beside the four of `models.py`, which are those of the peers' figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models

_LLAMA = models.CONFIGS["Llama-3.1-8B"]
_QWEN2 = models.CONFIGS["Qwen2.5-0.5B-Instruct"]
_QWEN3 = models.CONFIGS["Qwen3-0.6B"]
_TIED = {"tie_word_embeddings": True}


def _shape(
    like: dict[str, Any], hidden: int, layers: int, heads: int, kv_heads: int, inner: int, **more: Any
) -> dict[str, Any]:
    return {
        **with_layers(like, layers),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        **more,
    }


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same with another number of layers, none of which has a window."""
    return {**config, **dict.fromkeys({"num_hidden_layers", "max_window_layers"} & config.keys(), layers)}


CONFIGS: dict[str, dict[str, Any]] = {
    **models.CONFIGS,
    "Llama-3.2-1B": _shape(_LLAMA, 2048, 16, 32, 8, 8192, head_dim=64, **_TIED),
    "Llama-3.2-3B": _shape(_LLAMA, 3072, 28, 24, 8, 8192, head_dim=128, **_TIED),
    "Qwen2.5-1.5B": _shape(_QWEN2, 1536, 28, 12, 2, 8960),
    "Qwen2.5-7B": _shape(_QWEN2, 3584, 28, 28, 4, 18944, vocab_size=152064, tie_word_embeddings=False),
    "Qwen3-1.7B": _shape(_QWEN3, 2048, 28, 16, 8, 6144),
    "Qwen3-4B": _shape(_QWEN3, 2560, 36, 32, 8, 9728),
}


def write(folder: Path, name: str, *, layers: int | None = None) -> Path:
    """A folder with the config.json of a model, all of it or so many layers."""
    config = CONFIGS[name] if layers is None else with_layers(CONFIGS[name], layers)
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(config, indent=1))
    return folder / name


def parser_of_rows(description: str | None, rows: Sequence[int]) -> argparse.ArgumentParser:
    """For scripts that measure models by the number of rows: which of both."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=["Qwen3-0.6B"])
    parser.add_argument("--rows", nargs="+", type=int, default=rows)
    return parser
