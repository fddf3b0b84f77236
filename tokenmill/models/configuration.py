"""Configurations that leave nothing open are read here; all others are read by transformers.

Importing transformers takes a good part of an engine's start, and most checkpoints need nothing of it: they
say every fact that a model of their family has. What is read here is what transformers reads, and
`tests/models/test_configuration.py` compares the two. Whatever is missing, unknown or of another type is left
to transformers, which has defaults, older spellings and error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

# Whole numbers of at least 1.
COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# What says nothing about inference with one sequence to a row.
_WITHOUT_EFFECT = {
    "attention_dropout",
    "bos_token_id",
    "initializer_range",
    "max_window_layers",
    "model_type",
    "pad_token_id",
    "pretraining_tp",
    "transformers_version",
    "use_cache",
}
_DTYPE_NAMES = ("dtype", "torch_dtype")
_WINDOW_NAMES = ("sliding_window", "use_sliding_window", "layer_types")
_ROPE_NAMES = ("rope_theta", "rope_scaling", "rope_parameters")
_READ = {
    *COUNTS,
    *_DTYPE_NAMES,
    *_WINDOW_NAMES,
    *_ROPE_NAMES,
    "architectures",
    "attention_bias",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "mlp_bias",
    "rms_norm_eps",
    "tie_word_embeddings",
}
# The parameters of each rotary scaling, beside `rope_type` and `rope_theta`; all are numbers.
_ROPE_PARAMETERS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


class _LeftOpen(Exception):
    """The configuration is not for us."""


def read_configuration(stored: Mapping[str, Any]) -> SimpleNamespace | None:
    """The attributes of transformers' configuration object that a model's facts are read from.

    None where transformers has to read the object of config.json.
    """
    try:
        if not stored.keys() <= _READ | _WITHOUT_EFFECT:
            return None
        facts = {**_common(stored), **_FAMILIES[stored["model_type"]](stored)}
    except (KeyError, _LeftOpen):
        return None
    return None if facts["head_dim"] % 2 else SimpleNamespace(**facts)


def _common(stored: Mapping[str, Any]) -> dict[str, Any]:
    counts = {name: _whole(stored[name]) for name in COUNTS}
    if counts["num_attention_heads"] < 1 or counts["hidden_size"] % counts["num_attention_heads"]:
        raise _LeftOpen
    return {
        **counts,
        "architectures": _texts(stored["architectures"]),
        "model_type": _text(stored["model_type"]),
        "hidden_act": _text(stored["hidden_act"]),
        "rms_norm_eps": _real(stored["rms_norm_eps"]),
        "tie_word_embeddings": _flag(stored["tie_word_embeddings"]),
        "eos_token_id": _token_ids(stored["eos_token_id"]),
        "dtype": _dtype(stored),
        "rope_parameters": _rope_parameters(stored),
    }


# ── families ──────────────────────────────────────────────────────────────────────────────────


def _llama(stored: Mapping[str, Any]) -> dict[str, Any]:
    _without(stored, *_WINDOW_NAMES)
    return {
        "head_dim": _head_dim(stored),
        "attention_bias": _flag(stored.get("attention_bias", False)),
        "mlp_bias": _flag(stored.get("mlp_bias", False)),
    }


def _mistral(stored: Mapping[str, Any]) -> dict[str, Any]:
    _without(stored, "use_sliding_window", "layer_types", "attention_bias", "mlp_bias")
    window = stored["sliding_window"]
    return {"head_dim": _head_dim(stored), "sliding_window": None if window is None else _whole(window)}


def _qwen2(stored: Mapping[str, Any]) -> dict[str, Any]:
    _without(stored, "attention_bias", "mlp_bias", "head_dim")
    return {**_full_attention(stored), "head_dim": _head_dim(stored)}


def _qwen3(stored: Mapping[str, Any]) -> dict[str, Any]:
    _without(stored, "mlp_bias")
    return {
        **_full_attention(stored),
        "head_dim": _whole(stored["head_dim"]),
        "attention_bias": _flag(stored["attention_bias"]),
    }


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def _full_attention(stored: Mapping[str, Any]) -> dict[str, Any]:
    """No window in any layer; a window that is not used has no effect."""
    layer_types = ["full_attention"] * _whole(stored["num_hidden_layers"])
    if stored["use_sliding_window"] is not False or stored.get("layer_types", layer_types) != layer_types:
        raise _LeftOpen
    if stored.get("sliding_window") is not None:
        _whole(stored["sliding_window"])
    return {"sliding_window": None, "layer_types": layer_types}


def _head_dim(stored: Mapping[str, Any]) -> int:
    head_dim = stored.get("head_dim")
    return stored["hidden_size"] // stored["num_attention_heads"] if head_dim is None else _whole(head_dim)


# ── values ────────────────────────────────────────────────────────────────────────────────────


def _rope_parameters(stored: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' one spelling, from it or from the older two."""
    if "rope_parameters" in stored:
        _without(stored, "rope_theta", "rope_scaling")
        parameters = _object(stored["rope_parameters"])
    else:
        scaling = stored.get("rope_scaling")
        parameters = {"rope_type": "default"} if scaling is None else _object(scaling)
        if "rope_theta" in parameters:
            raise _LeftOpen
        parameters["rope_theta"] = stored["rope_theta"]
    rope_type = _text(parameters["rope_type"])
    if rope_type not in _ROPE_PARAMETERS:
        raise _LeftOpen
    if parameters.keys() != {"rope_type", "rope_theta", *_ROPE_PARAMETERS[rope_type]}:
        raise _LeftOpen
    if any(type(parameters[name]) not in (int, float) for name in parameters.keys() - {"rope_type"}):
        raise _LeftOpen
    return parameters


def _dtype(stored: Mapping[str, Any]) -> str:
    values = [stored[name] for name in _DTYPE_NAMES if stored.get(name) is not None]
    if len(values) != 1 or values[0] not in ("float32", "bfloat16", "float16"):
        raise _LeftOpen
    return str(values[0])


def _token_ids(value: Any) -> int | list[int] | None:
    if value is None:
        return None
    return [_whole(each) for each in value] if isinstance(value, list) else _whole(value)


def _without(stored: Mapping[str, Any], *names: str) -> None:
    if not stored.keys().isdisjoint(names):
        raise _LeftOpen


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _LeftOpen
    return dict(value)


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise _LeftOpen
    return value


def _real(value: Any) -> float:
    if type(value) is not float:
        raise _LeftOpen
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _LeftOpen
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise _LeftOpen
    return [_text(each) for each in value]


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise _LeftOpen
    return value
