"""The life of a request in the core, and the rows of the device that requests run in.

Who moves a request from one phase to the next is the scheduler; here is only what it knows of it.
"""

from __future__ import annotations

import enum
import time
from array import array
from collections.abc import Iterable

import numpy as np

from tokenmill.core.extras import request_extras
from tokenmill.core.grammars import Guide
from tokenmill.core.logprob_ledger import LogprobLine
from tokenmill.core.repetition import RepetitionGuard
from tokenmill.kvcache import RowPages
from tokenmill.messages import Finish, IntArray, Output, Request, RequestTimes

# Slot of a request that is in no row, age of one that never was in any.
NO_SLOT = -1
NEVER_ADMITTED = -1


class Phase(enum.Enum):
    """Where a request stands. WAITING -> PREFILL -> DECODE -> DRAINING -> FINISHED.

    A preempted request goes back to WAITING; any phase but FINISHED can end early. A request with a grammar
    begins in COMPILING.
    """

    COMPILING = "compiling"  # not in the queue yet: its grammar is being compiled
    WAITING = "waiting"  # in the queue, no row, no pages
    PREFILL = "prefill"  # in a row, some tokens known to the host are not computed yet
    DECODE = "decode"  # in a row, only the token drawn last is not computed yet
    DRAINING = "draining"  # the last draw is launched: no row, no pages, results on their way
    FINISHED = "finished"


class RequestState:
    """One request from submission to its end. Written by the scheduler only.

    `computed`, the number of tokens whose keys and values are launched, lives in `Rows` while the request
    runs and is 0 otherwise. `total` counts tokens known plus draws in flight; a step computes some of
    the difference. A row in DECODE has total = computed + 1 and does not keep `total` up to date.
    """

    __slots__ = (
        "admitted_seconds",
        "age",
        "cached_tokens",
        "due_at",
        "extras",
        "finish",
        "first_token_seconds",
        "guard",
        "guide",
        "limit",
        "num_prompt",
        "num_reported",
        "num_retractions",
        "pages",
        "phase",
        "request",
        "slot",
        "stop_ids",
        "submitted_seconds",
        "tokens",
        "total",
        "urgency",
        "watched_from",
    )

    def __init__(self, request: Request, *, urgency: int = 0) -> None:
        self.request = request
        self.urgency = urgency  # the larger, the sooner; equal for all while priorities are off
        self.age = NEVER_ADMITTED  # number of the first admission: the smaller, the older
        self.phase = Phase.WAITING if request.grammar is None else Phase.COMPILING
        self.num_prompt = len(request.prompt_ids)
        self.limit = self.num_prompt + request.max_new_tokens  # tokens when the length ends it
        self.stop_ids = frozenset(request.stop_ids)
        # Prompt and output ids known to the host; filled at admission, so that long queues stay small.
        self.tokens: array[int] = array("i")
        self.total = self.num_prompt + len(request.output_ids)
        self.slot = NO_SLOT
        self.pages: RowPages | None = None
        self.num_reported = len(request.output_ids)
        self.due_at = 0  # number of known tokens at which the next Output is due,
        self.watched_from = 0  # and from which on each token may end the request
        self.num_retractions = 0
        self.cached_tokens = 0  # prompt tokens that the first admission found
        self.finish: Finish | None = None
        self.guide: Guide | None = None  # which tokens its grammar allows next
        self.guard = _guard(request)  # against outputs that repeat themselves
        # See `RequestTimes`.
        self.submitted_seconds = time.perf_counter()
        self.admitted_seconds: float | None = None
        self.first_token_seconds: float | None = None
        self.extras = request_extras(request, self.tokens)
        self._set_report()

    @property
    def is_ready(self) -> bool:
        """Whether a waiting request can be admitted: no draw of an earlier run is still in flight."""
        return not self.tokens or len(self.tokens) == self.total

    @property
    def draws(self) -> bool:
        """Whether a token is drawn after the prompt, even if only to show what it was drawn from."""
        request = self.request
        return request.max_new_tokens > 0 or request.logprobs is not None or request.hidden_states == "last"

    @property
    def waits_for_tokens(self) -> bool:
        """Whether its next token is drawn only when the host knows all before it."""
        return self.extras is not None and self.extras.waits_for_tokens

    @property
    def reusable_tokens(self) -> array[int]:
        """The known tokens whose keys and values may come from the cache, and one to compute."""
        most = None if self.extras is None else self.extras.most_cached
        return self.tokens if most is None else self.tokens[: most + 1]

    @property
    def logprob_line(self) -> LogprobLine | None:
        """Where the log-probabilities of its next token go; None: nobody wants them, or not any more."""
        return None if self.extras is None or self.finish is not None else self.extras.logprob_line

    def admit(self, *, age: int) -> None:
        """Enter a row for the first time."""
        self.age = age
        self.admitted_seconds = self.admitted_seconds or time.perf_counter()

    def finish_with(self, token: int) -> Finish | None:
        """How the request ends with the token drawn last, if it does."""
        if not self.request.max_new_tokens:  # drawn for what is shown of it
            assert self.extras is not None
            self.extras.next_token = self.tokens.pop()
            return Finish("length", length=0)
        if token in self.stop_ids:
            return Finish("stop", matched=token)
        if self.guard is not None and (finish := self.guard.push(token)):
            return finish
        if len(self.tokens) >= self.limit:
            return Finish("length", length=self.request.max_new_tokens)
        return None

    def load_tokens(self) -> None:
        """Fill `tokens` from the request, if this is the first admission."""
        if not self.tokens:
            self.tokens.frombytes(self.request.prompt_ids.tobytes())
            self.tokens.extend(self.request.output_ids)

    def report(self, finish: Finish | None) -> Output:
        """The tokens not reported yet, and the end if this is it."""
        times = None if self.num_reported else self._times()
        first = self.num_prompt + self.num_reported
        token_ids = self.tokens[first:].tolist()
        self.num_reported += len(token_ids)
        self.finish = finish
        self._set_report()
        return Output(
            request_id=self.request.id,
            token_ids=token_ids,
            finish=finish,
            cached_tokens=self.cached_tokens,
            num_retractions=self.num_retractions,
            times=times,
            insight=None if self.extras is None else self.extras.insight(is_last=finish is not None),
        )

    def _times(self) -> RequestTimes:
        return RequestTimes(self.submitted_seconds, self.admitted_seconds, self.first_token_seconds)

    def _set_report(self) -> None:
        interval = self.request.report_interval
        # The first token is reported at once.
        due = self.num_prompt + self.num_reported + (interval if self.num_reported else 1)
        self.due_at = min(due, self.limit) if interval else self.limit
        self.watched_from = self.due_at if self.guard is None else 0


def _guard(request: Request) -> RepetitionGuard | None:
    params = request.params
    if params.max_repetitions is None:
        return None
    guard = RepetitionGuard(params.max_repetitions, min_new_tokens=params.min_new_tokens)
    for token in request.output_ids:
        guard.push(token)
    return guard


def urgency_of(state: RequestState) -> int:
    """For sorting."""
    return state.urgency


def note_first_tokens(states: list[RequestState]) -> None:
    """Remember when requests got their first token; one that was preempted keeps its first time."""
    if states:
        seconds = time.perf_counter()
        for state in states:
            state.first_token_seconds = state.first_token_seconds or seconds


class Decoding:
    """The requests whose rows decode, in order. All lists are only ever replaced: flights keep them."""

    def __init__(self) -> None:
        self.states: list[RequestState] = []
        self.slots: IntArray = np.zeros(0, dtype=np.int32)
        # Those of them that decode in the next step: all but those that are held back, if there are any.
        self.next_states = self.states
        self.next_slots = self.slots
        self._held: frozenset[RequestState] = frozenset()
        self._changed = False  # some of `states` decode no longer, or the others are not up to date

    @property
    def last(self) -> RequestState | None:
        """The last one that still decodes."""
        return next((state for state in reversed(self.states) if state.phase is Phase.DECODE), None)

    def add(self, states: list[RequestState], *, by_urgency: bool) -> None:
        """More rows, behind the others, or among them by their urgency."""
        self.states = self.states + states
        if by_urgency:
            self.states.sort(key=urgency_of, reverse=True)  # stable: equals stay as admitted
        self._changed = True

    def note_end(self) -> None:
        """One of them decodes no longer."""
        self._changed = True

    def hold_back(self, states: Iterable[RequestState]) -> None:
        """Let these stay as they are, and no others, until this is called again, or no others are left."""
        held = frozenset(states)
        self._changed |= held != self._held
        self._held = held

    def refresh(self) -> None:
        """Forget those that no longer decode."""
        if not self._changed:
            return
        self.states = [state for state in self.states if state.phase is Phase.DECODE]
        self.slots = np.array([state.slot for state in self.states], dtype=np.int32)
        self.next_states, self.next_slots = self.states, self.slots
        if self._held and (others := [state for state in self.states if state not in self._held]):
            self.next_states = others
            self.next_slots = np.array([state.slot for state in others], dtype=np.int32)
        self._changed = False


class Rows:
    """The persistent rows of the device: which are free, and the counts of the others as columns by slot.

    Columns, because a step of many decoding rows changes all of them alike.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._free = list(range(max_rows - 1, -1, -1))
        self.computed: IntArray = np.zeros(max_rows, dtype=np.int32)  # tokens launched
        self.room: IntArray = np.zeros(max_rows, dtype=np.int32)  # tokens that the row's pages hold
        self.end: IntArray = np.zeros(max_rows, dtype=np.int32)  # `computed` when no draw is left

    @property
    def num_free(self) -> int:
        """Rows without a request."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Rows with a request."""
        return self.max_rows - len(self._free)

    def left(self, slots: IntArray) -> IntArray:
        """The draws that each of these rows may still take."""
        left: IntArray = self.end[slots] - self.computed[slots]
        return left

    def most_left(self, slots: IntArray) -> int:
        """The most of these."""
        return int(self.left(slots).max(initial=0))

    def enter(self, *, computed: int, room: int, end: int) -> int:
        """Take a free slot with these counts; there must be one."""
        slot = self._free.pop()
        self.computed[slot] = computed
        self.room[slot] = room
        self.end[slot] = end
        return slot

    def leave(self, slot: int) -> None:
        """Free a slot. Steps already launched keep using it; they run before any later step."""
        self._free.append(slot)

    def check_invariants(self, used: list[int]) -> None:
        """Assert that every slot is free or in `used`, and in one of them once."""
        assert sorted(self._free + used) == list(range(self.max_rows))
