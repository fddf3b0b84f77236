"""What priorities do: the order, who gives way to whom, and that nobody else notices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill import logs
from tokenmill.config import EngineConfig
from tokenmill.core.priority import Priorities

pytestmark = pytest.mark.unit

Make = Callable[..., Any]
ON = Priorities(enabled=True, threshold=10)
ORDER_ONLY = Priorities(enabled=True)


def order_of_ends(loop: Any) -> list[str]:
    return list(loop.outputs)


# ── what a number means ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings_", "most_urgent_first"),
    [
        ({}, [2**63 - 1, 5, 0, -5, None]),
        ({"default": 1}, [5, None, 0, -5]),
        ({"low_values_first": True}, [-(2**63), -5, 0, 5, 2**63 - 1, None]),
        ({"low_values_first": True, "default": 1}, [0, None, 5]),
    ],
)
def test_larger_is_sooner_unless_turned_round(
    make_request: Make, settings_: dict[str, Any], most_urgent_first: list[int | None]
) -> None:
    priorities = Priorities(enabled=True, **settings_)
    urgencies = [priorities.urgency(make_request("a", [1], priority=each)) for each in most_urgent_first]
    assert all(one > other for one, other in pairwise(urgencies))


def test_the_arguments_of_the_engine() -> None:
    assert Priorities.of(EngineConfig()) == Priorities()
    assert Priorities.of(EngineConfig(enable_priority_scheduling=True)) == ON
    config = EngineConfig(
        enable_priority_scheduling=True,
        disable_priority_preemption=True,
        schedule_low_priority_values_first=True,
        default_priority_value=3,
    )
    assert Priorities.of(config) == Priorities(enabled=True, low_values_first=True, default=3)


def test_without_the_feature_a_priority_is_ignored_with_one_warning(
    harness: Make, make_request: Make, caplog: pytest.LogCaptureFixture
) -> None:
    logs.warn_once.cache_clear()
    loop = harness(max_rows=1)
    with caplog.at_level(logging.WARNING, logger="tokenmill"):
        loop.submit(*[make_request(str(index), [index], 2, priority=index) for index in range(4)])
    loop.run()
    assert order_of_ends(loop) == list("0123")
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["priority is ignored"]


def test_a_priority_can_be_refused(harness: Make, make_request: Make) -> None:
    loop = harness(priorities=Priorities(refused_when_disabled=True))
    (refused,) = loop.submit(make_request("a", [1], priority=0), make_request("b", [1]))
    assert (refused.request_id, refused.finish.kind, refused.finish.status_code) == ("a", "abort", 503)
    assert "abort_on_priority_when_disabled" in refused.finish.message
    assert "enable_priority_scheduling" in refused.finish.message
    loop.run()
    assert loop.last("b").finish.kind == "length"


# ── the order ─────────────────────────────────────────────────────────────────────────────────


def test_the_queue_goes_by_priority_then_arrival(harness: Make, make_request: Make) -> None:
    loop = harness(max_rows=1, priorities=ORDER_ONLY)
    loop.submit(*[make_request(str(index), [index], 2, priority=index % 3) for index in range(200)])
    loop.run()
    expected = sorted(range(200), key=lambda index: (-(index % 3), index))
    assert order_of_ends(loop) == list(map(str, expected))


def test_a_late_urgent_request_overtakes_all_that_wait(harness: Make, make_request: Make) -> None:
    loop = harness(max_rows=1, priorities=ORDER_ONLY)
    loop.submit(*[make_request(str(index), [index], 3) for index in range(100)])
    loop.step()
    loop.submit(make_request("urgent", [1], 3, priority=1))
    loop.run()
    assert order_of_ends(loop)[:2] == ["0", "urgent"]
    assert loop.last("0").num_retractions == 0


def test_when_pages_run_out_the_least_urgent_row_goes(harness: Make, make_request: Make, alone: Make) -> None:
    loop = harness(num_pages=8, page_size=4, max_sequence_tokens=32, priorities=ORDER_ONLY)
    job = [make_request("old", [1] * 4, 20), make_request("urgent", [2] * 4, 20, priority=1)]
    loop.submit(*job)
    loop.run()
    assert (loop.last("old").num_retractions, loop.last("urgent").num_retractions) == (1, 0)
    assert all(loop.tokens(request.id) == alone(request)[0] for request in job)


def test_when_pages_run_out_an_urgent_prompt_goes_on(harness: Make, make_request: Make, alone: Make) -> None:
    """Although it came last and is not complete."""
    loop = harness(
        num_pages=9, page_size=2, max_step_tokens=2, max_sequence_tokens=18, max_rows=4, priorities=ORDER_ONLY
    )
    job = [make_request("a", [1], 17, priority=0), make_request("b", [2] * 13, 2, priority=1)]
    loop.submit(job[0])
    loop.step()
    loop.submit(job[1])
    loop.run()
    assert [loop.last(name).num_retractions for name in "ab"] == [1, 0]
    assert all(loop.tokens(request.id) == alone(request)[0] for request in job)


# ── who gives way ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("priority_", "gives_way"), [(10, False), (11, True)])
def test_the_difference_must_exceed_the_threshold(
    harness: Make, make_request: Make, alone: Make, priority_: int, gives_way: bool
) -> None:
    loop = harness(max_rows=1, priorities=ON)
    job = [make_request("a", [1], 9, priority=0), make_request("b", [2], 3, priority=priority_)]
    loop.submit(job[0])
    loop.step()
    loop.submit(job[1])
    loop.run()
    assert order_of_ends(loop) == (["b", "a"] if gives_way else ["a", "b"])
    assert loop.last("a").num_retractions == int(gives_way)
    assert all(loop.tokens(request.id) == alone(request)[0] for request in job)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_an_urgent_request_runs_in_the_next_step(harness: Make, make_request: Make, depth: int) -> None:
    loop = harness(max_rows=2, depth=depth, priorities=ON)
    loop.submit(*[make_request(str(index), [index], 30) for index in range(6)])
    for _ in range(5):
        loop.step()
    loop.submit(make_request("urgent", [7], 2, priority=0))
    plan = loop.launch()
    assert plan.token_ids.tolist() == [7]


def test_victims_are_the_least_urgent_of_these_the_newest_and_no_more_than_needed(
    harness: Make, make_request: Make
) -> None:
    loop = harness(max_rows=5, priorities=ON)
    for name, value in (("a", 20), ("b", 0), ("c", 5), ("d", 0), ("e", 80)):
        loop.submit(make_request(name, [1], 20, priority=value))
        loop.step()
    loop.submit(make_request("x", [2], 20, priority=100), make_request("y", [3], 20, priority=100))
    loop.step()
    loop.submit(make_request("z", [4], 20, priority=100))
    loop.step()
    loop.run()
    retracted = {name for name in "abcdexyz" if loop.last(name).num_retractions}
    assert retracted == {"b", "c", "d"}
    ends = order_of_ends(loop)
    assert ends.index("e") < ends.index("c") < ends.index("b") < ends.index("d")


def test_rows_give_way_for_pages(harness: Make, make_request: Make, alone: Make) -> None:
    loop = harness(num_pages=12, page_size=4, max_sequence_tokens=48, max_rows=8, priorities=ON)
    job = [make_request(name, [index] * 8, 6, priority=0) for index, name in enumerate("abc")]
    loop.submit(*job)
    loop.step()
    urgent = make_request("urgent", [4] * 20, 4, priority=50)
    loop.submit(urgent)
    plan = loop.launch()
    assert plan.token_ids.tolist() == [4] * 20
    loop.run()
    assert loop.last("a").num_retractions == 0, "the oldest was not needed"
    assert all(loop.tokens(request.id) == alone(request)[0] for request in [*job, urgent])


def test_nobody_gives_way_in_vain(harness: Make, make_request: Make) -> None:
    """The pages of the row that may be pushed back are not enough, those of the other may not be had."""
    loop = harness(num_pages=12, page_size=4, max_sequence_tokens=48, max_rows=8, priorities=ON)
    loop.submit(make_request("peer", [1] * 24, 9, priority=45), make_request("idle", [2] * 4, 9, priority=0))
    loop.step()
    loop.submit(make_request("urgent", [3] * 30, 2, priority=50))
    loop.run()
    assert [loop.last(name).num_retractions for name in ("peer", "idle")] == [0, 0]


def test_what_two_rows_share_is_not_freed_by_one(harness: Make, make_request: Make) -> None:
    """Of 10 pages the rows hold 6, 4 of them together; without one row there are 5, and 6 are wanted."""
    loop = harness(num_pages=10, page_size=4, max_sequence_tokens=40, max_rows=8, priorities=ON)
    prompt = [1] * 16
    loop.submit(make_request("peer", [*prompt, 2], 3, priority=45))
    loop.submit(make_request("idle", [*prompt, 3], 3, priority=0))
    loop.step()
    loop.submit(make_request("urgent", [3] * 21, 2, priority=50))
    loop.run()
    assert loop.last("idle").cached_tokens == 16
    assert [loop.last(name).num_retractions for name in ("peer", "idle")] == [0, 0]


def test_what_is_there_of_a_prompt_needs_no_room(harness: Make, make_request: Make) -> None:
    """Of 24 tokens 20 are computed already, by a row that stays."""
    loop = harness(num_pages=14, page_size=4, max_sequence_tokens=48, max_rows=8, priorities=ON)
    prompt = [1] * 20
    loop.submit(make_request("peer", [*prompt, 2], 3, priority=45))
    loop.submit(make_request("idle", [2], 3, priority=0))
    loop.step()
    loop.submit(make_request("urgent", [*prompt, 3, 3, 3], 1, priority=50))
    assert loop.launch().token_ids.tolist() == [3, 3, 3]
    loop.run()
    assert loop.last("idle").num_retractions == 0


def test_a_long_prompt_gives_way_between_two_chunks(harness: Make, make_request: Make, alone: Make) -> None:
    """There are rows and pages enough, but its chunks would fill every step."""
    loop = harness(max_step_tokens=4, priorities=ON)
    job = [make_request("long", [1] * 40, 3), make_request("urgent", [2], 3, priority=0)]
    loop.submit(job[0])
    loop.step()
    loop.step()
    loop.submit(job[1])
    loop.run()
    assert order_of_ends(loop) == ["urgent", "long"]
    assert all(loop.tokens(request.id) == alone(request)[0] for request in job)
    assert loop.mill.num_computed <= 40 + 2 + 3 + 3, "the chunks that were computed are not computed again"


def test_a_row_gives_way_where_rows_fill_the_step(harness: Make, make_request: Make, alone: Make) -> None:
    """There are rows and pages enough, but each row takes one of three tokens."""
    loop = harness(max_step_tokens=3, priorities=ON)
    job = [make_request(str(index), [index], 12) for index in range(3)]
    urgent = make_request("urgent", [3, 3], 3, priority=0)
    loop.submit(*job)
    loop.step()
    loop.submit(urgent)
    plan = loop.launch()
    assert plan.token_ids.tolist() == [3]
    loop.run()
    assert [loop.last(name).num_retractions for name in "012"] == [0, 0, 1]
    assert all(loop.tokens(request.id) == alone(request)[0] for request in [*job, urgent])


def test_order_only(harness: Make, make_request: Make) -> None:
    loop = harness(max_rows=1, priorities=ORDER_ONLY)
    loop.submit(make_request("a", [1], 9))
    loop.step()
    loop.submit(make_request("b", [1], 9, priority=1000))
    loop.run()
    assert loop.last("a").num_retractions == 0


# ── no livelock ───────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(1, 12), st.integers(1, 12), st.sampled_from([None, 0, 7, 11, 30])
        ),
        min_size=1,
        max_size=25,
    ),
    threshold=st.sampled_from([0, 5, 10]),
    depth=st.integers(1, 3),
    max_rows=st.integers(1, 4),
    max_step_tokens=st.integers(1, 20),
)
def test_all_end_and_none_is_pushed_back_more_often_than_others_come(
    harness: Make,
    make_request: Make,
    alone: Make,
    arrivals: list[tuple[int, int, int, int | None]],
    threshold: int,
    depth: int,
    max_rows: int,
    max_step_tokens: int,
) -> None:
    """With pages for all, every push makes room for a more urgent request, which then runs to its end."""
    priorities = Priorities(enabled=True, threshold=threshold)
    loop = harness(
        num_pages=200,
        page_size=2,
        max_sequence_tokens=24,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        depth=depth,
        priorities=priorities,
    )
    job = []
    for number, (pause, num_prompt, num_new, value) in enumerate(arrivals):
        job.append(make_request(str(number), [number % 5] * num_prompt, num_new, priority=value))
        loop.submit(job[-1])
        for _ in range(pause):
            if not loop.scheduler.idle:
                loop.step()
    loop.run()
    for request in job:
        assert loop.tokens(request.id) == alone(request)[0]
        above = [
            other for other in job if priorities.urgency(other) - priorities.urgency(request) > threshold
        ]
        assert loop.last(request.id).num_retractions <= len(above)
