"""Nothing outlives its parent, and Python ends at once and in silence, whatever an engine is doing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MARK = "TOKENMILL_TEST_FAMILY"

BUSY = """
import re, sys, time
import tokenmill as sgl

class Long:
    def __init__(self, kind):
        self.kind = kind
    def __call__(self, logits, custom_param_list):
        if self.kind == "foreign code":  # which never lets go of the interpreter
            re.match("(a+)+$", "a" * 64 + "b")
        if self.kind == "sleeping":
            time.sleep(3600)
        return logits

if __name__ == "__main__":
    engine = sgl.Engine("tiny", device="cpu", core_process=sys.argv[1] == "process")
    long = {"max_new_tokens": 1900, "ignore_eos": True}
    engine.generate("x", {"regex": "[a-z]{3}"})
    iteration = engine.iter(["x"] * 4, {"max_new_tokens": 4})
    next(iteration)
    re.kept_to_the_end = iteration  # where it outlives the names of our modules
    stream = engine.generate(["x"] * 4, long, stream=True)
    next(stream)
    if len(sys.argv) > 2:
        import busy
        stuck = engine.generate("x", long, stream=True, custom_logit_processor=busy.Long(sys.argv[2]))
    print("ready", flush=True)
    if len(sys.argv) > 2:
        time.sleep(3600)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("busy") / "busy.py"
    path.write_text(BUSY)
    return path


def start(script: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """The process, and the mark that all its descendants bear."""
    mark = uuid.uuid4().hex
    paths = os.pathsep.join([str(ROOT), str(script.parent)])
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, MARK: mark},
    )
    return process, mark


def family(mark: str) -> list[int]:
    """Living processes with this mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it ended meanwhile, or is not ours
                continue
    return found


def wait_gone(mark: str) -> None:
    deadline = time.monotonic() + 20
    while living := family(mark):
        assert time.monotonic() < deadline, f"{living} live on"
        time.sleep(0.05)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_parent_that_is_killed_at_any_moment_leaves_nothing_behind(script: Path) -> None:
    draw = random.Random(0)
    parents = [start(script, "process") for _ in range(3)]
    for process, mark in parents:
        time.sleep(draw.uniform(0.2, 1.5))  # imports, start of the child, loading, generating
        end(process)
        wait_gone(mark)


@pytest.mark.parametrize("kind", ["sleeping", "foreign code"])
def test_a_core_that_hangs_ends_with_its_parent(script: Path, kind: str) -> None:
    process, mark = start(script, "process", kind)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    time.sleep(0.3)
    assert len(family(mark)) == 2
    end(process)
    wait_gone(mark)


@pytest.mark.parametrize("core", ["thread", "process"])
def test_python_ends_with_rows_in_flight_promptly_and_in_silence(script: Path, core: str) -> None:
    process, mark = start(script, core)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    rest, messages = process.communicate(timeout=30)
    assert time.monotonic() - began < 8
    assert (process.returncode, rest, messages) == (0, "", "")
    assert family(mark) == []
