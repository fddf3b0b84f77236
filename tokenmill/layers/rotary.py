"""Rotary position embedding: which angle a position turns each pair of dimensions by, for every scaling.

The formulas of most scalings are transformers', so that their frequencies are the reference's. Those of the
three that nearly all models have stand here, for a start without transformers, and give the same bits.

A rotation depends on the token's position alone, never on its batch, its chunk or what else is cached: a
token at position p turns as transformers turns it when the tokens of a sequence are fed one by one. For
`dynamic` and `longrope`, whose frequencies in transformers follow the current length, this means the
frequencies of length p + 1. That is the same for every prompt inside the original context and for all tokens
generated after it; only a prompt that is itself longer is rotated by transformers in one piece with the
frequencies of its end.
Letters: T tokens, P positions, R half of the rotated dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenmill.imports import import_transformers

# Passed on to models, which do not see the kernels.
from tokenmill.kernels.operands import Rotation as Rotation

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary facts of a model: transformers' `rope_parameters` and what their formulas read beside."""

    parameters: Mapping[str, Any]  # with `rope_type` and `rope_theta`
    head_dim: int
    max_positions: int  # the configuration's max_position_embeddings


class Rotary(nn.Module):
    """Cosines and sines of all positions below `num_positions`, computed once in float32 on the host.

    `Embedding` looks them up, once in a step, and all layers share what it found.
    """

    cosines_and_sines_PW: torch.Tensor  # W = 2R

    def __init__(
        self, spec: RopeSpec, *, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        positions_P = torch.arange(num_positions)
        frequencies, factor = inverse_frequencies(spec, positions_P)
        angles_PR = positions_P[:, None].float() * frequencies
        both_PW = angles_PR.new_empty((num_positions, 2 * angles_PR.shape[1]))
        cosines_PR, sines_PR = both_PW.chunk(2, dim=1)
        torch.cos(angles_PR, out=cosines_PR)
        torch.sin(angles_PR, out=sines_PR)
        both_PW *= factor
        self.register_buffer("cosines_and_sines_PW", both_PW.to(device, dtype), persistent=False)

    @staticmethod
    def halves(both_TW: torch.Tensor) -> Rotation:
        """Cosines and sines, each [T, R] in the model's dtype, times the scaling's attention factor."""
        half = both_TW.shape[1] // 2
        return both_TW[:, :half], both_TW[:, half:]


def inverse_frequencies(spec: RopeSpec, positions_P: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Radians per position, float32 [R] (or [P, R] where they depend on the position), and the factor
    that cosines and sines are multiplied by.

    Raises what the formulas raise for missing or senseless parameters.
    """
    rope_type = spec.parameters["rope_type"]
    if rope_type in _FORMULAS:
        exponents_R = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        return _FORMULAS[rope_type](1.0 / (spec.parameters["rope_theta"] ** exponents_R), spec), 1.0
    frequencies_R, factor = _scaled(spec)
    lengths_P1 = positions_P[:, None] + 1
    if rope_type == "dynamic":
        grown_PR, _ = _scaled(spec, length=lengths_P1)
        return torch.where(lengths_P1 > spec.max_positions, grown_PR, frequencies_R), factor
    if rope_type == "longrope":
        original = spec.parameters["original_max_position_embeddings"]
        long_R, _ = _scaled(spec, length=original + 1)
        return torch.where(lengths_P1 > original, long_R, frequencies_R), factor
    return frequencies_R, factor


def _unscaled(frequencies_R: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    return frequencies_R


def _linear(frequencies_R: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Positions that lie closer together (Chen and others 2023, arXiv 2306.15595)."""
    factor: float = spec.parameters["factor"]
    return frequencies_R / factor


def _llama3(frequencies_R: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Llama 3.1's: long waves are stretched by the factor, short ones stay, those between are mixed."""
    low, high = spec.parameters["low_freq_factor"], spec.parameters["high_freq_factor"]
    factor, original = spec.parameters["factor"], spec.parameters["original_max_position_embeddings"]
    waves_R = 2 * math.pi / frequencies_R
    kept_R = (original / waves_R - low) / (high - low)
    mixed_R = (1 - kept_R) * frequencies_R / factor + kept_R * frequencies_R
    scaled_R = torch.where(waves_R > original / low, frequencies_R / factor, mixed_R)
    return torch.where(waves_R < original / high, frequencies_R, scaled_R)


_FORMULAS: dict[str, Callable[[torch.Tensor, RopeSpec], torch.Tensor]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
}


def _scaled(spec: RopeSpec, *, length: int | torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
    """transformers' formula of a scaling, for sequences of a length."""
    llama_config = import_transformers().LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = llama_config(
        head_dim=spec.head_dim,
        hidden_size=spec.head_dim,
        num_attention_heads=1,
        max_position_embeddings=spec.max_positions,
        rope_parameters=dict(spec.parameters),
    )
    formula = ROPE_INIT_FUNCTIONS[spec.parameters["rope_type"]]
    frequencies, factor = formula(config, torch.device("cpu"), seq_len=length)
    return frequencies.float(), float(factor)
