"""JSON schemas before a library gets them: read from text, and walked through.

What a library cannot follow is said in a file of its own: `llguidance_schemas.py`, `xgrammar_schemas.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenmill.grammar.base import BadGrammar

# Keywords whose value maps names of the user to schemas, or holds no schema at all.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples", "required", "type", "discriminator")
_WHOLE_NUMBERS = range(-(2**63), 2**64)


def read_schema(text: str) -> Any:
    """The schema of a JSON text: an object or True. Raises `BadGrammar` for what no output can follow."""
    schema = read_json(text)
    if schema is False:
        raise BadGrammar("the schema `false` allows no output")
    leave_out_idle(schema)
    return schema


def read_json(text: str) -> Any:
    """A JSON text with schemas in it, whose numbers the libraries can take as they are."""
    return json.loads(text, parse_int=_whole_number)


def leave_out_idle(schema: Any) -> None:
    """Take away, in place, what allows everything, yet is refused where the keyword is not known."""
    for each in list(subschemas(schema)):
        if each.get("uniqueItems") is False:
            del each["uniqueItems"]


def _whole_number(digits: str) -> int:
    number = int(digits)
    if number not in _WHOLE_NUMBERS:
        shown = digits if len(digits) <= 40 else f"{digits[:40]}..."
        raise BadGrammar(
            f"the number {shown} of the schema is out of range: whole numbers go from -2^63 to 2^64 - 1; use "
            "a smaller one"
        )
    return number


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The objects among a schema and the schemas within it, from the outside in."""
    if isinstance(schema, list):
        for item in schema:
            yield from subschemas(item)
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            yield from subschemas(list(value.values()))
        elif key not in _VALUES:
            yield from subschemas(value)


def is_number(value: Any) -> bool:
    """Whether JSON calls it a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
