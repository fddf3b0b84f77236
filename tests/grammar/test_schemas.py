"""Formats that become patterns, against Python's own reading of them."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import jsonschema
import pytest

from tests.grammar.conftest import backend, follows
from tokenmill.grammar import BadGrammar
from tokenmill.grammar.backends import BACKENDS
from tokenmill.grammar.schemas import normalize
from tokenmill.messages import Grammar

pytestmark = pytest.mark.cpu


def is_read(read: Callable[[str], object], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True


def pattern_of(name: str) -> re.Pattern[str]:
    schema = {"type": "string", "format": name}
    normalize(schema)
    assert "format" not in schema
    return re.compile(schema["pattern"])


def test_dates_are_days_of_the_calendar() -> None:
    pattern = pattern_of("date")
    for year in (0, 1, 4, 100, 400, 1900, 1996, 2000, 2023, 2024, 2100, 2096, 9999):
        for month, day in product(range(14), range(33)):
            text = f"{year:04}-{month:02}-{day:02}"
            assert bool(pattern.search(text)) == is_read(datetime.date.fromisoformat, text), text


@pytest.mark.parametrize("end", ["T23:59:59Z", "T00:00:00.25+01:00", "T10:00:00-23:59"])
def test_times_have_a_zone(end: str) -> None:
    pattern = pattern_of("date-time")
    assert pattern.search(f"2024-02-29{end}")
    for text in (f"2023-02-29{end}", f"2024-02-29{end[:9]}", f"2024-02-29{end} ", f"2024-02-29{end[1:]}"):
        assert not pattern.search(text), text


def test_times_have_sixty_seconds() -> None:
    pattern = pattern_of("time")
    for hour, minute, second in product((0, 9, 23, 24), (0, 59, 60), (0, 59, 60)):
        text = f"{hour:02}:{minute:02}:{second:02}Z"
        assert bool(pattern.search(text)) == is_read(datetime.time.fromisoformat, text), text


def test_addresses_have_no_leading_zeros() -> None:
    pattern = pattern_of("ipv4")
    for byte in ["", *map(str, range(1001)), *(f"0{number}" for number in range(100))]:
        for text in (f"1.2.{byte}.4", f"{byte}.0.0.{byte}"):
            assert bool(pattern.search(text)) == is_read(ipaddress.IPv4Address, text), text


@pytest.mark.parametrize(
    "schema",
    [
        {"format": "date"},  # anything but a string goes
        {"type": "string", "format": "date", "maxLength": 10},
        {"type": "string", "format": "date", "pattern": "^2"},
        {"type": "string", "format": ["date"]},
        {"type": ["null", "string"], "format": "date", "enum": ["2024-02-29", None]},
        {"properties": {"format": {"const": "date"}}},
    ],
)
def test_what_says_more_stays(schema: dict[str, Any]) -> None:
    before = repr(schema)
    normalize(schema)
    assert repr(schema) == before


@pytest.mark.parametrize(
    "beside",
    [
        {"type": "string"},
        {"type": ["null", "string"]},
        {"type": ["string", "integer"], "maxLength": 10},
        {},
        {"type": "string", "minLength": 5},
        {"type": "string", "pattern": "^2"},
        {"type": "string", "pattern": "^2", "allOf": [{"maxLength": 10}]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"enum": ["2024-02-29", "2024-02-30", None, 5]},
        {"type": "integer"},
    ],
    ids=str,
)
def test_a_format_holds_with_whatever_stands_beside_it(beside: dict[str, Any]) -> None:
    schema = {**beside, "format": "date"}
    template = backend("llguidance").compile(Grammar("json_schema", json.dumps(schema)))
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date"]))
    for value in ("2024-02-29", "1999-12-31", "2024-02-30", "x", "", None, 5, 5.5, []):
        assert follows(template, json.dumps(value)) == checker.is_valid(value), value


@pytest.mark.parametrize("name", BACKENDS)
def test_a_format_of_an_optional_string(name: str) -> None:
    schema = {"type": ["string", "null"], "format": "byte"}
    template = backend(name).compile(Grammar("json_schema", json.dumps(schema)))
    for text, is_right in (('"YQ=="', True), ('"YQ="', False), ("null", True), ("5", False)):
        assert follows(template, text) == is_right


@pytest.mark.parametrize("kind", [5, None, {}, [5]], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_type_that_is_none_is_told(name: str, kind: Any) -> None:
    with pytest.raises(BadGrammar, match=r"(?i)type"):
        backend(name).compile(Grammar("json_schema", json.dumps({"type": kind, "format": "date"})))


def test_keywords_that_json_schema_does_not_define_are_told(caplog: pytest.LogCaptureFixture) -> None:
    names = {"maxlength": {"type": "string", "minLenght": 2, "x-order": 1, "default": 5}}
    schema = {"type": "object", "properties": names, "nullable-1": True, "components": {"a": {}}}
    for _ in range(2):
        normalize(schema)
        normalize({f"a{index}": None for index in range(1_000)})
    told = [
        record.getMessage().removesuffix(": JSON Schema defines none of this name")
        for record in caplog.records
    ]
    assert told == [
        f"the keyword {name!r} of a JSON schema is a note"
        for name in ("nullable-1", "minLenght", "a0", "a1", "a2", "a3", "a4")
    ]
