"""The persistent rows on the device, and how a plan's columns become the tensors of a step.

A row (`slot`) holds what a request needs between steps: its last token, its page table, its sampling
parameters. A host copy of the few numbers that decide which kernels a step needs lies beside it, so that
nothing has to be read back.

Shapes: S slots, R rows of a step, T tokens of a step, C columns (pages) of a row's table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tokenmill.attention.base import StepLayout
from tokenmill.kernels.operands import RowState, StepRows
from tokenmill.kernels.rows import num_inputs, read_rows
from tokenmill.kernels.sharing import SharedPrefixes, SharingCosts
from tokenmill.messages import IntArray, LongArray, RowStarts, StepPlan
from tokenmill.runner.extras import Extras
from tokenmill.runner.forest import Forest, Found
from tokenmill.sampling import SamplingColumns, SamplingNeeds
from tokenmill.sampling.slot_lists import to_device


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step."""

    token_ids_T: torch.Tensor  # int64
    layout: StepLayout


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The rows of a step that draw a token: Q of them."""

    slots_Q: torch.Tensor  # int64
    last_tokens_Q: torch.Tensor  # int64, index of the row's last token in the step
    columns: SamplingColumns
    needs: SamplingNeeds
    # Ids of ends to mask while `min_new_tokens` are not out; None when no row of the step needs it.
    masked_stop_ids_QK: torch.Tensor | None  # int32, padded by -1


@dataclass(frozen=True, slots=True, eq=False)
class _KnownNeeds:
    slots: IntArray
    sampling: SamplingNeeds
    waits_for_masks_only: bool


class Rows:
    """State of all slots, written only here."""

    def __init__(
        self,
        *,
        num_slots: int,
        num_columns: int,
        num_groups: int,
        page_size: int,
        spare_page: int,
        vocab_size: int,
        device: torch.device,
        sharing: SharingCosts | None = None,
        logprobs_ignore_temperature: bool = False,
    ) -> None:
        self.device = device
        self.page_size = page_size
        self.max_length = num_columns * page_size  # tokens of a row
        self.spare_slot = num_slots  # a row of nobody, whose keys and values go to a page of nobody
        num_slots += 1
        self.state = RowState(
            last_token_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
            page_table_GSC=torch.full(
                (num_groups, num_slots, num_columns), spare_page, dtype=torch.int32, device=device
            ),
            temperature_S=torch.zeros(num_slots, dtype=torch.float32, device=device),
            top_k_S=torch.zeros(num_slots, dtype=torch.int32, device=device),
            top_p_S=torch.zeros(num_slots, dtype=torch.float32, device=device),
            min_p_S=torch.zeros(num_slots, dtype=torch.float32, device=device),
            seed_S=torch.zeros(num_slots, dtype=torch.int64, device=device),
        )
        self.extras = Extras(
            num_slots=num_slots,
            vocab_size=vocab_size,
            device=device,
            logprobs_ignore_temperature=logprobs_ignore_temperature,
        )
        # Rows that compute one token each begin at these tokens of a step.
        self._ranks = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        # The host's copy of one group's tables: what rows share in one they share in all.
        self._pages_SC = np.full((num_slots, num_columns), spare_page, dtype=np.int32)
        self._forest = None
        if sharing is not None:
            self._forest = Forest(sharing, max_rows=num_slots, page_size=page_size, device=device)
        self._row_of_slot_S = np.zeros(num_slots, dtype=np.int64)  # of the step at hand
        # Host side: what decides which kernels a step needs.
        self._is_random_S = np.zeros(num_slots, dtype=np.bool_)
        self._is_filtered_S = np.zeros(num_slots, dtype=np.bool_)
        # From where on stop ids are allowed, and the slots for which that is behind their prompt.
        self._first_free_position_S = np.zeros(num_slots, dtype=np.int32)
        self._hiding: set[int] = set()
        self._held_ids_S: list[tuple[int, ...]] = [()] * num_slots
        # What the rows asked about last need; until others start, they are mostly asked about again.
        self._known_needs: _KnownNeeds | None = None

    def update(self, plan: StepPlan) -> None:
        """Write the plan's row starts; its page-table entries on the host only."""
        first = plan.page_groups == 0
        self._pages_SC[plan.page_slots[first], plan.page_columns[first]] = plan.page_ids[first]
        if plan.new_rows is not None:
            if self._forest is not None:
                self._forest.forget()
            self._start_rows(plan.new_rows)

    def num_columns(self, num_tokens: int) -> int:
        """Columns that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def pages(self, slot: int, num_tokens: int) -> list[int]:
        """The pages, of the first group, of a row's first tokens."""
        pages: list[int] = self._pages_SC[slot, : self.num_columns(num_tokens)].tolist()
        return pages

    def write_pages(self, plan: StepPlan) -> None:
        """Write the plan's page-table entries on the device."""
        for group, table_SC in enumerate(self.state.page_table_GSC):
            entries = plan.page_groups == group
            if entries.any():
                slots = self.to_device(plan.page_slots[entries].astype(np.int64))
                columns = self.to_device(plan.page_columns[entries].astype(np.int64))
                table_SC[slots, columns] = self.to_device(plan.page_ids[entries])

    def decode_inputs(self, plan: StepPlan, *, size: int) -> IntArray:
        """A step whose rows all decode, as `read_rows` wants it [F, size]: its page-table entries included.

        Rows past the plan's are spare ones.
        """
        count = len(plan.slots)
        inputs = self.blank_inputs(size)
        inputs[0, :count], inputs[1, :count] = plan.slots, plan.starts
        if len(plan.page_slots):
            self._row_of_slot_S[plan.slots] = np.arange(count)
            rows = self._row_of_slot_S[plan.page_slots]
            inputs[2 + 2 * plan.page_groups, rows] = plan.page_columns
            inputs[3 + 2 * plan.page_groups, rows] = plan.page_ids
        return inputs

    def stage(self, plan: StepPlan) -> StepInputs:
        """Build the tensors of a step whose plan was written by `update` and `write_pages`."""
        token_ids = self.to_device(plan.token_ids.astype(np.int64))
        slots = self.to_device(plan.slots.astype(np.int64))
        if plan.num_decodes:
            token_ids = torch.cat((self.state.last_token_S[slots[: plan.num_decodes]], token_ids))
        return StepInputs(token_ids, self._layout(plan, slots))

    def _layout(self, plan: StepPlan, slots_R: torch.Tensor) -> StepLayout:
        lengths = plan.starts + plan.counts
        token_positions = positions(plan.starts, plan.counts)
        query_starts = np.zeros(len(plan.slots) + 1, dtype=np.int32)
        np.cumsum(plan.counts, out=query_starts[1:])
        columns_used = int(-(-lengths.max() // self.page_size))
        positions_T = self.to_device(token_positions)
        page_table_GRC = self.state.page_table_GSC[:, slots_R, :columns_used]
        row_T = self.to_device(np.repeat(np.arange(len(plan.slots), dtype=np.int64), plan.counts))
        return StepLayout(
            positions_T=positions_T,
            slot_mapping_T=tuple(self.page_slots(table, row_T, positions_T) for table in page_table_GRC),
            page_table_RP=tuple(page_table_GRC),
            query_starts=self.to_device(query_starts),
            lengths_R=self.to_device(lengths),
            num_decodes=plan.num_decodes,
            host_query_lengths=plan.counts.tolist(),
            host_lengths=lengths.tolist(),
            shared=self._shared(plan),
        )

    def _shared(self, plan: StepPlan) -> SharedPrefixes | None:
        decodes = slice(0, plan.num_decodes)
        found = self.find_shared(plan.slots[decodes], plan.starts[decodes])
        return None if self._forest is None or found is None else self._forest.shared(plan.num_decodes, found)

    def find_shared(self, slots: IntArray, positions: IntArray) -> Found | None:
        """Bring the forest up to date for a step that decodes these rows; None if sharing does not pay."""
        return None if self._forest is None else self._forest.update(self._pages_SC, slots, positions)

    def decode_layout(self, step: StepRows, *, longest: int | None = None, max_pieces: int = 0) -> StepLayout:
        """The layout of a step in which each row computes one token, from device tensors alone.

        The host's lengths are upper bounds, so that the step can be captured once and replayed: a row reads
        at most `longest` keys by itself. With `max_pieces`, the step follows the forest of `find_shared`.
        """
        num_rows = len(step.position_B)
        longest, shared = self.decode_bounds(num_rows, longest=longest, max_pieces=max_pieces)
        return StepLayout(
            positions_T=step.position_B,
            slot_mapping_T=tuple(step.cache_slot_GB),
            page_table_RP=tuple(step.page_table_GBC),
            query_starts=self._ranks[: num_rows + 1],
            lengths_R=step.length_B,
            num_decodes=num_rows,
            host_query_lengths=[1] * num_rows,
            host_lengths=[longest] * num_rows,
            shared=shared,
        )

    def decode_bounds(
        self, num_rows: int, *, longest: int | None, max_pieces: int
    ) -> tuple[int, SharedPrefixes | None]:
        """What a captured step knows of its decoding rows: the most keys of one, and what they share."""
        longest = self.max_length if longest is None else min(longest, self.max_length)
        if self._forest is None or not max_pieces:
            return longest, None
        return self.max_length, self._forest.shared(num_rows, Found(longest, max_pieces))

    def spare_inputs(self, size: int) -> torch.Tensor:
        """`blank_inputs` on the device."""
        return self.to_device(self.blank_inputs(size))

    @property
    def num_inputs(self) -> int:
        """Lines of the inputs of a step whose rows all decode."""
        return num_inputs(len(self.state.page_table_GSC))

    def blank_inputs(self, size: int) -> IntArray:
        """Inputs of a step of spare rows (int32 [F, size])."""
        inputs = np.full((self.num_inputs, size), -1, dtype=np.int32)
        inputs[0], inputs[1] = self.spare_slot, 0
        return inputs

    def read(self, inputs_FB: torch.Tensor) -> StepRows:
        """What a step of `decode_inputs` (on the device) reads of its rows."""
        return read_rows(self.state, inputs_FB, page_size=self.page_size)

    def page_slots(
        self, page_table_RC: torch.Tensor, row_T: torch.Tensor, positions_T: torch.Tensor
    ) -> torch.Tensor:
        """Where each token's key and value go: page * page_size + offset."""
        pages_T = page_table_RC[row_T, positions_T // self.page_size].to(torch.int64)
        return pages_T * self.page_size + positions_T % self.page_size

    def sampling_needs(self, slots: IntArray) -> SamplingNeeds:
        """What drawing a token for these rows takes, known without asking the device."""
        return self._needs(slots).sampling

    def masked_needs(self, slots: IntArray) -> SamplingNeeds | None:
        """As `sampling_needs`, if none of these rows waits for anything but its mask."""
        needs = self._needs(slots)
        return needs.sampling if needs.waits_for_masks_only else None

    def _needs(self, slots: IntArray) -> _KnownNeeds:
        if self._known_needs is None or not np.array_equal(self._known_needs.slots, slots):
            random = self._is_random_S[slots]
            plain = SamplingNeeds(
                random=bool(random.any()), filters=bool((random & self._is_filtered_S[slots]).any())
            )
            self._known_needs = _KnownNeeds(
                slots.copy(), self.extras.needs(plain, slots), self.extras.wait_for_masks_only(slots)
            )
        return self._known_needs

    def hides_stops(self, plan: StepPlan) -> bool:
        """Whether some row must not stop yet at the token that it draws (`min_new_tokens`)."""
        if not self._hiding:
            return False
        positions = (plan.starts + plan.counts)[plan.samples]
        return bool((positions < self._first_free_position_S[plan.slots[plan.samples]]).any())

    def sampling_inputs(self, plan: StepPlan) -> SamplingInputs | None:
        """What is needed to draw the step's tokens, or None when no row draws one."""
        rows = np.flatnonzero(plan.samples)
        if not len(rows):
            return None
        slots = plan.slots[rows]
        positions = (plan.starts + plan.counts)[rows]
        last_tokens = np.cumsum(plan.counts)[rows] - 1
        slots_Q = self.to_device(slots.astype(np.int64))
        return SamplingInputs(
            slots_Q=slots_Q,
            last_tokens_Q=self.to_device(last_tokens.astype(np.int64)),
            columns=self.sampling_columns(slots_Q, self.to_device(positions.astype(np.int64))),
            needs=self.sampling_needs(slots),
            masked_stop_ids_QK=self._masked_stop_ids(slots, positions),
        )

    def sampling_columns(self, slots_R: torch.Tensor, positions_R: torch.Tensor) -> SamplingColumns:
        """What drawing the tokens of these positions reads of these slots (both int64)."""
        state = self.state
        return SamplingColumns(
            temperatures_R=state.temperature_S[slots_R],
            top_ks_R=state.top_k_S[slots_R],
            top_ps_R=state.top_p_S[slots_R],
            min_ps_R=state.min_p_S[slots_R],
            seeds_R=state.seed_S[slots_R],
            positions_R=positions_R,
        )

    def _masked_stop_ids(self, slots: IntArray, positions: IntArray) -> torch.Tensor | None:
        masked = positions < self._first_free_position_S[slots]
        if not masked.any():
            return None
        stops = [self._held_ids_S[slot] if hide else () for slot, hide in zip(slots, masked, strict=True)]
        ids = np.full((len(slots), max(1, *map(len, stops))), -1, dtype=np.int32)
        for row, stop_ids in enumerate(stops):
            ids[row, : len(stop_ids)] = stop_ids
        return self.to_device(ids)

    def _start_rows(self, starts: RowStarts) -> None:
        self._known_needs = None
        self.extras.start(starts)
        slots = self.to_device(starts.slots.astype(np.int64))
        self.state.temperature_S[slots] = self.to_device(starts.temperatures)
        self.state.top_k_S[slots] = self.to_device(starts.top_ks)
        self.state.top_p_S[slots] = self.to_device(starts.top_ps)
        self.state.min_p_S[slots] = self.to_device(starts.min_ps)
        self.state.seed_S[slots] = self.to_device(starts.seeds.view(np.int64))
        self._is_random_S[starts.slots] = (starts.temperatures > 0) & (starts.top_ks != 1)
        self._is_filtered_S[starts.slots] = (starts.top_ks != -1) | (starts.top_ps < 1) | (starts.min_ps > 0)
        self._first_free_position_S[starts.slots] = starts.prompt_lengths + starts.min_new_tokens
        self._hiding.difference_update(starts.slots.tolist())
        self._hiding.update(starts.slots[starts.min_new_tokens > 0].tolist())
        for slot, held_ids in zip(starts.slots.tolist(), starts.held_ids, strict=True):
            self._held_ids_S[slot] = held_ids

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)


def positions(starts: IntArray, counts: IntArray) -> LongArray:
    """`starts[row] + 0, 1, … counts[row] - 1` for all rows, one after the other."""
    first_token = np.cumsum(counts) - counts
    within_row = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(first_token, counts)
    return within_row + np.repeat(starts, counts)
