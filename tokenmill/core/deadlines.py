"""When requests with a `timeout` run out of time; who they are then is for the loop to tell the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from tokenmill.messages import Finish, Request

Clock = Callable[[], float]
# A queue cannot wait for longer than some centuries; whoever wakes earlier finds nothing due.
_LONGEST_WAIT_SECONDS = 86_400.0


class Deadlines:
    """The ends of the time of all requests that have a limit, the next one first.

    A request that ended in time stays here until then; its id, which is never used again, ends nobody.
    """

    def __init__(self, clock: Clock) -> None:
        """`clock` gives seconds from anywhere."""
        self._clock = clock
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, requests: Sequence[Request]) -> None:
        """Let the time of new requests begin now."""
        for request in requests:
            if request.timeout_seconds is not None:
                heappush(self._heap, (self._clock() + request.timeout_seconds, request.id))

    def seconds_left(self) -> float | None:
        """How long to wait for the next deadline, at least 0 and at most a day; None if there is none."""
        if not self._heap:
            return None
        return min(max(self._heap[0][0] - self._clock(), 0.0), _LONGEST_WAIT_SECONDS)

    def pop_due(self) -> list[str]:
        """Take out the ids of requests whose time is over."""
        now = self._clock()
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heappop(self._heap)[1])
        return due


def timed_out(request: Request) -> Finish:
    """The end of a request whose time is over."""
    message = f"the request timed out after {request.timeout_seconds:g} s (timeout)"
    return Finish("abort", message=message, status_code=408, error_type="timeout")
