"""Garbage while very many rows come and go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tokenmill.frontend import turns

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
    monkeypatch.setattr(turns, "_COLLECTION_SECONDS", 1000.0)
    with turns.seldom_collected() as collect_if_due:
        ring = weakref.ref(Ring())
        collect_if_due()
        assert not gc.isenabled()
        assert ring() is not None
    assert gc.isenabled()
    monkeypatch.setattr(turns, "_COLLECTION_SECONDS", -1.0)
    with turns.seldom_collected() as collect_if_due:
        collect_if_due()
        assert ring() is None


def test_a_collector_that_is_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.disable()
    monkeypatch.setattr(turns, "_COLLECTION_SECONDS", -1.0)
    ring = weakref.ref(Ring())
    with turns.seldom_collected() as collect_if_due:
        collect_if_due()
    assert ring() is not None
    assert not gc.isenabled()
