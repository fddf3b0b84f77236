"""A loop that stands still is noticed after so much running time, and nothing else is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import tokenmill as sgl
from tokenmill.core.watchdog import Pulse, Watchdog
from tokenmill.errors import EngineDead

PROMPT = "The capital of France is"
SHORT = {"temperature": 0, "max_new_tokens": 8}


class Loop:
    """What a watchdog sees of a loop."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        self.pulse.is_resting = False
        self.pulse.num_steps = 3
        self.num_requests = 3


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def stalls(loop: Loop) -> Iterator[list[EngineDead]]:
    """What a watchdog of 0.2 seconds says of the loop."""
    told: list[EngineDead] = []
    watchdog = Watchdog(loop, 0.2, stalled=told.append)
    yield told
    watchdog.close()


def test_a_loop_that_takes_no_step_stalls_once(loop: Loop, stalls: list[EngineDead]) -> None:
    time.sleep(0.8)
    assert len(stalls) == 1
    message = str(stalls[0])
    assert re.search(r"no step finished for 0\.2\d* seconds", message)
    assert "3 requests wait" in message
    assert "Thread MainThread" in message
    assert "test_a_loop_that_takes_no_step_stalls_once" in message


def test_steps_rest_and_the_first_steps_are_no_stall(loop: Loop, stalls: list[EngineDead]) -> None:
    for _ in range(10):
        loop.pulse.num_steps += 1
        time.sleep(0.05)
    with loop.pulse.resting():
        time.sleep(0.5)
    assert stalls == []
    loop.pulse.num_steps = 2  # kernels compile
    time.sleep(0.5)
    assert stalls == []


def test_a_timeout_of_zero_starts_no_thread(loop: Loop) -> None:
    before = threading.active_count()
    watchdog = Watchdog(loop, 0.0, stalled=lambda error: None)
    assert threading.active_count() == before
    watchdog.close()


@pytest.mark.parametrize("value", [-1, "soon", float("nan")])
def test_bad_timeouts_are_refused(value: Any) -> None:
    with pytest.raises(sgl.InvalidArgument, match="watchdog_timeout"):
        sgl.Engine("tiny", watchdog_timeout=value)


class Hanging:
    """A logit processor that hangs the first time that it is asked anywhere, which a file remembers."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __call__(self, logits: Any, custom_param_list: Any) -> Any:
        if not Path(self.file).exists():
            Path(self.file).touch()
            time.sleep(3600)
        return logits


def test_a_stalled_engine_tells_everybody_and_can_be_shut_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sgl.Engine("tiny", device="cpu", watchdog_timeout=1.0)
    engine.generate(PROMPT, SHORT)
    processor = Hanging(str(tmp_path / "flag"))
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            engine.generate(PROMPT, SHORT)
        except sgl.EngineDead as error:
            failures.append(error)

    stream = engine.generate(PROMPT, SHORT, stream=True, custom_logit_processor=processor)
    other = threading.Thread(target=ask)
    other.start()
    with pytest.raises(sgl.EngineDead, match=r"no step finished for 1\S* seconds(?s:.*)in __call__"):
        list(stream)
    other.join(10)
    assert len(failures) == 1
    with pytest.raises(sgl.EngineDead, match="make a new one"):
        engine.flush_cache()
    assert "in __call__" in caplog.text
    engine.shutdown()


def test_python_ends_in_good_order_though_a_step_took_too_long() -> None:
    """It waits for the step to come back; the thread would take the process down on its way out of torch."""
    script = """
        import tokenmill as sgl

        engine = sgl.Engine("tiny", device="cpu", watchdog_timeout=0.001)
        try:
            engine.generate("hello", {"max_new_tokens": 200, "ignore_eos": True})
        except sgl.EngineDead:
            print("dead")
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "dead\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stalled_core_process_is_replaced_and_a_stopped_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sgl.Engine(
        "tiny", device="cpu", core_process=True, watchdog_timeout=1.5, log_level="warning"
    ) as llm:
        expected = llm.generate(PROMPT, SHORT)["output_ids"]
        [core] = subprocess.check_output(["pgrep", "-P", str(os.getpid()), "-f", "core.process"]).split()
        os.kill(int(core), signal.SIGSTOP)
        threading.Timer(2.0, os.kill, (int(core), signal.SIGCONT)).start()
        assert llm.generate(PROMPT, SHORT)["output_ids"] == expected
        assert not caplog.records
        processor = Hanging(str(tmp_path / "flag"))
        result = llm.generate(PROMPT, SHORT, custom_logit_processor=processor)
    assert result["output_ids"] == expected
    assert "no step finished for 1" in caplog.text
    assert "in __call__" in caplog.text
    assert "another takes its place and replays 1 requests" in caplog.text
