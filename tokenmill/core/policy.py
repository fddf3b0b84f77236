"""The order of the waiting queue: which request is admitted next, not whether it fits."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, Protocol

from tokenmill.core.request import RequestState
from tokenmill.kvcache import Cache


class Policy(Protocol):
    """Orders the head of the queue: the smaller key goes first, equal keys in order of arrival.

    `window` is how many requests at the head are ordered at a time. Keys are read once, when a window is
    filled, and a window is admitted before the next is filled: the cost per admission does not
    depend on the length of the queue, and nobody is overtaken by more than one window.
    """

    window: int

    def __init__(self, cache: Cache) -> None: ...

    def key(self, request: RequestState) -> Any:
        """A value that compares with the keys of other requests."""


class FirstComeFirstServed:
    """Order of arrival."""

    window = 64

    def __init__(self, cache: Cache) -> None:
        del cache  # the order does not depend on it

    def key(self, request: RequestState) -> int:
        """The arrival number."""
        return request.arrival


class LongestPrefixFirst:
    """The most cached tokens first, then in the order of the token ids.

    Ordered by ids, prompts that share a prefix stand together, even before anything is cached: they are
    computed while their prefix is there, once.
    """

    window = 1024

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def key(self, request: RequestState) -> tuple[int, bytes]:
        """Minus the cached tokens, then the ids."""
        token_ids = request.request.prompt_ids.tobytes()
        return -self._cache.count_cached(token_ids), token_ids


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "lpm": LongestPrefixFirst,
}


def create_policy(name: str, cache: Cache) -> Policy:
    """The policy of that name (a key of `POLICIES`) over the cache that it may look at."""
    return POLICIES[name](cache)


class WaitingQueue:
    """Everything that waits for a row: preempted requests, oldest first, then the policy's order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._retracted: deque[RequestState] = deque()
        self._window: deque[RequestState] = deque()
        self._arrived: OrderedDict[str, RequestState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._retracted) + len(self._window) + len(self._arrived)

    def __iter__(self) -> Iterator[RequestState]:
        yield from self._retracted
        yield from self._window
        yield from self._arrived.values()

    def add(self, request: RequestState) -> None:
        """A new request, behind all others."""
        self._arrived[request.request.id] = request

    def add_retracted(self, request: RequestState) -> None:
        """A preempted request, before all others: it ran before anything that still waits here."""
        self._retracted.appendleft(request)

    def peek(self) -> RequestState:
        """The request to be admitted next; there must be one."""
        if self._retracted:
            return self._retracted[0]
        if not self._window:
            count = min(self._policy.window, len(self._arrived))
            head = [self._arrived.popitem(last=False)[1] for _ in range(count)]
            self._window.extend(sorted(head, key=self._policy.key))
        return self._window[0]

    def pop(self) -> RequestState:
        """Remove and return the request that `peek` shows."""
        request = self.peek()
        (self._retracted or self._window).popleft()
        return request

    def remove(self, request: RequestState) -> None:
        """Take out a request that ended while it waited."""
        if self._arrived.pop(request.request.id, None) is None:
            (self._retracted if request.num_retractions else self._window).remove(request)
