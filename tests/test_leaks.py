"""Engines opened and closed one after the other leave no thread, file, child, object or memory behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# The same with 100 engines is a matter of a minute or two; what leaks shows with a few as well.
PROGRAM = """
import asyncio, contextlib, ctypes, gc, json, os, sys, threading, time, weakref
from pathlib import Path
import tokenmill as sgl

def used():
    time.sleep(0.3)  # a thread that has ended lets go of its arguments only when it gets the interpreter
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    me = Path("/proc/self")
    children = 0
    for task in (me / "task").iterdir():
        with contextlib.suppress(OSError):  # a worker that ends just now
            children += len((task / "children").read_text().split())
    return {
        "threads": threading.active_count(),
        "tasks": len(list((me / "task").iterdir())),
        "files": len(list((me / "fd").iterdir())),
        "children": children,
        "objects": len(gc.get_objects()),
        "megabytes": int((me / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 2**20,
    }

few = {"temperature": 0, "max_new_tokens": 4}

async def use_async(engine):
    await asyncio.gather(*(engine.async_generate("x", few) for _ in range(3)))
    async for result in engine.iter(("x" for _ in range(100)), few):
        break

def use(**arguments):
    with sgl.Engine("tiny", device="cpu", **arguments) as engine:
        engine.generate(["The capital of France is", "The cat"], few, return_logprob=True)
        engine.generate("x", {**few, "regex": "[a-z]{2}"})
        engine.generate("x", few, session_params={"id": engine.open_session(1000)})
        engine.chat([{"role": "user", "content": "Hello"}], few)
        asyncio.run(use_async(engine))
        next(engine.generate("x", {**few, "max_new_tokens": 500}, stream=True))
        return weakref.ref(engine._client)

if __name__ == "__main__":
    count, arguments = int(sys.argv[1]), json.loads(sys.argv[2])
    for _ in range(1 if arguments else 3):
        use(**arguments)
    before = used()
    clients = [use(**arguments) for _ in range(count)]
    after = used()
    for _ in range(20):  # beside other processes a thread that has ended may stay a while
        if after["tasks"] <= before["tasks"]:
            break
        after = used()
    print(json.dumps([before, after, sum(client() is not None for client in clients)]))
"""


def measure(count: int, arguments: str) -> tuple[dict[str, int], dict[str, int], int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(count), arguments],
        capture_output=True,
        text=True,
        timeout=110,
        # One heap for all threads: else what is measured is how full the heaps of past threads are.
        env=os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr
    before, after, num_alive = json.loads(done.stdout)
    return before, after, num_alive


@pytest.mark.parametrize(("count", "arguments"), [(10, "{}"), (2, '{"core_process": true}')])
def test_nothing_is_left_of_many_engines(count: int, arguments: str) -> None:
    before, after, num_alive = measure(count, arguments)
    assert num_alive == 0
    for what in ("threads", "tasks", "files", "children"):
        assert after[what] <= before[what], what
    assert (after["children"], after["threads"]) == (0, 1)
    assert after["objects"] - before["objects"] < 10 * count
    # An engine of the bundled model holds 30 and more; the allocator keeps a few, whatever the count.
    assert after["megabytes"] - before["megabytes"] < 8 + count
