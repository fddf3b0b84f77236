"""How `json_model_override_args` is merged over a config.json, whichever of two spellings each uses.

transformers 5 keeps rotary settings in `rope_parameters`; older files (and habits) say `rope_theta` and
`rope_scaling`. An override in one spelling must win over a stored value in the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.errors import UnknownArgument, did_you_mean

_ROPE_NAMES = ("rope_theta", "rope_scaling", "rope_parameters")
# Understood by transformers' configurations, though not listed among their fields.
_OLD_NAMES = {
    *_ROPE_NAMES,
    "head_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "quantization_config",
    "torch_dtype",
}


def merge_overrides(
    stored: Mapping[str, Any], overrides: Mapping[str, Any], config_class: Any
) -> dict[str, Any]:
    """The config.json as if the overrides had been written into it.

    Raises `UnknownArgument` for an override that neither the file nor `config_class` has.
    """
    known = {*stored, *config_class().to_dict(), *_OLD_NAMES} if overrides else set()
    for name in overrides:
        if name not in known:
            raise UnknownArgument(
                f"json_model_override_args has {name!r}, which the model's configuration does not have."
                f"{did_you_mean(name, known)}"
            )
    merged = {**stored, **overrides}
    if not overrides.keys().isdisjoint(_ROPE_NAMES):
        _set_rope(merged, stored, overrides)
    if "torch_dtype" in overrides and "dtype" not in overrides:
        merged.pop("dtype", None)
    _set_layer_types(merged, overrides)
    return merged


def _set_rope(merged: dict[str, Any], stored: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Write one `rope_parameters`: the scaling and the base, each from the override if it has one."""
    stored_parameters = stored.get("rope_scaling") or stored.get("rope_parameters") or {}
    parameters = dict(stored_parameters)
    for name in ("rope_scaling", "rope_parameters"):
        if name in overrides:
            parameters = dict(overrides[name] or {})
    theta = stored_parameters.get("rope_theta", stored.get("rope_theta"))
    if "rope_theta" in overrides:
        parameters["rope_theta"] = overrides["rope_theta"]
    elif theta is not None:
        parameters.setdefault("rope_theta", theta)
    for name in _ROPE_NAMES:
        merged.pop(name, None)
    merged["rope_parameters"] = parameters


def _set_layer_types(merged: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Keep the stored list of layer types only where the overrides leave it true."""
    layer_types = merged.get("layer_types")
    if layer_types is None or "layer_types" in overrides:
        return
    num_layers = merged.get("num_hidden_layers", len(layer_types))
    windows_change = {"use_sliding_window", "max_window_layers"} & overrides.keys()
    if windows_change or num_layers > len(layer_types):
        del merged["layer_types"]
    else:
        merged["layer_types"] = layer_types[:num_layers]
