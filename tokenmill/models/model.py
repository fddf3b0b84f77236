"""The interface that every model family implements; what the engine needs of a network and no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from tokenmill.attention.base import Step


class Model(Protocol):
    """A network over flat tokens. Letters: T tokens of a step, D hidden size, N rows, V vocabulary."""

    def forward(self, tokens_T: torch.Tensor, step: Step) -> torch.Tensor:
        """Hidden states [T, D] after the final norm; the step's keys and values are stored on the way.

        `step.attention` must have planned the step. Of a rehearsal (see `Step`), only the shape is right.
        """
        ...

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in the model's dtype, for whichever rows are asked for."""
        ...

    def weight_slots(self) -> Mapping[str, torch.Tensor]:
        """Checkpoint name -> the place of that tensor in our parameters, a view to copy into.

        Only before the weights are packed for a CPU.
        """
        ...

    def parameters(self) -> Iterator[torch.Tensor]:
        """Every weight once."""
        ...
