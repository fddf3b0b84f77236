"""What the `priority` of a request means, and which running requests give way to more urgent ones.

Knows rows and pages only to count them; whoever is chosen is pushed back by the scheduler.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from tokenmill.config import EngineConfig
from tokenmill.core.request import RequestState, Rows
from tokenmill.kvcache import Cache, RowPages
from tokenmill.messages import Finish, Request

logger = logging.getLogger("tokenmill")

# No priority of 64 bits is less urgent, in either direction.
_LEAST_URGENT = -(2**63)


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
                _warn_ignored()
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


@cache
def _warn_ignored() -> None:
    logger.warning("priority is ignored: the engine was made without enable_priority_scheduling=True")


@dataclass(slots=True)
class Room:
    """Rows and columns that waiting requests would take, against what running ones would leave behind.

    `leaving` are the running requests in the order in which they would be pushed back.
    """

    rows: Rows
    cache: Cache
    leaving: Sequence[RequestState]
    num_growing: int  # running rows that begin a page in this step
    num_new: int = 0  # requests that would come in
    num_missing: int = 0  # columns that these need

    def fits(self, count: int) -> bool:
        """Whether all that would come in have room once the first `count` have left.

        A page must be left for each row, as always when a request is admitted.
        """
        num_staying = self.rows.num_used - count
        if num_staying + self.num_new > self.rows.max_rows:
            return False
        released = self.cache.count_released([_pages(state) for state in self.leaving[:count]])
        needed = self.num_missing + self.num_growing + num_staying + self.num_new - 1
        return self.cache.num_available_columns + released >= needed


def choose_victims(
    waiting: Iterable[RequestState], room: Room, *, threshold: int, num_tokens: int, least: int = 0
) -> Sequence[RequestState]:
    """Who is to be pushed back so that the first of `waiting` can run: as few as do, at least `least`.

    Nobody gives way to a request that is not more urgent by more than `threshold`, that would not fit even
    so, or that the step, which computes `num_tokens` tokens of prompts, would not reach. What two waiting
    requests will share is counted twice, so there may be more room than they need.
    """
    chosen = 0
    held: list[RowPages] = []  # prefixes of those that would come in: not to be counted as released
    for state in waiting:
        eligible = _count_below(room.leaving, state.urgency - threshold)
        if eligible < max(least, 1) or num_tokens <= 0 or not state.is_ready:
            break
        state.load_tokens()
        pages = room.cache.match(state.tokens.tobytes(), namespace=state.request.cache_namespace)
        held.append(pages)
        room.num_new += 1
        room.num_missing += room.cache.columns(len(state.tokens)) - pages.num_columns
        num_tokens -= len(state.tokens) - pages.num_columns * room.cache.page_size
        counts = range(max(chosen, least), eligible + 1)
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
