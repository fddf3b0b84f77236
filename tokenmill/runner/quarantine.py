"""Which rows of a step failed, and which cannot be computed because of that.

A row that fails leaves pages unwritten. Steps that were planned before the core heard of it may read them:
such rows are postponed, which the core answers by computing them anew. Nothing here costs a step anything
while no row fails.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from tokenmill.errors import told
from tokenmill.messages import Failure, IntArray, LongArray, RowStarts, StepPlan
from tokenmill.runner.batch import Rows

_log = logging.getLogger("tokenmill")

# How libraries say that memory is short where they do not raise `torch.OutOfMemoryError`.
_WANT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_NOTHING: IntArray = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Losses:
    """What one step did not do."""

    failures: dict[int, Failure] = field(default_factory=dict)  # by slot
    postponed: set[int] = field(default_factory=set)  # slots
    pages: set[int] = field(default_factory=set)  # of the first group, that it should have written

    def __bool__(self) -> bool:
        return bool(self.failures or self.postponed)

    def fail_all(self, plan: StepPlan, failure: Failure) -> None:
        """All rows of the step fail for one reason, as far as they have no other."""
        for slot in plan.slots.tolist():
            if slot not in self.postponed:
                self.failures.setdefault(slot, failure)


class Quarantine:
    """Keeps the losses of the steps in flight. Owned by one runner."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._in_flight: list[Losses] = []  # those that have lost pages
        self.losses = Losses()  # of the step at hand

    def start(self, plan: StepPlan) -> StepPlan | None:
        """Begin a step: update its rows, and return those that can be computed, None if none can."""
        self.losses = Losses()
        try:
            self._rows.update(plan)
        except Exception as error:
            self.judge(error)
            self._update_one_by_one(plan)
        return self.readable(plan)

    def readable(self, plan: StepPlan) -> StepPlan | None:
        """The rows of a plan that read nothing that is lost; the others are postponed."""
        if not (self._in_flight or self.losses.failures):
            return plan
        rows = range(len(plan.slots))
        kept = np.array([row for row in rows if self._is_readable(plan, row)], dtype=np.int64)
        return plan if len(kept) == len(rows) else select(plan, kept) if len(kept) else None

    def judge(self, error: Exception) -> Failure:
        """What an error in a step means for the row that causes it. Must be called where it is handled.

        Raises it again if the device takes no more work, so that nothing can be tried.
        """
        if not self._device_works():
            raise error
        if _is_want_of_memory(error):
            return Failure(f"there is no memory to compute it: {told(error)}", "out_of_memory", 503)
        _log.debug("a step failed", exc_info=error)
        return Failure(f"its step failed: {told(error)}")

    def fail(self, plan: StepPlan, failure: Failure, *, first_lost: int) -> None:
        """The only row of a plan fails; what it should have written from this position on is lost."""
        slot = int(plan.slots[0])
        _log.warning("a row failed by itself: %s", failure.message)
        self.losses.failures[slot] = failure
        self._lose(slot, first_lost, int(plan.starts[0] + plan.counts[0]))

    def collected(self, losses: Losses) -> None:
        """The core was told of these; no later plan reads what they lost."""
        if losses in self._in_flight:
            self._in_flight.remove(losses)

    def _is_readable(self, plan: StepPlan, row: int) -> bool:
        slot, start = int(plan.slots[row]), int(plan.starts[row])
        end = start + int(plan.counts[row])
        pages = self._rows.pages(slot, end)
        num_read = self._rows.num_columns(start)
        has_failed = slot in self.losses.failures
        if has_failed or any(not losses.pages.isdisjoint(pages[:num_read]) for losses in self._in_flight):
            if not has_failed:
                self.losses.postponed.add(slot)
            self._lose(slot, start, end)
            return False
        # Whatever the pages held, this row writes them from their beginning.
        for losses in self._in_flight:
            losses.pages.difference_update(pages[num_read:])
        return True

    def _lose(self, slot: int, start: int, end: int) -> None:
        pages = self._rows.pages(slot, end)[start // self._rows.page_size :]
        self.losses.pages.update(pages)
        if self.losses not in self._in_flight:
            self._in_flight.append(self.losses)

    def _update_one_by_one(self, plan: StepPlan) -> None:
        """Start rows of which some cannot be; these fail."""
        assert plan.new_rows is not None, "nothing else of an update can fail"
        for index, slot in enumerate(plan.new_rows.slots.tolist()):
            try:
                self._rows.update(replace(plan, new_rows=_one_start(plan.new_rows, index)))
            except Exception as error:
                failure = self.judge(error)
                row = select(plan, np.flatnonzero(plan.slots == slot))
                self.fail(row, failure, first_lost=int(row.starts[0]))

    def _device_works(self) -> bool:
        """Whether an error left the device able to go on; one in a kernel takes everything with it."""
        if self._device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self._device)
        except Exception:
            return False
        return True


def _is_want_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _WANT_OF_MEMORY)


def select(plan: StepPlan, rows: LongArray) -> StepPlan:
    """Some rows of a plan, ascending, without its page-table entries, which must be written already."""
    chosen = np.zeros(len(plan.slots), dtype=np.bool_)
    chosen[rows] = True
    is_chosen_T = np.repeat(chosen[plan.num_decodes :], plan.counts[plan.num_decodes :])
    return replace(
        plan,
        slots=plan.slots[rows],
        starts=plan.starts[rows],
        counts=plan.counts[rows],
        samples=plan.samples[rows],
        num_decodes=int(chosen[: plan.num_decodes].sum()),
        token_ids=plan.token_ids[is_chosen_T],
        page_slots=_NOTHING,
        page_groups=_NOTHING,
        page_columns=_NOTHING,
        page_ids=_NOTHING,
    )


def _one_start(starts: RowStarts, index: int) -> RowStarts:
    one = slice(index, index + 1)
    return RowStarts(*(getattr(starts, name)[one] for name in RowStarts.__dataclass_fields__))
