"""The ledger against one plain list for each request, with requests coming and going and widths growing."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tokenmill.core import logprob_ledger
from tokenmill.core.logprob_ledger import LogprobLedger, LogprobLine
from tokenmill.messages import LogprobOptions, Logprobs

pytestmark = pytest.mark.unit


class Owner:
    """A request that may want log-probabilities, and what it should be told."""

    def __init__(self, num_top: int, num_given: int, *, wants: bool) -> None:
        options = LogprobOptions(0, num_top, tuple(range(num_given)))
        self.line = LogprobLine(options) if wants else None
        self.finished = False
        self.expected: list[tuple[Any, ...]] = []

    @property
    def logprob_line(self) -> LogprobLine | None:
        return None if self.finished else self.line

    def check_taken(self) -> None:
        assert self.line is not None
        found, num_top, num_given = self.line.take(), self.line.num_top, self.line.num_given
        assert found.top_NK.shape == found.top_ids_NK.shape == (len(self.expected), num_top)
        assert found.given_NI.shape == (len(self.expected), num_given)
        rows = zip(
            found.token_N.tolist(),
            found.top_NK.tolist(),
            found.top_ids_NK.tolist(),
            found.given_NI.tolist(),
            strict=True,
        )
        assert list(rows) == [
            (token, top[:num_top], ids[:num_top], given[:num_given])
            for token, top, ids, given in self.expected
        ]
        self.expected.clear()


def step_of(owners: list[Owner], numbers: count[int], more_top: int = 0, more_given: int = 0) -> Logprobs:
    """A step as wide as its widest row, or wider, in which no number comes twice; noted by its owners."""
    lines = [owner.line for owner in owners if owner.line is not None]
    num_top = more_top + max((line.num_top for line in lines), default=0)
    num_given = more_given + max((line.num_given for line in lines), default=0)
    rows = [
        (
            float(next(numbers)),
            [float(next(numbers)) for _ in range(num_top)],
            [next(numbers) for _ in range(num_top)],
            [float(next(numbers)) for _ in range(num_given)],
        )
        for _ in owners
    ]
    for owner, row in zip(owners, rows, strict=True):
        if not owner.finished:
            owner.expected.append(row)
    return Logprobs(
        np.array([row[0] for row in rows], dtype=np.float32),
        np.array([row[1] for row in rows], dtype=np.float32).reshape(len(rows), num_top),
        np.array([row[2] for row in rows], dtype=np.int32).reshape(len(rows), num_top),
        np.array([row[3] for row in rows], dtype=np.float32).reshape(len(rows), num_given),
    )


class Comings(RuleBasedStateMachine):
    """Requests come, draw, are reported and go while steps with them are still in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = LogprobLedger()
        self.owners: list[Owner] = []  # replaced, never changed, as the scheduler does it
        self.numbers = count()

    @rule(num_top=st.integers(0, 3), num_given=st.integers(0, 3), wants=st.booleans())
    def come(self, num_top: int, num_given: int, wants: bool) -> None:
        self.owners = [*self.owners, Owner(num_top, num_given, wants=wants)]

    @rule(steps=st.integers(1, 9), more_top=st.integers(0, 2), more_given=st.integers(0, 2))
    def draw(self, steps: int, more_top: int, more_given: int) -> None:
        for _ in range(steps if self.owners else 0):
            self.ledger.add(self.owners, step_of(self.owners, self.numbers, more_top, more_given))

    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        """Some rows are not in the next steps."""
        if self.owners:
            self.owners = data.draw(st.permutations(self.owners))
            some = self.owners[: data.draw(st.integers(1, len(self.owners)))]
            self.ledger.add(some, step_of(some, self.numbers))

    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        owners = [owner for owner in self.owners if owner.line is not None]
        if owners:
            data.draw(st.sampled_from(owners)).check_taken()

    @rule(data=st.data(), in_flight=st.integers(0, 2))
    def finish(self, data: st.DataObject, in_flight: int) -> None:
        if not self.owners:
            return
        owner = data.draw(st.sampled_from(self.owners))
        owner.finished = True
        if owner.line is not None:
            owner.check_taken()
            owner.line.close()
        for _ in range(in_flight):  # launched while it was there
            self.ledger.add(self.owners, step_of(self.owners, self.numbers))
        self.owners = [other for other in self.owners if other is not owner]

    @invariant()
    def every_line_has_one_owner(self) -> None:
        indexes = [owner.line.index for owner in self.owners if owner.line and owner.line.ledger]
        assert len(set(indexes)) == len(indexes)

    def teardown(self) -> None:
        for owner in self.owners:
            if owner.line is not None:
                owner.check_taken()


@pytest.mark.parametrize(("window", "most_numbers"), [(4, 1 << 20), (4, 40), (128, 1 << 20)])
def test_a_list_for_each_request(monkeypatch: pytest.MonkeyPatch, window: int, most_numbers: int) -> None:
    """Windows of one size, windows that get shorter as they get wider, and windows never full."""
    monkeypatch.setattr(logprob_ledger, "_WINDOW", window)
    monkeypatch.setattr(logprob_ledger, "_MOST_NUMBERS", most_numbers)
    run = settings(max_examples=60, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Comings, settings=run)


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129, 256, 300])
def test_the_borders_of_a_window(num_tokens: int) -> None:
    ledger, owners, numbers = LogprobLedger(), [Owner(2, 1, wants=True)], count()
    for _ in range(num_tokens):
        ledger.add(owners, step_of(owners, numbers))
    owners[0].check_taken()
    owners[0].check_taken()  # nothing is left


def test_lines_are_used_again_and_windows_stay_small() -> None:
    """A thousand requests, four at a time, take no more room than four."""
    ledger, numbers = LogprobLedger(), count()
    owners = [Owner(2, 0, wants=True) for _ in range(4)]
    for _ in range(1000):
        ledger.add(owners, step_of(owners, numbers))
        first = owners[0]
        first.finished = True
        first.check_taken()
        assert first.line is not None
        first.line.close()
        owners = [*owners[1:], Owner(2, 0, wants=True)]
        lines = [owner.line for owner in owners if owner.line is not None]
        assert all(line.index < 4 for line in lines)
