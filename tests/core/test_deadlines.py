"""Time limits: a clock that a test turns, and what the loop does when one is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.core.conftest import FACTS, Unprepared
from tokenmill.core.deadlines import Deadlines
from tokenmill.core.loop import Close, Inbox, Loop, Submit
from tokenmill.messages import Lane, Output, StepPlan, StepResult

pytestmark = pytest.mark.unit

Make = Callable[..., Any]


class TurnedClock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class SlowRunner(Unprepared):
    """A step takes a second of the turned clock."""

    def __init__(self, mill: Any, clock: TurnedClock) -> None:
        self.facts = replace(FACTS, steps_in_flight=1)
        self._mill = mill
        self._clock = clock

    def launch(self, plan: StepPlan) -> None:
        self._mill.launch(plan)

    def sample(self, masks: None) -> None:
        pass

    def collect(self, lane: Lane = Lane.WHOLE) -> StepResult:
        self._clock.seconds += 1
        return self._mill.collect()


NO_GRAMMARS: Any = SimpleNamespace(close=lambda: None)


def run_loop(world: Any, requests: Sequence[Any]) -> dict[str, Output]:
    """The last Output of each request, from a loop whose steps take a second."""
    clock, inbox, ends = TurnedClock(), Inbox(), {}

    def deliver(outputs: Sequence[Output]) -> None:
        ends.update({output.request_id: output for output in outputs if output.finish is not None})
        if len(ends) == len(requests):
            inbox.put(Close())

    runner: Any = SlowRunner(world.mill, clock)
    inbox.put(Submit(requests))
    Loop(
        runner, world.scheduler, world.cache, grammars=NO_GRAMMARS, inbox=inbox, deliver=deliver, clock=clock
    ).run()
    return ends


def test_deadlines_come_in_the_order_of_their_times(make_request: Make) -> None:
    clock = TurnedClock()
    deadlines = Deadlines(clock)
    assert deadlines.seconds_left() is None
    deadlines.add([make_request("a", [1], timeout_seconds=5.0), make_request("b", [1])])
    clock.seconds += 1
    deadlines.add([make_request("c", [1], timeout_seconds=2.5), make_request("d", [1], timeout_seconds=4.0)])
    assert len(deadlines) == 3
    assert deadlines.seconds_left() == 2.5
    assert deadlines.pop_due() == []
    clock.seconds += 4
    assert deadlines.seconds_left() == 0
    assert deadlines.pop_due() == ["c", "a", "d"]
    assert (len(deadlines), deadlines.seconds_left()) == (0, None)


def test_a_request_ends_with_the_tokens_it_has(harness: Make, make_request: Make, alone: Make) -> None:
    job = [make_request("late", [1], 40, timeout_seconds=5.5), make_request("free", [2], 40)]
    ends = run_loop(harness(), job)
    finish = ends["late"].finish
    assert (finish.kind, finish.status_code, finish.error_type) == ("abort", 408, "timeout")
    assert finish.message == "the request timed out after 5.5 s (timeout)"
    assert list(ends["late"].token_ids) == alone(job[0])[0][:6]
    assert list(ends["free"].token_ids) == alone(job[1])[0]


def test_waiting_counts_and_ending_in_time_ends_the_watch(
    harness: Make, make_request: Make, alone: Make
) -> None:
    job = [
        make_request("runs", [1], 10, timeout_seconds=10.5),
        make_request("waits", [2], 10, timeout_seconds=3.0),
        make_request("next", [3], 10),
    ]
    ends = run_loop(harness(max_rows=1), job)
    assert ends["waits"].finish.error_type == "timeout"
    assert list(ends["waits"].token_ids) == []
    assert [ends[name].finish.kind for name in ("runs", "next")] == ["length", "length"]


def test_a_preempted_request_times_out_in_the_queue(harness: Make, make_request: Make, alone: Make) -> None:
    loop = harness(num_pages=8, page_size=4, max_sequence_tokens=32)
    loop.submit(make_request("a", [1] * 4, 20), make_request("b", [2] * 4, 14, timeout_seconds=9.0))
    loop.step()
    while not loop.scheduler.num_waiting:
        loop.step()
    (output,) = loop.keep(loop.scheduler.time_out(["b", "unknown"]))
    assert output.num_retractions == 1
    assert list(output.token_ids) == alone(make_request("b", [2] * 4, 14))[0][: len(output.token_ids)]
    assert output.token_ids
    loop.run()


def test_a_passed_deadline_of_an_ended_request_only_wakes_the_loop(harness: Make, make_request: Make) -> None:
    """Asleep, too: the next request is served as ever."""
    world, inbox, ends = harness(), Inbox(), []

    later = threading.Timer(0.1, lambda: inbox.put(Submit([make_request("b", [1], 2)])))

    def deliver(outputs: Sequence[Output]) -> None:
        ends.extend(output.request_id for output in outputs)
        if len(ends) == 1:
            later.start()
        else:
            inbox.put(Close())

    inbox.put(Submit([make_request("a", [1], 2, timeout_seconds=0.05)]))
    runner: Any = SlowRunner(world.mill, TurnedClock())
    Loop(
        runner,
        world.scheduler,
        world.cache,
        grammars=NO_GRAMMARS,
        inbox=inbox,
        deliver=deliver,
        clock=time.monotonic,
    ).run()
    assert ends == ["a", "b"]


def test_a_limit_of_centuries_is_waited_for_in_parts(make_request: Make) -> None:
    """No queue can wait so long at once; a thread that tried would end the engine."""
    for seconds in (1e10, 1e300):
        deadlines = Deadlines(TurnedClock())
        deadlines.add([make_request("a", [1], timeout_seconds=seconds)])
        left = deadlines.seconds_left()
        assert left is not None
        assert left <= threading.TIMEOUT_MAX
        assert deadlines.pop_due() == []
