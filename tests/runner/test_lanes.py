"""Lanes of a device: what waits for what, and which devices have any. Streams are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenmill.messages import Lane
from tokenmill.runner import lanes as lanes_module
from tokenmill.runner.lanes import LaneKernels, Lanes, can_part, decode_processors

pytestmark = pytest.mark.unit

WHOLE, DECODES, PROMPTS = Lane


class Stream:
    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.awaited: list[Lane] = []

    def wait_stream(self, other: Stream) -> None:
        self.awaited.append(other.lane)


def waits(launched: list[Lane | tuple[Lane, bool]]) -> list[set[Lane]]:
    """The lanes that each step waits for; with True it awaits prompts."""
    lanes: Any = Lanes(torch.device("cpu"), None)
    lanes._streams = {lane: Stream(lane) for lane in Lane}
    found = []
    for each in launched:
        lane, awaits_prompts = each if isinstance(each, tuple) else (each, False)
        lanes._streams[lane].awaited.clear()
        lanes.order(SimpleNamespace(lane=lane, awaits_prompts=awaits_prompts))
        found.append(set(lanes._streams[lane].awaited))
    return found


def test_steps_wait_for_what_they_read() -> None:
    launched = [WHOLE, PROMPTS, DECODES, DECODES, PROMPTS, DECODES, WHOLE, WHOLE, DECODES, PROMPTS]
    nothing: set[Lane] = set()
    assert waits(list(launched)) == [
        nothing,
        {WHOLE},
        {WHOLE},
        nothing,  # rows that decode are no longer among the prompts under way
        {DECODES},  # prompts may share pages that these have written, and get their rows
        nothing,
        {DECODES, PROMPTS},
        nothing,
        {WHOLE},
        {WHOLE, DECODES},
    ]


def test_a_step_waits_for_prompts_once_where_it_has_to() -> None:
    launched: list[Lane | tuple[Lane, bool]] = [PROMPTS, DECODES, (DECODES, True), (DECODES, True)]
    assert waits(launched) == [set(), set(), {PROMPTS}, set()]


def test_other_work_is_waited_for_like_a_step() -> None:
    lanes: Any = Lanes(torch.device("cpu"), None)
    lanes._streams = {lane: Stream(lane) for lane in Lane}
    for lane in (DECODES, PROMPTS, DECODES):
        lanes.order(SimpleNamespace(lane=lane, awaits_prompts=False))
    lanes.note_other_work()
    for lane in (PROMPTS, DECODES):
        lanes._streams[lane].awaited.clear()
        lanes.order(SimpleNamespace(lane=lane, awaits_prompts=False))
        assert WHOLE in lanes._streams[lane].awaited


def test_lanes_catch_up_with_the_whole_device() -> None:
    lanes: Any = Lanes(torch.device("cpu"), None)
    lanes._streams = {lane: Stream(lane) for lane in Lane}
    lanes.catch_up()
    assert {lane: stream.awaited for lane, stream in lanes._streams.items()} == {
        WHOLE: [],
        DECODES: [WHOLE],
        PROMPTS: [WHOLE],
    }


def test_nothing_waits_before_lanes_are_open() -> None:
    lanes = Lanes(torch.device("cpu"), None)
    plan: Any = SimpleNamespace(lane=WHOLE, awaits_prompts=False)
    lanes.order(plan)
    with lanes.within(WHOLE):
        assert not lanes.are_open()
    lanes.close()


GPU = SimpleNamespace(major=9, multi_processor_count=132)


def placement(device: str = "cuda:0", **changes: Any) -> Any:
    usual = {"cuda_graphs": True, "deterministic": False, "steps_in_flight": 2}
    return SimpleNamespace(device=torch.device(device), **(usual | changes))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    properties = SimpleNamespace(**vars(GPU))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(lanes_module.importlib.util, "find_spec", lambda name: object())
    return properties


def test_which_devices_are_parted(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_part(placement())
    assert not can_part(placement("cpu"))
    for changes in ({"cuda_graphs": False}, {"deterministic": True}, {"steps_in_flight": 1}):
        assert not can_part(placement(**changes))
    monkeypatch.setattr(lanes_module.importlib.util, "find_spec", lambda name: None)
    assert not can_part(placement())


@pytest.mark.parametrize(("name", "value"), [("major", 8), ("multi_processor_count", 40)])
def test_a_device_that_is_older_or_small_stays_whole(gpu: SimpleNamespace, name: str, value: int) -> None:
    setattr(gpu, name, value)
    assert not can_part(placement())


@pytest.mark.parametrize(("num_parameters", "count"), [(500_000_000, 64), (8_000_000_000, 40)])
def test_rows_of_small_models_get_more(gpu: SimpleNamespace, num_parameters: int, count: int) -> None:
    assert decode_processors(torch.device("cuda", 0), num_parameters) == count


def test_a_device_that_cannot_be_parted_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no green contexts here")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    compilation: Any = SimpleNamespace(cancel=lambda: None)
    lanes = Lanes(torch.device("cuda", 0), LaneKernels(64, compilation))
    with caplog.at_level("INFO", "tokenmill"):
        for _ in range(3):
            assert not lanes.are_open()
        lanes.close()
    assert [record.message for record in caplog.records] == [
        "prompts are not computed beside rows that decode: no green contexts here"
    ]
