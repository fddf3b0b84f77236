"""The number of threads of a CPU engine, on a machine that is simulated and, once, on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.runner.cpu_threads import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    LOOK_SECONDS,
    REHEARSAL_SECONDS,
    CpuThreads,
)

pytestmark = pytest.mark.cpu
STEP_SECONDS = 0.01


class Machine:
    """Processors that all who want to compute share fairly: the engine's threads and `others`."""

    def __init__(self, processors: int) -> None:
        self.now, self.waited = 100.0, 0.0
        self.others = 0
        self._processors = self.number = processors
        self.threads = CpuThreads(
            processors, self._set, lambda: self.waited, self.rehearse, clock=lambda: self.now
        )

    def _set(self, number: int) -> None:
        assert 1 <= number <= self._processors
        self.number = number

    def rehearse(self) -> None:
        self.compute(REHEARSAL_SECONDS)

    def compute(self, seconds: float) -> None:
        share = min(1, self._processors / (self.number + self.others))
        self.now += seconds
        self.waited += seconds * self.number * (1 - share)

    def run(self, seconds: float) -> Iterator[int]:
        """Steps one after the other; gives the number of threads of each."""
        end = self.now + seconds
        while self.now < end:
            self.threads.follow()
            yield self.number
            self.compute(STEP_SECONDS)


@pytest.mark.parametrize("processors", [2, 3, 8, 64])
def test_on_a_free_machine_all_threads_compute(processors: int) -> None:
    assert set(Machine(processors).run(60)) == {processors}


@pytest.mark.parametrize(
    ("processors", "others", "room"),
    [(2, 1, 1), (2, 2, 1), (4, 1, 3), (8, 3, 5), (8, 8, 2), (64, 10, 54), (64, 64, 8)],
)
def test_beside_other_work_threads_give_way(processors: int, others: int, room: int) -> None:
    machine = Machine(processors)
    list(machine.run(1))
    machine.others = others
    first = list(machine.run(2))
    assert first[-1] <= room
    later = list(machine.run(120))
    assert sum(number > room for number in later) < 0.05 * len(later), "more threads are tried too often"
    assert min(later) >= (processors - others) / 2, "fewer threads than there is room for"


def test_when_the_other_work_ends_all_threads_compute_again() -> None:
    machine = Machine(8)
    machine.others = 6
    list(machine.run(100))
    machine.others = 0
    list(machine.run(4 * LONGEST_PAUSE_SECONDS))
    assert set(machine.run(30)) == {8}
    # What was long ago does not make the engine slower to come back.
    machine.others = 6
    list(machine.run(3 * LOOK_SECONDS))
    assert machine.number < 8
    machine.others = 0
    list(machine.run(4 * (FIRST_PAUSE_SECONDS + LOOK_SECONDS) + 8))
    assert machine.number == 8


def test_a_moment_of_other_work_changes_nothing() -> None:
    machine = Machine(2)
    list(machine.run(1))
    for _ in range(20):
        machine.others = 1
        assert set(machine.run(LOOK_SECONDS)) == {2}
        machine.others = 0
        assert set(machine.run(2 * LOOK_SECONDS)) == {2}


@pytest.mark.parametrize("seconds_alone", [0, 20])
def test_hardly_a_step_waits_for_other_work(seconds_alone: float) -> None:
    """Threads that meet with others in their way make a step of some milliseconds one of some seconds."""
    machine = Machine(2)
    list(machine.run(seconds_alone))
    machine.others, num_slow = 1, 0
    end = machine.now + 300
    while machine.now < end:
        machine.threads.follow()
        is_slow = machine.number == 2
        num_slow += is_slow
        machine.compute(5.0 if is_slow else 0.02)
    assert num_slow <= (1 if seconds_alone else 0)


def test_looking_costs_little() -> None:
    """At most one look in a while, however short the steps are."""
    machine, looks = Machine(2), []
    machine.threads = CpuThreads(
        2, print, lambda: looks.append(1) or 0.0, machine.rehearse, clock=lambda: machine.now
    )
    list(machine.run(10))
    assert len(looks) <= 10 / LOOK_SECONDS + 2


def test_long_looks_are_rare() -> None:
    """As in a process with thousands of threads."""
    machine, looks = Machine(2), []

    def look() -> float:
        looks.append(1)
        machine.now += 0.02
        return machine.waited

    machine.threads = CpuThreads(2, machine._set, look, machine.rehearse, clock=lambda: machine.now)
    list(machine.run(100))
    assert 40 <= len(looks) <= 53


def _run_with_two_threads(code: str) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=environment, timeout=90)


BESIDE_ITSELF = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
from tokenmill.kernels import openmp
from tokenmill.kernels.norm import rms_norm
from tokenmill.runner import cpu_threads
torch.set_num_threads(2)
threads = cpu_threads.cpu_threads()
assert threads is not None
x, weight = torch.randn(4000, 512), torch.ones(512)
deadline = cpu_threads.time.monotonic() + 20
while torch.get_num_threads() == 2 and cpu_threads.time.monotonic() < deadline:
    threads.follow()
    rms_norm(x, weight, 1e-6)  # ours, or torch's without a compiler
assert torch.get_num_threads() == 1
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell who waits")
def test_two_threads_on_one_processor_become_one() -> None:
    """A process that may use one processor only, and believes that it has two."""
    _run_with_two_threads(BESIDE_ITSELF)


WORKERS_OF_WHO_RESTS = """
import os, threading, time, torch
import tokenmill as sgl

def num_native():
    return len(os.listdir("/proc/self/task")) - len(threading.enumerate())

def settled(wanted):
    deadline = time.monotonic() + 20
    while num_native() != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return num_native()

with sgl.Engine(model_path="tiny", device="cpu") as engine:
    engine.generate("Once", {"max_new_tokens": 4})
    time.sleep(0.5)
    resting = num_native()
    torch.ones(500, 500) @ torch.ones(500, 500)
    assert settled(resting + 1) == resting + 1, "torch computes with two threads"
    stream = engine.generate("Once", {"max_new_tokens": 1000, "ignore_eos": True}, stream=True)
    next(stream)
    assert settled(resting + 1) == resting + 1, "the engine's worker alone"
    stream.close()
    assert settled(resting) == resting, "and none when it rests"
    assert (torch.ones(500, 500) @ torch.ones(500, 500)).eq(500).all()
    assert engine.generate("Once", {"max_new_tokens": 4})["meta_info"]["completion_tokens"] == 4
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_workers_of_who_rests_are_released() -> None:
    """Those of the caller while it waits, and those of the engine while nobody wants anything."""
    _run_with_two_threads(WORKERS_OF_WHO_RESTS)
