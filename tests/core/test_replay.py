"""The books of requests that outlive their core: what is sent to whom, and which one is the killer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core.replay import Replay
from tokenmill.messages import Finish, Output, Request, RequestTimes
from tokenmill.sampling_params import SamplingParams

pytestmark = pytest.mark.unit
DONE = Finish("length", length=4)


def request(name: str, *, interval: int = 0, timeout: float | None = None) -> Request:
    return Request(
        id=name,
        prompt_ids=np.arange(3, dtype=np.int32),
        params=SamplingParams(),
        max_new_tokens=100,
        seed=7,
        stop_ids=(),
        report_interval=interval,
        timeout_seconds=timeout,
    )


def output(name: str, *tokens: int, finish: Finish | None = None, cached: int = 0) -> Output:
    return Output(name, tokens, finish, cached, 0)


def test_requests_go_out_once_and_as_they_are() -> None:
    books = Replay()
    rows = [request("a", timeout=5.0), request("b", interval=3)]
    books.add(rows)
    assert books.next() == rows
    assert books.next() == []


def test_after_a_death_rows_go_on_behind_what_was_delivered() -> None:
    books = Replay()
    books.add([request("a", interval=1), request("b")])
    books.next()
    books.take([output("a", 5, 6, cached=16), output("a", 7, cached=16)])
    assert books.died(blames=True) == []
    books.add([request("new")])
    again = {sent.id: sent for sent in books.next()}
    assert list(again) == ["a", "b", "new"]
    assert again["a"].output_ids == (5, 6, 7)
    assert again["b"].output_ids == again["new"].output_ids == ()
    # What the first core told of its cache stays; retractions add up.
    [heard] = books.take([replace(output("a", 8, finish=DONE), num_retractions=2)])
    assert (heard.cached_tokens, heard.num_retractions) == (16, 2)


def test_a_row_that_reported_at_its_end_reports_on_its_way_after_a_death() -> None:
    books = Replay()
    books.add([request("a")])
    [first] = books.next()
    books.died(blames=True)
    [second] = books.next()
    assert first.report_interval == 0
    assert second.report_interval > 0


def test_the_time_of_a_row_goes_on_through_deaths() -> None:
    books = Replay()
    books.add([request("a", timeout=5.0)])
    books.next()
    books.died(blames=True)
    [again] = books.next()
    assert again.timeout_seconds is not None
    assert 4.0 < again.timeout_seconds < 5.0
    times = RequestTimes(submitted=1e12, admitted=None, first_token=None)
    late = Finish("abort", message="after 4.9 s", status_code=408, error_type="timeout")
    [heard] = books.take([replace(output("a", finish=late), times=times)])
    assert heard.times is not None
    assert heard.times.submitted < 1e12
    assert heard.finish is not None
    assert heard.finish.message is not None
    assert "after 5 s" in heard.finish.message


def test_cancelled_rows_are_not_computed_again_and_hear_of_it() -> None:
    books = Replay()
    books.add([request("a"), request("b")])
    books.next()
    assert books.cancel(["a", "unknown"]) == []  # the core will answer
    [ended] = books.died(blames=True)
    assert (ended.request_id, ended.finish and ended.finish.kind) == ("a", "abort")
    [ended] = books.cancel(["b"])
    assert (ended.request_id, ended.finish and ended.finish.kind) == ("b", "abort")
    assert books.next() == []


def run(books: Replay, computes: Callable[[Request], bool], *, most_deaths: int) -> dict[str, Output]:
    """Cores that compute one token of each row after the other, and die of those that cannot be computed."""
    ended: dict[str, Output] = {}
    for _ in range(most_deaths):
        running: dict[str, list[int]] = {}
        while True:
            rows = books.next()
            running |= {row.id: list(row.output_ids) for row in rows}
            if not running:
                return ended
            deadly = [row for row in rows if not computes(row)]
            for name, tokens in list(running.items()):
                if any(name == row.id for row in deadly):
                    continue
                if deadly and name in {row.id for row in rows}:
                    continue  # the core dies in the step that would have told
                tokens.append(len(tokens))
                if len(tokens) == 4:
                    del running[name]
                    ended[name] = output(name, finish=DONE)
                    books.take([output(name, tokens[-1], finish=DONE)])
                else:
                    books.take([output(name, tokens[-1])])
            if deadly:
                break
        ended |= {end.request_id: end for end in books.died(blames=True)}
    raise AssertionError("it goes on and on")


@given(count=st.integers(1, 300), data=st.data())
def test_the_row_that_kills_fails_alone(count: int, data: st.DataObject) -> None:
    deadly = {str(data.draw(st.integers(0, count - 1))) for _ in range(data.draw(st.integers(0, 2)))}
    books = Replay()
    books.add([request(str(number)) for number in range(count)])
    ended = run(books, lambda row: row.id not in deadly, most_deaths=40)
    assert len(ended) == count
    for name, end in ended.items():
        assert end.finish is not None
        if name in deadly:
            assert end.finish.error_type == "internal"
            assert "the core's process died" in (end.finish.message or "")
        else:
            assert end.finish is DONE


def test_a_row_that_gets_on_between_deaths_is_never_blamed() -> None:
    books = Replay()
    books.add([request("a")])
    books.next()
    for token in range(50):
        assert books.died(blames=True) == []
        [again] = books.next()
        assert again.output_ids == tuple(range(token))
        books.take([output("a", token)])


def test_deaths_of_an_engine_that_stands_still_are_nobodys_fault() -> None:
    books = Replay()
    books.add([request("a")])
    for _ in range(10):
        assert [row.id for row in books.next()] == ["a"]
        assert books.died(blames=False) == []


def test_kills_count_less_than_what_a_core_does_by_itself() -> None:
    books = Replay()
    books.add([request("a")])
    for _ in range(19):
        books.next()
        assert books.died(blames=True, was_killed=True) == []
    for _ in range(2):
        books.next()
        assert books.died(blames=True) == []
    books.next()
    [end] = books.died(blames=True, was_killed=True)  # the twentieth: perhaps it takes too much memory
    assert end.finish is not None
    assert end.finish.error_type == "internal"
