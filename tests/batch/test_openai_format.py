"""Batch files written for OpenAI's API: which lines are requests, and what is written for each."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.batch.records import TIMEOUT, ListSource, failed, record_of, result
from tokenmill.batch.openai_format import OpenAIOutput, OpenAIRows, is_batch_file
from tokenmill.batch.openai_parts import PromptRows
from tokenmill.errors import InvalidArgument

pytestmark = pytest.mark.unit

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"


def request(custom_id: Any = "request-1", **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 5}
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes}
    return {key: value for key, value in line.items() if value != "left out"}


def completion(**body: Any) -> dict[str, Any]:
    return request(url="/v1/completions", body={"model": "tiny", "prompt": "Hello", **body})


def fault(line: dict[str, Any] | None) -> str:
    """What is told of a line alone in its file."""
    made = OpenAIRows(model="tiny").item(record_of(0, line))
    assert (made["type"], made["status_code"]) == ("bad_parameters", 400)
    return str(made["message"])


# ── in ────────────────────────────────────────────────────────────────────────────────────────


def test_a_line_becomes_an_item() -> None:
    rows = OpenAIRows(model="tiny", sampling_params={"temperature": 0})
    expected = {"messages": HELLO, "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
    assert rows.item(record_of(0, request())) == expected
    completions = OpenAIRows(model="tiny")
    assert completions.item(record_of(0, completion(max_tokens=2)))["prompt"] == "Hello"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (None, "line 1: no valid JSON"),
        (
            request("left out"),
            "line 1: the line has no custom_id; a request has custom_id, method, url, body",
        ),
        (request("left out", id=1), "(it has 'id')"),
        (request(extra=1), "a request has no 'extra'"),
        (request(7), "custom_id must be a text that is not empty, got 7"),
        (request(""), "custom_id must be a text that is not empty"),
        (request(method="GET"), "method must be 'POST', got 'GET'"),
        (request(url="/v1/embeddings"), "/v1/embeddings, which is not served yet"),
        (request(url="/v1/chat/completion"), "Did you mean '/v1/chat/completions'?"),
        (request(url=5), "url must be /v1/chat/completions or /v1/completions, got 5"),
        (request(body="Hello"), "body must be a JSON object"),
        (
            request(body={"messages": HELLO, "strem": True}),
            "body has no parameter 'strem'. Did you mean 'stream'",
        ),
    ],
)
def test_a_line_that_is_no_request_is_a_row_with_an_error(line: dict[str, Any] | None, told: str) -> None:
    assert told in fault(line)


def test_each_line_has_an_id_of_its_own_however_often_it_is_read() -> None:
    rows = OpenAIRows(model="tiny")
    lines = [request("a"), None, request("b"), request("a"), request("left out"), request("b")]
    records = list(ListSource(lines))
    once = [rows.item(record) for record in records]
    assert ["custom_id" in item.get("message", "") for item in once] == [
        False,
        False,
        False,
        True,
        True,
        True,
    ]
    assert "line 4: custom_id 'a' (str) is that of an earlier line" in once[3]["message"]
    assert [rows.item(record) for record in records] == once
    assert [rows.item(record) for record in reversed(records)] == once[::-1]


def test_all_lines_have_the_url_of_the_first() -> None:
    rows = OpenAIRows(model="tiny")
    lines = [
        request("x", url="/v1/embeddings"),
        request("a"),
        {**completion(), "custom_id": "b"},
        request("c"),
    ]
    made = [rows.item(record) for record in ListSource(lines)]
    assert "earlier lines have /v1/chat/completions" in made[2]["message"]
    assert [("messages" in item) for item in made] == [False, True, False, True]


def test_another_model_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    rows = OpenAIRows(model="tiny")
    with caplog.at_level(logging.WARNING, logger="tokenmill"):
        rows.item(record_of(0, request("a")))
        assert not caplog.records
        for index in range(1, 4):
            rows.item(record_of(index, request(f"b{index}", body={"model": "gpt-4o", "messages": HELLO})))
    assert [record.getMessage() for record in caplog.records] == [
        "the batch file asks for model 'gpt-4o' (str); 'tiny' answers instead"
    ]


def test_an_engine_without_words_cannot_answer() -> None:
    with pytest.raises(InvalidArgument, match="no tokenizer"):
        OpenAIRows(model="tiny", has_tokenizer=False)


def test_batch_files_are_told_from_others() -> None:
    assert is_batch_file(ListSource([None, request()]))
    assert is_batch_file(ListSource([*[None] * 500, request()]))
    assert is_batch_file(ListSource([request("left out")]))
    for first in ({}, request(body="left out"), request(url="left out"), request(method="left out")):
        assert is_batch_file(ListSource([first, request()]))
    assert is_batch_file(ListSource([request()]), has_columns=True)
    log = {"method": "GET", "url": "/", "body": "x"}
    assert is_batch_file(ListSource([log]))  # each line is told that it has no custom_id
    assert not is_batch_file(ListSource([log]), has_columns=True)
    assert not is_batch_file(ListSource([{**log, "prompt": "Hi"}]))
    assert not is_batch_file(ListSource([{"prompt": "Hi"}, request()]))
    assert not is_batch_file(ListSource([{"question": "Hi"}]))
    assert not is_batch_file(ListSource([]))
    assert not is_batch_file(ListSource([None]))
    assert not is_batch_file(ListSource([request()], format="csv"))


# ── out ───────────────────────────────────────────────────────────────────────────────────────


def lines_of(line: dict[str, Any] | None, *results: dict[str, Any]) -> tuple[Any, Any]:
    output = OpenAIOutput(model="tiny")
    made = output.line(record_of(0, line), results)
    again = output.line(
        record_of(0, line), [{**each, "meta_info": {**each["meta_info"], "id": "2"}} for each in results]
    )
    assert made == again
    return tuple(None if each is None else json.loads(each) for each in made)  # type: ignore[return-value]


def test_a_line_of_the_output_file() -> None:
    made, error = lines_of(request(), result("Hi!"), result("Ho!"))
    assert error is None
    assert list(made) == ["id", "custom_id", "response", "error"]
    assert (made["custom_id"], made["error"]) == ("request-1", None)
    assert made["id"].startswith("batch_req_")
    response = made["response"]
    assert (response["status_code"], response["request_id"][:4]) == (200, "req_")
    assert response["body"]["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in response["body"]["choices"]] == ["Hi!", "Ho!"]
    made, _ = lines_of(completion(), result("Hi!"))
    assert made["response"]["body"]["object"] == "text_completion"


def test_a_request_that_failed_is_a_line_of_the_error_file() -> None:
    made, error = lines_of(request(), result("Hi!"), failed(TIMEOUT))
    assert made is None
    assert error["error"] == {"code": "timeout", "message": "timed out after 3 seconds"}
    assert (error["custom_id"], error["response"]["status_code"]) == ("request-1", 408)
    assert error["response"]["body"]["error"]["code"] == "timeout"


@pytest.mark.parametrize("line", [None, request("left out"), request(method="GET")])
def test_what_is_no_request_has_no_response(line: dict[str, Any] | None) -> None:
    _, error = lines_of(line, failed(TIMEOUT))
    assert error["response"] is None
    assert error["custom_id"] == (line or {}).get("custom_id")
    assert error["error"]["code"] == "timeout"


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_a_line_with_several_prompts_is_run_in_parts_and_answered_as_one(order: list[int]) -> None:
    prompts = ["a", "b", "c"]
    lines = [completion(), completion(prompt=prompts, n=2), completion(prompt=[1, 2])]
    lines = [{**line, "custom_id": str(number)} for number, line in enumerate(lines)]
    source = PromptRows(ListSource(lines))
    records = list(source)
    assert [record.index for record in records] == [0, 1, 2, 3, 4]
    assert [record.line for record in records] == [1, 2, 2, 2, 3]
    rows = OpenAIRows(model="tiny")
    items = [rows.item(record) for record in records]
    assert [item.get("prompt", item.get("input_ids")) for item in items] == ["Hello", *prompts, [1, 2]]
    output = OpenAIOutput(model="tiny")
    results = [[result(f"{number}.{sample}") for sample in range(2)] for number in range(5)]
    written = {index: output.line(records[index], results[index])[0] for index in order}
    answers = [json.loads(line) for index in sorted(written) if (line := written[index]) is not None]
    assert [answer["custom_id"] for answer in answers] == ["0", "1", "2"]
    body = answers[1]["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == ["1.0", "1.1", "2.0", "2.1", "3.0", "3.1"]
    assert body["usage"] == {"prompt_tokens": 15, "completion_tokens": 12, "total_tokens": 27}


def test_a_part_that_fails_fails_its_line() -> None:
    records = list(PromptRows(ListSource([completion(prompt=[[1], [2]])])))
    output = OpenAIOutput(model="tiny")
    assert output.line(records[1], [failed(TIMEOUT)]) == (None, None)
    made, error = output.line(records[0], [result()])
    assert made is None
    assert json.loads(error or b"")["error"]["code"] == "timeout"


@pytest.mark.parametrize(
    "prompt", [[["x", "y"], ["z"]], [[5], ["a"]], [["a"]], [[[5], [6]], [[7]]], [[5], []]]
)
def test_lists_in_lists_of_prompts_are_an_error_of_their_line(prompt: Any) -> None:
    rows = OpenAIRows(model="tiny")
    records = list(PromptRows(ListSource([completion(), completion(prompt=prompt)])))
    assert len(records) == 2
    assert "prompt must be a text, a list of texts, token ids" in rows.item(records[1])["message"]


@pytest.mark.parametrize("prompt", [["a"], [], ["a", 1], [[1]], [1, 2], "a", None])
def test_other_prompts_stay_in_one_row(prompt: Any) -> None:
    assert len(list(PromptRows(ListSource([completion(prompt=prompt)])))) == 1


def test_ids_differ_between_lines() -> None:
    output = OpenAIOutput(model="tiny")
    lines = [output.line(record_of(index, request()), [result()])[0] for index in range(3)]
    assert len({json.loads(line or b"")["id"] for line in lines}) == 3
