"""The facts of a model that the engine needs, read once from a checkpoint's configuration files.

Where a configuration leaves something open, transformers' config classes say what it means
(`configuration.py`). Whatever we could not honour is refused, never ignored.
Weights are `loader.py`'s business.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tokenmill.attention.base import AttentionSpec
from tokenmill.errors import InvalidArgument, ModelNotFound, UnsupportedModel, told
from tokenmill.hub import read_json
from tokenmill.imports import import_transformers
from tokenmill.layers.rotary import ROPE_TYPES, RopeSpec, inverse_frequencies
from tokenmill.models.checkpoint import stored_dtype
from tokenmill.models.configuration import COUNTS, read_configuration
from tokenmill.models.overrides import merge_overrides
from tokenmill.models.registry import model_class

_log = logging.getLogger("tokenmill")

_DTYPES = ("float32", "bfloat16", "float16")
# Largest numbers of a configuration that we believe; what they count is laid out before it is compared.
_MOST = dict.fromkeys(COUNTS, 2**31 - 1)
_MOST |= {"num_hidden_layers": 10_000, "hidden_size": 2**20, "head_dim": 2**16}
_MOST_POSITIONS = _MOST["max_position_embeddings"]
# Of the queries that share a key head: kernels keep them on the stack.
_MOST_SHARING = 2**16
_ACTIVATIONS = ("silu", "swish")  # two names of one function
_ROPE_KEYS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
}


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """What a family's file reads from its own configuration class."""

    windows: tuple[int | None, ...]  # per layer: tokens a token sees, itself included; None: all
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The facts of a model, with every default and override applied."""

    architecture: str
    vocab_size: int
    hidden_size: int
    inner_size: int  # of the feed-forward layers
    num_layers: int
    num_stored_layers: int  # in the checkpoint; more than `num_layers` where an override cuts the model
    context_length: int
    eos_token_ids: tuple[int, ...]  # of config.json and generation_config.json, ascending
    dtype: str  # of the stored weights: "float32", "bfloat16" or "float16"
    tied_embeddings: bool
    norm_epsilon: float
    attention: tuple[AttentionSpec, ...]  # one per layer
    rope: RopeSpec
    family: FamilyFacts


def read_spec(
    folder: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    context_length: int | None = None,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """Read a checkpoint folder. `overrides` is merged over its config.json; `context_length` shortens the
    model's own. `trust_remote_code` permits a configuration class that lies in the folder.

    Raises `ModelNotFound` without a config.json, `UnsupportedModel` for what we do not run,
    `UnknownArgument` for an override that the configuration does not have, `InvalidArgument` for a file that
    cannot be read.
    """
    path = folder / "config.json"
    stored = read_json(path)
    if stored is None:
        raise ModelNotFound(f"{folder} has no config.json, so it is not a checkpoint that can be loaded")
    with _of_file(path, overrides or {}):
        _check_counts({**stored, **(overrides or {})})
        config = None if overrides else read_configuration(stored)
        if config is None:
            config = _configuration(folder, stored, overrides or {}, trust_remote_code=trust_remote_code)
        return _read_facts(folder, config, stored, context_length)


def _read_facts(
    folder: Path, config: Any, stored: Mapping[str, Any], context_length: int | None
) -> ModelSpec:
    architecture = _architecture(config)
    family = _family(architecture, config)
    _refuse_unsupported(config)
    rope = _rope(config)
    length = _context_length(rope, context_length)
    num_stored_layers = stored.get("num_hidden_layers")
    if not isinstance(num_stored_layers, int):  # missing, or an override repaired it
        num_stored_layers = config.num_hidden_layers
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_stored_layers=num_stored_layers,
        context_length=length,
        eos_token_ids=_eos_token_ids(folder, config),
        dtype=_dtype(folder, config),
        tied_embeddings=config.tie_word_embeddings,
        norm_epsilon=config.rms_norm_eps,
        attention=_attention(config, family, length),
        rope=rope,
        family=family,
    )


def windows_by_layer_type(config: Any) -> tuple[int | None, ...]:
    """The windows of a configuration that lists `layer_types`."""
    unknown = sorted(set(config.layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(f"layer_types has {unknown}; supported: 'full_attention', 'sliding_attention'")
    if "sliding_attention" in config.layer_types and config.sliding_window is None:
        raise UnsupportedModel(
            "layer_types has 'sliding_attention', but sliding_window is null or use_sliding_window is false"
        )
    return tuple(
        config.sliding_window if layer_type == "sliding_attention" else None
        for layer_type in config.layer_types
    )


# ── the configuration ─────────────────────────────────────────────────────────────────────────


@contextmanager
def _of_file(path: Path, overrides: Mapping[str, Any]) -> Iterator[None]:
    """Begin the message of an `UnsupportedModel` with the file that says so."""
    try:
        yield
    except UnsupportedModel as error:
        changed = " with json_model_override_args" if overrides else ""
        raise UnsupportedModel(f"{path}{changed}: {error}") from error


def _check_counts(settings: Mapping[str, Any]) -> None:
    """Whole numbers are in a range that makes sense. Other types are told by those who read on."""
    for name, most in _MOST.items():
        value = settings.get(name)
        if isinstance(value, int) and not 1 <= value <= most:
            raise UnsupportedModel(f"{name}={value} must be from 1 to {most}")


def _configuration(
    folder: Path, stored: Mapping[str, Any], overrides: Mapping[str, Any], *, trust_remote_code: bool
) -> Any:
    """transformers' configuration object of the folder with the overrides."""
    auto_config = import_transformers().AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = overrides.get("model_type", stored.get("model_type"))
    try:
        if trust_remote_code and "auto_map" in stored:
            config_class = type(auto_config.from_pretrained(folder, trust_remote_code=True))
        elif isinstance(model_type, str) and model_type in CONFIG_MAPPING:
            with _no_composed_docstrings():
                config_class = CONFIG_MAPPING[model_type]
        else:
            raise UnsupportedModel(f"model_type {model_type!r} is none that transformers knows")
        return config_class.from_dict(merge_overrides(stored, overrides, config_class))
    except InvalidArgument:
        raise
    except Exception as error:  # transformers has no common base for what its validators raise
        raise UnsupportedModel(
            f"this is not a valid configuration: {told(error)}; correct the file"
        ) from error


@contextmanager
def _no_composed_docstrings() -> Iterator[None]:
    """Let configuration classes be defined without the docstrings that transformers composes for them.

    For these some releases (5.17) import all that models are made of, torch.distributed and, where it is
    installed, scikit-learn: seconds of every start.
    """
    utils: Any = import_module("transformers.utils")

    def leave(decorated: Any = None, **_: Any) -> Any:
        return leave if decorated is None else decorated

    composed = utils.auto_docstring
    utils.auto_docstring = leave
    try:
        yield
    finally:
        utils.auto_docstring = composed


def _architecture(config: Any) -> str:
    architectures = config.architectures
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise UnsupportedModel(
            f"'architectures' must be a list with one name, not {architectures!r}; "
            'name it with json_model_override_args={"architectures": ["..."]}'
        )
    return str(architectures[0])


def _family(architecture: str, config: Any) -> FamilyFacts:
    read: Callable[[Any], FamilyFacts] = model_class(architecture).read_facts
    try:
        return read(config)
    except AttributeError as error:  # another family's configuration
        raise UnsupportedModel(
            f"architecture {architecture!r} does not go with model_type {config.model_type!r}, which has no "
            f"{error.name!r}"
        ) from error


def _refuse_unsupported(config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            "the checkpoint is quantized (it has a quantization_config), which is not supported yet; use the "
            "original 16-bit or 32-bit checkpoint"
        )
    if config.hidden_act not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"hidden_act={config.hidden_act!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    if not 0 <= config.rms_norm_eps < math.inf:
        raise UnsupportedModel(f"rms_norm_eps={config.rms_norm_eps} must be a finite number from 0 on")
    if config.num_attention_heads % config.num_key_value_heads:
        raise UnsupportedModel(
            f"num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    if config.model_type == "mistral" and getattr(config, "layer_types", None):
        _log.warning("layer_types is ignored for Mistral, as in transformers: sliding_window holds for all")
    if config.model_type == "llama" and getattr(config, "sliding_window", None):
        _log.warning(
            "sliding_window is ignored for Llama, as in transformers: every token sees all before it"
        )


# ── facts ─────────────────────────────────────────────────────────────────────────────────────


def _head_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not isinstance(head_dim, int):  # a family without one does not check it
        raise UnsupportedModel(f"head_dim={head_dim!r} must be a whole number, or null")
    if head_dim < 1:
        raise UnsupportedModel(
            f"the size of a head must be at least 1, and hidden_size={config.hidden_size} with "
            f"num_attention_heads={config.num_attention_heads} makes it {head_dim}"
        )
    return head_dim


def _rope(config: Any) -> RopeSpec:
    """The rotary facts; the formulas are tried here, so that bad parameters show before any weight loads."""
    parameters = dict(config.rope_parameters)
    unknown = sorted(set(parameters) - _ROPE_KEYS)
    if unknown:
        raise UnsupportedModel(f"rope parameters {unknown} are not supported")
    rope_type = parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModel(
            f"rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    share = parameters.get("partial_rotary_factor") or 1.0
    if share != 1.0 and rope_type != "proportional":
        raise UnsupportedModel(
            f"partial_rotary_factor={share} is not supported with rope_type {rope_type!r}: the "
            "architecture rotates whole heads"
        )
    rope = RopeSpec(parameters, _head_dim(config), config.max_position_embeddings)
    if rope.head_dim % 2:
        raise UnsupportedModel(f"head_dim={rope.head_dim} is odd; rotary embedding needs pairs")
    _try_frequencies(rope)
    return rope


def _try_frequencies(rope: RopeSpec) -> None:
    problem: object = "they give frequencies that are negative or not finite"
    try:
        frequencies, factor = inverse_frequencies(rope, torch.arange(1))
        if bool((frequencies >= 0).all() and frequencies.isfinite().all()) and math.isfinite(factor):
            return
    except Exception as error:  # whatever arithmetic on senseless numbers raises
        problem = error
    raise UnsupportedModel(f"rope parameters {dict(rope.parameters)} cannot be used: {problem}")


def _context_length(rope: RopeSpec, wanted: int | None) -> int:
    """The model's own length, or the shorter one that is wanted."""
    own = _own_context_length(rope)
    if wanted is None:
        return own
    if wanted < 1:
        raise InvalidArgument(f"context_length={wanted} must be at least 1")
    if wanted > own:
        raise InvalidArgument(
            f"context_length={wanted} is longer than the {own} tokens that the model was made for. Use a "
            "shorter one, or say that the model can do more with "
            f'json_model_override_args={{"max_position_embeddings": {wanted}}}'
        )
    return wanted


def _own_context_length(rope: RopeSpec) -> int:
    """Scalings by a factor stretch the length they were configured over; the other kinds state the result."""
    rope_type = rope.parameters["rope_type"]
    if rope_type not in ("linear", "dynamic", "yarn"):
        return rope.max_positions
    unscaled = rope.max_positions
    if rope_type == "yarn":
        unscaled = rope.parameters["original_max_position_embeddings"]
    length = unscaled * (rope.parameters.get("factor") or 1.0)
    if length > _MOST_POSITIONS:
        raise UnsupportedModel(
            f"rope parameters {dict(rope.parameters)} stretch the context to {length:.4g} tokens; at most "
            f"{_MOST_POSITIONS} are supported"
        )
    return max(rope.max_positions, int(length))


def _attention(config: Any, family: FamilyFacts, context_length: int) -> tuple[AttentionSpec, ...]:
    head_dim = _head_dim(config)
    group = config.num_attention_heads // config.num_key_value_heads
    if group * head_dim > _MOST_SHARING:
        raise UnsupportedModel(
            f"num_attention_heads={config.num_attention_heads}, num_key_value_heads="
            f"{config.num_key_value_heads} and heads of {head_dim} let {group * head_dim} numbers of queries "
            f"share a key head; at most {_MOST_SHARING} may"
        )
    for window in family.windows:
        if window is not None and window < 1:
            raise UnsupportedModel(f"sliding_window={window} must be at least 1, or null")
    return tuple(
        AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            # A window as long as the context hides nothing, and attention without one is simpler.
            window=None if window is None or window >= context_length else window,
        )
        for window in family.windows
    )


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    generation = read_json(path) or {}
    found = {
        *_listed_ids(config.eos_token_id, folder / "config.json"),
        *_listed_ids(generation.get("eos_token_id"), path),
    }
    # Some configurations say -1 for "none"; an id past the vocabulary cannot be drawn.
    return tuple(sorted(token_id for token_id in found if 0 <= token_id < config.vocab_size))


def _listed_ids(ids: Any, path: Path) -> list[int]:
    """The ids of `eos_token_id` in a file."""
    several = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if any(type(token_id) is not int for token_id in several):
        raise InvalidArgument(
            f"eos_token_id={ids!r} in {path} must be a token id, a list of them, or null; correct it there"
        )
    return several


def _dtype(folder: Path, config: Any) -> str:
    named = getattr(config, "dtype", None)
    dtype = stored_dtype(folder) if named is None else str(named).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UnsupportedModel(
            f"weights of dtype {dtype!r} are not supported; supported: {', '.join(_DTYPES)}"
        )
    return dtype
