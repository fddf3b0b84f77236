"""A job that is killed again and again, at random moments, ends with the file of an undisturbed run.

`TOKENMILL_TEST_KILLS` sets how often, for longer hunts.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill.batch.records import find_all

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent
NUM_KILLS = int(os.environ.get("TOKENMILL_TEST_KILLS", "12"))
NUM_ROWS = 4 * NUM_KILLS
HEADER_BYTES = 64


class Jobs:
    """Starts jobs in children of a helper process, which has imported everything once."""

    def __init__(self, folder: Path) -> None:
        self._summary = folder / "summary.json"
        self._helper = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "forked_jobs.py")],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, **arguments: Any) -> int:
        """Begin a job; gives the pid of its process."""
        assert self._helper.stdin is not None
        self._summary.unlink(missing_ok=True)
        asked = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
        self._helper.stdin.write(json.dumps({"summary": str(self._summary), **asked}) + "\n")
        self._helper.stdin.flush()
        return self._answer()

    def wait(self) -> int:
        """The exit status of the job, negative for the signal that ended it."""
        return self._answer()

    def run(self, **arguments: Any) -> dict[str, Any]:
        """The summary of a job that nobody disturbs."""
        self.start(**arguments)
        assert self.wait() == 0
        return self.summary()

    def summary(self) -> dict[str, Any]:
        """What the last job said at its end."""
        summary: dict[str, Any] = json.loads(self._summary.read_text())
        return summary

    def close(self) -> None:
        self._helper.communicate()

    def _answer(self) -> int:
        assert self._helper.stdout is not None
        return int(self._helper.stdout.readline())


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.close()


def rows(count: int) -> list[dict[str, Any]]:
    """Plain rows, some drawn, some of several samples, some like others, some that cannot be run."""
    made = []
    for number in range(count):
        prompt = f"The capital of country {number % (count - 20)} is"
        row: dict[str, Any] = {"number": number, "prompt": prompt}
        if number % 3 == 0:
            row["sampling_params"] = {"temperature": 0}
        elif number % 7 == 0:
            row["sampling_params"] = {"n": 3, "top_p": 0.9}
        elif number % 31 == 0:
            row["sampling_params"] = {"max_new_tokens": -1}
        made.append(row)
    return made


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def keys_in(journal: Path) -> list[bytes]:
    if not journal.exists():
        return []
    with journal.open("rb") as file:
        return [found.key for found in find_all(file, HEADER_BYTES)]


def check_output(path: Path) -> set[int]:
    """Whole lines of JSON, no row twice; gives the rows.

    What a process writes when it is killed the system may cut, but only where a page of memory ends.
    """
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if lines and size_of(path) % mmap.PAGESIZE == 0 and not lines[-1].endswith("\n"):
        lines.pop()
    assert all(line.endswith("\n") for line in lines)
    numbers = [json.loads(line)["number"] for line in lines]
    assert len(set(numbers)) == len(numbers)
    return set(numbers)


@pytest.mark.timeout(600)
def test_killed_often_it_ends_with_the_file_of_an_undisturbed_run(tmp_path: Path, jobs: Jobs) -> None:
    source, output, calm = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "calm.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(NUM_ROWS)))
    # In float32 a CPU computes a row alike in any batch; in bfloat16 sums depend on how many rows there are.
    job = {
        "source": source,
        "model_path": "tiny",
        "dtype": "float32",
        "sampling_params": {"max_new_tokens": 8},
    }
    undisturbed = jobs.run(output=calm, **job)  # with a core in a process of its own, as jobs have it
    assert undisturbed["rows"]["done"] == NUM_ROWS

    journal = tmp_path / "out.jsonl.journal"
    chance = random.Random(NUM_KILLS)
    num_kills = num_useful = 0
    while True:
        known, seen = keys_in(journal), check_output(output)
        # Mostly in a thread, whose start is quick enough for many moments.
        pid = jobs.start(output=output, core_process=num_kills % 8 == 7, **job)
        if num_kills < NUM_KILLS:
            wait_for_the_moment(chance, journal)
            with contextlib.suppress(ProcessLookupError):  # it was done before
                os.kill(pid, signal.SIGKILL)
        if jobs.wait() == -signal.SIGKILL:
            num_kills += 1
            num_useful += len(keys_in(journal)) > len(known)
            assert check_output(output) >= seen  # nothing is ever taken back
            continue
        assert output.read_bytes() == calm.read_bytes()
        keys = keys_in(journal)
        assert len(keys) == len(set(keys)) == len(keys_in(calm.with_name("calm.jsonl.journal")))
        last = jobs.summary()
        # What was known was not computed. The first record says whose output the journal is for.
        assert len(keys) - max(len(known), 1) == last["samples"] - last["rows"]["failed"]
        assert sorted(path.name for path in tmp_path.glob("out.jsonl*")) == [output.name, journal.name]
        if num_kills == NUM_KILLS:
            break
        output.unlink()  # quicker than the kills: once more from the start
        journal.unlink()
    assert num_useful > NUM_KILLS / 10


def wait_for_the_moment(chance: random.Random, journal: Path) -> None:
    """Any moment: while everything starts, or soon after something was finished."""
    ends = time.monotonic() + chance.uniform(0, 0.6)
    if chance.random() < 0.5:
        wanted = size_of(journal) + chance.randrange(1, 3000)
        latest = time.monotonic() + 5
        while size_of(journal) < wanted and time.monotonic() < latest:
            time.sleep(0.001)
        ends = time.monotonic() + chance.uniform(0, 0.05)
    while time.monotonic() < ends:
        time.sleep(0.001)


def test_a_job_goes_on_when_its_core_is_killed(tmp_path: Path, jobs: Jobs) -> None:
    source, output, calm = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "calm.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(40)))
    job = {
        "source": source,
        "model_path": "tiny",
        "dtype": "float32",
        "max_running_requests": 8,  # some wait while others finish
        "sampling_params": {"max_new_tokens": 20, "ignore_eos": True},
    }
    jobs.run(output=calm, **job)
    journal = tmp_path / "out.jsonl.journal"
    pid = jobs.start(output=output, **job)
    while len(keys_in(journal)) < 8:
        time.sleep(0.001)
    find = ["pgrep", "-P", str(pid), "-f", "tokenmill.core.process"]
    [core] = subprocess.check_output(find).split()
    os.kill(int(core), signal.SIGKILL)
    assert jobs.wait() == 0
    assert output.read_bytes() == calm.read_bytes()
    assert jobs.summary()["rows"]["failed"] == 1  # it cannot be run
