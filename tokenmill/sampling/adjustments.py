"""Penalties and biases of all slots: what was drawn, counted on the device, and what it does to the logits.

Owns the tables; they are made when the first row needs them. Blind to requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.kernels.penalty import IN_PROMPT, penalize

Ids = NDArray[np.int32]
Biases = Sequence[tuple[int, float]]


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
        slots_N = self._to_device(np.array(slots, dtype=np.int64))
        self._penalties_S3[slots_N] = self._to_device(np.array(penalties, dtype=np.float32))
        self._counts_SV[slots_N] = 0
        places = [
            slot * self._vocab_size + ids
            for slot, drawn, given in zip(slots, output_ids, prompt_ids, strict=True)
            for ids in (drawn.astype(np.int64), np.unique(given).astype(np.int64))
        ]
        if any(map(len, places)):
            weights = np.repeat(np.tile([1, IN_PROMPT], len(slots)), [len(ids) for ids in places])
            self._counts_SV.view(-1).scatter_add_(
                0, self._to_device(np.concatenate(places)), self._to_device(weights.astype(np.int32))
            )

    def set_biases(self, slots: Sequence[int], biases: Sequence[Biases]) -> None:
        """Start rows with these biases, at most one for a token."""
        while self.num_biases < max(map(len, biases)):
            self._widen()
        ids_NK = np.zeros((len(slots), self.num_biases), dtype=np.int64)
        values_NK = np.zeros(ids_NK.shape, dtype=np.float32)
        for row, each in enumerate(biases):
            if each:
                ids_NK[row, : len(each)], values_NK[row, : len(each)] = zip(*each, strict=True)
        slots_N = self._to_device(np.array(slots, dtype=np.int64))
        self._bias_ids_SK[slots_N] = self._to_device(ids_NK)
        self._biases_SK[slots_N] = self._to_device(values_NK)

    def clear(self, slots: Sequence[int]) -> None:
        """Make slots neutral again."""
        slots_N = self._to_device(np.array(slots, dtype=np.int64))
        self._penalties_S3[slots_N] = self._to_device(np.array([[0, 0, 1]], dtype=np.float32))
        self.set_biases(slots, [()] * len(slots))

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

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return (
            tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)
        )

    def _widen(self) -> None:
        """Double the table of biases. The old one is left to the captured steps that know it."""
        old = self.num_biases
        ids_SK = torch.zeros((self._num_slots, max(16, 2 * old)), dtype=torch.int64, device=self._device)
        biases_SK = torch.zeros_like(ids_SK, dtype=torch.float32)
        ids_SK[:, :old] = self._bias_ids_SK
        biases_SK[:, :old] = self._biases_SK
        self._bias_ids_SK, self._biases_SK = ids_SK, biases_SK
