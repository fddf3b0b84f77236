"""Garbage while very many rows come and go."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

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


def test_what_was_imported_is_not_looked_through_by_young_collections() -> None:
    many = [[] for _ in range(1000)]
    garbage.make_old()
    young = {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}
    assert not young.intersection(map(id, many))
    assert gc.get_freeze_count() == 0
