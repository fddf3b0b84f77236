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
from tokenmill.messages import IntArray, LongArray, RowStarts, StepPlan
from tokenmill.sampling import SamplingColumns, SamplingNeeds


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
    # Stop ids to mask while `min_new_tokens` are not out; None when no row of the step needs it.
    masked_stop_ids_QK: torch.Tensor | None  # int32, padded by -1


class Rows:
    """State of all slots, written only here."""

    def __init__(
        self, *, num_slots: int, num_columns: int, num_groups: int, page_size: int, device: torch.device
    ) -> None:
        self._device = device
        self._page_size = page_size
        self.last_token_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._page_tables_SC = [
            torch.zeros((num_slots, num_columns), dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self._temperature_S = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self._top_k_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._top_p_S = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self._min_p_S = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self._seed_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        # Host side: what decides which kernels a step needs.
        self._is_random_S = np.zeros(num_slots, dtype=np.bool_)
        self._is_filtered_S = np.zeros(num_slots, dtype=np.bool_)
        self._first_free_position_S = np.zeros(
            num_slots, dtype=np.int32
        )  # from here on, stop ids are allowed
        self._stop_ids_S: list[tuple[int, ...]] = [()] * num_slots

    def stage(self, plan: StepPlan) -> StepInputs:
        """Write the plan's row starts and page-table entries, then build the tensors of the step."""
        if plan.new_rows is not None:
            self._start_rows(plan.new_rows)
        if len(plan.page_ids):
            self._write_pages(plan)
        token_ids = self._to_device(plan.token_ids.astype(np.int64))
        slots = self._to_device(plan.slots.astype(np.int64))
        if plan.num_decodes:
            token_ids = torch.cat((self.last_token_S[slots[: plan.num_decodes]], token_ids))
        return StepInputs(token_ids, self._layout(plan, slots))

    def _layout(self, plan: StepPlan, slots_R: torch.Tensor) -> StepLayout:
        lengths = plan.starts + plan.counts
        positions = _positions(plan.starts, plan.counts)
        query_starts = np.zeros(len(plan.slots) + 1, dtype=np.int32)
        np.cumsum(plan.counts, out=query_starts[1:])
        columns_used = int(-(-lengths.max() // self._page_size))
        positions_T = self._to_device(positions)
        page_table_RC = [table[slots_R, :columns_used] for table in self._page_tables_SC]
        row_T = self._to_device(np.repeat(np.arange(len(plan.slots), dtype=np.int64), plan.counts))
        column_T = positions_T // self._page_size
        offset_T = positions_T % self._page_size
        return StepLayout(
            positions_T=positions_T,
            slot_mapping_T=tuple(
                table[row_T, column_T].to(torch.int64) * self._page_size + offset_T for table in page_table_RC
            ),
            page_table_RP=tuple(page_table_RC),
            query_starts=self._to_device(query_starts),
            lengths_R=self._to_device(lengths),
            num_decodes=plan.num_decodes,
            host_query_lengths=plan.counts.tolist(),
            host_lengths=lengths.tolist(),
        )

    def sampling_inputs(self, plan: StepPlan) -> SamplingInputs | None:
        """What is needed to draw the step's tokens, or None when no row draws one."""
        rows = np.flatnonzero(plan.samples)
        if not len(rows):
            return None
        slots = plan.slots[rows]
        positions = (plan.starts + plan.counts)[rows]
        last_tokens = np.cumsum(plan.counts)[rows] - 1
        slots_Q = self._to_device(slots.astype(np.int64))
        random = self._is_random_S[slots]
        return SamplingInputs(
            slots_Q=slots_Q,
            last_tokens_Q=self._to_device(last_tokens.astype(np.int64)),
            columns=SamplingColumns(
                temperatures_R=self._temperature_S[slots_Q],
                top_ks_R=self._top_k_S[slots_Q],
                top_ps_R=self._top_p_S[slots_Q],
                min_ps_R=self._min_p_S[slots_Q],
                seeds_R=self._seed_S[slots_Q],
                positions_R=self._to_device(positions.astype(np.int64)),
            ),
            needs=SamplingNeeds(
                random=bool(random.any()), filters=bool((random & self._is_filtered_S[slots]).any())
            ),
            masked_stop_ids_QK=self._masked_stop_ids(slots, positions),
        )

    def _masked_stop_ids(self, slots: IntArray, positions: IntArray) -> torch.Tensor | None:
        masked = positions < self._first_free_position_S[slots]
        if not masked.any():
            return None
        stops = [self._stop_ids_S[slot] if hide else () for slot, hide in zip(slots, masked, strict=True)]
        ids = np.full((len(slots), max(1, *map(len, stops))), -1, dtype=np.int32)
        for row, stop_ids in enumerate(stops):
            ids[row, : len(stop_ids)] = stop_ids
        return self._to_device(ids)

    def _start_rows(self, starts: RowStarts) -> None:
        slots = self._to_device(starts.slots.astype(np.int64))
        self._temperature_S[slots] = self._to_device(starts.temperatures)
        self._top_k_S[slots] = self._to_device(starts.top_ks)
        self._top_p_S[slots] = self._to_device(starts.top_ps)
        self._min_p_S[slots] = self._to_device(starts.min_ps)
        self._seed_S[slots] = self._to_device(starts.seeds.view(np.int64))
        self._is_random_S[starts.slots] = (starts.temperatures > 0) & (starts.top_ks != 1)
        self._is_filtered_S[starts.slots] = (starts.top_ks != -1) | (starts.top_ps < 1) | (starts.min_ps > 0)
        self._first_free_position_S[starts.slots] = starts.prompt_lengths + starts.min_new_tokens
        for slot, stop_ids in zip(starts.slots.tolist(), starts.stop_ids, strict=True):
            self._stop_ids_S[slot] = stop_ids

    def _write_pages(self, plan: StepPlan) -> None:
        for group, table in enumerate(self._page_tables_SC):
            entries = plan.page_groups == group
            if entries.any():
                slots = self._to_device(plan.page_slots[entries].astype(np.int64))
                columns = self._to_device(plan.page_columns[entries].astype(np.int64))
                table[slots, columns] = self._to_device(plan.page_ids[entries])

    def _to_device(self, array: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cpu":
            return tensor
        # Pinned, so that the copy does not make the host wait for the steps in flight.
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _positions(starts: IntArray, counts: IntArray) -> LongArray:
    """`starts[row] + 0, 1, … counts[row] - 1` for all rows, one after the other."""
    first_token = np.cumsum(counts) - counts
    within_row = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(first_token, counts)
    return within_row + np.repeat(starts, counts)
