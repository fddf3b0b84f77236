"""The books of requests that must outlive their core: what was delivered of each, and who is computed anew.

A request that is in flight at a death is computed again behind the tokens that were delivered. One that
kills whatever computes it is found by giving new cores fewer and fewer of those that never get on, and fails
alone. Processes and sockets are `restart.py`'s matter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenmill.core.deadlines import timed_out
from tokenmill.messages import CANCELLED, Finish, Output, Request

# Deaths without a new token after which a request is a suspect, and deaths alone after which it fails. Kills
# mostly come from outside, and may come faster than a long prompt gets its first token; but the system also
# kills what takes too much memory.
_DEATHS_OF_SUSPECTS = 2
_MOST_DEATHS_ALONE = 3
_MOST_KILLS_ALONE = 20
# Suspects are tried in so many parts: those in a part that gets on are cleared without another death.
_NUM_PARTS = 4
# A request that saw a death reports at least so often, so that the next death costs it few tokens; a suspect
# reports each token, which clears it.
_INTERVAL_AFTER_DEATH = 8
_INTERVAL_OF_SUSPECTS = 1


@dataclass(slots=True, eq=False)
class _Flight:
    """One request that has not finished."""

    request: Request
    submitted_seconds: float = field(default_factory=time.perf_counter)
    output_ids: list[int] = field(default_factory=list)  # delivered
    cached_tokens: int | None = None  # as told with the first tokens delivered
    num_retractions: int = 0  # as told last,
    num_retractions_before: int = 0  # and at the last death
    last_call: int = 0  # begun before it, of those that requests wait for
    is_cancelled: bool = False
    was_delayed: bool = False  # it had to wait for a new core
    got_on: bool = False  # since a core has it
    num_deaths: int = 0  # in a row that found it without a new token
    num_deaths_alone: int = 0  # those of them that no other request can have caused,
    num_kills_alone: int = 0  # and of these, those by a kill

    @property
    def is_deadly(self) -> bool:
        """Whether it fails instead of being computed again."""
        num_faults = self.num_deaths_alone - self.num_kills_alone
        return num_faults >= _MOST_DEATHS_ALONE or self.num_kills_alone >= _MOST_KILLS_ALONE


class Replay:
    """All requests in flight of one engine, whatever becomes of its cores. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Flight] = {}  # that no living core has
        self._sent: dict[str, _Flight] = {}
        self._unproven: set[str] = set()  # suspects among those sent, until they get on
        # Calls that later requests wait for: all so far, those without an answer, and those of these that a
        # core has died of or before.
        self._num_calls = 0
        self._asked: set[int] = set()
        self._asked_anew: set[int] = set()

    @property
    def num_sent(self) -> int:
        """Requests that the core has."""
        return len(self._sent)

    @property
    def num_waiting(self) -> int:
        """Requests that no core has."""
        return len(self._waiting)

    @property
    def num_resumed(self) -> int:
        """Those of them that go on behind tokens that were delivered."""
        return sum(bool(flight.output_ids) for flight in self._waiting.values())

    def add(self, requests: Sequence[Request]) -> None:
        """Take requests in; `next` will name them."""
        last = max(self._asked, default=0)
        self._waiting.update((request.id, _Flight(request, last_call=last)) for request in requests)

    def begin_call(self) -> int:
        """A call is put to the core that requests from here on wait for; its number."""
        self._num_calls += 1
        self._asked.add(self._num_calls)
        return self._num_calls

    def end_call(self, number: int) -> None:
        """It has its answer, or gets none; `next` may have more to name."""
        self._asked.discard(number)
        self._asked_anew.discard(number)

    def hold(self) -> None:
        """Nobody takes requests now: those that wait are late when somebody does."""
        for flight in self._waiting.values():
            flight.was_delayed = True

    def next(self) -> list[Request]:
        """Requests to give to the core now; it has them from here on.

        Nearly always all that wait. While there are suspects, some of those that saw most deaths, and nobody
        else until each of these got on. A core keeps requests behind a call by itself; one that is put to
        another core comes after the requests that were before it, and so these wait here.
        """
        if self._unproven:
            self.hold()
            return []
        first = min(self._asked_anew, default=self._num_calls + 1)
        chosen = [flight for flight in self._waiting.values() if flight.last_call < first]
        most = max((flight.num_deaths for flight in chosen), default=0)
        if most >= _DEATHS_OF_SUSPECTS:
            suspects = [flight for flight in chosen if flight.num_deaths == most]
            chosen = suspects[: -(-len(suspects) // _NUM_PARTS)]
            self._unproven = {flight.request.id for flight in chosen}
        for flight in chosen:
            del self._waiting[flight.request.id]
            self._sent[flight.request.id] = flight
        self.hold()
        return [_as_sent(flight) for flight in chosen]

    def take(self, outputs: Sequence[Output]) -> list[Output]:
        """Enter what the core said, and give it as the callers shall hear it."""
        return [self._take(output) for output in outputs]

    def _take(self, output: Output) -> Output:
        flight = self._sent.get(output.request_id)
        if flight is None:
            return output
        if output.finish is not None:
            del self._sent[output.request_id]
        if output.token_ids or output.finish is not None:
            flight.got_on = True
            flight.num_deaths = flight.num_deaths_alone = flight.num_kills_alone = 0
            self._unproven.discard(output.request_id)
        flight.output_ids += output.token_ids
        if flight.cached_tokens is None:
            flight.cached_tokens = output.cached_tokens
        flight.num_retractions = flight.num_retractions_before + output.num_retractions
        return _as_heard(output, flight) if flight.was_delayed or output.times is not None else output

    def cancel(self, request_ids: Sequence[str]) -> list[Output]:
        """Note whom nobody wants any more; gives the ends of those that no core has."""
        ended = []
        for name in request_ids:
            if flight := self._waiting.pop(name, None):
                ended.append(_end(flight, _CANCELLED))
            elif flight := self._sent.get(name):
                flight.is_cancelled = True
        return ended

    def died(self, *, blames: bool, was_killed: bool = False) -> list[Output]:
        """The core died: whom it had waits again. Gives the ends of those that are not computed again.

        With `blames` it may have died of one of its requests; less likely so if it was killed.
        """
        self._asked_anew |= self._asked
        stuck = [flight for flight in self._sent.values() if not flight.got_on]
        for flight in stuck if blames else ():
            flight.num_deaths += 1
            is_alone = len(stuck) == 1
            flight.num_deaths_alone = flight.num_deaths_alone + 1 if is_alone else 0
            flight.num_kills_alone = flight.num_kills_alone + was_killed if is_alone else 0
        ended = []
        lost = list(self._sent.values())
        self._sent.clear()
        self._unproven.clear()
        again: dict[str, _Flight] = {}
        for flight in lost:
            flight.got_on = False
            flight.was_delayed = True
            flight.num_retractions_before = flight.num_retractions
            if flight.is_cancelled:
                ended.append(_end(flight, _CANCELLED))
            elif flight.is_deadly:
                ended.append(_end(flight, _deadly(flight.num_deaths)))
            else:
                again[flight.request.id] = flight
        self._waiting = again | self._waiting  # those that came first go first
        return ended


_CANCELLED = Finish("abort", message=CANCELLED)


def _deadly(num_deaths: int) -> Finish:
    message = f"the core's process died {num_deaths} times while computing it"
    return Finish("abort", message=message, status_code=500, error_type="internal")


def _end(flight: _Flight, finish: Finish) -> Output:
    return Output(flight.request.id, (), finish, flight.cached_tokens or 0, flight.num_retractions)


def _as_sent(flight: _Flight) -> Request:
    """The request as the next core gets it."""
    request = flight.request
    if not flight.was_delayed:
        return request
    interval = _INTERVAL_OF_SUSPECTS if flight.num_deaths >= _DEATHS_OF_SUSPECTS else _INTERVAL_AFTER_DEATH
    seconds_gone = time.perf_counter() - flight.submitted_seconds
    return replace(
        request,
        output_ids=tuple(flight.output_ids),
        report_interval=min(request.report_interval or interval, interval),
        timeout_seconds=None
        if request.timeout_seconds is None
        else max(0.0, request.timeout_seconds - seconds_gone),
    )


def _as_heard(output: Output, flight: _Flight) -> Output:
    """What the core says of a request, as if it had been its only core."""
    times, finish = output.times, output.finish
    if finish is not None and finish.error_type == "timeout":
        finish = timed_out(flight.request)
    return replace(
        output,
        finish=finish,
        cached_tokens=output.cached_tokens if flight.cached_tokens is None else flight.cached_tokens,
        num_retractions=flight.num_retractions,
        times=None if times is None else replace(times, submitted=flight.submitted_seconds),
    )
