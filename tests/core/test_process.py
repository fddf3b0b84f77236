"""The core in a process of its own, and real engines side by side: who hears of a death, who goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tokenmill as sgl

ROOT = Path(__file__).parents[2]
PROMPT = "The capital of France is"
LONG = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
SHORT = {"temperature": 0, "max_new_tokens": 4}


def child_of(parent: int) -> int:
    """The process id of the only child that runs a core."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and is_core_of(entry, parent):
                return int(entry.name)
        time.sleep(0.05)
    raise AssertionError("no core process")


def is_core_of(entry: Path, parent: int) -> bool:
    try:
        command = (entry / "cmdline").read_text()
        status = (entry / "stat").read_text()
    except OSError:  # it ended meanwhile
        return False
    return "tokenmill.core.process" in command and int(status.rsplit(")", 1)[1].split()[1]) == parent


def wait_gone(process_id: int) -> None:
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process_id}").exists():
        assert time.monotonic() < deadline, "the core process lives on"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_core_reaches_the_waiting_call_and_the_process_lives() -> None:
    engine = sgl.Engine(model_path="tiny", device="cpu", core_process=True)
    killer = threading.Timer(0.3, os.kill, (child_of(os.getpid()), signal.SIGKILL))
    killer.start()
    with pytest.raises(sgl.EngineDead, match="signal 9"):
        engine.generate(PROMPT, LONG)
    with pytest.raises(sgl.EngineDead, match="make a new one"):
        engine.generate(PROMPT, SHORT)
    engine.shutdown()
    with sgl.Engine(model_path="tiny", device="cpu", core_process=True) as another:
        assert another.generate(PROMPT, SHORT)["text"].startswith(" Paris")
        core = child_of(os.getpid())
    wait_gone(core)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_parent_leaves_no_core_behind() -> None:
    program = (
        "import tokenmill as sgl, time\n"
        "engine = sgl.Engine(model_path='tiny', device='cpu', core_process=True)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    core = child_of(parent.pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_gone(core)


def test_errors_of_loading_come_out_of_the_process() -> None:
    with pytest.raises(ValueError, match="context_length"):
        sgl.Engine(model_path="tiny", device="cpu", core_process=True, context_length=1_000_000)


@pytest.fixture(scope="module")
def engine() -> Any:
    with sgl.Engine(model_path="tiny", device="cpu") as engine:
        yield engine


def test_threads_loops_and_a_second_engine_share_the_process(engine: sgl.Engine) -> None:
    expected = engine.generate(PROMPT, SHORT)["text"]
    answers: list[str] = []

    def ask() -> None:
        answers.append(engine.generate(PROMPT, SHORT)["text"])

    async def ask_async() -> None:
        batch = await engine.async_generate([PROMPT] * 3, SHORT)
        answers.extend(batch["text"])
        answers.append(engine.generate(PROMPT, SHORT)["text"])  # sync inside a running loop
        pieces = [chunk["text"] async for chunk in await engine.async_generate(PROMPT, SHORT, stream=True)]
        answers.append("".join(pieces))

    with sgl.Engine(model_path="tiny", device="cpu") as second:
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        asyncio.run(ask_async())
        asyncio.run(ask_async())  # another loop, the same engine
        answers.append(second.generate(PROMPT, SHORT)["text"])
        for thread in threads:
            thread.join()
    ask()  # the first engine does not mind that the second is shut down
    assert answers == [expected] * 20


def test_a_stream_that_is_left_early_is_aborted(engine: sgl.Engine) -> None:
    stream = engine.generate(PROMPT, LONG, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while not engine.flush_cache().success:  # refused while anything runs
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.01)
