"""The keys and values of result dicts, and the list that also answers with a column."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tokenmill.frontend.outputs import (
    Arrival,
    FlushResult,
    Piece,
    ResultList,
    Row,
    Shape,
    chunk_of,
    result_of,
)
from tokenmill.messages import Finish, Output, Request

pytestmark = pytest.mark.unit

SINGLE = Shape(single=True, has_text=True, cumulative=False, weight_version="v7")
META_KEYS = {
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cached_tokens_details",
    "reasoning_tokens",
    "weight_version",
    "num_retractions",
    "response_sent_to_client_ts",
    "dp_rank",
}


@pytest.fixture
def row(make_request: Callable[..., Request]) -> Row:
    return Row(make_request([1, 2, 3], request_id="mine"), name="0", index=4, text=None)


def take(row: Row, *token_ids: int, finish: Finish | None = None) -> Piece:
    output = Output("0", token_ids, finish, cached_tokens=2, num_retractions=1)
    return row.take(Arrival(output, time.perf_counter()))


def test_a_finished_result(row: Row) -> None:
    take(row, 7, 8, finish=Finish("length", length=2))
    result = result_of(row, " text", SINGLE)
    assert list(result) == ["text", "output_ids", "meta_info"]
    assert result["text"] == " text"
    assert result["output_ids"] == [7, 8]
    meta = result["meta_info"]
    assert set(meta) == META_KEYS | {"e2e_latency"}
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 2, 2)
    assert meta["cached_tokens_details"] == {"device": 2, "host": 0}
    assert (meta["reasoning_tokens"], meta["num_retractions"], meta["dp_rank"]) == (0, 1, None)
    assert meta["weight_version"] == "v7"
    assert 0 < meta["e2e_latency"] < 60
    assert abs(meta["response_sent_to_client_ts"] - time.time()) < 60


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (Finish("stop", matched=9), {"type": "stop", "matched": 9}),
        (Finish("stop", matched="END"), {"type": "stop", "matched": "END"}),
        (Finish("length", length=1), {"type": "length", "length": 1}),
        (
            Finish("abort", message="gone"),
            {"type": "abort", "message": "gone", "status_code": None, "err_type": None},
        ),
    ],
)
def test_finish_reasons(row: Row, finish: Finish, expected: dict[str, object]) -> None:
    take(row, 9, finish=finish)
    assert result_of(row, "", SINGLE)["meta_info"]["finish_reason"] == expected


def test_without_tokenizer_there_is_no_text(row: Row) -> None:
    take(row, 7, finish=Finish("length", length=1))
    assert list(result_of(row, "", replace(SINGLE, has_text=False))) == ["output_ids", "meta_info"]


@pytest.mark.parametrize(("cumulative", "expected"), [(False, [[7], [8, 9]]), (True, [[7], [7, 8, 9]])])
def test_chunks_are_not_shared(row: Row, cumulative: bool, expected: list[list[int]]) -> None:
    shape = replace(SINGLE, cumulative=cumulative)
    first = chunk_of(row, take(row, 7), shape)
    assert "e2e_latency" not in first["meta_info"]
    assert first["meta_info"]["finish_reason"] is None
    first["output_ids"].append(99)
    second = chunk_of(row, take(row, 8, 9), shape)
    first["output_ids"].pop()
    assert [first["output_ids"], second["output_ids"]] == expected
    assert [c["meta_info"]["completion_tokens"] for c in (first, second)] == [1, 3]
    assert row.token_ids == [7, 8, 9]


def test_only_chunks_of_a_batch_have_an_index(row: Row) -> None:
    piece = take(row, 7)
    assert "index" not in chunk_of(row, piece, SINGLE)
    assert chunk_of(row, piece, replace(SINGLE, single=False))["index"] == 4


def test_result_list() -> None:
    rows = ResultList([{"text": "a", "n": 1}, {"text": "b", "n": 2}, {"text": "c", "n": 3}])
    assert rows["text"] == ["a", "b", "c"]
    assert rows[1] == {"text": "b", "n": 2}
    assert rows[-1]["n"] == 3
    assert rows[1:]["n"] == [2, 3]
    assert [row["n"] for row in rows] == [1, 2, 3]
    assert isinstance(rows, list)
    assert len(rows) == 3
    with pytest.raises(KeyError):
        rows["nothing"]
    assert ResultList()["text"] == []


def test_flush_result_is_true_when_it_worked() -> None:
    assert FlushResult(True, "")
    assert not FlushResult(False, "busy")
