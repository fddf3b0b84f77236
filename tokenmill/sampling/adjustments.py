"""Penalties and biases of all slots: what was drawn, counted on the device, and what it does to the logits.

Owns the tables; they are made when the first row needs them. Blind to requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tokenmill.kernels.penalty import IN_PROMPT, penalize


class Adjustments:
    """Per-slot state of S slots over a vocabulary of V ids. A slot nobody has started is neutral."""

    def __init__(self, *, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = device
        self._penalties_S3 = torch.tensor([[0.0, 0.0, 1.0]], device=device).repeat(num_slots, 1)
        self._counts_SV: torch.Tensor | None = None
        # Biases of a slot, padded by a bias of 0 on token 0; wide enough for the longest so far.
        self._bias_ids_SK = torch.zeros((num_slots, 0), dtype=torch.int64, device=device)
        self._biases_SK = torch.zeros((num_slots, 0), dtype=torch.float32, device=device)

    @property
    def num_biases(self) -> int:
        """Columns of the table of biases. A captured step holds on to the table of its time."""
        return self._biases_SK.shape[1]

    def set_penalties(
        self,
        slot: int,
        *,
        frequency: float,
        presence: float,
        repetition: float,
        output_ids: np.ndarray,
        prompt_ids: np.ndarray,
    ) -> None:
        """Start a row; `output_ids` were drawn before, `prompt_ids` count for the repetition penalty only."""
        if self._counts_SV is None:
            shape = (self._num_slots, self._vocab_size)
            self._counts_SV = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._penalties_S3[slot] = torch.tensor([frequency, presence, repetition], device=self._device)
        counts_V = self._counts_SV[slot].zero_()
        for ids, weight in ((output_ids, 1), (np.unique(prompt_ids), IN_PROMPT)):
            if len(ids):
                ids_N = torch.from_numpy(ids.astype(np.int64)).to(self._device)
                counts_V.scatter_add_(0, ids_N, torch.full_like(ids_N, weight, dtype=torch.int32))

    def set_biases(self, slot: int, biases: Sequence[tuple[int, float]]) -> None:
        """Start a row with these biases, at most one for a token."""
        while self.num_biases < len(biases):
            self._widen()
        self._biases_SK[slot] = 0
        self._bias_ids_SK[slot] = 0
        if biases:
            ids, values = zip(*biases, strict=True)
            self._bias_ids_SK[slot, : len(ids)] = torch.tensor(ids, device=self._device)
            self._biases_SK[slot, : len(ids)] = torch.tensor(values, device=self._device)

    def clear(self, slot: int) -> None:
        """Make a slot neutral again."""
        self._penalties_S3[slot] = torch.tensor([0.0, 0.0, 1.0], device=self._device)
        self.set_biases(slot, ())

    def penalize(self, logits_RV: torch.Tensor, slots_R: torch.Tensor) -> torch.Tensor:
        """Logits after penalties, float32 [R, V]; the given ones are only read."""
        assert self._counts_SV is not None, "some row has penalties"
        return penalize(logits_RV, slots_R, self._penalties_S3, self._counts_SV)

    def add_biases(self, logits_RV: torch.Tensor, slots_R: torch.Tensor) -> torch.Tensor:
        """Logits plus biases, float32 [R, V], in place where they are float32 already."""
        logits_RV = logits_RV.float()
        # Ids past the vocabulary were refused; a padding column adds 0, which changes nothing.
        return logits_RV.scatter_add_(1, self._bias_ids_SK[slots_R], self._biases_SK[slots_R])

    def count(self, tokens_R: torch.Tensor, slots_R: torch.Tensor) -> None:
        """Take note of the tokens drawn (int64)."""
        assert self._counts_SV is not None, "some row has penalties"
        places_R = slots_R * self._vocab_size + tokens_R
        ones_R = torch.ones_like(places_R, dtype=torch.int32)
        self._counts_SV.view(-1).scatter_add_(0, places_R, ones_R)

    def _widen(self) -> None:
        """Double the table of biases. The old one is left to the captured steps that know it."""
        old = self.num_biases
        ids_SK = torch.zeros((self._num_slots, max(16, 2 * old)), dtype=torch.int64, device=self._device)
        biases_SK = torch.zeros_like(ids_SK, dtype=torch.float32)
        ids_SK[:, :old] = self._bias_ids_SK
        biases_SK[:, :old] = self._biases_SK
        self._bias_ids_SK, self._biases_SK = ids_SK, biases_SK
