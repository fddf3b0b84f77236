"""What the `priority` of a request means, and which running requests give way to more urgent ones.

Knows rows and pages only to count them; whoever is chosen is pushed back by the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill import logs
from tokenmill.config import EngineConfig
from tokenmill.core.request import RequestState, Rows, urgency_of
from tokenmill.kvcache import Cache, RowPages
from tokenmill.messages import Finish, Request

# No priority of 64 bits is less urgent, in either direction.
_LEAST_URGENT = -(2**63)
_IGNORED = "priority is ignored: the engine was made without enable_priority_scheduling=True"


@dataclass(frozen=True, slots=True, kw_only=True)
class Priorities:
    """How priorities are read; as made by default they are off, and every request is as urgent as any."""

    enabled: bool = False
    low_values_first: bool = False
    default: int | None = None  # priority of requests without one; None: less urgent than any
    threshold: int | None = None  # urgency that a request needs above another's to push it back; None: never
    refused_when_disabled: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> Priorities:
        """What the engine's arguments say."""
        preempts = config.enable_priority_scheduling and not config.disable_priority_preemption
        return cls(
            enabled=config.enable_priority_scheduling,
            low_values_first=config.schedule_low_priority_values_first,
            default=config.default_priority_value,
            threshold=config.priority_scheduling_preemption_threshold if preempts else None,
            refused_when_disabled=config.abort_on_priority_when_disabled,
        )

    def urgency(self, request: Request) -> int:
        """The larger, the sooner."""
        if not self.enabled:
            if request.priority is not None:
                logs.warn_once("priority", _IGNORED)
            return 0
        value = self.default if request.priority is None else request.priority
        if value is None:
            return _LEAST_URGENT
        return -value if self.low_values_first else value

    def refusal(self, request: Request) -> Finish | None:
        """The end of a request whose priority must not be ignored."""
        if self.enabled or not self.refused_when_disabled or request.priority is None:
            return None
        message = (
            f"the request has priority={request.priority}, but the engine has no priorities and "
            "abort_on_priority_when_disabled is set; leave priority out, or make the engine with "
            "enable_priority_scheduling=True"
        )
        return Finish("abort", message=message, status_code=503, error_type="bad_parameters")


def queue_full(max_queued: int | None, *, by_urgency: bool, has_waited: bool) -> Finish:
    """The end of a request for which there is no place in the queue, or none any more (`has_waited`)."""
    if has_waited:
        problem = f"it made way for a more urgent request: max_queued_requests={max_queued} were waiting"
    else:
        peers = ", none of them less urgent" if by_urgency else ""
        problem = f"the queue is full: max_queued_requests={max_queued} are waiting{peers}"
    message = f"{problem}; send it again later, send fewer at a time, or raise max_queued_requests"
    return Finish("abort", message=message, status_code=503, error_type="queue_full")


class Room:
    """Rows and pages that waiting requests would take, against what running ones would leave behind.

    `decoding` and `prefilling` are in the order of the scheduler; `max_tokens` is what a step computes.
    """

    def __init__(
        self,
        rows: Rows,
        cache: Cache,
        *,
        decoding: Sequence[RequestState],
        prefilling: Sequence[RequestState],
        max_tokens: int,
    ) -> None:
        self.cache = cache
        self._rows = rows
        slots = [state.slot for state in (*decoding, *prefilling)]
        self._num_growing = int(np.count_nonzero(rows.computed[slots] >= rows.room[slots]))
        self._num_new = 0  # requests that would come in
        self._num_missing = 0  # columns that these need
        self.num_tokens = max_tokens - len(decoding)  # tokens of prompts that the step can still take
        num_begun = sum(len(state.tokens) - int(rows.computed[state.slot]) for state in prefilling)
        # A long prompt that would take the whole step gives way first: what is computed of it is remembered.
        blocking = prefilling if num_begun >= self.num_tokens else ()
        self.num_blocking = len(blocking)
        self.num_tokens -= 0 if blocking else num_begun
        self._num_tokens_before = self.num_tokens  # what the last of those that would come in finds
        others = [state for state in (*decoding, *prefilling) if state not in blocking]
        # In the order in which they would be pushed back: the least urgent first, of equals the youngest.
        self.leaving = [*blocking, *sorted(reversed(others), key=urgency_of)]

    def take(self, state: RequestState, pages: RowPages) -> None:
        """Count a request that would come in; `pages` is the prefix that it found."""
        self._num_new += 1
        self._num_tokens_before = self.num_tokens
        self._num_missing += self.cache.columns(len(state.tokens)) - pages.num_columns
        self.num_tokens -= len(state.tokens) - pages.num_columns * self.cache.page_size

    def fits(self, num_leaving: int) -> bool:
        """Whether all that would come in have room once so many have left.

        A page must be left for each row, as always when a request is admitted, and for each that begins one.
        A row that writes leaves a token of the step behind.
        """
        num_staying = self._rows.num_used - num_leaving
        has_row = num_staying + self._num_new <= self._rows.max_rows
        if not has_row or self._num_tokens_before + num_leaving <= self.num_blocking:
            return False
        released = self.cache.count_released([_pages(state) for state in self.leaving[:num_leaving]])
        needed = self._num_missing + self._num_growing + num_staying + self._num_new - 1
        return self.cache.num_available_columns + released >= needed


def choose_victims(waiting: Iterable[RequestState], room: Room, *, threshold: int) -> Sequence[RequestState]:
    """Who is to be pushed back so that the first of `waiting` can run: as few as do.

    Nobody gives way to a request that is not more urgent by more than `threshold`, that would not fit even
    so, or that this step would not reach. What two waiting requests will share is counted twice, so there
    may be more room in the end than they need.
    """
    chosen = 0
    held: list[RowPages] = []  # prefixes of those that would come in: not to be counted as released
    for state in waiting:
        most = _count_below(room.leaving, state.urgency - threshold)
        is_reached = room.num_tokens > 0 or not held
        if most < max(room.num_blocking, 1) or not is_reached or not state.is_ready:
            break
        state.load_tokens()
        known, namespace = state.reusable_tokens.tobytes(), state.request.cache_namespace
        held.append(room.cache.match(known, namespace=namespace))
        room.take(state, held[-1])
        counts = range(max(chosen, room.num_blocking), most + 1)
        index = bisect_left(counts, True, key=room.fits)
        if index == len(counts):
            break
        chosen = counts[index]
    for pages in held:
        room.cache.release(pages)
    return room.leaving[:chosen]


def _count_below(states: Sequence[RequestState], urgency: int) -> int:
    """How many at the head of `states` are less urgent than that."""
    return next((index for index, state in enumerate(states) if state.urgency >= urgency), len(states))


def _pages(state: RequestState) -> RowPages:
    assert state.pages is not None
    return state.pages
