"""JSON schemas before a library gets them: read from text, and walked through.

What a library cannot follow is said in a file of its own: `llguidance_schemas.py`, `xgrammar_schemas.py`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

from tokenmill.grammar.base import BadGrammar
from tokenmill.grammar.property_names import write_as_properties
from tokenmill.grammar.references import check_levels
from tokenmill.grammar.unions import write_as_any

_log = logging.getLogger("tokenmill")

# Keywords whose value maps names of the user to schemas, or holds no schema at all.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples", "required", "type", "discriminator")
# RFC 3339, without seconds that are leapt; RFC 2673.
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = "((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR, _BELOW_60 = "([01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = rf"{_HOUR}:{_BELOW_60}:{_BELOW_60}(\.[0-9]+)?(Z|[+-]{_HOUR}:{_BELOW_60})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_BASE64 = "([{0}]{{4}})*([{0}]{{2}}==|[{0}]{{3}}=)?"
# What says more of a string than its format, which not every library takes beside it.
_BESIDE_FORMAT = {"pattern", "minLength", "maxLength", "const", "enum", "anyOf", "allOf", "$ref"}
_PATTERNS = {
    name: f"^{pattern}$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
        # Of OpenAPI and pydantic; RFC 4648.
        "byte": _BASE64.format("A-Za-z0-9+/"),
        "base64": _BASE64.format("A-Za-z0-9+/"),
        "base64url": _BASE64.format("A-Za-z0-9_-"),
    }.items()
}
# What JSON Schema defines, so that a library which does not know it must say so. Others, as OpenAPI's and
# pydantic's "password", are notes.
_FORMATS = frozenset(
    [
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4"),
        *("ipv6", "uuid", "uri", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
        *("relative-json-pointer", "regex"),
    ]
)
# Of all drafts, with OpenAPI's.
_KEYWORDS = frozenset(
    [
        *("$schema", "$id", "id", "$anchor", "$ref", "$defs", "definitions", "$comment", "$vocabulary"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "type", "enum", "const"),
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "discriminator", "externalDocs", "xml"),
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
        *("minProperties", "maxProperties", "dependencies", "dependentSchemas", "dependentRequired"),
        *("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "minItems"),
        *("maxItems", "uniqueItems", "unevaluatedItems", "unevaluatedProperties", "minLength", "maxLength"),
        *("pattern", "format", "contentEncoding", "contentMediaType", "contentSchema", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ]
)
# What may ask for a control character that no letter behind a backslash stands for.
_CONTROL = re.compile(r"\\u00(?:[01]|7f)|\\\\[uxc]")
_MOST_TOLD = 5  # unknown keywords of a schema
_WHOLE_NUMBERS = range(-(2**63), 2**64)


def read_schema(text: str) -> Any:
    """The schema of a JSON text: an object or True. Raises `BadGrammar` for what no output can follow."""
    schema = read_json(text)
    if schema is False:
        raise BadGrammar("the schema `false` allows no output")
    normalize(schema)
    return schema


def read_json(text: str) -> Any:
    """A JSON text with schemas in it, whose numbers the libraries can take as they are."""
    return json.loads(text, parse_int=_whole_number)


def normalize(schema: Any) -> None:
    """Change a schema, in place, into one that means the same to more libraries. May raise `BadGrammar`.

    What allows everything is taken away: it is refused where the keyword is not known. Formats that the
    libraries take too widely, days that no month has and numbers with zeros in front, become patterns,
    unions whose members exclude each other become ones that more libraries know, and names that are an
    enumeration become properties.
    """
    references = (each.get("$ref") for each in subschemas(schema))
    check_levels(schema, {each for each in references if isinstance(each, str)})
    write_as_any(subschemas(schema), schema)
    write_as_properties(list(subschemas(schema)), schema)
    for each in list(subschemas(schema)):
        if each.get("uniqueItems") is False:
            del each["uniqueItems"]
        if isinstance(each.get("format"), str):
            _write_format(each, each["format"])

    for key in islice(_unknown_keywords(schema), _MOST_TOLD):
        _tell_once("keyword", key)


def _unknown_keywords(schema: Any) -> Iterator[str]:
    """Mistakes, mostly; what holds schemas may be there for references, and x- begins notes of OpenAPI."""
    for each in subschemas(schema):
        for key, value in each.items():
            if key not in _KEYWORDS and not isinstance(value, dict | list) and not key.startswith("x-"):
                yield key


def _write_format(schema: dict[str, Any], name: str) -> None:
    types = schema.get("type", "string")
    if "string" not in (types if isinstance(types, list) else [types]):
        del schema["format"]  # it is about strings
    elif name not in _FORMATS and name not in _PATTERNS:
        del schema["format"]
        _tell_once("format", name)
    elif name in _PATTERNS and "type" in schema and not schema.keys() & _BESIDE_FORMAT:
        del schema["format"]
        schema["pattern"] = _PATTERNS[name]


def write_formats_as_patterns(schema: Any) -> None:
    """Do so, in place, with whatever stands beside them, for a library that follows patterns everywhere."""
    for each in list(subschemas(schema)):
        name, parts = each.get("format"), each.get("allOf", [])
        if not isinstance(name, str) or name not in _PATTERNS or not isinstance(parts, list):
            continue
        del each["format"]
        pattern = {"pattern": _PATTERNS[name]}
        each.update({"allOf": [*parts, pattern]} if "pattern" in each else pattern)


@cache
def _tell_once(kind: str, name: str) -> None:
    message = "the %s %.40r of a JSON schema is a note: JSON Schema defines none of this name"
    _log.warning(message, kind, name)


def _whole_number(digits: str) -> int:
    number = int(digits)
    if number not in _WHOLE_NUMBERS:
        shown = digits if len(digits) <= 40 else f"{digits[:40]}..."
        raise BadGrammar(
            f"the number {shown} of the schema is out of range: whole numbers go from -2^63 to 2^64 - 1; use "
            "a smaller one"
        )
    return number


def names_control_characters(schema: Any) -> bool:
    """Whether outputs of a schema may need escapes of code points: other characters need none."""
    return _CONTROL.search(json.dumps(schema)) is not None


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
