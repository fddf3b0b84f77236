"""What rows need beyond a plain draw: penalties, biases, log-probabilities, hidden states, masks, processors.

Owns it slot by slot, on the host as columns that tell in one look what a step needs, on the device as tables.
Shapes: S slots, R rows of a step, I token ids.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tokenmill.messages import Failure, IntArray, RowExtras, RowStarts
from tokenmill.sampling import Adjustments, SamplingColumns, SamplingNeeds
from tokenmill.sampling.logprobs import effective_temperatures
from tokenmill.sampling.slot_lists import SlotLists

_NO_LOGPROBS = -1
_NO_PENALTIES = (0.0, 0.0, 1.0)
# Up to so many likeliest tokens a step is made for their number, as each of them costs something.
_FEW_TOP = 8


class Extras:
    """The extras of all slots; a slot without any costs a step nothing."""

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        logprobs_ignore_temperature: bool = False,
    ) -> None:
        self.adjustments = Adjustments(num_slots=num_slots, vocab_size=vocab_size, device=device)
        self._device = device
        self._logprobs_ignore_temperature = logprobs_ignore_temperature
        self._of_slot: dict[int, RowExtras] = {}
        self._failures: dict[int, Failure] = {}  # slots that cannot have what they need
        self._is_penalized_S = np.zeros(num_slots, dtype=np.bool_)
        self._num_top_S = np.full(num_slots, _NO_LOGPROBS, dtype=np.int32)
        self._is_late_S = np.zeros(num_slots, dtype=np.bool_)
        self._is_masked_only_S = np.zeros(num_slots, dtype=np.bool_)  # late for its mask and nothing else
        self._shows_hidden_S = np.zeros(num_slots, dtype=np.bool_)
        # Ids of which a row wants the log-probabilities.
        self._given_ids = SlotLists(num_slots, dtype=torch.int64, device=device)

    def start(self, starts: RowStarts) -> None:
        """Rows begin with these extras; whatever was in their slots is forgotten."""
        if not self._of_slot and not starts.extras:
            return
        slots = starts.slots.tolist()
        self._forget([slot for slot in slots if slot in self._of_slot])
        if starts.extras:
            self._start(
                {slot: row for slot, row in zip(slots, starts.extras, strict=True) if row is not None}
            )

    def wait_for_masks_only(self, slots: IntArray) -> bool:
        """Whether those of these rows that are late wait for their masks and nothing else."""
        return bool((self._is_masked_only_S[slots] | ~self._is_late_S[slots]).all())

    def get(self, slot: int) -> RowExtras | None:
        """The extras of one slot."""
        return self._of_slot.get(slot)

    def are_late(self, slots: IntArray) -> bool:
        """Whether some of these rows draw only after the host has had its say, or show more than tokens."""
        return bool(self._of_slot) and bool(self._is_late_S[slots].any())

    def failures(self, slots: IntArray) -> dict[int, Failure]:
        """Why some of these rows cannot go on."""
        return {slot: self._failures[slot] for slot in slots.tolist() if slot in self._failures}

    def exist(self, slots: IntArray) -> bool:
        """Whether some of these rows have extras."""
        return bool(self._of_slot) and any(slot in self._of_slot for slot in slots.tolist())

    def show_hidden(self, slots: IntArray) -> bool:
        """Whether some of these rows show hidden states."""
        return bool(self._of_slot) and bool(self._shows_hidden_S[slots].any())

    def needs(self, needs: SamplingNeeds, slots: IntArray) -> SamplingNeeds:
        """What these rows need of a draw, added to what their plain parameters need."""
        if not self._of_slot:
            return needs
        num_top = int(self._num_top_S[slots].max(initial=_NO_LOGPROBS))
        return replace(
            needs,
            penalties=bool(self._is_penalized_S[slots].any()),
            num_biases=self.adjustments.num_biases(slots),
            num_top=None if num_top == _NO_LOGPROBS else _num_top(num_top),
            num_given=self._given_ids.width(slots),
        )

    def logprob_temperatures(self, columns: SamplingColumns) -> torch.Tensor:
        """The temperatures under which these rows' log-probabilities are told, float32 [R]."""
        if self._logprobs_ignore_temperature:
            return torch.ones_like(columns.temperatures_R)
        return effective_temperatures(columns.temperatures_R, columns.top_ks_R)

    def given_ids(self, slots_R: torch.Tensor, num_given: int) -> torch.Tensor:
        """The ids of which these rows want the log-probabilities, int64 [R, I]."""
        if num_given:
            return self._given_ids.gather(slots_R, num_given)
        return slots_R.new_empty((len(slots_R), 0))

    def _start(self, rows: dict[int, RowExtras]) -> None:
        self._of_slot.update(rows)
        self._penalize({slot: row for slot, row in rows.items() if _penalties(row) != _NO_PENALTIES})
        biased = [slot for slot, row in rows.items() if row.logit_bias]
        if biased:
            self.adjustments.set_biases(biased, [rows[slot].logit_bias for slot in biased])
        given = {slot: row.logprobs.token_ids for slot, row in rows.items() if row.logprobs is not None}
        if any(given.values()):
            self._given_ids.set(list(given), list(given.values()))
        for slot, row in rows.items():
            if row.logprobs is not None:
                self._num_top_S[slot] = row.logprobs.num_top
            self._shows_hidden_S[slot] = row.hidden_states is not None
            is_special = row.processor is not None or slot in self._failures or self._shows_hidden_S[slot]
            self._is_late_S[slot] = row.is_masked or is_special
            self._is_masked_only_S[slot] = row.is_masked and not is_special

    def _penalize(self, rows: dict[int, RowExtras]) -> None:
        if not rows:
            return
        try:
            self.adjustments.set_penalties(
                list(rows),
                [_penalties(row) for row in rows.values()],
                output_ids=[row.output_ids for row in rows.values()],
                prompt_ids=[row.prompt_ids[: None if row.penalize_prompt else 0] for row in rows.values()],
            )
        except torch.OutOfMemoryError as error:
            message = f"there is no memory to count tokens in: {error}"
            self._failures.update(dict.fromkeys(rows, Failure(message, "out_of_memory", 503)))
        else:
            self._is_penalized_S[list(rows)] = True

    def _forget(self, slots: list[int]) -> None:
        adjusted = [slot for slot in slots if self._is_penalized_S[slot] or self._of_slot[slot].logit_bias]
        if adjusted:
            self.adjustments.clear(adjusted)
        self._given_ids.clear(slots)
        self._is_penalized_S[slots] = False
        self._is_late_S[slots] = self._is_masked_only_S[slots] = self._shows_hidden_S[slots] = False
        self._num_top_S[slots] = _NO_LOGPROBS
        for slot in slots:
            del self._of_slot[slot]
            self._failures.pop(slot, None)


def _penalties(row: RowExtras) -> tuple[float, float, float]:
    return row.frequency_penalty, row.presence_penalty, row.repetition_penalty


def _num_top(wanted: int) -> int:
    """Rounded up to a power of two where it is large, so that steps come in few kinds."""
    return wanted if wanted <= _FEW_TOP else 1 << (wanted - 1).bit_length()
