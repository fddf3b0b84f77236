"""When a batch size gets a graph of its own: padding and captures cost about the same, and neither much."""

from __future__ import annotations

import random

import pytest

from tokenmill.runner.capture import CapturePolicy, batch_sizes, lane_sizes, row_seconds

CAPTURE_SECONDS = 0.04
ROW_SECONDS = 2.5e-6


class Costs:
    """Drives a policy and adds up what its choices cost."""

    def __init__(self, most: int = 256, *, row_seconds: float = ROW_SECONDS) -> None:
        self.policy = CapturePolicy(most, row_seconds=row_seconds)
        self.row_seconds = row_seconds
        self.graphs: set[tuple[int, str]] = set()
        self.padding = 0.0
        self.num_captures = 0

    def step(self, num_rows: int, kind: str = "plain", *, may_put_off: bool = False) -> int:
        size = self.policy.choose(num_rows, kind, may_put_off=may_put_off)
        assert size is not None
        assert size >= num_rows
        if (size, kind) not in self.graphs:
            self.graphs.add((size, kind))
            self.num_captures += 1
            self.policy.captured(size, kind, seconds=CAPTURE_SECONDS)
        self.padding += (size - num_rows) * self.row_seconds
        return size


@pytest.mark.parametrize("most", [1, 8, 63, 64, 65, 100, 256, 1024])
def test_lanes_have_few_sizes(most: int) -> None:
    """Rows that decode beside prompts soon become more; each number of them is served all the same."""
    sizes = lane_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert len(sizes) <= 1 + len(batch_sizes(most)) / 2
    policy = CapturePolicy(most, row_seconds=1.0, sizes=sizes)
    for num_rows in range(1, most + 1):
        size = policy.choose(num_rows, "plain")
        assert size is not None
        assert size in sizes
        assert size >= num_rows
        if policy.serving(num_rows, "plain") != size:
            policy.captured(size, "plain", seconds=0.1)


def test_what_serves_most_comes_first() -> None:
    policy = CapturePolicy(1000, row_seconds=1.0)
    assert policy.lacking("plain", 64)[:6] == [64, 32, 48, 16, 56, 40]
    assert policy.lacking("plain", 300)[:7] == [320, 256, 128, 64, 192, 224, 160]
    few = [size for size in batch_sizes(1000) if size <= 256]
    assert sorted(policy.lacking("plain", 2000)) == [*few, 512, 1000]  # others take long to capture
    for size in (64, 16, 256):
        policy.captured(size, "plain", seconds=0.1)
    assert policy.lacking("plain", 64)[:4] == [32, 48, 56, 40]
    assert policy.lacking("plain", 1) == [1]
    assert policy.lacking("filtered", 64)[0] == 64


@pytest.mark.parametrize(
    ("captured", "num_rows", "are_ready"),
    [
        ((), 1, False),
        ((256,), 1, False),
        ((256,), 256, False),
        ((64,), 1, True),
        ((64,), 65, False),
        ((16, 64, 128), 100, True),
        ((128,), 20, False),  # would be padded by many
        ((16, 64, 128, 256, 512), 512, True),
        ((64, 128, 192), 192, True),
        ((64, 128, 192), 193, False),
        ((64, 192), 192, False),
        ((64, 128, 256, 512, 1000), 2000, True),  # no more can run
    ],
)
def test_graphs_are_ready_where_none_is_much_too_large(
    captured: tuple[int, ...], num_rows: int, are_ready: bool
) -> None:
    policy = CapturePolicy(1000, row_seconds=1.0, sizes=lane_sizes(1000))
    for size in captured:
        policy.captured(size, "plain", seconds=0.1)
    assert policy.are_ready("plain", num_rows) is are_ready
    assert not policy.are_ready("filtered", num_rows)


@pytest.mark.parametrize("num_rows", [1, 20, 64, 200, 256, 300, 1000])
def test_what_is_lacking_makes_lanes_ready(num_rows: int) -> None:
    policy = CapturePolicy(1000, row_seconds=1.0, sizes=lane_sizes(1000))
    for size in policy.lacking("plain", num_rows):
        policy.captured(size, "plain", seconds=0.1)
    assert policy.are_ready("plain", num_rows)


def test_no_graph_has_as_many_rows_as_products_are_slow_with() -> None:
    costs = Costs(1024)
    for _ in range(1000):
        costs.step(440)
    assert {size for size, _ in costs.graphs} == {512, 480}
    assert 448 in batch_sizes(448)  # as many as may run: padding would need more slots than there are


def test_a_batch_of_one_size_is_captured_once() -> None:
    costs = Costs()
    assert {costs.step(1) for _ in range(1000)} == {1}
    assert costs.num_captures == 1


def test_a_batch_that_drains_is_captured_a_few_times_only() -> None:
    costs = Costs()
    for num_rows in range(256, 0, -1):
        for _ in range(4):
            costs.step(num_rows)
    assert costs.num_captures <= 6
    assert costs.padding <= 6 * CAPTURE_SECONDS
    assert costs.padding + costs.num_captures * CAPTURE_SECONDS < len(batch_sizes(256)) * CAPTURE_SECONDS / 3


def test_a_batch_that_grows_row_by_row_is_captured_at_powers_of_two() -> None:
    costs = Costs(row_seconds=0.0)
    sizes = [costs.step(num_rows) for num_rows in range(1, 257)]
    assert sizes == sorted(sizes)
    assert costs.num_captures == 9


def test_a_size_that_stays_gets_its_own_graph() -> None:
    costs = Costs()
    for num_rows in (256, 5):
        for _ in range(200):
            last = costs.step(num_rows)
    assert last == 8


def test_a_capture_that_nothing_waits_for_comes_sooner() -> None:
    steps = {}
    for may_put_off in (False, True):
        costs = Costs()
        costs.step(256)
        numbers = (costs.step(100, may_put_off=may_put_off) for _ in range(1000))
        steps[may_put_off] = next(index for index, size in enumerate(numbers) if size == 104)
    assert 0 < steps[True] < steps[False] / 3 + 1


def test_captures_never_cost_more_than_the_padding_before_them() -> None:
    rng = random.Random(3)
    costs = Costs(1000)
    forced = 0
    for _ in range(5000):
        before = costs.num_captures
        num_rows = min(1000, int(rng.paretovariate(0.4)))
        largest = max((size for size, _ in costs.graphs), default=0)
        costs.step(num_rows)
        forced += costs.num_captures > before and num_rows > largest
    assert forced <= 11
    # The last piece of padding may overshoot.
    assert (costs.num_captures - forced) * CAPTURE_SECONDS <= costs.padding + 1000 * ROW_SECONDS


def test_kinds_do_not_stand_in_for_each_other() -> None:
    costs = Costs()
    costs.step(64, "plain")
    assert costs.step(3, "plain") == 64
    assert costs.step(3, "filtered") == 4


@pytest.mark.parametrize("most", [1, 3, 64, 200, 1024])
def test_every_batch_fits_some_size(most: int) -> None:
    for num_rows in range(1, most + 1):
        assert num_rows <= Costs(most).step(num_rows) <= most


def test_without_memory_only_what_is_there_is_used() -> None:
    policy = CapturePolicy(64, row_seconds=1.0)
    policy.captured(8, "plain", seconds=CAPTURE_SECONDS)
    policy.stop()
    assert policy.choose(3, "plain") == 8
    assert policy.choose(9, "plain") is None
    assert policy.choose(1, "filtered") is None


def test_a_row_of_a_large_model_costs_more() -> None:
    assert row_seconds(8 * 10**9) > 5 * row_seconds(10**9) > 0


def test_a_slow_capture_is_remembered_for_a_while() -> None:
    policy = CapturePolicy(64, row_seconds=ROW_SECONDS)
    assert policy.seconds_to_spare > 0
    for size, seconds in ((64, 0.02), (32, 0.04), (16, 0.02)):
        policy.captured(size, "plain", seconds=seconds)
    assert policy.capture_seconds == 0.02
    assert 0.03 < policy.seconds_to_spare < 0.04
    for size in range(15):
        policy.captured(size, "plain", seconds=0.02)
    assert policy.seconds_to_spare == 0.02


def test_a_capture_that_waited_for_a_compiler_is_no_example() -> None:
    """With so long to go, most jobs would be at their end."""
    policy = CapturePolicy(64, row_seconds=ROW_SECONDS)
    policy.captured(64, "plain", seconds=9.0)
    assert policy.capture_seconds == policy.seconds_to_spare == 0.1
