"""What xgrammar would pass over in a JSON schema: outputs would break the schema, so it is refused instead.

Whether the library enforces a keyword depends on those beside it, so each object is looked at as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenmill.grammar.base import BadGrammar
from tokenmill.grammar.patterns import literals, translate_plain
from tokenmill.grammar.schemas import is_number, subschemas
from tokenmill.grammar.unions import OVERLAP

# These say nothing about a value.
_NOTES = {
    "$schema",
    "$id",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "discriminator",
    # Schemas that others refer to.
    "$defs",
    "definitions",
}
# With one of these the library looks at nothing else.
_ALONE = ("$ref", "const", "enum", "anyOf")
# What says the type where `type` does not.
_TELLING = {"properties", "additionalProperties", "items", "prefixItems"}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_ENFORCED = {
    *_NOTES,
    *_ALONE,
    *_TELLING,
    *_COUNTS,
    "type",
    "required",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "pattern",
    "format",
}
# What llguidance (1.9) does not know either.
_FOLLOWED_BY_NONE = {
    *("propertyNames", "uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then"),
    *("else", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"),
    "$dynamicRef",
}
_FORMATS = ["email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"]
# Counts are written out; larger ones keep the library busy for ever.
_MAX_COUNT = 10_000
_MAX_INTEGER = 2**63 - 1
_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: is_number(value) and value == value // 1,
    "number": is_number,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def prepare_schema(schema: Any) -> None:
    """Write the patterns of a schema in signs that the library reads right, in place.

    Raises `BadGrammar` for the first thing in it that would not be enforced.
    """
    for each in subschemas(schema):
        if "oneOf" in each:
            raise BadGrammar(OVERLAP)
        if key := next((key for key in each if key in _FOLLOWED_BY_NONE), None):
            raise BadGrammar(f"no library follows the keyword {key!r} of a schema; leave it out")
        for problem in _problems(each):
            raise _refusal(problem)
        if isinstance(pattern := each.get("pattern"), str):
            each["pattern"] = _plain(pattern)
        if each.keys() & {"minItems", "maxItems"} and not each.keys() & {"items", "prefixItems"}:
            each["items"] = {}  # the library allows none of what is not named


def _refusal(problem: str) -> BadGrammar:
    return BadGrammar(f"xgrammar cannot follow {problem}; leave it out, or use llguidance")


def _plain(pattern: str) -> str:
    """The pattern for whole strings, which are all that the library knows."""
    try:
        # What it names one by one would be written as it stands, where JSON wants an escape.
        if any(code < 32 or chr(code) in '"\\' for code in literals(pattern)):
            raise BadGrammar("it names a quote, a backslash or a control character")
        return f"^{translate_plain(pattern)}$"
    except (BadGrammar, re.error) as error:
        raise _refusal(f"the pattern {pattern!r} ({error})") from error


def _problems(schema: dict[str, Any]) -> Iterator[str]:
    """What would be passed over in an object, regardless of the schemas within it."""
    for key in _without(schema, _ENFORCED):
        yield f"the keyword {key!r} of a schema"
    for key in ("anyOf", "enum", "type"):
        if schema.get(key) == []:
            yield f"an empty {key!r}"
    reference = schema.get("$ref", "#")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        yield f"the $ref {reference!r}, which is no path within the schema (#/...)"
    if alone := [key for key in _ALONE if key in schema]:
        yield from _neighbours(schema, alone[0])
    elif "type" not in schema and not schema.keys() & _TELLING:
        for key in _without(schema, _NOTES):
            yield f"{key!r} without 'type'"
    yield from _missing_names(schema)
    yield from _counts(schema)
    yield from _strings(schema)


def _without(schema: dict[str, Any], keys: set[str]) -> list[str]:
    return [key for key in schema if key not in keys]


def _neighbours(schema: dict[str, Any], alone: str) -> Iterator[str]:
    """Keywords beside one that the library follows alone; harmless are those that its values fit anyway."""
    values = {"const": [schema.get("const")], "enum": schema.get("enum")}.get(alone)
    for key in _without(schema, _NOTES | {alone}):
        fits = isinstance(values, list) and (
            (key == "type" and all(_has_type(value, schema["type"]) for value in values))
            or (key == "enum" and json.dumps(schema["enum"]) == json.dumps(values))
        )
        if not fits:
            yield f"{key!r} beside {alone!r}"
    if isinstance(values, list) and any(isinstance(value, int) and value > _MAX_INTEGER for value in values):
        yield f"a number above {_MAX_INTEGER:,} as {alone!r}"


def _missing_names(schema: dict[str, Any]) -> Iterator[str]:
    required, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        for name in required:
            if isinstance(name, str) and name not in properties:
                yield f"the required name {name!r} that is not in 'properties'"


def _counts(schema: dict[str, Any]) -> Iterator[str]:
    for key in _COUNTS:
        count = schema.get(key)
        if isinstance(count, int) and count > _MAX_COUNT:
            yield f"a {key} above {_MAX_COUNT:,}"
        if isinstance(count, int) and count < 0:
            yield f"a {key} below 0"


def _strings(schema: dict[str, Any]) -> Iterator[str]:
    """The library knows one of: a format, a pattern, lengths."""
    if "format" in schema and schema["format"] not in _FORMATS:
        yield f"the format {schema['format']!r}"
    has_length = "minLength" in schema or "maxLength" in schema
    if "format" in schema and ("pattern" in schema or has_length):
        yield "'format' together with a pattern or a length"
    if "pattern" in schema and has_length:
        yield "'pattern' together with a length"


def _has_type(value: Any, names: Any) -> bool:
    given = names if isinstance(names, list) else [names]
    return any(name in given and is_of(value) for name, is_of in _TYPES.items())
