"""Formats that become patterns, against Python's own reading of them."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from tokenmill.grammar.schemas import normalize

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


def test_addresses_have_no_leading_zeros() -> None:
    pattern = pattern_of("ipv4")
    for byte in ["", *map(str, range(1001)), *(f"0{number}" for number in range(100))]:
        for text in (f"1.2.{byte}.4", f"{byte}.0.0.{byte}"):
            assert bool(pattern.search(text)) == is_read(ipaddress.IPv4Address, text), text


@pytest.mark.parametrize(
    "schema",
    [
        {"format": "date"},
        {"type": "string", "format": "date", "maxLength": 9},
        {"type": "string", "format": "date", "pattern": "^2"},
        {"type": "string", "format": ["date"]},
        {"properties": {"format": {"const": "date"}}},
    ],
)
def test_what_says_more_stays(schema: dict[str, Any]) -> None:
    before = repr(schema)
    normalize(schema)
    assert repr(schema) == before
