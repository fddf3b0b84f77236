"""The order of the waiting queue: which request is admitted next, not whether it fits."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Protocol

from tokenmill.core.request import RequestState
from tokenmill.kvcache import Cache
from tokenmill.queue_order import (
    LENGTH_WINDOW,
    PREFIX_WINDOW,
    along_prefixes,
    by_length,
    can_run_at_once,
    short_tail_window,
)

# With less than such a part of a window left, the next one is ordered, where there is time for it.
_PARTS_LEFT = 4


class Policy(Protocol):
    """Puts the head of the queue into order.

    `window` is how many requests at the head are ordered at a time. They are ordered once, when a window is
    filled, and a window is admitted before the next one: the cost per admission does not depend on the length
    of the queue, and nobody is overtaken by more than one window.
    """

    window: int

    def ordered(self, requests: list[RequestState]) -> list[RequestState]:
        """The requests, given in order of arrival, in the order in which they are to go."""


class FirstComeFirstServed:
    """Order of arrival."""

    window = 64

    def __init__(self, cache: Cache) -> None:
        del cache  # the order does not depend on it

    def ordered(self, requests: list[RequestState]) -> list[RequestState]:
        """As they came."""
        return requests


class LongestPrefixFirst:
    """Prompts that share a prefix stand together, even before anything is cached; it is computed once, then.

    What may write longest goes first, as far as that parts no such group: a group goes by its longest
    request, and so do the groups within it. So the end of a job is not one long request alone, and next to
    nothing more is computed for it. Equals are ordered by their cached tokens, the most first, then as they
    came.
    """

    window = PREFIX_WINDOW

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def ordered(self, requests: list[RequestState]) -> list[RequestState]:
        """Depth first through the tree of their prefixes."""
        waiting = [state.request for state in requests]
        cached = [
            self._cache.count_cached(each.prompt_ids.tobytes(), namespace=each.cache_namespace)
            for each in waiting
        ]
        order = along_prefixes(waiting, cached=cached, page_size=self._cache.page_size)
        return [requests[place] for place in order]


class LongestOutputFirst:
    """The most new tokens allowed first: what may take longest is not left for the end."""

    window = LENGTH_WINDOW

    def __init__(self, cache: Cache) -> None:
        del cache

    def ordered(self, requests: list[RequestState]) -> list[RequestState]:
        """By the tokens that they may still draw; equals as they came."""
        return [requests[place] for place in by_length([state.request for state in requests])]


class RandomOrder:
    """Any order, so that equal neighbours in a job do not meet in a batch."""

    window = 65_536

    def __init__(self, cache: Cache) -> None:
        del cache
        self._random = random.Random()

    def ordered(self, requests: list[RequestState]) -> list[RequestState]:
        """A new order each time."""
        return self._random.sample(requests, len(requests))


class ShortTail:
    """What the engine chooses: the longest outputs first, so that a job does not end with few rows.

    Unless all that wait can run at once, those that share a prefix stand together, too.
    """

    def __init__(self, cache: Cache, max_rows: int) -> None:
        self._along_prefixes = LongestPrefixFirst(cache)
        self._by_length = LongestOutputFirst(cache)
        self._cache = cache
        self._max_rows = max_rows
        self.window = short_tail_window(max_rows)

    def ordered(self, requests: list[RequestState]) -> list[RequestState]:
        """By their outputs alone where no prefix is forgotten before all that begin with it have come."""
        waiting, cache = [state.request for state in requests], self._cache
        at_once = not cache.prefix_caching or can_run_at_once(
            waiting,
            max_rows=self._max_rows,
            num_pages=cache.num_available_columns,  # pages that rows use already are not
            page_size=cache.page_size,
        )
        return (self._by_length if at_once else self._along_prefixes).ordered(requests)


POLICIES: dict[str, Callable[[Cache], Policy]] = {
    "fcfs": FirstComeFirstServed,
    "lpm": LongestPrefixFirst,
    "lof": LongestOutputFirst,
    "random": RandomOrder,
}


def create_policy(name: str, cache: Cache) -> Policy:
    """The policy of that name (a key of `POLICIES`) over the cache that it may look at."""
    return POLICIES[name](cache)


def choose_policy(cache: Cache, *, max_rows: int, has_priorities: bool) -> Policy:
    """The policy where none was named. With priorities, equals go as they came."""
    return FirstComeFirstServed(cache) if has_priorities else ShortTail(cache, max_rows)


class WaitingQueue:
    """Everything that waits for a row: preempted requests, oldest first, then the policy's order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._retracted: deque[RequestState] = deque()
        self._window: OrderedDict[str, RequestState] = OrderedDict()
        self._arrived: OrderedDict[str, RequestState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._retracted) + len(self._window) + len(self._arrived)

    def __iter__(self) -> Iterator[RequestState]:
        yield from self._retracted
        yield from self._window.values()
        yield from self._arrived.values()

    def add(self, request: RequestState) -> None:
        """A new request, behind all others."""
        self._arrived[request.request.id] = request

    def add_retracted(self, request: RequestState) -> None:
        """A preempted request, before all others: it ran before anything that still waits here."""
        self._retracted.appendleft(request)

    def add_again(self, request: RequestState) -> None:
        """A request that begins anew: behind the preempted ones, before those that never ran."""
        self._retracted.append(request)

    def peek(self) -> RequestState:
        """The request to be admitted next; there must be one."""
        if self._retracted:
            return self._retracted[0]
        if not self._window:
            self._fill_window()
        return next(iter(self._window.values()))

    def look_ahead(self) -> None:
        """Order the next window, if it is full already, when the last one is nearly used up."""
        size = self._policy.window
        if len(self._arrived) >= size and len(self._window) < size // _PARTS_LEFT:
            self._fill_window()

    def _fill_window(self) -> None:
        """Let the next ones follow upon what is left of the window."""
        count = min(self._policy.window, len(self._arrived))
        head = [self._arrived.popitem(last=False)[1] for _ in range(count)]
        self._window.update((each.request.id, each) for each in self._policy.ordered(head))

    @property
    def last(self) -> RequestState:
        """The request that would go last if nothing came any more; there must be one."""
        return next(reversed(self._arrived.values() or self._window.values() or self._retracted))

    def pop(self) -> RequestState:
        """Remove and return the request that `peek` shows."""
        request = self.peek()
        if self._retracted:
            self._retracted.popleft()
        else:
            self._window.popitem(last=False)
        return request

    def remove(self, request: RequestState) -> None:
        """Take out a request that ended while it waited."""
        if request.num_retractions:  # preempted, or begun anew
            self._retracted.remove(request)
        elif self._arrived.pop(request.request.id, None) is None:
            del self._window[request.request.id]


class PriorityQueue:
    """Everything that waits for a row where priorities count: a queue for each urgency, the highest first.

    Within one urgency the order is that of `WaitingQueue`, whose methods are the same.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._levels: dict[int, WaitingQueue] = {}  # none of them is empty
        self._urgencies: list[int] = []  # keys of `_levels`, ascending
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[RequestState]:
        for urgency in reversed(self._urgencies):
            yield from self._levels[urgency]

    def add(self, request: RequestState) -> None:
        """A new request, behind all others of its urgency."""
        self._level(request.urgency).add(request)

    def add_retracted(self, request: RequestState) -> None:
        """A preempted request, before all others of its urgency."""
        self._level(request.urgency).add_retracted(request)

    def add_again(self, request: RequestState) -> None:
        """A request that begins anew: behind the preempted ones of its urgency."""
        self._level(request.urgency).add_again(request)

    def peek(self) -> RequestState:
        """The request to be admitted next; there must be one."""
        return self._levels[self._urgencies[-1]].peek()

    def look_ahead(self) -> None:
        """As a plain queue does, among the most urgent ones."""
        if self._urgencies:
            self._levels[self._urgencies[-1]].look_ahead()

    @property
    def last(self) -> RequestState:
        """The request that would go last if nothing came any more; there must be one."""
        return self._levels[self._urgencies[0]].last

    def pop(self) -> RequestState:
        """Remove and return the request that `peek` shows."""
        request = self._levels[self._urgencies[-1]].pop()
        self._shrink(request.urgency)
        return request

    def remove(self, request: RequestState) -> None:
        """Take out a request that ended while it waited."""
        self._levels[request.urgency].remove(request)
        self._shrink(request.urgency)

    def _level(self, urgency: int) -> WaitingQueue:
        """The queue of an urgency, for one more request."""
        self._count += 1
        if urgency not in self._levels:
            self._levels[urgency] = WaitingQueue(self._policy)
            insort(self._urgencies, urgency)
        return self._levels[urgency]

    def _shrink(self, urgency: int) -> None:
        """One request has left; without another the queue of its urgency goes, too."""
        self._count -= 1
        if not len(self._levels[urgency]):
            del self._levels[urgency]
            self._urgencies.pop(bisect_left(self._urgencies, urgency))
