"""Before the runner prepares something, the device gets steps for as long as that takes: no token changes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.conftest import FACTS, run_alone, run_loop, tokens_of
from tokenmill.core.scheduler import Scheduler
from tokenmill.messages import Lane, Output, StepPlan, StepResult

pytestmark = pytest.mark.unit

Make = Callable[..., Any]


class Runner:
    """Hands plans on to a fake mill, and wants to prepare something after so many steps."""

    def __init__(self, mill: Any, depth: int, wants: dict[int, float]) -> None:
        self.facts = replace(FACTS, steps_in_flight=depth)
        self._mill = mill
        self._wants = dict(wants)
        self.num_launched = self.num_collected = 0
        self.now = 0.0
        self.most_in_flight = 0
        self.in_flight_when_rehearsed: list[int] = []
        self.in_flight_when_prepared: list[int] = []
        self.in_flight_when_put_off: list[int] = []
        self.in_flight_at_launches: list[int] = []
        self.prepared_before: list[tuple[int, int]] = []  # for how many rows, and steps in flight then
        self.launched_before_preparing: list[int] = []
        self.num_lacking = 0  # preparations that are left for when there is time, each of which takes
        self.seconds_before = 0.0

    def prepare_more(self, num_rows: int) -> bool:
        self.prepared_before.append((num_rows, self.in_flight))
        self.launched_before_preparing.append(self.num_launched)
        self.now += self.seconds_before
        self.num_lacking -= 1
        return self.num_lacking >= 0

    @property
    def preparation_seconds(self) -> float:
        return max((seconds for at, seconds in self._wants.items() if at <= self.num_launched), default=0.0)

    @property
    def in_flight(self) -> int:
        return self.num_launched - self.num_collected

    def rehearse(self) -> None:
        self.in_flight_when_rehearsed.append(self.in_flight)

    def prepare(self) -> None:
        self.in_flight_when_prepared.append(self.in_flight)
        self._want_no_more()

    def put_off(self) -> None:
        self.in_flight_when_put_off.append(self.in_flight)
        self._want_no_more()

    def _want_no_more(self) -> None:
        self._wants = {at: seconds for at, seconds in self._wants.items() if at > self.num_launched}

    def launch(self, plan: StepPlan) -> None:
        self._mill.launch(plan)
        self.in_flight_at_launches.append(self.in_flight)
        self.num_launched += 1
        self.now += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def sample(self, masks: Any) -> None:
        pass

    def collect(self, lane: Lane = Lane.WHOLE) -> StepResult:
        self.num_collected += 1
        self.now += 3
        return self._mill.collect()


def run(
    world: Any,
    requests: Sequence[Any],
    *,
    depth: int = 2,
    wants: dict[int, float],
    cancelled: Sequence[str] = (),
    clock: Callable[[], float] | None = time.monotonic,
) -> tuple[Runner, dict[str, list[Output]]]:
    """The runner and the outputs of each request. Without a clock the runner's goes."""
    runner = Runner(world.mill, depth, wants)
    outputs = run_loop(world, runner, requests, cancelled=cancelled, clock=clock or (lambda: runner.now))
    return runner, outputs


def test_steps_are_under_way_while_something_is_prepared(harness: Make, make_request: Make) -> None:
    """A step takes four seconds, one of which to launch."""
    requests = [make_request("a", [1, 2, 3], 60), make_request("b", [4], 50)]
    runner, outputs = run(harness(num_pages=100), requests, wants={9: 60.0}, clock=None)
    assert runner.in_flight_when_rehearsed == [1 + 7]  # for a quarter of the time
    assert runner.in_flight_when_prepared == [1 + 22]
    for request in requests:
        assert tokens_of(outputs[request.id]) == run_alone(request)[0]


def test_the_device_gets_on_while_results_are_taken_in(harness: Make, make_request: Make) -> None:
    """What was launched ahead may be done: to take all of it in before the next launch would be too long."""
    runner, _ = run(harness(num_pages=100), [make_request("a", [1, 2, 3], 60)], wants={9: 60.0}, clock=None)
    behind = runner.in_flight_at_launches[9 + 22 :]
    assert runner.in_flight_when_prepared == behind[:1] == [23]
    assert behind[:11] == list(range(23, 1, -2))
    assert set(behind[11:]) == {1}  # as before


def test_the_end_of_a_job_is_no_time_for_it(harness: Make, make_request: Make) -> None:
    """Nothing would run meanwhile."""
    requests = [make_request("a", [1, 2, 3], 60), make_request("b", [4], 30)]
    runner, outputs = run(harness(num_pages=100), requests, wants={50: 60.0}, clock=None)
    assert runner.in_flight_when_put_off == [1]
    assert not runner.in_flight_when_rehearsed
    assert not runner.in_flight_when_prepared
    assert tokens_of(outputs["a"]) == run_alone(requests[0])[0]


def test_who_waits_makes_it_worth_while_at_the_end(harness: Make, make_request: Make) -> None:
    requests = [make_request(name, [1, 2, 3], 12) for name in "abcd"]
    runner, _ = run(harness(max_rows=2), requests, wants={10: 60.0}, clock=None)
    assert not runner.in_flight_when_put_off
    assert len(runner.in_flight_when_prepared) == 1


@pytest.mark.parametrize("wants", [{}, {3: 5.0}])
def test_a_step_is_launched_before_the_books_follow_it(
    harness: Make, make_request: Make, wants: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def note(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def noted(*arguments: Any) -> Any:
            result = original(*arguments)
            if name != "plan_step" or result is not None:
                order.append(name)
            return result

        monkeypatch.setattr(kind, name, noted)

    for name in ("launch", "sample"):
        note(Runner, name)
    for name in ("plan_step", "settle"):
        note(Scheduler, name)
    run(harness(), [make_request("a", [1, 2, 3], 12), make_request("b", [4], 5)], wants=wants)
    assert order == ["plan_step", "launch", "sample", "settle"] * 12


def test_what_takes_less_than_a_step_needs_one_more(harness: Make, make_request: Make) -> None:
    requests = [make_request("a", [1, 2, 3], 30)]
    runner, _ = run(harness(), requests, wants={5: 1e-9}, clock=lambda: 0.0)
    assert runner.in_flight_when_prepared == [3]
    assert runner.in_flight_when_rehearsed == [3]


def test_launching_ahead_takes_time_of_the_device_too(harness: Make, make_request: Make) -> None:
    """A step takes four seconds: one to launch, three to take in. Four beside the usual two cover 11 seconds
    and the five that it takes to launch them."""
    requests = [make_request("a", [1, 2, 3], 60)]
    runner, _ = run(harness(), requests, wants={9: 11.0}, clock=None)
    assert runner.in_flight_when_prepared == [6]


def test_one_step_at_a_time_stays_so(harness: Make, make_request: Make) -> None:
    runner, _ = run(harness(), [make_request("a", [1, 2, 3], 30)], depth=1, wants={5: 1.0})
    assert runner.in_flight_when_prepared == [0]
    assert not runner.in_flight_when_rehearsed  # the device stands still anyway
    assert runner.most_in_flight == 1


def test_rows_that_wait_for_their_tokens_put_it_off(
    harness: Make, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, late = harness(), [True] * 10
    monkeypatch.setattr(type(world.scheduler), "has_late_rows", property(lambda _: bool(late and late.pop())))
    requests = [make_request("a", [1, 2, 3], 30)]
    runner, _ = run(world, requests, wants={5: 1e-9}, clock=lambda: 0.0)
    assert runner.in_flight_when_prepared == [3]
    assert not late


@pytest.mark.parametrize(("depth", "expected"), [(1, []), (2, [(3, 2)] * 3), (3, [(3, 3)] * 3)])
def test_the_host_prepares_for_all_that_wait_while_long_prompts_are_computed(
    harness: Make, make_request: Make, depth: int, expected: list[tuple[int, int]]
) -> None:
    """Three prompts of 60 tokens in steps of 32 at most."""
    requests = [make_request(name, [*range(at, at + 60)], 40) for at, name in enumerate("abc", 1)]
    world = harness(num_pages=200, max_step_tokens=32, max_sequence_tokens=128)
    runner, outputs = run(world, requests, depth=depth, wants={})
    assert runner.prepared_before[: len(expected)] == expected
    assert {rows for rows, _ in runner.prepared_before} <= {3}
    for request in requests:
        assert tokens_of(outputs[request.id]) == run_alone(request)[0]


def test_as_much_is_prepared_as_there_is_time_for(harness: Make, make_request: Make) -> None:
    """Half of what a step is known to take: at first nothing, then 4.9 and more of the runner's seconds."""
    requests = [make_request(name, [*range(at, at + 60)], 40) for at, name in enumerate("abcdefg", 1)]
    world = harness(num_pages=300, max_step_tokens=32, max_sequence_tokens=128)
    runner = Runner(world.mill, 2, {})
    runner.num_lacking, runner.seconds_before = 10**9, 0.9
    run_loop(world, runner, requests, clock=lambda: runner.now)
    launched = Counter(runner.launched_before_preparing)
    assert [launched[number] for number in range(2, 8)] == [1, 1, 2, 3, 3, 3]


def test_nothing_is_prepared_for_requests_that_hardly_decode(harness: Make, make_request: Make) -> None:
    requests = [make_request(name, [*range(at, at + 60)], 4) for at, name in enumerate("abc", 1)]
    runner, _ = run(harness(num_pages=100, max_step_tokens=32), requests, wants={})
    assert runner.prepared_before == []


def test_steps_that_decode_leave_no_time(harness: Make, make_request: Make) -> None:
    requests = [make_request(name, [1, 2, 3], 12) for name in "abcd"]
    runner, _ = run(harness(), requests, wants={})
    assert runner.prepared_before == []


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # they only make things
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    stops=st.sets(st.integers(0, 9)),
    cancelled=st.lists(st.integers(0, 9), max_size=3),
    wants=st.dictionaries(st.integers(1, 60), st.sampled_from([1e-6, 1e-4, 1.0]), max_size=4),
    num_pages=st.integers(16, 60),
    depth=st.integers(1, 4),
)
def test_tokens_are_those_of_a_request_alone(
    harness: Make,
    make_request: Make,
    lengths: list[int],
    stops: set[int],
    cancelled: list[int],
    wants: dict[int, float],
    num_pages: int,
    depth: int,
) -> None:
    """Also where rows stop early, memory is short, and requests are aborted."""
    requests = [
        make_request(
            f"r{index}", [1 + index % 4, 2, 3], length, stop_ids=frozenset({0} if index in stops else ())
        )
        for index, length in enumerate(lengths)
    ]
    world = harness(num_pages=num_pages)
    _, outputs = run(
        world, requests, depth=depth, wants=wants, cancelled=[f"r{index}" for index in cancelled]
    )
    for request in requests:
        expected, finish = run_alone(request)
        found, end = tokens_of(outputs[request.id]), outputs[request.id][-1].finish
        assert end is not None
        if end.kind == "abort":
            assert int(request.id[1:]) in cancelled
            assert found == expected[: len(found)]
        else:
            assert (found, end) == (expected, finish)
    world.scheduler.check_invariants()
