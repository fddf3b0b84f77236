"""Names of properties that are an enumeration, by the `jsonschema` library; pydantic's are followed."""

from __future__ import annotations

import copy
import enum
import json
from collections.abc import Callable
from itertools import product
from typing import Any, Literal

import jsonschema
import pydantic
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from referencing.exceptions import Unresolvable

from tests.grammar.conftest import backend
from tokenmill.grammar import BadGrammar
from tokenmill.grammar.backends import BACKENDS
from tokenmill.grammar.schemas import normalize
from tokenmill.messages import Grammar

pytestmark = pytest.mark.cpu
Drawn = Callable[..., list[str]]

NAMES: list[Any] = [
    {"enum": ["a", "b"]},
    {"const": "c", "type": "string", "title": "C"},
    {"$ref": "#/$defs/one"},
    {"enum": []},
    {"enum": ["a", 1]},
    {"enum": ["b", "a"], "default": "b"},
    True,
    {},
    {"type": "string", "title": "Key"},
    {"type": ["string", "null"]},
    False,
    {"minLength": 1, "enum": ["a"]},
    {"type": "integer", "enum": ["a"]},
    {"maxLength": 1},
]
OTHERS: list[Any] = [
    True,
    False,
    {"type": "integer"},
    {"$ref": "#/$defs/two"},
    {"propertyNames": {"const": "x"}},
    {"$ref": "#/propertyNames"},
    {"$ref": "#/properties/d"},
]
schemas = st.builds(
    lambda names, others, properties, required: {
        "type": "object",
        "propertyNames": names,
        "required": required,
        "$defs": {"one": {"enum": ["a", "c"]}, "two": {"type": "string"}, "value": {"type": "null"}},
        **properties,
        **({} if others is None else {"additionalProperties": others}),
    },
    st.sampled_from(NAMES),
    st.sampled_from([None, *OTHERS]),
    st.sampled_from(
        [
            {},
            {"properties": {"a": {"type": "boolean"}, "d": {}}},
            {"properties": {"a": False}},
            {"properties": {"a": {"$ref": "#/additionalProperties"}, "d": {"maxLength": 3}}},
            {"patternProperties": {"^a": {"type": "string"}}},
        ]
    ),
    st.sampled_from([[], ["a"], ["d"]]),
)
VALUES = [1, True, "s", None, {}, {"x": 1}, {"y": 1}]
OBJECTS: list[Any] = [
    {},
    *({name: value} for name, value in product("abcd", VALUES)),
    *({"a": one, "b": two} for one, two in product(VALUES, VALUES)),
]


@given(schemas)
def test_what_is_rewritten_means_the_same(schema: dict[str, Any]) -> None:
    values = [*OBJECTS, 3]
    try:
        expected = list(map(jsonschema.Draft202012Validator(schema).is_valid, values))
    except Unresolvable:
        assume(False)
    written = copy.deepcopy(schema)
    normalize(written)
    assert list(map(jsonschema.Draft202012Validator(written).is_valid, values)) == expected, written


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Paints(pydantic.BaseModel):
    litres: dict[Colour, int]
    names: dict[Literal["short", "long"], dict[Colour, bool]]


@pytest.mark.parametrize("name", BACKENDS)
def test_enumerations_of_pydantic(name: str, drawn: Drawn) -> None:
    schema = json.dumps(Paints.model_json_schema())
    for text in drawn(name, "json_schema", schema, count=12):
        Paints.model_validate_json(text)


@pytest.mark.parametrize("name", BACKENDS)
def test_names_that_no_library_follows(name: str) -> None:
    schema = {"type": "object", "propertyNames": {"minLength": 2}}
    with pytest.raises(
        BadGrammar, match=r"no library follows the keyword 'propertyNames' of a schema; leave it out$"
    ):
        backend(name).compile(Grammar("json_schema", json.dumps(schema)))
