"""Penalties and biases of all slots: what was drawn, counted on the device, and what it does to the logits.

Owns the tables; they are made when the first row needs them. Blind to requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.kernels.penalty import IN_PROMPT, penalize
from tokenmill.sampling.slot_lists import SlotLists, to_device

Ids = NDArray[np.int32]
Biases = Sequence[tuple[int, float]]
_LEAST_BIASES = 16


class Adjustments:
    """Per-slot state of S slots over a vocabulary of V ids. A slot nobody has started is neutral."""

    def __init__(self, *, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = device
        self._penalties_S3 = torch.zeros((num_slots, 3), dtype=torch.float32, device=device)
        self._penalties_S3[:, 2] = 1.0  # what is on the device stays there: a copy would wait for it
        self._counts_SV: torch.Tensor | None = None
        self._bias_ids = SlotLists(num_slots, dtype=torch.int64, device=device)
        self._biases = SlotLists(num_slots, dtype=torch.float32, device=device)

    def num_biases(self, slots: NDArray[Any]) -> int:
        """Room for the biases that one of these slots has, rounded up so that steps come in few kinds."""
        return self._biases.width(slots, least=_LEAST_BIASES)

    def set_penalties(
        self,
        slots: Sequence[int],
        penalties: Sequence[tuple[float, float, float]],
        *,
        output_ids: Sequence[Ids],
        prompt_ids: Sequence[Ids],
    ) -> None:
        """Start rows with a frequency, presence and repetition penalty each.

        `output_ids` were drawn before, `prompt_ids` count for the repetition penalty only.
        """
        if self._counts_SV is None:
            shape = (self._num_slots, self._vocab_size)
            self._counts_SV = torch.zeros(shape, dtype=torch.int32, device=self._device)
        slots_N = to_device(np.array(slots, dtype=np.int64), self._device)
        self._penalties_S3[slots_N] = to_device(np.array(penalties, dtype=np.float32), self._device)
        self._counts_SV[slots_N] = 0
        places = [
            slot * self._vocab_size + ids
            for slot, drawn, given in zip(slots, output_ids, prompt_ids, strict=True)
            for ids in (drawn.astype(np.int64), np.unique(given).astype(np.int64))
        ]
        if any(map(len, places)):
            weights = np.repeat(np.tile([1, IN_PROMPT], len(slots)), [len(ids) for ids in places])
            places_P = to_device(np.concatenate(places), self._device)
            weights_P = to_device(weights.astype(np.int32), self._device)
            self._counts_SV.view(-1).scatter_add_(0, places_P, weights_P)

    def set_biases(self, slots: Sequence[int], biases: Sequence[Biases]) -> None:
        """Start rows with these biases, at most one for a token."""
        self._bias_ids.set(slots, [[token for token, _ in each] for each in biases])
        self._biases.set(slots, [[bias for _, bias in each] for each in biases])

    def clear(self, slots: Sequence[int]) -> None:
        """Make slots neutral again."""
        slots_N = to_device(np.array(slots, dtype=np.int64), self._device)
        neutral = np.array([[0, 0, 1]], dtype=np.float32)
        self._penalties_S3[slots_N] = to_device(neutral, self._device)
        self._bias_ids.clear(slots)
        self._biases.clear(slots)

    def penalize(self, logits_RV: torch.Tensor, slots_R: torch.Tensor) -> torch.Tensor:
        """Logits after penalties, float32 [R, V]; the given ones are only read."""
        assert self._counts_SV is not None, "some row has penalties"
        return penalize(logits_RV, slots_R, self._penalties_S3, self._counts_SV)

    def add_biases(self, logits_RV: torch.Tensor, slots_R: torch.Tensor, num_biases: int) -> torch.Tensor:
        """Logits plus biases, float32 [R, V], in place where they are float32 already."""
        logits_RV = logits_RV.float()
        # Ids past the vocabulary were refused. Behind its biases a row has a bias of 0 on token 0.
        ids_RK = self._bias_ids.gather(slots_R, num_biases)
        return logits_RV.scatter_add_(1, ids_RK, self._biases.gather(slots_R, num_biases))

    def count(self, tokens_R: torch.Tensor, slots_R: torch.Tensor) -> None:
        """Take note of the tokens drawn (int64)."""
        assert self._counts_SV is not None, "some row has penalties"
        places_R = slots_R * self._vocab_size + tokens_R
        ones_R = torch.ones_like(places_R, dtype=torch.int32)
        self._counts_SV.view(-1).scatter_add_(0, places_R, ones_R)
