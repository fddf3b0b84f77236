"""What xgrammar would pass over in a schema is refused; what it enforces and pydantic writes is not."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from typing import Any, Literal

import jsonschema
import pytest

from tests.grammar.conftest import backend
from tokenmill.grammar import BadGrammar
from tokenmill.messages import Grammar

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.cpu

INTEGER = {"type": "integer"}

# Each was followed in part once: outputs broke the schema.
PASSED_OVER: list[tuple[Any, str]] = [
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["b"]}, "required name 'b'"),
    ({"properties": {"a": INTEGER}, "anyOf": [{"type": "null"}]}, "'properties' beside 'anyOf'"),
    ({"anyOf": [{"type": "string"}], "type": "integer"}, "'type' beside 'anyOf'"),
    ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}, "minimum": 4}, r"'minimum' beside '\$ref'"),
    ({"minimum": 5}, "'minimum' without 'type'"),
    ({"maxLength": 2}, "'maxLength' without 'type'"),
    ({"required": ["x"]}, "'required' without 'type'"),
    ({"minItems": 2}, "'minItems' without 'type'"),
    ({"format": "date"}, "'format' without 'type'"),
    ({"type": "integer", "enum": [1, 2, 3], "minimum": 2}, "'minimum' beside 'enum'"),
    ({"const": 5, "type": "string"}, "'type' beside 'const'"),
    ({"type": "string", "enum": ["a", 1]}, "'type' beside 'enum'"),
    ({"type": "integer", "const": True}, "'type' beside 'const'"),
    ({"enum": [True], "const": 1}, "'enum' beside 'const'"),
    ({"enum": ["a", "abc"], "minLength": 2}, "'minLength' beside 'enum'"),
    ({"type": "string", "format": "date", "pattern": "^2024"}, "'format' together"),
    ({"type": "string", "format": "date", "maxLength": 3}, "'format' together"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "'pattern' together"),
    ({"type": "string", "format": {"a": 1}}, "the format {'a': 1}"),
    ({"const": "a", "type": [{}]}, "'type' beside 'const'"),
    ({"anyOf": []}, "empty 'anyOf'"),
    ({"type": []}, "empty 'type'"),
    ({"enum": []}, "empty 'enum'"),
    ({"type": "string", "maxLength": -1}, "maxLength below 0"),
    ({"$ref": "http://example.com/x"}, "no path within the schema"),
    ({"$ref": "#name"}, "no path within the schema"),
    ({"const": 2**63 + 1}, "a number above"),
    ({"type": "array", "items": {"minimum": 5}}, "'minimum' without 'type'"),
    ({"type": "object", "properties": {"required": {"maxLength": 5}}}, "'maxLength' without 'type'"),
    # Written as they stand, these would be no JSON.
    ({"type": "string", "pattern": r"^\"\w{2}\"$"}, "names a quote"),
    ({"type": "string", "pattern": r"^\\\d$"}, "names a quote"),
    ({"type": "string", "pattern": r"^a\nb$"}, "names a quote"),
    ({"type": "string", "pattern": r"^(?:a|\x22)*$"}, "names a quote"),
    ({"type": "string", "pattern": "^(?!a).$"}, "look-ahead"),
    ({"type": "string", "pattern": "a$b"}, "anchors"),
    ({"type": "string", "pattern": "("}, "the pattern"),
]
FOLLOWED: list[Any] = [
    {"properties": {"a": INTEGER}, "required": ["a"]},
    {"items": INTEGER, "minItems": 2, "maxItems": 3},
    {"type": ["integer", "string"], "minimum": 3, "maxLength": 1},
    {"type": "string", "enum": ["a", "b"], "default": "a", "title": "Letter"},
    {"type": "number", "enum": [1, 2.5]},
    {"type": ["string", "null"], "enum": ["a", None]},
    {"const": "a", "enum": ["a"], "type": "string"},
    {"$ref": "#/$defs/a", "$defs": {"a": INTEGER}, "description": "a number", "default": 3},
    {"anyOf": [INTEGER, {"type": "null"}], "default": None, "discriminator": {"propertyName": "kind"}},
    {"type": "object", "properties": {"enum": INTEGER, "required": INTEGER}, "required": ["enum"]},
    {"type": "string", "pattern": r"^[^a][^\"\\]{2}\s\S.[!-~]$"},
]


def compile_schema(schema: Any) -> None:
    backend("xgrammar").compile(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(("schema", "reason"), PASSED_OVER, ids=[str(schema) for schema, _ in PASSED_OVER])
def test_what_would_be_passed_over_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(BadGrammar, match=reason):
        compile_schema(schema)


@pytest.mark.parametrize("schema", FOLLOWED, ids=str)
def test_what_is_followed_in_whole(schema: Any, drawn: Callable[..., list[str]]) -> None:
    for text in drawn("xgrammar", "json_schema", json.dumps(schema)):
        jsonschema.validate(json.loads(text), schema)


def test_models_of_pydantic(drawn: Callable[..., list[str]]) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Colour(enum.Enum):
        red = "r"
        none = 0

    class Point(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        x: int = pydantic.Field(ge=0, lt=100)
        kind: Literal["point"] = "point"

    class Shape(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        centre: Point | None = None
        colour: Colour = Colour.red
        label: Literal["a", 1, None]
        sizes: dict[str, int] = pydantic.Field(default={}, description="in pixels")
        corners: tuple[Point, Point]

    schema = Shape.model_json_schema()
    for text in drawn("xgrammar", "json_schema", json.dumps(schema), most=600, count=4):
        Shape.model_validate_json(text)


@pytest.mark.parametrize("is_legacy", [True, False])
def test_schemas_of_tags_are_looked_at(is_legacy: bool) -> None:
    schema = {"type": "object", "minProperties": 1}
    content = {"type": "json_schema", "json_schema": schema}
    tag: Any = {"type": "structural_tag", "format": {"type": "sequence", "elements": [content]}}
    if is_legacy:
        tag = {"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a"]}
    with pytest.raises(BadGrammar, match="minProperties"):
        backend("xgrammar").compile(Grammar("structural_tag", json.dumps(tag)))
