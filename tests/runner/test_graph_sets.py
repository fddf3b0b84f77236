"""What is captured before it is wanted: in which order, and what it waits for. Graphs are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.messages import Lane
from tokenmill.runner.capture import CapturePolicy, lane_sizes
from tokenmill.runner.graph_sets import Graphs, GraphSets, StepGraphs

pytestmark = pytest.mark.unit


class MadeRecorder:
    """Notes what is captured."""

    def __init__(self, *, is_ready: bool) -> None:
        self.is_ready = is_ready
        self.num_captures = 0
        self.captured: list[tuple[Lane, int]] = []

    def record(self, lane: Lane, size: int, error: Exception | None = None) -> None:
        self.num_captures += 1
        if error is not None:
            raise error
        self.captured.append((lane, size))


class MadeDecodes:
    """Graphs of the sizes of a policy."""

    wanted_seconds = 0.0

    def __init__(self, policy: CapturePolicy, recorder: MadeRecorder, lane: Lane) -> None:
        self._policy = policy
        self._recorder = recorder
        self._lane = lane
        self.error: Exception | None = None

    def next_size(self, num_rows: int) -> int | None:
        return next(iter(self._policy.lacking("any", num_rows)), None)

    def are_ready(self, num_rows: int) -> bool:
        return self._policy.are_ready("any", num_rows)

    def capture_size(self, size: int) -> None:
        self._recorder.record(self._lane, size, self.error)
        self._policy.captured(size, "any", seconds=0.01)

    def close(self) -> None:
        pass


class MadePrompts:
    """Graphs of two shapes."""

    def __init__(self, recorder: MadeRecorder) -> None:
        self._recorder = recorder
        self._lacking = [8192, 8193]

    @property
    def next_shape(self) -> int | None:
        return self._lacking[0] if self._lacking else None

    def capture(self, shape: int) -> None:
        self._lacking.remove(shape)
        self._recorder.record(Lane.PROMPTS, shape)


class Within:
    """Stands in for a block."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class MadeSets(GraphSets):
    """Up to 256 rows. Lanes open when they were asked for a second time, if they `can_open`."""

    def __init__(self, *, has_graphs: bool = True, can_open: bool = True, is_ready: bool = True) -> None:
        self.told: list[Exception] = []
        self.recorder: Any = MadeRecorder(is_ready=is_ready)
        self.captured = self.recorder.captured
        self.num_asked = 0
        self.can_open = can_open
        self.num_caught_up = 0
        self.has_room = True
        lanes: Any = SimpleNamespace(within=lambda lane: Within(), are_open=self._open, close=lambda: None)
        lanes.catch_up = self._catch_up
        draws: Any = SimpleNamespace(close=lambda: None)
        super().__init__(
            lambda: Graphs(*self._made(Lane.WHOLE, None), draws) if has_graphs else None,
            lambda: StepGraphs(*self._made(Lane.DECODES, lane_sizes(256))),
            lanes,
            has_room=lambda: self.has_room,
            tell=self.told.append,
        )

    def _open(self) -> bool:
        self.num_asked += 1
        return self.can_open and self.num_asked >= 2

    def _catch_up(self) -> None:
        assert not [lane for lane, _ in self.captured if lane is Lane.DECODES]
        self.num_caught_up += 1

    def _made(self, lane: Lane, sizes: list[int] | None) -> tuple[Any, Any, Any]:
        policy = CapturePolicy(256, row_seconds=1.0, sizes=sizes)
        return MadeDecodes(policy, self.recorder, lane), MadePrompts(self.recorder), (self.recorder,)


W, D, P = Lane.WHOLE, Lane.DECODES, Lane.PROMPTS


def test_what_serves_most_is_captured_first_in_lanes_too() -> None:
    sets = MadeSets()
    while sets.prepare_more(128):
        pass
    assert sets.captured[:7] == [(W, 128), (D, 128), (D, 64), (P, 8192), (P, 8193), (W, 64), (W, 96)]
    assert {size for lane, size in sets.captured if lane is D} == {16, 32, 48, 64, 96, 128}
    assert sets.part(128)
    assert not sets.part(129)
    assert not sets.prepare_more(128)
    assert sets.prepare_more(256)
    assert sets.captured[-1] == (D, 256)  # lanes are not ready for so many


def test_lanes_are_of_no_use_before_their_graphs_are_there() -> None:
    sets = MadeSets()
    assert not sets.part(64)  # opens them
    assert not sets.part(64)
    assert sets.beside is not None
    assert sets.captured == []
    while not sets.part(64):
        assert sets.prepare_more(64)
    assert sets.captured == [(D, 64)]  # others may come later


@pytest.mark.parametrize("can_open", [True, False])
def test_without_lanes_there_is_an_end_too(can_open: bool) -> None:
    sets = MadeSets(can_open=can_open)
    count = 0
    while sets.prepare_more(256):
        count += 1
        assert count < 100
    assert {lane for lane, _ in sets.captured} == ({W, D, P} if can_open else {W})
    assert len(sets.captured) == len(set(sets.captured)) == count


def test_nothing_waits_for_lanes_that_open() -> None:
    sets = MadeSets()
    assert sets.whole is not None
    while (size := sets.whole.decodes.next_size(256)) is not None:
        sets.whole.decodes.capture_size(size)
    assert not sets.prepare_more(256)  # those were of steps
    sets.captured.clear()
    assert not sets.prepare_more(256)
    assert sets.captured == []
    assert sets.prepare_more(256)
    assert sets.captured == [(D, 256)]


def test_nothing_waits_for_kernels_that_are_compiled() -> None:
    sets = MadeSets(is_ready=False)
    assert not sets.prepare_more(256)
    assert sets.captured == []
    sets.recorder.is_ready = True
    assert sets.prepare_more(256)
    assert sets.captured == [(W, 256)]


def test_nothing_is_captured_beside_a_step_that_was_captured_itself() -> None:
    """For so long the device has had nothing to do, and what comes next has to begin at once."""
    sets = MadeSets(can_open=False)
    sets.recorder.record(W, 1000)
    assert not sets.prepare_more(256)
    assert sets.captured == [(W, 1000)]
    assert sets.prepare_more(256)
    assert sets.prepare_more(256)  # what was captured just now was no step
    assert len(sets.captured) == 3
    sets.recorder.record(W, 2000)
    assert not sets.prepare_more(256)
    assert sets.prepare_more(256)


@pytest.mark.parametrize("num_failing", [2, 3])
def test_captures_that_fail_time_and_again_are_given_up(num_failing: int) -> None:
    """They would fail again, and take their time. New graphs may do better."""
    sets = MadeSets(can_open=False)
    failing: Any = sets.whole
    failing.decodes.error = RuntimeError("for the test")
    for _ in range(num_failing):
        assert not sets.prepare_more(256)
    failing.decodes.error = None
    assert [str(error) for error in sets.told] == ["for the test"] * num_failing
    assert sets.prepare_more(256) == (num_failing < 3)
    sets.close()
    sets.reopen()
    assert sets.prepare_more(256)


def test_memory_that_others_may_need_is_left_to_them() -> None:
    sets = MadeSets()
    sets.has_room = False
    assert not sets.prepare_more(256)
    assert sets.captured == []
    sets.has_room = True
    assert sets.prepare_more(256)


def test_lanes_begin_behind_what_had_their_memory_before() -> None:
    sets = MadeSets()
    while sets.prepare_more(256):
        pass
    assert sets.num_caught_up == 1


def test_closed_graphs_are_not_captured() -> None:
    sets = MadeSets(can_open=False)
    while sets.prepare_more(8):
        pass
    sets.close()
    assert not sets.prepare_more(8)
    assert sets.of(W) is sets.of(D) is None
    sets.reopen()
    sets.captured.clear()
    assert sets.prepare_more(8)
    assert sets.captured == [(W, 8)]
    assert not MadeSets(has_graphs=False).prepare_more(8)
