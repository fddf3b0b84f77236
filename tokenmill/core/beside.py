"""When prompts are computed beside the rows that decode, instead of in the same steps.

Each side has processors of its own, then. Prompts keep theirs busy, whatever else there is to wait for, and
steps of rows that decode are not as much slower as they have fewer: they wait for memory, and for one kernel
after the other. Together both take 10 to 25 percent less time than one after the other. It helps only a job
whose end comes sooner by the steps that are done meanwhile: those that decode must have more to draw than any
that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenmill.core.plan import Flight
from tokenmill.core.policy import PriorityQueue, WaitingQueue
from tokenmill.core.request import Decoding, Phase, RequestState, Rows

# Steps that rows do, roughly, while a full step of prompts is computed.
_STEPS_BESIDE = 16
# Of a full step, what is worth one behind others: rows that decode need not wait for its end.
_LEAST_SHARE = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    flight: Flight
    ending: list[RequestState]  # whose prompts end in it
    behind: Flight | None  # the newest of the other steps that were in flight when it was launched


class PromptLane:
    """The steps of `Lane.PROMPTS` whose results were not taken in yet."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._was_left = False

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
        return step.flight, [state for state in step.ending if state.phase is Phase.PREFILL]

    def note_leaving(self, state: RequestState) -> None:
        """Somebody gives up row and pages, which these steps may write to yet."""
        self._was_left |= any(state in flight.chunks for flight in self.flights)

    def was_left(self) -> bool:
        """Whether somebody did so since this was asked last."""
        was_left, self._was_left = self._was_left, False
        return was_left


def pay_apart(
    waiting: WaitingQueue | PriorityQueue,
    prefilling: Sequence[RequestState],
    decoding: Decoding,
    rows: Rows,
    max_step_tokens: int,
    *,
    are_apart: bool,
) -> bool:
    """Whether all that wait can run, a step is full of their prompts, and those that decode outlast them.

    Where some `are_apart` already, a part of a step is enough.
    """
    if not len(decoding.slots) or not 0 < len(waiting) <= rows.num_free:
        return False
    if any(state.num_retractions for state in waiting):  # those who ran before go first
        return False
    enough = max_step_tokens * (_LEAST_SHARE if are_apart else 1)
    num_tokens = sum(len(state.tokens) - int(rows.computed[state.slot]) for state in prefilling)
    if num_tokens + sum(state.num_prompt for state in waiting) < enough:
        return False
    longest = max(state.limit - state.num_prompt for state in waiting)
    return rows.most_left(decoding.slots) >= longest + _STEPS_BESIDE
