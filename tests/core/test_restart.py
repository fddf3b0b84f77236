"""One dead core process after the other, all fakes: when the engine goes on, and when it gives up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from tests.core.conftest import FACTS
from tokenmill.config import EngineConfig
from tokenmill.core.process import CoreLost
from tokenmill.core.restart import LastingCore
from tokenmill.errors import EngineClosed, EngineDead, InvalidArgument, WrongState
from tokenmill.messages import EngineFacts, Finish, Output, Request
from tokenmill.sampling_params import SamplingParams


class FakeProcess:
    """Does nothing by itself; a call named "hang" is never answered."""

    def __init__(self, family: Family, deliver: Any, died: Callable[[BaseException], None]) -> None:
        self.family = family
        self.deliver = deliver
        self.died = died
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.has_ended = False
        self.was_killed = False  # by a signal that no process catches
        self.killed = threading.Event()
        self.closed = False
        self.hanging: list[Future[Any]] = []

    def start(self, config: EngineConfig) -> EngineFacts:
        self.config = config
        if self.family.loading is not None:
            self.family.loads.set()
            while not self.family.loading.wait(0.01):
                if self.killed.is_set():
                    raise CoreLost("killed while it started")
        if self.family.failures:
            self.has_ended = True
            self.was_killed = self.family.are_killed
            raise self.family.failures.pop(0)
        return FACTS

    def submit(self, requests: Sequence[Request]) -> None:
        self._check()
        self.submitted += requests

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._check()
        self.cancelled += request_ids

    def call(self, name: str, **arguments: Any) -> Any:
        self._check()
        self.calls.append((name, arguments))
        if name in self.family.hangs:
            self.hanging.append(Future())
            return self.hanging[-1].result(10)
        return (True, "", 0) if name.startswith("update") else len(self.family.made)

    def kill(self) -> None:
        self.killed.set()

    def close(self) -> None:
        self.closed = self.has_ended = True

    def die(self, error: BaseException | None = None) -> None:
        self.has_ended = True
        for answer in self.hanging:
            answer.set_exception(CoreLost("gone"))
        thread = threading.Thread(target=self.died, args=[error or CoreLost("the core's process was killed")])
        thread.start()

    def _check(self) -> None:
        if self.has_ended:
            raise CoreLost("gone")


class Family:
    """All processes of one core, and how the next ones behave."""

    def __init__(self) -> None:
        self.made: list[FakeProcess] = []
        self.failures: list[Exception] = []  # of the next starts
        self.are_killed = False  # whether they fail by a kill
        self.hangs: set[str] = set()
        self.loading: threading.Event | None = None  # processes start only once it is set
        self.loads = threading.Event()
        self.outputs: list[Output] = []
        self.death: BaseException | None = None

    def make(self, *, deliver: Any, died: Callable[[BaseException], None]) -> FakeProcess:
        self.made.append(FakeProcess(self, deliver, died))
        return self.made[-1]

    def note_death(self, error: BaseException) -> None:
        self.death = error

    @property
    def newest(self) -> FakeProcess:
        return self.made[-1]


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Family:
    family = Family()
    monkeypatch.setattr("tokenmill.core.restart.CoreProcess", family.make)
    return family


@pytest.fixture
def core(family: Family) -> Iterator[LastingCore]:
    core = LastingCore(EngineConfig(), deliver=family.outputs.extend, died=family.note_death)
    yield core
    core.close()


def request(name: str) -> Request:
    prompt = np.arange(3, dtype=np.int32)
    return Request(name, prompt, SamplingParams(), 4, seed=0, stop_ids=(), report_interval=0)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_next_process_is_as_large_and_gets_all_rows(core: LastingCore, family: Family) -> None:
    core.submit([request("a"), request("b")])
    family.newest.deliver([Output("a", (1,), Finish("length", length=1), 0, 0)])
    family.newest.die()
    wait_for(lambda: len(family.made) == 2 and family.newest.submitted)
    assert [each.id for each in family.newest.submitted] == ["b"]
    assert family.newest.config.max_total_tokens == FACTS.max_total_num_tokens
    assert [output.request_id for output in family.outputs] == ["a"]


def test_a_first_process_that_is_killed_while_it_starts_is_started_again(family: Family) -> None:
    family.failures = [CoreLost("killed while it started")] * 2
    family.are_killed = True
    core = LastingCore(EngineConfig(), deliver=family.outputs.extend, died=family.note_death)
    core.submit([request("a")])
    assert [len(each.submitted) for each in family.made] == [0, 0, 1]
    core.close()


@pytest.mark.parametrize(("are_killed", "num_starts"), [(True, 3), (False, 1)])
def test_a_first_process_that_never_starts_is_told(family: Family, are_killed: bool, num_starts: int) -> None:
    family.failures = [CoreLost("ended while it started")] * num_starts
    family.are_killed = are_killed
    with pytest.raises(CoreLost, match="while it started"):
        LastingCore(EngineConfig(), deliver=family.outputs.extend, died=family.note_death)
    assert len(family.made) == num_starts


def test_rows_and_calls_wait_while_a_process_starts(core: LastingCore, family: Family) -> None:
    family.loading = threading.Event()
    family.newest.die()
    assert family.loads.wait(10)
    core.submit([request("late"), request("gone")])
    core.cancel(["gone"])
    assert [output.request_id for output in family.outputs] == ["gone"]
    threading.Timer(0.05, family.loading.set).start()
    assert core.call("state") == 2  # answered by the second
    assert [each.id for each in family.newest.submitted] == ["late"]


def test_a_call_goes_to_the_next_process_but_not_for_ever(core: LastingCore, family: Family) -> None:
    family.hangs = {"state"}

    def kill_all() -> None:
        for number in range(1, 4):
            wait_for(lambda: len(family.made) == number and family.newest.calls)  # noqa: B023
            family.newest.die()

    killer = threading.Thread(target=kill_all)
    killer.start()
    with pytest.raises(WrongState, match="died 3 times while it answered state"):
        core.call("state")
    killer.join()


def test_a_profile_is_lost_with_its_process(core: LastingCore, family: Family) -> None:
    family.hangs = {"stop_profile"}
    threading.Timer(0.05, lambda: family.made[0].die()).start()
    with pytest.raises(WrongState, match="the profile is lost"):
        core.call("stop_profile")


def test_state_is_restored_before_any_row_comes(core: LastingCore, family: Family) -> None:
    core.call("pause_generation", mode="retract")
    core.call("release_memory_occupation", tags=["kv_cache", "weights"])
    core.call("resume_memory_occupation", tags=["weights"])
    core.call("update_weights_from_disk", model_path="there")
    family.newest.die()
    wait_for(lambda: len(family.made) == 2 and len(family.newest.calls) == 3)
    assert family.newest.calls == [
        ("update_weights_from_disk", {"model_path": "there"}),
        ("pause_generation", {"mode": "in_place"}),
        ("release_memory_occupation", {"tags": ("kv_cache",)}),
    ]


def test_rows_behind_an_update_stay_behind_it(core: LastingCore, family: Family) -> None:
    """The next process gets the rows before the update, the update, and then those behind it."""
    family.hangs = {"update_weights_from_disk"}
    core.submit([request("before")])
    updating = threading.Thread(
        target=core.call, args=["update_weights_from_disk"], kwargs={"model_path": "there"}
    )
    updating.start()
    wait_for(lambda: family.newest.hanging)
    core.submit([request("behind")])  # which this process keeps by itself
    assert [each.id for each in family.newest.submitted] == ["before", "behind"]
    family.newest.die()
    wait_for(lambda: len(family.made) == 2 and family.newest.hanging)
    core.submit([request("later")])
    assert [each.id for each in family.newest.submitted] == ["before"]
    family.newest.hanging[0].set_result((True, "", 0))
    updating.join(10)
    assert [each.id for each in family.newest.submitted] == ["before", "behind", "later"]
    family.newest.deliver([Output(name, (1,), None, 0, 0) for name in ("before", "behind", "later")])
    family.hangs.clear()
    family.newest.hanging.clear()
    family.newest.die()
    wait_for(lambda: len(family.made) == 3 and family.newest.submitted)
    assert [each.id for each in family.newest.submitted] == ["before", "behind", "later"]
    assert family.newest.calls == [("update_weights_from_disk", {"model_path": "there"})]


def test_processes_that_cannot_start_end_the_engine(core: LastingCore, family: Family) -> None:
    core.submit([request("a")])
    family.failures = [InvalidArgument(f"no memory {number}") for number in range(3)]
    family.newest.die()
    wait_for(lambda: family.death)
    assert "3 processes in a row" in str(family.death)
    assert "no memory 2" in str(family.death)
    for call in (lambda: core.submit([request("b")]), lambda: core.call("state")):
        with pytest.raises(EngineDead, match="make a new one"):
            call()


def test_processes_that_die_idle_end_the_engine_unless_they_did_something(
    core: LastingCore, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(15):
        core.call("state")
        number = len(family.made)
        family.newest.die()
        wait_for(lambda: len(family.made) > number)  # noqa: B023
    assert family.death is None
    monkeypatch.setattr("tokenmill.core.restart._SECONDS_OF_KILLS", 0.0)
    for _ in range(9):
        number = len(family.made)
        wait_for(lambda: core._core is family.newest)
        family.newest.die()
        wait_for(lambda: len(family.made) > number or family.death)  # noqa: B023
    assert family.death is not None


def test_tensors_of_the_caller_cannot_be_loaded_again(core: LastingCore, family: Family) -> None:
    core.call("update_weights_from_tensor", named_tensors=[], flush_cache=True)
    family.newest.die()
    wait_for(lambda: family.death)
    assert "update_weights_from_tensor are lost" in str(family.death)
    assert len(family.made) == 1


def test_an_engine_can_be_shut_down_while_a_process_starts(core: LastingCore, family: Family) -> None:
    family.loading = threading.Event()
    core.submit([request("a")])
    family.newest.die()
    assert family.loads.wait(10)
    core.close()
    core.close()
    assert family.newest.killed.is_set()
    assert family.newest.closed
    assert family.death is None
    with pytest.raises(EngineClosed):
        core.submit([request("b")])
    assert len(family.made) == 2
