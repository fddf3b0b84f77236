"""The core in a thread: messages in, Outputs out, and what everybody hears when the loop ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.core.conftest import FACTS, Unprepared
from tokenmill.config import EngineConfig
from tokenmill.core import launch
from tokenmill.core.launch import CoreThread, start_core
from tokenmill.errors import EngineClosed, EngineDead, InvalidArgument
from tokenmill.messages import EngineFacts, Lane, Output, Request, StepPlan, StepResult
from tokenmill.sampling_params import SamplingParams


class CountingRunner(Unprepared):
    """The token drawn at position p is p. Waits at each step while `gate` is closed; fails when told to."""

    def __init__(self, facts: EngineFacts = FACTS) -> None:
        self.facts = facts
        self.gate = threading.Event()
        self.gate.set()
        self.launching = threading.Event()  # set when the first step has come
        self.failure: Exception | None = None
        self.closed = False
        self._launched: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        self.launching.set()
        assert self.gate.wait(10)
        if self.failure is not None:
            raise self.failure
        tokens = np.where(plan.samples, plan.starts + plan.counts, -1).astype(np.int32)
        self._launched.append(StepResult(tokens))

    def sample(self, masks: None) -> None:
        pass

    def collect(self, lane: Lane = Lane.WHOLE) -> StepResult:
        return self._launched.popleft()

    def call(self, name: str, **arguments: Any) -> Any:
        return {"cache_bytes": 0}

    def close(self) -> None:
        self.closed = True


class Ears:
    """Collects what the core says."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.death: BaseException | None = None
        self._changed = threading.Condition()

    def deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            self.outputs += outputs
            self._changed.notify_all()

    def died(self, error: BaseException) -> None:
        with self._changed:
            self.death = error
            self._changed.notify_all()

    def wait_finished(self, count: int) -> list[Output]:
        def finished() -> list[Output]:
            return [output for output in self.outputs if output.finish is not None]

        with self._changed:
            assert self._changed.wait_for(lambda: len(finished()) >= count, timeout=10)
            return finished()

    def wait_dead(self) -> BaseException:
        with self._changed:
            assert self._changed.wait_for(lambda: self.death is not None, timeout=10)
            assert self.death is not None
            return self.death


def request(name: str, *, prompt_length: int = 5, max_new_tokens: int = 4, interval: int = 0) -> Request:
    return Request(
        id=name,
        prompt_ids=np.arange(prompt_length, dtype=np.int32),
        params=SamplingParams(temperature=0),
        max_new_tokens=max_new_tokens,
        seed=0,
        stop_ids=(),
        report_interval=interval,
    )


@pytest.fixture
def mill() -> CountingRunner:
    return CountingRunner()


@pytest.fixture
def ears() -> Ears:
    return Ears()


@pytest.fixture
def core(mill: CountingRunner, ears: Ears) -> Iterator[CoreThread]:
    core = CoreThread(lambda: mill, EngineConfig(), deliver=ears.deliver, died=ears.died)
    yield core
    mill.gate.set()
    core.close()


def test_requests_are_answered_in_full(core: CoreThread, ears: Ears) -> None:
    core.submit([request(str(index), prompt_length=5 + index) for index in range(20)])
    for output in ears.wait_finished(20):
        first = 5 + int(output.request_id)
        assert list(output.token_ids) == [first, first + 1, first + 2, first + 3]


def test_interval_reports_as_tokens_come(core: CoreThread, ears: Ears) -> None:
    core.submit([request("a", max_new_tokens=5, interval=2)])
    ears.wait_finished(1)
    assert [list(output.token_ids) for output in ears.outputs] == [[5], [6, 7], [8, 9]]


def test_cancel_ends_a_running_request(core: CoreThread, mill: CountingRunner, ears: Ears) -> None:
    mill.gate.clear()
    core.submit([request("a", max_new_tokens=100), request("b")])
    core.cancel(["a", "unknown"])
    mill.gate.set()
    kinds = {output.request_id: output.finish.kind for output in ears.wait_finished(2) if output.finish}
    assert kinds == {"a": "abort", "b": "length"}


def test_calls_are_answered_and_their_errors_reach_the_caller(core: CoreThread) -> None:
    assert core.call("flush_cache")[0] is True
    assert core.call("load") == {"running": 0, "waiting": 0}
    with pytest.raises(InvalidArgument, match="no_such_call"):
        core.call("no_such_call")
    assert core.call("flush_cache")[0] is True  # the loop lives on


def test_close_aborts_what_is_left_and_is_idempotent(
    core: CoreThread, mill: CountingRunner, ears: Ears
) -> None:
    mill.gate.clear()
    core.submit([request("a", max_new_tokens=100)])
    threading.Timer(0.05, mill.gate.set).start()
    core.close()
    core.close()
    assert mill.closed
    assert [output.finish.kind for output in ears.wait_finished(1) if output.finish] == ["abort"]
    with pytest.raises(EngineClosed):
        core.submit([request("b")])
    with pytest.raises(EngineClosed):
        core.call("load")


def test_close_returns_where_the_memory_cannot_be_given_back(
    mill: CountingRunner, ears: Ears, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(mill, "close", fail)
    core = CoreThread(lambda: mill, EngineConfig(), deliver=ears.deliver, died=ears.died)
    closing = threading.Thread(target=core.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert "the device is lost" in caplog.text


def test_a_crash_reaches_everybody_with_its_cause(core: CoreThread, mill: CountingRunner, ears: Ears) -> None:
    mill.failure = ArithmeticError("the device is on fire")
    core.submit([request("a")])
    assert ears.wait_dead() is mill.failure
    with pytest.raises(EngineDead, match="on fire") as caught:
        core.submit([request("b")])
    assert caught.value.__cause__ is mill.failure
    with pytest.raises(EngineDead, match="on fire"):
        core.call("load")
    core.close()
    assert mill.closed


def test_a_call_that_waits_while_the_loop_dies_is_answered(core: CoreThread, mill: CountingRunner) -> None:
    mill.gate.clear()
    mill.failure = ArithmeticError("the device is on fire")
    core.submit([request("a")])
    assert mill.launching.wait(10)  # else the call might be answered before the step
    threading.Timer(0.05, mill.gate.set).start()
    with pytest.raises(EngineDead, match="on fire"):
        core.call("load")


def test_a_call_that_waits_while_the_core_is_closed_hears_so(core: CoreThread, mill: CountingRunner) -> None:
    """An update of weights waits for the requests before it."""
    mill.gate.clear()
    core.submit([request("a", max_new_tokens=100)])
    assert mill.launching.wait(10)

    def close() -> None:
        while not core._calls:  # until the call is in the inbox
            time.sleep(0.001)
        threading.Timer(0.05, mill.gate.set).start()
        core.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(EngineClosed, match="before it answered"):
        core.call("update_weights_from_disk", model_path="new")
    closing.join()


def test_no_step_in_flight_gives_the_same(ears: Ears) -> None:
    core = CoreThread(
        lambda: CountingRunner(replace(FACTS, steps_in_flight=1)),
        EngineConfig(),
        deliver=ears.deliver,
        died=ears.died,
    )
    core.submit([request("a")])
    assert list(ears.wait_finished(1)[0].token_ids) == [5, 6, 7, 8]
    core.close()


def test_an_error_while_loading_reaches_the_caller_and_ends_the_thread(ears: Ears) -> None:
    def fail() -> CountingRunner:
        raise InvalidArgument("no such model")

    others = set(threading.enumerate())  # engines of other tests may be alive
    with pytest.raises(InvalidArgument, match="no such model"):
        CoreThread(fail, EngineConfig(), deliver=ears.deliver, died=ears.died)
    assert ears.death is None
    for thread in set(threading.enumerate()) - others:
        if thread.name == "tokenmill-core":
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("core_process", [False, True])
def test_a_grammar_backend_that_is_not_there_is_told_before_any_loading(
    ears: Ears, monkeypatch: pytest.MonkeyPatch, core_process: bool
) -> None:
    def load(config: EngineConfig) -> CountingRunner:
        raise AssertionError("nothing is to be loaded")

    monkeypatch.setattr("tokenmill.runner.start", load)
    monkeypatch.setattr("tokenmill.core.process.CoreProcess.start", load)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = EngineConfig(grammar_backend="xgrammar", core_process=core_process)
    with pytest.raises(InvalidArgument, match=r"tokenmill\[xgrammar\]"):
        start_core(config, deliver=ears.deliver, died=ears.died)


class Opened:
    """Held by the frame of a start that fails."""


def test_what_a_failed_start_has_loaded_goes_while_its_error_stays(ears: Ears) -> None:
    loaded: list[weakref.ref[Opened]] = []

    def load() -> None:
        weights = Opened()
        loaded.append(weakref.ref(weights))
        raise ValueError("no room")

    def fails() -> Any:
        weights = Opened()
        loaded.append(weakref.ref(weights))
        try:
            load()
        except ValueError as error:
            raise RuntimeError("the start failed") from error

    with pytest.raises(RuntimeError, match="the start failed") as caught:
        CoreThread(fails, EngineConfig(model_path="tiny"), deliver=ears.deliver, died=ears.died)
    gc.collect()
    assert [each() for each in loaded] == [None, None]
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_mill_whose_loop_cannot_be_built_is_closed(
    mill: CountingRunner, ears: Ears, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_loop(*_: Any, **__: Any) -> Any:
        raise ValueError("no loop")

    monkeypatch.setattr(launch, "build_loop", build_loop)
    with pytest.raises(ValueError, match="no loop"):
        CoreThread(lambda: mill, EngineConfig(model_path="tiny"), deliver=ears.deliver, died=ears.died)
    assert mill.closed


def test_an_error_that_is_its_own_cause_is_told(ears: Ears) -> None:
    def fails() -> Any:
        error = ValueError("again and again")
        raise error from error

    with pytest.raises(ValueError, match="again and again"):
        CoreThread(fails, EngineConfig(model_path="tiny"), deliver=ears.deliver, died=ears.died)


def test_a_mill_that_cannot_be_closed_leaves_nobody_waiting(
    mill: CountingRunner, ears: Ears, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("no loop")

    def stays() -> None:
        raise RuntimeError("not closed")

    monkeypatch.setattr(launch, "build_loop", fails)
    monkeypatch.setattr(mill, "close", stays)
    with pytest.raises(ValueError, match="no loop"):
        CoreThread(lambda: mill, EngineConfig(model_path="tiny"), deliver=ears.deliver, died=ears.died)
    assert "could not be freed" in caplog.text
    assert "not closed" in caplog.text
