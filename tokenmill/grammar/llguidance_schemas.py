"""What llguidance would get wrong in a JSON schema, or never be done with; it is refused before."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from tokenmill.grammar.base import BadGrammar
from tokenmill.grammar.patterns import translate_searched
from tokenmill.grammar.schemas import is_number, subschemas, write_formats_as_patterns

# The library counts through as many remainders, wherever values of `multipleOf` meet.
_MAX_MULTIPLE = 100_000
_LEAST = -(2.0**63)
_WITH_NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# What may be too wide: no letter or digit of ASCII, to the library as to JavaScript, may be one to Python;
# and a quote may come out as an escape although a class excludes it.
_TOO_WIDE = re.compile(r"\\[WDS]|\[\^")


def prepare_schema(schema: Any) -> None:
    """Make patterns and formats of a schema, or of a list, mean the same to whoever checks the outputs.

    Works in place. Raises `BadGrammar` for what the library would get wrong in it.
    """
    write_formats_as_patterns(schema)
    for each in subschemas(schema):
        if isinstance(pattern := each.get("pattern"), str):
            each["pattern"] = _portable(pattern)
        if isinstance(named := each.get("patternProperties"), dict):
            each["patternProperties"] = {_portable(name): value for name, value in named.items()}
    objects = list(subschemas(schema))
    _check_multiples([each["multipleOf"] for each in objects if is_number(each.get("multipleOf"))])
    for each in objects:
        _check_least(each)
        _check_names(each)
        _check_bounds(each)


def _portable(pattern: str) -> str:
    if _TOO_WIDE.search(pattern) is None:
        return pattern
    try:
        return translate_searched(pattern)
    except (BadGrammar, re.error):  # the library says what it does not know, or knows more
        return pattern


def _check_multiples(values: list[int | float]) -> None:
    """Memory and time without bound; powers of ten cost nothing."""
    numbers = [abs(Decimal(str(value))) for value in values if value and math.isfinite(value)]
    if not numbers:
        return
    scale = max(0, *(-int(number.as_tuple().exponent) for number in numbers))
    common = 1
    for number in numbers:
        common = math.lcm(common, int(number.scaleb(scale)))
        if common > _MAX_MULTIPLE and str(common).rstrip("0") != "1":
            raise BadGrammar(
                f"the values of 'multipleOf' have a least common multiple above {_MAX_MULTIPLE:,} (in units "
                "of their last decimal); use smaller ones, fewer ones, or powers of ten"
            )


def _check_least(schema: dict[str, Any]) -> None:
    """Where the library makes a whole number of one that is as small as this, it ends the process."""
    for key in _WITH_NUMBERS:
        for number in _numbers(schema.get(key)):
            if float(number) <= _LEAST:
                raise BadGrammar(
                    f"{key!r} has the number {number}, and llguidance needs numbers above -2^63; use a "
                    "larger one, or xgrammar"
                )


def _numbers(value: Any) -> Iterator[int | float]:
    if is_number(value):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)


def _check_names(schema: dict[str, Any]) -> None:
    """The library counts a name twice that an object has twice; names of `properties` come once."""
    least: Any = schema.get("minProperties")
    if not is_number(least) or least <= 1:
        return
    required: Any = schema.get("required")
    properties: Any = schema.get("properties")
    has_both = isinstance(required, list) and isinstance(properties, dict)
    if not has_both or sum(name in required for name in properties) < least:
        raise BadGrammar(
            f"minProperties={least} cannot be enforced, because the output may have one name twice; have "
            f"{least} names in both 'required' and 'properties', or set it to 1"
        )


def _check_bounds(schema: dict[str, Any]) -> None:
    """The library takes an excluded whole number for one that is allowed, if the other bound lies within one
    of it, away from zero. Bounds meet in one object, or in the parts of `allOf`."""
    if schema.get("type") == "integer":
        return
    others = schema.get("allOf")
    parts = [schema, *(others if isinstance(others, list) else [])]

    def bounds(*names: str) -> list[tuple[str, int | float]]:
        found: list[tuple[str, int | float]] = []
        for part in parts:
            for name in names:
                value: Any = part.get(name) if isinstance(part, dict) else None
                if is_number(value) and (isinstance(value, int) or math.isfinite(value)):
                    found.append((name, value))
        return found

    lower, upper = ("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")
    for sign, (excluding, _), other in ((1, lower, upper), (-1, upper, lower)):
        for name, excluded in bounds(excluding):
            for far_name, far in bounds(*other):
                if excluded == int(excluded) and 0 <= sign * excluded < sign * far < sign * excluded + 1:
                    raise BadGrammar(
                        f"{name}={excluded} cannot be enforced together with {far_name}={far}, because "
                        f"{excluded} itself may come out; use {name.replace('exclusiveM', 'm')} with the "
                        "nearest number that you want"
                    )
