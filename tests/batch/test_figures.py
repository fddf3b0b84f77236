"""Counts of a running job, in bounded memory."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tokenmill.batch.figures import Distribution, Figures, Timeline

pytestmark = pytest.mark.unit


Make = Callable[..., dict[str, Any]]


def fail(figures: Figures, index: int, row: dict[str, Any]) -> None:
    figures.finished([row])
    figures.failed(index, [row["error"]])


def test_a_summary_adds_up_and_is_json(clock: Any, result: Make, failure: Make) -> None:
    figures = Figures(clock=clock)
    figures.started(num_rows=8)
    figures.replayed(2)
    figures.duplicate(1)
    clock.now += 1
    figures.finished([result(10, 4, cached=8), result(10, 6, cached=8)])
    fail(figures, 3, failure("too_long", "a prompt is too long"))
    clock.now += 1
    figures.finished([result(30, 5)])
    summary = json.loads(json.dumps(figures.summary()))
    assert summary["rows"] == {
        "total": 8, "done": 6, "computed": 3, "replayed": 2, "duplicates": 1, "failed": 1,
    }  # fmt: skip
    assert summary["samples"] == 4
    assert summary["tokens"] == {"prompt": 50, "cached": 16, "output": 15}
    assert summary["cached_share"] == pytest.approx(0.32)
    assert summary["seconds"] == 2
    assert summary["throughput"]["output_tokens_per_second"] == pytest.approx(7.5)
    assert summary["errors"] == [
        {"type": "too_long", "count": 1, "examples": ["row 3: a prompt is too long"]}
    ]
    assert summary["finish_reasons"] == {"length": 3}
    assert summary["output_length"]["count"] == 3
    assert (summary["output_length"]["min"], summary["output_length"]["max"]) == (4, 6)
    timeline = summary["timeline"]
    assert sum(timeline["rows"]) == 3
    assert sum(timeline["output_tokens"]) == 15
    assert sum(timeline["errors"]) == 1
    assert timeline["prompt_tokens"][int(1 / timeline["bucket_seconds"])] == 20
    assert summary["idle_share"] is None
    assert set(timeline["idle_share"]) == {None}


def test_what_the_device_did_not_do_is_told_as_a_share(clock: Any) -> None:
    figures = Figures(clock=clock)
    figures.started()
    figures.watched(idle_seconds=7.0, busy_seconds=50.0)  # before the job
    clock.now += 1
    figures.watched(idle_seconds=7.25, busy_seconds=50.75)
    summary = figures.summary()
    assert summary["idle_share"] == pytest.approx(0.25)
    assert summary["timeline"]["idle_share"][-1] == pytest.approx(0.25)


def test_a_long_job_keeps_few_buckets_and_loses_nothing() -> None:
    timeline = Timeline()
    seconds, total = 0.0, 0
    draw = random.Random(1)
    for _ in range(20_000):
        seconds += draw.expovariate(0.2)
        timeline.at(seconds)[0] += 1
        total += 1
    told = timeline.to_dict(seconds=seconds)
    assert sum(told["rows"]) == total
    assert 120 <= len(told["rows"]) <= 240
    assert len(told["rows"]) * told["bucket_seconds"] >= seconds
    half = timeline.since(seconds / 2, 0)
    assert half == pytest.approx(total / 2, rel=0.1)


def test_percentiles_are_those_of_the_values_to_the_width_of_a_bin() -> None:
    draw = random.Random(2)
    values = sorted(draw.lognormvariate(3, 1.5) for _ in range(5000))
    distribution = Distribution(1, 7)
    for start in range(0, len(values), 7):
        distribution.add(values[start : start + 7])
    told = distribution.to_dict()
    assert sum(count for _, _, count in told["bins"]) == 5000
    assert told["mean"] == pytest.approx(sum(values) / 5000)
    assert (told["min"], told["max"]) == (values[0], values[-1])
    for percent in (50, 90, 99):
        assert told[f"p{percent}"] == pytest.approx(values[percent * 50], rel=0.2)
    for low, high, count in told["bins"]:
        assert count == sum(low <= value < high for value in values)


@pytest.mark.parametrize("values", [[], [0], [0, 0, 3], [1e12]])
def test_odd_distributions(values: list[float]) -> None:
    distribution = Distribution(1, 7)
    for start in range(0, len(values), 7):
        distribution.add(values[start : start + 7])
    told = distribution.to_dict()
    assert told["count"] == len(values)
    if values:
        assert told["min"] <= told["p50"] <= told["p99"] <= told["max"]
        assert [count for _, _, count in told["bins"] if count][-1] == 1 or values == [0]


def test_memory_does_not_grow_with_rows_or_errors(clock: Any, result: Make, failure: Make) -> None:
    figures = Figures(clock=clock)
    figures.started(num_rows=10_000)
    sizes = []
    for number in range(10_000):
        clock.now += 0.7
        figures.finished([result(number % 900, number % 333, latency=number / 100)])
        fail(figures, number, failure("internal", f"message {number} " + "x" * 100_000))
        if number % 5000 == 4999:
            sizes.append(len(json.dumps(figures.summary())))
    assert sizes[1] < 40_000
    assert sizes[1] < 1.5 * sizes[0]
    assert max(len(text) for text in figures.summary()["errors"][0]["examples"]) < 600


def test_the_time_left_is_that_of_the_tokens_not_of_the_rows(clock: Any, result: Make) -> None:
    """Half of the rows are done, but they had a tenth of the prompt tokens; the plan knows it."""
    figures = Figures(clock=clock)
    plan = {"prompt_tokens": 100_000, "max_output_tokens": 0}
    figures.started(num_rows=200, plan=plan)
    for _ in range(100):
        clock.now += 0.1
        figures.finished([result(100, 0)])
    assert figures.snapshot().seconds_left == pytest.approx(90, rel=0.05)


def test_without_a_plan_a_row_is_as_long_as_those_before_it(clock: Any, result: Make) -> None:
    figures = Figures(clock=clock)
    figures.started(num_rows=1000)
    figures.replayed(400)
    assert figures.snapshot().seconds_left is None
    for _ in range(300):
        clock.now += 0.2
        figures.finished([result(50, 50, cached=40)])
    assert figures.snapshot().seconds_left == pytest.approx(60, rel=0.05)


def test_the_limit_of_new_tokens_bounds_what_is_left(clock: Any, result: Make) -> None:
    """Rows so far had 50 tokens each, but all together may have 6000: only 1000 are left."""
    figures = Figures(clock=clock)
    figures.started(num_rows=200, plan={"prompt_tokens": 0, "max_output_tokens": 6000})
    for _ in range(100):
        clock.now += 0.1
        figures.finished([result(0, 50)])
    assert figures.snapshot().seconds_left == pytest.approx(2, rel=0.05)


def test_a_job_of_unknown_length_and_a_job_that_is_done(clock: Any, result: Make) -> None:
    figures = Figures(clock=clock)
    figures.started()
    clock.now += 5
    figures.finished([result()])
    assert figures.snapshot().seconds_left is None
    figures.started(num_rows=1)
    assert figures.snapshot().seconds_left == 0
    assert figures.snapshot().seconds == 5


def test_a_row_costs_little(result: Make) -> None:
    """The best of several, because other programs of the machine only ever add time."""
    figures = Figures()
    figures.started(num_rows=10**6)
    row = [result(100, 50, cached=64)]

    def seconds() -> float:
        began = time.perf_counter()
        for _ in range(2000):
            figures.finished(row)
        return (time.perf_counter() - began) / 2000

    assert min(seconds() for _ in range(10)) < 15e-6
