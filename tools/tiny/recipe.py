"""Recipes: the sizes and settings from which a member of the tiny family is made.

A relative (a smaller draft model, say) is a further row of `RECIPES`; the pipeline reads nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE_FOLDER = Path(__file__).resolve().parents[2] / "tokenmill" / "tiny"
"""Where the shipped model lives; the tokenizer of every relative is read from here."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen2 network. Heads have `hidden_size / num_heads` dimensions."""

    vocab_size: int = 6144
    hidden_size: int = 384
    mlp_size: int = 1024
    num_layers: int = 8
    num_heads: int = 6
    num_kv_heads: int = 2
    context_length: int = 2048
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6

    @property
    def head_size(self) -> int:
        """Dimensions of one attention head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything a training run needs. The learning rates follow the clock, so every run ends finished.

    `rows_per_step` rows of `shape.context_length` tokens make a step; `seconds` is the training time, without
    start-up; `warm_share` and `decay_share` are the parts of it in which the learning rate rises and falls.
    """

    name: str
    shape: Shape
    seconds: float
    rows_per_step: int = 64
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    weight_decay: float = 0.05
    warm_share: float = 0.02
    decay_share: float = 0.6
    num_workers: int = 14
    seed: int = 1


RECIPES = {
    "tiny": Recipe(name="tiny", shape=Shape(), seconds=385),
    "miniature": Recipe(
        name="miniature",
        shape=Shape(
            hidden_size=64, mlp_size=128, num_layers=2, num_heads=2, num_kv_heads=1, context_length=256
        ),
        seconds=20,
        rows_per_step=4,
        num_workers=1,
    ),
}
"""`tiny` is what the package ships; `miniature` proves the pipeline on a CPU in seconds, no more."""
