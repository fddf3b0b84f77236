"""Who watches requests is told of each once, whoever is first to see its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenmill.frontend.observers import Ended, Observers
from tokenmill.frontend.outputs import Row
from tokenmill.messages import Finish, Request

pytestmark = pytest.mark.unit


def test_a_request_ends_once_for_those_who_watch(make_request: Callable[..., Request]) -> None:
    """One thread may give up what another has just seen the end of."""
    told: list[Any] = []

    class Watcher:
        def received(self, row: Row) -> None:
            told.append(row)

        def ended(self, ended: Ended) -> None:
            told.append((ended.row, ended.finish.kind))

    first, second, never = (
        Row(make_request(), name=f"{index}", index=index, text=None) for index in range(3)
    )
    observers = Observers([Watcher()])
    observers.received([first, second])
    first.finish = second.finish = Finish("length", length=4)
    observers.finished(first)
    observers.given_up([first, second, never])
    assert told == [first, second, (first, "length")], "what is given up is told later"
    observers.finished(second)
    assert told == [first, second, (first, "length"), (second, "abort")]
    observers.tell()
    assert len(told) == 4
