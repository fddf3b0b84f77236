"""One step while it is being scheduled: collects rows and pages, then turns them into a `StepPlan`.

Decides nothing; holds no state between steps. What is remembered of a step on its way is a `Flight`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenmill.core.grammars import Guide
from tokenmill.core.request import RequestState
from tokenmill.kvcache import RowPages
from tokenmill.messages import BoolArray, Finish, IntArray, Lane, RowStarts, StepPlan

_NOTHING: IntArray = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What one step and one sequence may use."""

    max_rows: int  # slots
    max_step_tokens: int  # tokens computed in one step; a decoding row counts 1
    max_sequence_tokens: int  # prompt and output together, but for an output of one token
    max_queued: int | None = None  # requests that may wait beyond the free rows


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step whose result is not taken in yet."""

    slots: IntArray  # of the plan's rows
    samples: BoolArray  # which of the plan's rows draw a token
    states: list[RequestState]  # whose rows these are, in the plan's order
    starting: list[RequestState]  # those of `states` whose prompt ends in this step
    num_decodes: int
    chunks: list[RequestState]  # whose rows the others are, those that draw and those that do not
    prompts_only: list[RequestState]  # requests for no token whose prompt ends in this step

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        decodes: list[RequestState],
        chunks: list[RequestState],
        *,
        ending: list[RequestState],
    ) -> Flight:
        """The rows of a plan: those that decode, and the others, of which some end their prompt in it."""
        drawing = [state for state in ending if state.draws]
        return cls(
            slots=plan.slots,
            samples=plan.samples,
            states=decodes + drawing if drawing else decodes,
            starting=drawing,
            num_decodes=plan.num_decodes,
            chunks=chunks,
            prompts_only=[state for state in ending if not state.draws],
        )

    @property
    def guided(self) -> list[tuple[int, Guide]]:
        """The slots whose draw a grammar guides, and their guides."""
        return [
            (slot, state.guide)
            for slot, state in zip(self.slots[self.samples].tolist(), self.states, strict=True)
            if state.guide is not None and state.finish is None
        ]

    @property
    def stuck(self) -> list[tuple[RequestState, Finish]]:
        """Requests whose grammar left them no token to draw, and how they end."""
        return [
            (state, state.guide.finish)
            for state in self.states
            if state.finish is None and state.guide is not None and state.guide.finish is not None
        ]

    def state(self, row: int) -> RequestState:
        """Whose row of the plan this is."""
        return self.states[row] if row < self.num_decodes else self.chunks[row - self.num_decodes]


class PlanDraft:
    """The columns of one step. Decoding rows come in one piece, the others one by one."""

    def __init__(self) -> None:
        self._decode_slots = _NOTHING
        self._decode_starts = _NOTHING
        self._slots: list[int] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._samples: list[bool] = []
        self._token_ids: list[IntArray] = []
        # Page-table entries: slot, group, column, page; and those of whole rows: slot, group, how many.
        self._entries: list[tuple[int, int, int, int]] = []
        self._runs: list[tuple[int, int, int]] = []
        self._run_pages: list[int] = []  # of all runs
        self._entered: list[RequestState] = []
        self.chunks: list[RequestState] = []  # whose rows compute ids the host knows, in their order

    @property
    def is_empty(self) -> bool:
        """Whether no row computes anything."""
        return not len(self._decode_slots) and not self._slots

    def set_decodes(self, slots: IntArray, starts: IntArray) -> None:
        """The rows that read their token from the device; the draft keeps the arrays."""
        self._decode_slots = slots
        self._decode_starts = starts

    def add_prefill(self, state: RequestState, start: int, token_ids: IntArray, *, samples: bool) -> None:
        """A row that computes ids the host knows, from position `start`."""
        self.chunks.append(state)
        self._slots.append(state.slot)
        self._starts.append(start)
        self._counts.append(len(token_ids))
        self._samples.append(samples)
        self._token_ids.append(token_ids)

    def add_row(self, state: RequestState, pages: RowPages) -> None:
        """A request that enters its slot in this step, with all its pages."""
        self._entered.append(state)
        for group, table in enumerate(pages.tables):
            self._runs.append((state.slot, group, len(table)))
            self._run_pages += table

    def add_page(self, slot: int, pages: RowPages, *, column: int) -> None:
        """One more column of a row that has entered before."""
        for group, table in enumerate(pages.tables):
            self._entries.append((slot, group, column, table[column]))

    def build(self, lane: Lane = Lane.WHOLE, *, awaits_prompts: bool = False) -> StepPlan:
        """The plan; the draft is used up."""
        num_decodes = len(self._decode_slots)
        slots, starts = self._decode_slots, self._decode_starts
        counts: IntArray = np.ones(num_decodes, dtype=np.int32)
        samples: BoolArray = np.ones(num_decodes, dtype=np.bool_)
        token_ids = _NOTHING
        if self._slots:
            slots = np.concatenate([slots, _ints(self._slots)])
            starts = np.concatenate([starts, _ints(self._starts)])
            counts = np.concatenate([counts, _ints(self._counts)])
            samples = np.concatenate([samples, np.array(self._samples, dtype=np.bool_)])
            token_ids = np.concatenate(self._token_ids)
        page_slots, page_groups, page_columns, page_ids = self._page_entries()
        return StepPlan(
            slots=slots,
            starts=starts,
            counts=counts,
            samples=samples,
            num_decodes=num_decodes,
            token_ids=token_ids,
            page_slots=page_slots,
            page_groups=page_groups,
            page_columns=page_columns,
            page_ids=page_ids,
            new_rows=_row_starts(self._entered) if self._entered else None,
            lane=lane,
            awaits_prompts=awaits_prompts,
        )

    def _page_entries(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Slot, group, column and page of every entry."""
        if not (self._entries or self._runs):
            return _NOTHING, _NOTHING, _NOTHING, _NOTHING
        entries = np.array(self._entries, dtype=np.int32).reshape(-1, 4)
        if self._runs:
            slots, groups, counts = np.array(self._runs, dtype=np.int32).T
            first = np.cumsum(counts, dtype=np.int32) - counts  # entry of each run
            columns = np.arange(counts.sum(), dtype=np.int32) - np.repeat(first, counts)
            runs = (np.repeat(slots, counts), np.repeat(groups, counts), columns, _ints(self._run_pages))
            entries = np.concatenate([entries, np.stack(runs, axis=1)])
        slots, groups, columns, pages = np.ascontiguousarray(entries.T)
        return slots, groups, columns, pages


def _ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int32) if values else _NOTHING


def _row_starts(states: list[RequestState]) -> RowStarts:
    requests = [state.request for state in states]
    params = [request.params for request in requests]
    return RowStarts(
        slots=_ints([state.slot for state in states]),
        prompt_lengths=_ints([state.num_prompt for state in states]),
        temperatures=np.array([each.temperature for each in params], dtype=np.float32),
        top_ks=_ints([each.top_k for each in params]),
        top_ps=np.array([each.top_p for each in params], dtype=np.float32),
        min_ps=np.array([each.min_p for each in params], dtype=np.float32),
        seeds=np.array([request.seed for request in requests], dtype=np.uint64),
        min_new_tokens=_ints([each.min_new_tokens for each in params]),
        held_ids=tuple(request.held_ids for request in requests),
        extras=tuple(None if state.extras is None else state.extras.row() for state in states)
        if any(state.extras is not None for state in states)
        else (),
    )
