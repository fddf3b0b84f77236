"""Errors as plain data, typed by the exceptions that they come from, and the results that hold them."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from tokenmill import errors
from tokenmill.errors import ERROR_TYPES
from tokenmill.frontend.failures import failed_result, row_error

pytestmark = pytest.mark.unit

CASES: list[tuple[BaseException, str, int]] = [
    (errors.InvalidArgument("x"), "bad_parameters", 400),
    (errors.WrongType("x"), "bad_parameters", 400),
    (errors.UnknownArgument("x"), "bad_parameters", 400),
    (errors.TooLong("x"), "too_long", 400),
    (errors.InvalidGrammar("x"), "bad_grammar", 400),
    (errors.request_error("x", error_type="bad_grammar", status_code=400), "bad_grammar", 400),
    (errors.request_error("x", error_type="timeout", status_code=408), "timeout", 408),
    (errors.request_error("x", error_type="queue_full", status_code=503), "queue_full", 503),
    (errors.RequestFailed("x"), "internal", 500),
    (errors.EngineDead("x"), "internal", 500),
    (errors.EngineClosed("x"), "aborted", 503),
]


@pytest.mark.parametrize(("error", "kind", "status"), CASES, ids=lambda case: type(case).__name__)
def test_our_exceptions_say_what_type_of_error_they_are(error: Exception, kind: str, status: int) -> None:
    assert kind in ERROR_TYPES
    assert row_error(error) == {"type": kind, "message": "x", "status_code": status}


def test_an_unknown_exception_is_an_internal_error_that_names_it() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert row_error(KeyError("k")) == {"type": "internal", "message": "KeyError: 'k'", "status_code": 500}
    assert row_error(Odd())["message"].startswith("Odd: ")


@pytest.mark.parametrize("has_text", [True, False])
def test_a_failed_result_looks_like_any_other_and_is_plain_data(has_text: bool) -> None:
    error = row_error(errors.TooLong("prompt[1] has 300 tokens"))
    result: dict[str, Any] = failed_result(error, request_id="r1", has_text=has_text, weight_version="v")
    assert ("text" in result) == has_text
    assert result.get("text", "") == ""
    assert (result["output_ids"], result["error"]) == ([], error)
    facts = result["meta_info"]
    assert (facts["id"], facts["weight_version"], facts["completion_tokens"]) == ("r1", "v", 0)
    assert facts["finish_reason"] == {
        "type": "abort",
        "message": "prompt[1] has 300 tokens",
        "status_code": 400,
        "err_type": "too_long",
    }
    assert json.loads(json.dumps(result)) == result
    assert pickle.loads(pickle.dumps(result)) == result
