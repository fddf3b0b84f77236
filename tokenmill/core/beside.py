"""When prompts are computed beside the rows that decode, instead of in the same steps.

Each side has processors of its own, then. Prompts keep theirs busy, whatever else there is to wait for, and
steps of rows that decode are not as much slower as they have fewer: they wait for memory, and for one kernel
after the other. Together both take 10 to 25 percent less time than one after the other. It helps only a job
whose end comes sooner by the steps that are done meanwhile: those that decode must have more to draw than any
that wait. For the same reason not all of them decode meanwhile: fewer rows take less time, and the end comes
when those are done that have most to draw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tokenmill.core.plan import Flight, SchedulerLimits
from tokenmill.core.policy import PriorityQueue, WaitingQueue
from tokenmill.core.prefilling import Prefilling
from tokenmill.core.request import Decoding, Phase, RequestState, Rows

# Steps that rows do, roughly, while a full step of prompts is computed.
_STEPS_BESIDE = 16
# How many tokens less than others a row may have to draw that is not held back for them.
_LEVEL = 2 * _STEPS_BESIDE
# Of a full step, what is worth one behind others: rows that decode need not wait for its end.
_LEAST_SHARE = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    flight: Flight
    ending: list[RequestState]  # whose prompts end in it
    behind: Flight | None  # the newest of the other steps that were in flight when it was launched


class PromptLane:
    """The steps of `Lane.PROMPTS` whose results were not taken in yet, and what follows from them."""

    def __init__(
        self,
        waiting: WaitingQueue | PriorityQueue,
        prefilling: Prefilling,
        decoding: Decoding,
        rows: Rows,
        limits: SchedulerLimits,
    ) -> None:
        self._waiting = waiting
        self._prefilling = prefilling
        self._decoding = decoding
        self._rows = rows
        self._limits = limits
        self._steps: deque[_Step] = deque()
        self._was_left = False
        self._has_newcomers = False

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def flights(self) -> list[Flight]:
        """The oldest first."""
        return [step.flight for step in self._steps]

    def launched(self, flight: Flight, ending: list[RequestState], *, behind: Flight | None) -> None:
        """One more, in which the prompts of some end; `behind` is the newest of the other steps in flight."""
        self._steps.append(_Step(flight, ending, behind))

    def is_next(self, others: Iterable[Flight]) -> bool:
        """Whether none of the other steps in flight was launched before the oldest one here: chunks of a
        prompt are taken in one after the other."""
        return bool(self._steps) and all(flight is not self._steps[0].behind for flight in others)

    def done(self) -> tuple[Flight, list[RequestState]]:
        """The oldest one, and whose prompts have ended, but for those who left meanwhile."""
        step = self._steps.popleft()
        self._has_newcomers &= bool(self._steps)
        return step.flight, [state for state in step.ending if state.phase is Phase.PREFILL]

    def note_newcomers(self) -> None:
        """Requests are submitted."""
        self._has_newcomers = bool(self._steps)

    def note_leaving(self, state: RequestState) -> None:
        """Somebody gives up row and pages, which these steps may write to yet."""
        self._was_left |= any(state in flight.chunks for flight in self.flights)

    def was_left(self) -> bool:
        """Whether somebody did so since this was asked last."""
        was_left, self._was_left = self._was_left, False
        return was_left

    def pays(self) -> bool:
        """Whether one more is worth it: all that wait can run, a step is full of their prompts, and the rows
        that decode outlast them.

        Where there are some already, a part of a step is enough.
        """
        waiting, rows = self._waiting, self._rows
        if not len(self._decoding.slots) or not 0 < len(waiting) <= rows.num_free:
            return False
        if any(state.num_retractions for state in waiting):  # those who ran before go first
            return False
        if self._num_steps_to_come < (_LEAST_SHARE if self._steps else 1):
            return False
        longest = max(state.limit - state.num_prompt for state in waiting)
        return rows.most_left(self._decoding.slots) >= longest + _STEPS_BESIDE

    def hold_back(self) -> None:
        """Choose who does not decode until the oldest of them is done, when this is to be called again: those
        that have less to draw than others, if these outlast all prompts to come, and if nobody wants their
        tokens before their end, or has come since they began: one newcomer after the other could come."""
        self._decoding.refresh()
        self._decoding.hold_back(self._with_less_to_draw() if self._steps and not self._has_newcomers else [])

    def _with_less_to_draw(self) -> list[RequestState]:
        left = self._rows.left(self._decoding.slots)
        most = int(left.max(initial=0))
        if most < _STEPS_BESIDE * (len(self._steps) + self._num_steps_to_come):
            return []
        less = [self._decoding.states[at] for at in np.flatnonzero(left < most - _LEVEL).tolist()]
        return [state for state in less if not state.request.report_interval]

    @property
    def _num_steps_to_come(self) -> float:
        """Full steps that prompts make which are in none yet; of those that wait some may be in the cache."""
        computed = self._rows.computed
        begun = sum(len(state.tokens) - int(computed[state.slot]) for state in self._prefilling.states)
        return (begun + sum(state.num_prompt for state in self._waiting)) / self._limits.max_step_tokens
