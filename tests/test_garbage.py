"""Garbage while very many rows come and go."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import pytest

from tokenmill import garbage
from tokenmill.garbage import collect_if_due, uncollected

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    gc.enable() if was_on else gc.disable()


class Ring:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_is_looked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.enable()
    with uncollected():
        ring = weakref.ref(Ring())
        collect_if_due()
        assert not gc.isenabled()
        assert ring() is not None
    assert gc.isenabled()
    monkeypatch.setattr(garbage, "_COLLECTION_SECONDS", -1.0)
    with uncollected(), uncollected():
        collect_if_due()
        assert ring() is None


def test_a_collector_that_is_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.disable()
    monkeypatch.setattr(garbage, "_COLLECTION_SECONDS", -1.0)
    ring = weakref.ref(Ring())
    with uncollected():
        collect_if_due()
    assert ring() is not None
    assert not gc.isenabled()


def test_many_young_objects_are_looked_through_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """So there are few at the end of the block."""
    monkeypatch.setattr(garbage, "_MANY_YOUNG", 200)
    gc.enable()
    gc.collect()
    with uncollected():
        ring = weakref.ref(Ring())
        collect_if_due()
        assert ring() is not None
        young = [[] for _ in range(300)]
        collect_if_due()
        assert ring() is None
        assert not gc.isenabled()
        assert gc.get_count()[0] < len(young)


def test_a_call_leaves_few_young_objects_to_be_looked_through_at_its_end(
    tiny_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of prompts among them; all of them at once would be some milliseconds for which it waits."""
    gc.enable()
    monkeypatch.setattr(garbage, "_MANY_YOUNG", 150)
    looked_through: list[tuple[int, bool]] = []

    def note(phase: str, facts: dict[str, int]) -> None:
        if phase == "start":
            looked_through.append((gc.get_count()[0], gc.isenabled()))

    prompts = [[index + 1] * 300 for index in range(60)]
    gc.collect()
    gc.callbacks.append(note)
    try:
        tiny_engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 4})
    finally:
        gc.callbacks.remove(note)
    meanwhile = [count for count, is_on in looked_through if not is_on]
    at_the_end = [count for count, is_on in looked_through if is_on]
    assert len(meanwhile) > 3
    assert sum(at_the_end) < sum(meanwhile) / 2


def test_the_last_of_overlapping_blocks_turns_it_on_again() -> None:
    gc.enable()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with uncollected():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    with uncollected():
        thread.start()
        assert entered.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
@pytest.mark.parametrize("was_on", [True, False])
def test_a_process_that_is_forked_meanwhile_collects(was_on: bool) -> None:
    script = """
        import gc, os, sys, threading
        from tokenmill.garbage import _holds, uncollected

        if not (was_on := sys.argv[1] == "True"):
            gc.disable()
        entered = threading.Event()

        def hold():
            with uncollected(), _holds._lock:
                entered.set()
                threading.Event().wait()

        threading.Thread(target=hold, daemon=True).start()
        entered.wait()
        assert not gc.isenabled()
        if not (child := os.fork()):
            is_on = [gc.isenabled()]
            with uncollected():
                is_on.append(gc.isenabled())
            is_on.append(gc.isenabled())
            os._exit(7 if is_on == [was_on, False, was_on] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        os._exit(0)
    """
    command = [sys.executable, "-W", "ignore", "-c", dedent(script), str(was_on)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_a_process_that_is_forked_within_a_block_collects() -> None:
    script = """
        import gc, os
        from tokenmill.garbage import uncollected

        with uncollected():
            child = os.fork()
        assert gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    command = [sys.executable, "-c", dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_was_imported_is_not_looked_through_by_young_collections() -> None:
    many = [[] for _ in range(1000)]
    garbage.make_old()
    young = {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}
    assert not young.intersection(map(id, many))
    assert gc.get_freeze_count() == 0


def test_what_python_itself_puts_aside_does_not_keep_objects_young(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 begins with 375 objects put aside; who freezes a process puts aside thousands."""
    for num_aside, stays_young in ((375, False), (20_000, True)):
        monkeypatch.setattr(gc, "get_freeze_count", lambda count=num_aside: count)
        with garbage.uncollected():
            mine = [[] for _ in range(1000)]
            garbage.make_old()
            young = {id(each) for each in gc.get_objects(0)}
        assert bool(young.intersection(map(id, mine))) == stays_young
