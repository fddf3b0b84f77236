"""Prompts in a lane of their own, beside rows that decode: when, and that nobody gets other tokens for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.conftest import FACTS, FakeMill, Unprepared, run_alone, run_loop, tokens_of
from tokenmill.core import beside
from tokenmill.messages import Lane, Output, StepPlan, StepResult

pytestmark = pytest.mark.unit

Make = Callable[..., Any]
MOST_IN_FLIGHT = 2


class Runner(Unprepared):
    """Hands plans on to a fake mill; prompts in a lane of their own take two decode steps, or with a seed as
    long as chance will have it."""

    def __init__(self, mill: FakeMill, *, depth: int, seed: int | None, opens_at: int) -> None:
        """Lanes are open when it was asked for them so often."""
        self.facts = replace(FACTS, steps_in_flight=depth, has_lanes=True)
        self._mill = mill
        self._random = None if seed is None else random.Random(seed)
        self._num_beside = 0
        self._opens_at = opens_at
        self.plans: list[StepPlan] = []
        self.num_prompts_in_flight = 0
        self.now = 0.0  # a step takes a hundredth of a second

    def part(self, num_rows: int) -> bool:
        self._opens_at -= 1
        return self._opens_at < 0

    def has_prompts(self) -> bool:
        assert self.num_prompts_in_flight
        return self._num_beside >= 2 if self._random is None else self._random.random() < 0.2

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        if plan.lane is Lane.PROMPTS:
            self.num_prompts_in_flight += 1
            assert self.num_prompts_in_flight <= MOST_IN_FLIGHT
        assert (plan.lane is Lane.DECODES) <= (self.num_prompts_in_flight > 0)
        self._mill.launch(plan)

    def sample(self, masks: Any) -> None:
        assert masks is None

    def collect(self, lane: Lane = Lane.WHOLE) -> StepResult:
        self.num_prompts_in_flight -= lane is Lane.PROMPTS
        self._num_beside = 0 if lane is Lane.PROMPTS else self._num_beside + 1
        self.now += 0.01
        return self._mill.collect(lane)

    def lanes(self) -> list[str]:
        return [plan.lane.value for plan in self.plans]


def run(
    world: Any,
    requests: Sequence[Any],
    *,
    depth: int = 2,
    seed: int | None = None,
    opens_at: int = 0,
    cancelled: Sequence[str] = (),
) -> tuple[Runner, dict[str, list[Output]]]:
    """The runner, and the outputs of each request."""
    runner = Runner(world.mill, depth=depth, seed=seed, opens_at=opens_at)
    outputs = run_loop(world, runner, requests, cancelled=cancelled, clock=lambda: runner.now)
    world.scheduler.check_invariants()
    return runner, outputs


def job(make_request: Make, outputs: Sequence[int], *, prompt: int = 8) -> list[Any]:
    return [
        make_request(str(at), [at // 5**place % 5 for place in range(prompt)], num_tokens, seed=at)
        for at, num_tokens in enumerate(outputs)
    ]


def test_prompts_run_beside_rows_that_outlast_them(harness: Make, make_request: Make) -> None:
    requests = job(make_request, [100, 60, 55, 50, 45, 40, 20, 10])
    world = harness(num_pages=400, max_rows=8, max_step_tokens=16, max_sequence_tokens=120, policy=None)
    runner, outputs = run(world, requests)
    lanes = runner.lanes()
    assert lanes[0] == "whole"  # nobody decodes yet
    # Two requests in each step: those of the first step decode while the others are computed.
    assert lanes.count("prompts") == 3
    assert lanes[1:3] == ["prompts", "decodes"]
    beside = [plan for plan in runner.plans if plan.lane is Lane.PROMPTS]
    assert [plan.counts.tolist() for plan in beside] == [[8, 8]] * 3
    assert not any(plan.awaits_prompts for plan in runner.plans)
    for request in requests:
        assert tokens_of(outputs[request.id]) == run_alone(request)[0]


@pytest.mark.parametrize(
    ("outputs", "beside"),
    [
        ([300, 200, 190, 180, 40, 30, 20, 10], {0}),
        ([300, 290, 240, 230, 40, 30, 20, 10], {0, 1}),
        ([300, 290, 280, 240, 40, 30, 20, 10], {0, 1, 2}),
        ([300, 299, 283, 282, 281, 280, 279, 278], {0, 1, 2, 3, 4, 5}),  # the last ones are done with all
    ],
)
def test_who_has_less_to_draw_is_held_back_while_prompts_are_computed(
    harness: Make, make_request: Make, outputs: list[int], beside: set[int]
) -> None:
    requests = job(make_request, outputs)
    world = harness(num_pages=800, max_rows=8, max_step_tokens=16, max_sequence_tokens=320, policy=None)
    runner, found = run(world, requests)
    assert runner.lanes().count("prompts") == 3
    rows = [*dict.fromkeys(slot for plan in runner.plans for slot in plan.slots.tolist())]
    decoding = [plan.slots.tolist() for plan in runner.plans if plan.lane is Lane.DECODES]
    assert {rows.index(slot) for slots in decoding for slot in slots} == beside
    for request in requests:
        assert tokens_of(found[request.id]) == run_alone(request)[0]


def test_who_is_listened_to_is_not_held_back(harness: Make, make_request: Make) -> None:
    """Somebody wants the tokens of a stream as they come."""
    requests = job(make_request, [300, 200, 190, 180, 40, 30, 20, 10])
    requests[1] = make_request("1", list(requests[1].prompt_ids), 200, seed=1, report_interval=1)
    world = harness(num_pages=800, max_rows=8, max_step_tokens=16, max_sequence_tokens=320, policy=None)
    runner, _ = run(world, requests)
    first = runner.plans[0].slots.tolist()
    decoding = [plan.slots.tolist() for plan in runner.plans if plan.lane is Lane.DECODES]
    assert decoding
    assert all(slots == first for slots in decoding)


def test_nobody_is_held_back_for_those_who_come_later(harness: Make, make_request: Make) -> None:
    """One after the other could come."""
    world = harness(num_pages=800, max_rows=16, max_step_tokens=16, max_sequence_tokens=320, lags=True)
    world.submit(*job(make_request, [300, 200, 100, 90, 80, 70]))
    first = world.launch().slots.tolist()
    world.launch_prompts()
    assert world.launch().slots.tolist() == first[:1]
    world.submit(make_request("late", [4] * 8, 50))
    world.launch_prompts()
    assert world.launch().slots.tolist() == first


def test_who_decodes_for_those_preempted_has_a_page(harness: Make, make_request: Make) -> None:
    """All that lead give way in the middle of a plan, and one that was held back begins a page in it."""
    prompt = [at * at % 5 for at in range(36)]
    held = make_request("held", prompt, 8, seed=1)
    leading = make_request("leading", [2, 2, 3, 4, 1, 2, 3, 4], 50, seed=2)
    beside = make_request("beside", [*prompt, 1, 2, 3, 4, 1, 2, 3, 4], 10, seed=3)
    world = harness(num_pages=15, max_rows=4, max_step_tokens=44, max_sequence_tokens=58, lags=True)
    world.submit(held, leading)
    world.launch()
    world.submit(beside)
    assert world.scheduler.prompts_pay_apart
    world.launch_prompts()
    world.take_in()
    leads = world.launch().slots.tolist()
    assert len(leads) == 1
    world.take_in()
    while world.launch().slots.tolist() == leads:
        world.take_in()
    assert world.scheduler.num_waiting == 2  # the leading one, and the one beside
    world.take_in()
    world.take_in(Lane.PROMPTS)
    world.run()
    for request in (held, leading, beside):
        assert world.tokens(request.id) == run_alone(request)[0]


def test_nobody_is_held_back_where_prompts_outlast_all_rows(harness: Make, make_request: Make) -> None:
    """Work is all that is left, then."""
    requests = job(make_request, [47, 31, 12, 11, 10, 9, 8, 7])
    world = harness(num_pages=400, max_rows=8, max_step_tokens=16, max_sequence_tokens=120, policy=None)
    runner, _ = run(world, requests)
    first = runner.plans[0].slots.tolist()
    beside = [plan.slots.tolist() for plan in runner.plans if plan.lane is Lane.DECODES]
    assert beside[0] == first


def test_the_last_prompts_need_not_fill_a_step(harness: Make, make_request: Make) -> None:
    """Rows that decode would wait for them; a few tokens are not worth it."""
    for last, num_beside in ((5, 2), (3, 1)):
        requests = job(make_request, [100, 60, 55, 50, 45])
        requests[-1] = make_request("4", [4] * last, 45, seed=4)
        world = harness(num_pages=400, max_rows=8, max_step_tokens=16, max_sequence_tokens=120, policy=None)
        runner, outputs = run(world, requests)
        assert runner.lanes().count("prompts") == num_beside
        assert all(tokens_of(outputs[each.id]) == run_alone(each)[0] for each in requests)


@pytest.mark.parametrize(
    ("outputs", "max_rows", "policy"),
    [
        ([60] * 8, 8, None),  # those who wait would be the last to end
        ([60, 55, 20, 10, 5, 5, 100, 5], 8, "fcfs"),  # one of them
        ([100, 60, 55, 50], 8, None),  # less than a step is left
        ([100, 60, 55, 50, 45, 40, 20, 10], 6, None),  # some would have to wait for rows
    ],
)
def test_prompts_that_gain_nothing_run_with_the_others(
    harness: Make, make_request: Make, outputs: list[int], max_rows: int, policy: str | None
) -> None:
    world = harness(
        num_pages=400, max_rows=max_rows, max_step_tokens=16, max_sequence_tokens=120, policy=policy
    )
    prompt = 8 if len(outputs) == 8 else 6
    runner, _ = run(world, job(make_request, outputs, prompt=prompt))
    assert set(runner.lanes()) == {"whole"}


def test_lanes_are_taken_as_soon_as_they_are_open(harness: Make, make_request: Make) -> None:
    world = harness(num_pages=400, max_rows=8, max_step_tokens=16, max_sequence_tokens=120, policy=None)
    runner, _ = run(world, job(make_request, [100, 60, 55, 50, 45, 40, 20, 10]), opens_at=1)
    assert runner.lanes().count("prompts") == 2
    assert runner.lanes()[:2] == ["whole", "whole"]


def test_chunks_of_a_prompt_are_taken_in_one_after_the_other(harness: Make, make_request: Make) -> None:
    """What is shown of a prompt comes in its order."""
    world = harness(num_pages=400, max_rows=8, max_step_tokens=16, max_sequence_tokens=130, depth=3)
    first, second = job(make_request, [100, 50], prompt=24)
    world.submit(first, second)
    world.launch()
    assert not world.scheduler.may_take_in_prompts
    world.launch()  # ends the first prompt, begins the second one
    world.launch_prompts()
    world.launch()
    for _ in range(2):
        assert not world.scheduler.may_take_in_prompts
        world.take_in()
    assert world.scheduler.may_take_in_prompts
    world.take_in()
    assert world.scheduler.may_take_in_prompts
    world.take_in(Lane.PROMPTS)
    assert not world.scheduler.may_take_in_prompts


def test_those_who_ran_before_go_on_with_the_others(harness: Make, make_request: Make) -> None:
    world = harness(num_pages=400, max_rows=8, max_step_tokens=16, max_sequence_tokens=120)
    world.submit(*job(make_request, [100, 60, 20, 20]))
    world.launch()
    assert world.scheduler.prompts_pay_apart
    world.take_in()
    world.scheduler.retract_all()
    assert not world.scheduler.prompts_pay_apart


def test_a_row_that_leaves_its_prompt_is_waited_for(harness: Make, make_request: Make) -> None:
    """Its pages may be written to until then, whoever has them."""
    world = harness(num_pages=400, max_rows=8, max_step_tokens=16, max_sequence_tokens=120, lags=True)
    first, second, third = job(make_request, [100, 50, 40])
    world.submit(first)
    world.launch()
    world.submit(second, third)
    assert world.launch_prompts() is not None
    assert not world.launch().awaits_prompts
    world.keep(world.scheduler.cancel([second.id]))
    assert [world.launch().awaits_prompts for _ in range(2)] == [True, False]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 40)), min_size=2, max_size=16),
    depth=st.integers(1, 3),
    max_step_tokens=st.integers(8, 24),
    num_pages=st.integers(16, 200),
    seed=st.integers(0, 2**16),
    opens_at=st.integers(0, 3),
    lags=st.booleans(),
    num_cancelled=st.integers(0, 3),
    level=st.integers(0, 20),
    interval=st.sampled_from([0, 0, 3]),
)
def test_nobody_gets_other_tokens(
    harness: Make,
    make_request: Make,
    lengths: list[tuple[int, int]],
    depth: int,
    max_step_tokens: int,
    num_pages: int,
    seed: int,
    opens_at: int,
    lags: bool,
    num_cancelled: int,
    level: int,
    interval: int,
) -> None:
    """With room for few requests they preempt each other; some are cancelled."""
    requests = [
        make_request(
            str(at), [(at * place) % 5 for place in range(prompt)], most, seed=at, report_interval=interval
        )
        for at, (prompt, most) in enumerate(lengths)
    ]
    world = harness(num_pages=num_pages, max_step_tokens=max_step_tokens, policy=None, lags=lags, depth=depth)
    cancelled = [request.id for request in requests[:num_cancelled]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beside, "_STEPS_BESIDE", -100)  # whoever outlasts whom
        patch.setattr(beside, "_LEVEL", level)
        _, outputs = run(world, requests, depth=depth, seed=seed, opens_at=opens_at, cancelled=cancelled)
    for request in requests:
        tokens, finish = run_alone(request)
        told, last = tokens_of(outputs[request.id]), outputs[request.id][-1].finish
        assert last is not None
        if last.kind == "abort":
            assert request.id in cancelled
            assert told == tokens[: len(told)]
        else:
            assert (told, last) == (tokens, finish)
    assert world.cache.num_used_pages == 0
