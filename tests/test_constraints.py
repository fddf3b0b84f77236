"""What is taken in place of text, and which texts are refused before any library sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenmill.errors import InvalidArgument, WrongType
from tokenmill.sampling_params import SamplingParams

pytestmark = pytest.mark.unit


def test_a_schema_in_every_form_is_one_text() -> None:
    pydantic = pytest.importorskip("pydantic")
    person = pydantic.create_model("Person", name=(str, ...))
    schema = person.model_json_schema()
    texts = {
        SamplingParams(json_schema=form).json_schema
        for form in (schema, json.dumps(schema, indent=2), person)
    }
    assert texts == {json.dumps(schema, separators=(",", ":"))}


def test_any_json_has_two_names() -> None:
    assert SamplingParams(json_schema="$$ANY$$").json_schema == "{}"
    assert SamplingParams(json_schema={}).json_schema == "{}"


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_empty_text_is_none(name: str) -> None:
    assert getattr(SamplingParams(**{name: ""}), name) is None


def test_only_one_at_a_time() -> None:
    SamplingParams(json_schema="", regex="a")
    with pytest.raises(InvalidArgument, match="json_schema and regex"):
        SamplingParams(json_schema={}, regex="a")


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"not": value}
    return value


CYCLE: dict[str, Any] = {}
CYCLE["self"] = CYCLE


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("json_schema", '{"type": ', "not valid JSON"),
        ("json_schema", '{"maximum": NaN}', "NaN"),
        ("json_schema", {"maximum": float("inf")}, "cannot be written"),
        ("json_schema", {"default": object()}, "cannot be written"),
        ("json_schema", deep(200), "nested"),
        ("json_schema", "[" * 100_000, "nested|JSON"),
        ("json_schema", CYCLE, "nested"),
        ("json_schema", json.dumps({"description": "x" * 2**20}), "limit"),
        ("regex", "(", "regular expression"),
        ("regex", "((a{1000}){1000}){1000}", "limit"),
        ("regex", "a" * 70_000, "limit"),
        ("regex", "(" * 20_000 + ")" * 20_000, "nested"),
        ("regex", "\ud800", "surrogate"),
        ("ebnf", 'start ::= "a"', "root"),
        ("ebnf", "root ::= " + '"a"' * 2**20, "limit"),
        ("structural_tag", "{}", "structures"),
        ("structural_tag", {"type": "structural_tag"}, "format"),
    ],
)
def test_refused_at_once(name: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"(?s){name}.*({reason})"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("json_schema", 5), ("json_schema", ["a"]), ("regex", b"a"), ("ebnf", {}), ("structural_tag", [])],
)
def test_wrong_types(name: str, value: Any) -> None:
    with pytest.raises(WrongType, match=name):
        SamplingParams(**{name: value})
