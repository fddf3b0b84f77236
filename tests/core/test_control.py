"""Calls between two steps: which wait for requests, what a pause does, and when a profile runs."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.core.conftest import FACTS, Unprepared
from tokenmill.config import EngineConfig
from tokenmill.core import control
from tokenmill.core.launch import CoreThread
from tokenmill.core.priority import Priorities
from tokenmill.errors import InvalidArgument, WrongState
from tokenmill.messages import Lane, Output, Request, StepPlan, StepResult
from tokenmill.sampling_params import SamplingParams

pytestmark = pytest.mark.unit


class VersionedMill(Unprepared):
    """Draws the number of weight updates so far. A step waits while `gate` is closed; calls are noted."""

    def __init__(self) -> None:
        self.facts = FACTS
        self.gate = threading.Event()
        self.gate.set()
        self.version = 0
        self.steps = 0
        self.calls: list[tuple[str, int]] = []  # name, steps before it
        self.failures: dict[str, Exception] = {}
        self.num_prompt_tokens = 0
        self._launched: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        assert self.gate.wait(10)
        self.steps += 1
        self.num_prompt_tokens += len(plan.token_ids)
        self._launched.append(StepResult(np.where(plan.samples, self.version, -1).astype(np.int32)))

    def sample(self, masks: None) -> None:
        pass

    def collect(self, lane: Lane = Lane.WHOLE) -> StepResult:
        return self._launched.popleft()

    def call(self, name: str, **arguments: Any) -> Any:
        self.calls.append((name, self.steps))
        if name in self.failures:
            raise self.failures[name]
        if name.startswith("update_weights"):
            self.version += 1
        return {"cache_bytes": 0, "graph_bytes": 0}

    def close(self) -> None:
        pass


class Answers:
    """What came back, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.times: dict[str, Any] = {}
        self.delivered: Callable[[], None] = lambda: None  # in the core's thread, after each delivery
        self._changed = threading.Condition()

    def deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            for output in outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.times is not None:
                    assert output.request_id not in self.times, "times are told once"
                    self.times[output.request_id] = output.times
                if output.finish is not None:
                    self.finished[output.request_id] = output.finish.kind
            self._changed.notify_all()
        self.delivered()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout=10)

    def wait_finished(self, *names: str) -> None:
        self.wait(lambda: set(names) <= set(self.finished))


@pytest.fixture
def mill() -> VersionedMill:
    return VersionedMill()


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def core(mill: VersionedMill, answers: Answers) -> Iterator[CoreThread]:
    def died(error: BaseException) -> None:
        raise AssertionError("the loop must live") from error

    core = CoreThread(lambda: mill, EngineConfig(), deliver=answers.deliver, died=died)
    yield core
    mill.gate.set()
    core.close()


def request(name: str, *, max_new_tokens: int = 6, interval: int = 1) -> Request:
    return Request(
        id=name,
        prompt_ids=np.arange(9, dtype=np.int32),
        params=SamplingParams(temperature=0),
        max_new_tokens=max_new_tokens,
        seed=0,
        stop_ids=(),
        report_interval=interval,
    )


def update(core: CoreThread) -> Any:
    return core.call("update_weights_from_disk", model_path="new")


class Background:
    """A call in another thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.value: Any = None
        self.thread = threading.Thread(target=self._run, args=(call,))
        self.thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        self.value = call()

    def result(self) -> Any:
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.value


# ── weight updates ────────────────────────────────────────────────────────────────────────────


def update_in_background(core: CoreThread) -> Background:
    """A call that is in the inbox."""
    updated = Background(lambda: update(core))
    while not core._calls:
        time.sleep(0.001)
    return updated


def test_an_update_waits_for_requests_before_it_and_those_after_it_wait(
    core: CoreThread, mill: VersionedMill, answers: Answers
) -> None:
    mill.gate.clear()
    core.submit([request("old", max_new_tokens=40), request("older", max_new_tokens=20)])
    updated = update_in_background(core)
    core.submit([request("new")])
    mill.gate.set()
    answers.wait_finished("old", "older", "new")
    assert updated.result() == (True, "the weights were updated", 0)
    assert answers.tokens == {"old": [0] * 40, "older": [0] * 20, "new": [1] * 6}
    assert answers.finished == {"old": "length", "older": "length", "new": "length"}


def test_a_request_behind_an_update_ends_before_its_turn(
    core: CoreThread, mill: VersionedMill, answers: Answers
) -> None:
    """By its caller, or for want of time: the update may wait for others for long."""
    run_until_some_tokens(core, answers)
    answers.delivered = lambda: time.sleep(0.01)  # a step takes its time
    updated = update_in_background(core)
    late = replace(request("late"), timeout_seconds=0.02)
    core.submit([request("unwanted"), request("new"), late])
    core.cancel(["unwanted"])
    answers.wait_finished("unwanted", "late")
    assert "a" not in answers.finished
    assert mill.version == 0
    core.cancel(["a"])
    answers.wait_finished("new")
    assert updated.result()[0]
    assert answers.finished == {"a": "abort", "unwanted": "abort", "late": "abort", "new": "length"}
    assert answers.tokens["unwanted"] == answers.tokens["late"] == []
    assert answers.tokens["new"] == [1] * 6


def test_an_update_forgets_the_prefixes_of_the_old_weights(
    core: CoreThread, mill: VersionedMill, answers: Answers
) -> None:
    for name in ("first", "second"):
        core.submit([request(name)])
        answers.wait_finished(name)
    assert mill.num_prompt_tokens == 9 + 1  # the second found two pages of four
    update(core)
    core.submit([request("third")])
    answers.wait_finished("third")
    assert mill.num_prompt_tokens == 9 + 1 + 9
    core.call("update_weights_from_tensor", named_tensors=[], flush_cache=False)
    core.submit([request("fourth")])
    answers.wait_finished("fourth")
    assert mill.num_prompt_tokens == 9 + 1 + 9 + 1


def test_weights_that_do_not_fit_are_reported(core: CoreThread, mill: VersionedMill) -> None:
    mill.failures["update_weights_from_disk"] = InvalidArgument("a tensor is missing")
    assert update(core) == (False, "a tensor is missing", 0)


# ── pauses ────────────────────────────────────────────────────────────────────────────────────


def run_until_some_tokens(core: CoreThread, answers: Answers, name: str = "a") -> None:
    """The next thing that the core learns is the test's next call, however slow the test is."""
    met = threading.Event()

    def meet() -> None:
        if len(answers.tokens.get(name, [])) >= 3 and not met.is_set():
            met.set()
            deadline = time.monotonic() + 10
            while not core._calls and time.monotonic() < deadline:  # until the call is in the inbox
                time.sleep(0.001)

    answers.delivered = meet
    core.submit([request(name, max_new_tokens=100)])
    assert met.wait(10)


def test_paused_in_place_nothing_moves_until_it_goes_on(
    core: CoreThread, mill: VersionedMill, answers: Answers
) -> None:
    run_until_some_tokens(core, answers)
    core.call("pause_generation", mode="in_place")
    steps, prompt = mill.steps, mill.num_prompt_tokens
    core.submit([request("b")])
    assert core.call("state")["paused"]
    assert mill.steps == steps
    success, message, _ = update(core)
    assert not success
    assert "mode='retract'" in message
    core.call("continue_generation")
    answers.wait_finished("a", "b")
    assert answers.tokens["a"] == [0] * 100
    assert mill.num_prompt_tokens <= prompt + 9  # only "b" was prefilled


def test_retracted_requests_go_on_with_new_weights(
    core: CoreThread, mill: VersionedMill, answers: Answers
) -> None:
    run_until_some_tokens(core, answers)
    core.call("pause_generation", mode="retract")
    core.call("check")
    known, prompt = len(answers.tokens["a"]), mill.num_prompt_tokens
    assert core.call("load") == {"running": 0, "waiting": 1}
    assert update(core) == (True, "the weights were updated", 1)
    core.call("continue_generation")
    answers.wait_finished("a")
    assert answers.tokens["a"] == [0] * known + [1] * (100 - known)
    assert mill.num_prompt_tokens == prompt + 9 + known  # everything was computed anew


def test_a_pause_that_aborts(core: CoreThread, answers: Answers) -> None:
    run_until_some_tokens(core, answers)
    core.call("pause_generation", mode="abort")
    answers.wait_finished("a")
    assert answers.finished["a"] == "abort"
    core.submit([request("b")])
    assert core.call("load") == {"running": 0, "waiting": 1}
    core.call("continue_generation")
    answers.wait_finished("b")


def test_a_pause_that_aborts_ends_what_is_behind_an_update(
    core: CoreThread, mill: VersionedMill, answers: Answers
) -> None:
    run_until_some_tokens(core, answers)
    answers.delivered = lambda: time.sleep(0.01)  # a step takes its time
    updated = update_in_background(core)
    core.submit([request("b"), request("c")])
    assert core.call("load") == {"running": 1, "waiting": 2}
    core.call("pause_generation", mode="abort")
    answers.wait_finished("a", "b", "c")
    assert answers.finished == {"a": "abort", "b": "abort", "c": "abort"}
    assert updated.result()[0]
    assert core.call("load") == {"running": 0, "waiting": 0}
    core.call("continue_generation")


def test_time_runs_during_a_pause(core: CoreThread, answers: Answers) -> None:
    core.call("pause_generation", mode="in_place")
    core.submit([replace(request("late"), timeout_seconds=0.02), request("patient")])
    answers.wait_finished("late")
    assert answers.finished == {"late": "abort"}
    core.call("continue_generation")
    answers.wait_finished("patient")


def test_the_core_can_be_closed_while_it_is_paused(core: CoreThread, answers: Answers) -> None:
    run_until_some_tokens(core, answers)
    core.call("pause_generation", mode="in_place")
    core.close()
    assert answers.finished == {"a": "abort"}


# ── memory ────────────────────────────────────────────────────────────────────────────────────


def test_memory_is_released_only_when_nothing_runs(
    core: CoreThread, mill: VersionedMill, answers: Answers
) -> None:
    run_until_some_tokens(core, answers)
    with pytest.raises(WrongState, match="idle engine, but 1 requests"):
        core.call("release_memory_occupation", tags=("kv_cache",))
    core.cancel(["a"])
    answers.wait_finished("a")
    mill.calls.clear()
    core.call("release_memory_occupation", tags=("kv_cache", "cuda_graph"))
    core.submit([request("b")])  # nothing may run now
    assert core.call("load") == {"running": 0, "waiting": 1}
    core.call("resume_memory_occupation", tags=("cuda_graph", "kv_cache", "weights"))
    answers.wait_finished("b")
    assert [name for name, _ in mill.calls] == [
        "release_memory",
        "resume_memory",
        "resume_memory",
        "open_graphs",
    ]


@pytest.mark.parametrize(
    ("call", "arguments"), [("flush_cache", {}), ("release_memory_occupation", {"tags": ("kv_cache",)})]
)
def test_steps_that_no_request_needs_any_more_hold_up_no_call(
    core: CoreThread, answers: Answers, call: str, arguments: dict[str, Any]
) -> None:
    """A request has ended, and the step after its last token was launched before that was known."""
    run_until_some_tokens(core, answers)
    core.cancel(["a"])
    assert core.call(call, **arguments) in (None, (True, "the prefix cache is empty"))
    assert answers.finished == {"a": "abort"}
    core.call("check")


def test_weights_that_are_released_are_neither_read_nor_updated(core: CoreThread) -> None:
    core.call("release_memory_occupation", tags=("weights",))
    assert not update(core)[0]
    with pytest.raises(WrongState, match="released"):
        core.call("get_weights_by_name", tensor_name="w", truncate_size=1)
    core.call("resume_memory_occupation", tags=("weights",))
    assert update(core)[0]


def test_memory_that_cannot_be_taken_back_stays_released(core: CoreThread, mill: VersionedMill) -> None:
    core.call("release_memory_occupation", tags=("weights", "kv_cache"))
    mill.failures["resume_memory"] = WrongState("no memory")
    with pytest.raises(WrongState, match="no memory"):
        core.call("resume_memory_occupation", tags=("kv_cache",))
    assert core.call("state")["released"] == ["kv_cache", "weights"]
    del mill.failures["resume_memory"]
    core.call("resume_memory_occupation", tags=("kv_cache", "weights"))
    assert core.call("state")["released"] == []


# ── profiles ──────────────────────────────────────────────────────────────────────────────────


def profile_calls(mill: VersionedMill) -> list[tuple[str, int]]:
    return [call for call in mill.calls if "profile" in call[0]]


def test_a_profile_of_some_steps_begins_and_ends_by_itself(
    core: CoreThread, mill: VersionedMill, answers: Answers
) -> None:
    core.call("start_profile", start_step=5, num_steps=7)
    with pytest.raises(WrongState, match="running already"):
        core.call("start_profile", start_step=None, num_steps=None)
    core.submit([request("a", max_new_tokens=30)])
    answers.wait_finished("a")
    (started, first), (stopped, last) = profile_calls(mill)
    assert (started, stopped) == ("start_profile", "stop_profile")
    assert 5 <= first <= 6  # a step may be in flight
    assert last - first == 7
    with pytest.raises(WrongState, match="no profile is running"):
        core.call("stop_profile")


def test_a_profile_without_an_end_runs_until_it_is_stopped(
    core: CoreThread, mill: VersionedMill, answers: Answers
) -> None:
    core.call("start_profile", start_step=None, num_steps=None)
    core.submit([request("a", max_new_tokens=30)])
    answers.wait_finished("a")
    assert [name for name, _ in profile_calls(mill)] == ["start_profile"]
    core.call("stop_profile")
    assert [name for name, _ in profile_calls(mill)] == ["start_profile", "stop_profile"]


@pytest.mark.parametrize("failure", [OSError("the disk is full"), ValueError("no file name"), MemoryError()])
@pytest.mark.parametrize("call", ["start_profile", "stop_profile"])
def test_a_profile_that_fails_between_steps_does_not_stop_the_engine(
    core: CoreThread, mill: VersionedMill, answers: Answers, call: str, failure: Exception
) -> None:
    mill.failures[call] = failure
    core.call("start_profile", start_step=3, num_steps=2)
    core.submit([request("a", max_new_tokens=30)])
    answers.wait_finished("a")
    assert answers.finished == {"a": "length"}
    with pytest.raises(WrongState, match="no profile is running"):
        core.call("stop_profile")


@pytest.fixture
def no_seconds_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any trace is too large at once."""
    monkeypatch.setattr(control, "_MOST_TRACED_SECONDS", 0.0)


@pytest.mark.usefixtures("no_seconds_traced")
def test_a_profile_without_an_end_is_written_before_it_grows_too_large(
    core: CoreThread, mill: VersionedMill, answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    core.call("start_profile", start_step=3, num_steps=None)
    core.submit([request("a", max_new_tokens=30)])
    answers.wait_finished("a")
    assert [name for name, _ in profile_calls(mill)] == ["start_profile", "stop_profile"]
    assert "give num_steps" in caplog.text
    with pytest.raises(WrongState, match="running already"):  # as far as its user knows
        core.call("start_profile", start_step=None, num_steps=None)
    assert core.call("stop_profile") is None
    with pytest.raises(WrongState, match="no profile is running"):
        core.call("stop_profile")
    core.call("start_profile", start_step=None, num_steps=None)
    assert [name for name, _ in profile_calls(mill)] == ["start_profile", "stop_profile", "start_profile"]


@pytest.mark.usefixtures("no_seconds_traced")
@pytest.mark.parametrize("options", [{"num_steps": 100}, {"num_steps": None, "activities": ["MEM"]}])
def test_what_was_asked_for_or_cannot_grow_is_traced_to_the_end(
    core: CoreThread, mill: VersionedMill, answers: Answers, options: dict[str, Any]
) -> None:
    core.call("start_profile", start_step=None, **options)
    core.submit([request("a", max_new_tokens=30)])
    answers.wait_finished("a")
    assert [name for name, _ in profile_calls(mill)] == ["start_profile"]


# ── times ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("interval", [0, 1])
def test_times_come_in_order_and_once(core: CoreThread, answers: Answers, interval: int) -> None:
    before = time.perf_counter()
    core.submit([request(str(index), interval=interval) for index in range(20)])
    answers.wait_finished(*map(str, range(20)))
    after = time.perf_counter()
    for times in answers.times.values():
        assert before <= times.submitted <= times.admitted <= times.first_token <= after
    assert len(answers.times) == 20
    # Eight rows at a time: the last one waits for a row.
    assert answers.times["19"].admitted > answers.times["0"].first_token


def test_a_request_that_never_ran_has_no_further_times(
    core: CoreThread, mill: VersionedMill, answers: Answers
) -> None:
    core.call("pause_generation", mode="in_place")
    core.submit([request("a")])
    core.cancel(["a"])
    answers.wait_finished("a")
    assert answers.times["a"].admitted is None
    assert answers.times["a"].first_token is None


# ── retracting everything ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("priorities", [Priorities(), Priorities(enabled=True, threshold=2)])
def test_retracting_everything_now_and_then_changes_no_token(
    harness: Callable[..., Any],
    make_request: Callable[..., Request],
    alone: Callable[[Request], Any],
    depth: int,
    prefix_caching: bool,
    priorities: Priorities,
) -> None:
    rng = random.Random(depth)
    for _ in range(10):
        rig = harness(
            depth=depth,
            prefix_caching=prefix_caching,
            num_pages=24,
            max_step_tokens=16,
            priorities=priorities,
        )
        requests = [
            make_request(
                str(number),
                rng.choices(range(5), k=rng.randint(1, 30)),
                rng.randint(1, 20),
                seed=number,
                priority=rng.randint(0, 5) if priorities.enabled else None,
            )
            for number in range(12)
        ]
        rig.scheduler.submit(requests)
        while not rig.scheduler.idle:
            rig.step()
            if rng.random() < 0.2:
                while rig.scheduler.num_in_flight:
                    rig.take_in()
                rig.scheduler.retract_all()
                rig.scheduler.check_invariants()
                assert rig.scheduler.num_running == 0
        for request in requests:
            assert (rig.tokens(request.id), rig.last(request.id).finish) == alone(request)
