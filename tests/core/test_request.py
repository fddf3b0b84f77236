"""The counts of one request, and the table of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenmill.core.request import NO_SLOT, Phase, RequestState, Rows
from tokenmill.messages import Finish

pytestmark = pytest.mark.unit

Make = Callable[..., Any]


def test_a_new_request_waits_and_owns_nothing(make_request: Make) -> None:
    state = RequestState(make_request("a", [1, 2, 3], 5))
    assert (state.phase, state.slot, state.pages) == (Phase.WAITING, NO_SLOT, None)
    assert (state.total, state.limit) == (3, 8)
    assert state.is_ready
    assert not state.tokens, "the ids are copied at admission only"


def test_tokens_are_loaded_once_and_are_not_the_callers(make_request: Make) -> None:
    request = make_request("a", [1, 2, 3])
    state = RequestState(request)
    state.load_tokens()
    state.tokens.append(9)
    state.load_tokens()
    assert state.tokens.tolist() == [1, 2, 3, 9]
    assert request.prompt_ids.tolist() == [1, 2, 3]
    assert state.tokens[:3].tobytes() == request.prompt_ids.tobytes()


def test_a_request_is_ready_when_all_its_draws_are_known(make_request: Make) -> None:
    state = RequestState(make_request("a", [1, 2]))
    state.load_tokens()
    state.total = 4
    for token in (5, 6):
        assert not state.is_ready
        state.tokens.append(token)
    assert state.is_ready


def test_reports_are_due_at_the_first_token_at_the_interval_and_never_after_the_limit(
    make_request: Make,
) -> None:
    state = RequestState(make_request("a", [1, 2], 6, report_interval=3))
    state.load_tokens()
    assert state.due_at == 3
    state.tokens.append(6)
    output = state.report(None)
    assert (output.token_ids, output.finish) == ([6], None)
    assert state.due_at == 6
    state.tokens.extend([7, 8, 9])
    output = state.report(None)
    assert (output.token_ids, output.finish) == ([7, 8, 9], None)
    assert state.due_at == state.limit == 8
    state.tokens.append(4)
    finish = Finish("stop", matched=4)
    output = state.report(finish)
    assert (output.token_ids, output.finish, state.finish) == ([4], finish, finish)


def test_without_an_interval_only_the_end_is_due(make_request: Make) -> None:
    state = RequestState(make_request("a", [1, 2], 5))
    assert state.due_at == 7


def test_rows_are_taken_and_given_back() -> None:
    rows = Rows(2)
    first = rows.enter(computed=0, room=8, end=5)
    second = rows.enter(computed=4, room=8, end=9)
    assert {first, second} == {0, 1}
    assert (rows.num_free, rows.num_used) == (0, 2)
    assert (rows.computed[second], rows.room[second], rows.end[second]) == (4, 8, 9)
    rows.leave(first)
    rows.check_invariants([second])
    with pytest.raises(AssertionError):
        rows.check_invariants([first])
    assert rows.enter(computed=1, room=1, end=1) == first
    assert rows.computed[first] == 1
