"""Threads beside event loops: each piece of work is done once, and nobody waits for what never ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

import tokenmill as sgl
from tokenmill.frontend.event_loops import OwnLoop, Threads, run_aside

pytestmark = pytest.mark.cpu


def no_more_threads(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("others_are_busy", [True, False])
def test_without_more_threads_work_is_still_done_once(
    monkeypatch: pytest.MonkeyPatch, others_are_busy: bool
) -> None:
    done: list[str] = []
    gate = threading.Event()

    async def main() -> None:
        threads = Threads(3)
        await threads.run(done.append, "first")  # starts a thread, which is there from now on
        busy = asyncio.ensure_future(threads.run(gate.wait, 30)) if others_are_busy else None
        await asyncio.sleep(0.01)
        monkeypatch.setattr(threading.Thread, "start", no_more_threads)
        await threads.run(done.append, "second")
        await run_aside(lambda: done.append("third"))
        gate.set()
        if busy is not None:
            await busy
        await threads.run(done.append, "fourth")  # behind all that the thread may have found
        threads.close()
        await threads.run(done.append, "fifth")

    asyncio.run(main())
    assert done == ["first", "second", "third", "fourth", "fifth"]


def test_errors_and_arguments_of_any_name_get_through() -> None:
    def fail(*, work: str) -> None:
        raise KeyError(work)

    async def main(threads: Threads) -> None:
        with pytest.raises(KeyError, match="mine"):
            await threads.run(fail, work="mine")
        with pytest.raises(KeyError, match="yours"):
            await run_aside(lambda: fail(work="yours"))

    asyncio.run(main(Threads(1)))


def test_the_end_of_python_waits_for_no_source() -> None:
    """One that waits for ever, as a queue into which nobody puts anything."""
    script = """
import asyncio, threading
from tokenmill.frontend.event_loops import run_aside

async def main():
    waiting = asyncio.ensure_future(run_aside(threading.Event().wait))
    await asyncio.sleep(0.01)
    waiting.cancel()

asyncio.run(main())
print("over")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "over\n", "")


def test_a_loop_that_nobody_would_close_is_not_made() -> None:
    closed, used = OwnLoop(), OwnLoop()
    loop: Any = used.get()
    for each in (closed, used):
        each.close()
    assert used.get() is loop
    assert loop.is_closed()
    with pytest.raises(sgl.EngineClosed, match="event loop"):
        closed.get()
