"""Unions that are rewritten mean the same as before, by the `jsonschema` library; pydantic's are followed."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grammar.conftest import backend, tokenizer
from tokenmill.grammar import BadGrammar
from tokenmill.grammar.backends import BACKENDS
from tokenmill.grammar.schemas import normalize
from tokenmill.messages import Grammar

pytestmark = pytest.mark.cpu
Drawn = Callable[..., list[str]]

PLAIN: list[Any] = ["a", "b", 0, 1, True, False, None]
VALUES: list[Any] = [
    *PLAIN,
    2.5,
    [],
    *({"k": kind, **rest} for kind in PLAIN for rest in ({}, {"x": 1}, {"x": 1, "y": "s"})),
    {},
    {"x": 1},
    {"y": "s"},
]

plain = st.sampled_from(PLAIN)
named = st.one_of(
    plain.map(lambda value: {"const": value}),
    st.lists(plain, min_size=1, max_size=2, unique_by=repr).map(lambda values: {"enum": values}),
)
types = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
objects = st.builds(
    lambda kind, rest, required, closed: {
        "type": "object",
        "properties": {"k": kind, **rest},
        "required": required,
        **({"additionalProperties": False} if closed else {}),
    },
    named,
    st.sampled_from([{}, {"x": {"type": "integer"}}, {"y": {"type": "string"}}]),
    st.sampled_from([[], ["k"], ["k", "x"]]),
    st.booleans(),
)
members = st.one_of(
    named,
    types.map(lambda name: {"type": name}),
    st.lists(types, min_size=1, max_size=2, unique=True).map(lambda names: {"type": names}),
    objects,
    objects,
    st.sampled_from([{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two~1three"}, {}, True]),
)
unions = st.builds(
    lambda members, one, two, discriminator: {
        "oneOf": members,
        "$defs": {"one": one, "two/three": two},
        **({"discriminator": {"propertyName": "k"}} if discriminator else {}),
    },
    st.lists(members, min_size=1, max_size=3),
    objects,
    objects,
    st.booleans(),
)


@given(unions)
@settings(max_examples=400, deadline=None)
def test_what_is_rewritten_means_the_same(schema: dict[str, Any]) -> None:
    written = copy.deepcopy(schema)
    normalize(written)
    before, after = (jsonschema.Draft202012Validator(each) for each in (schema, written))
    for value in VALUES:
        assert before.is_valid(value) or not after.is_valid(value), (value, written)
        # With a discriminator, the property that tells the members apart is required.
        if "discriminator" not in schema or (isinstance(value, dict) and "k" in value):
            assert before.is_valid(value) == after.is_valid(value), (value, written)


def tagged(tag: Any, name: str, *, required: bool = True) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"k": {"const": tag}, name: {"type": "integer"}},
        "required": ["k", name] if required else [name],
    }


@pytest.mark.parametrize(
    ("members", "is_rewritten"),
    [
        ([{"type": "string"}, {"type": "integer"}], True),
        ([{"type": "number"}, {"type": "integer"}], False),
        ([{"const": "a"}, {"enum": ["b", 1]}], True),
        ([{"const": "a"}, {"enum": ["b", "a"]}], False),
        ([{"const": 1}, {"const": True}], True),
        ([tagged("a", "x"), tagged("b", "y"), {"type": "null"}], True),
        ([tagged("a", "x"), tagged("a", "y")], False),
        ([tagged("a", "x"), tagged("b", "y", required=False)], False),
        ([{"$ref": "#/$defs/other"}, tagged("b", "y")], True),
        ([{"$ref": "#/$defs/missing"}, tagged("b", "y")], False),
        ([{"$ref": "#/$defs/endless"}, tagged("b", "y")], False),
        ([True], False),
    ],
)
def test_only_where_no_value_fits_two_members(members: list[Any], is_rewritten: bool) -> None:
    definitions = {"other": tagged("a", "x"), "endless": {"$ref": "#/$defs/endless"}}
    schema = {"properties": {"p": {"oneOf": members}}, "$defs": definitions}
    normalize(schema)
    assert ("anyOf" in schema["properties"]["p"]) is is_rewritten


@pytest.mark.parametrize("name", BACKENDS)
def test_members_that_overlap_are_refused_with_what_helps(name: str) -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}
    with pytest.raises(BadGrammar, match="may fit the same value, which no library follows; use 'anyOf'"):
        backend(name).compile(Grammar("json_schema", json.dumps(schema)))


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, pydantic.Field(ge=0, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog", "puppy"]
    good: bool
    password: pydantic.SecretStr = pydantic.SecretStr("")


class StrictCat(Cat):
    kind: Literal["cat"]


class Num(pydantic.BaseModel):
    kind: Literal["num"]
    value: int


class Add(pydantic.BaseModel):
    kind: Literal["add"]
    left: Annotated[Num | Add, pydantic.Field(discriminator="kind")]
    right: Annotated[Num | Add, pydantic.Field(discriminator="kind")]


class DefaultNum(pydantic.BaseModel):
    kind: Literal["num"] = "num"
    value: int


class DefaultAdd(pydantic.BaseModel):
    kind: Literal["add"] = "add"
    left: Annotated[DefaultNum | DefaultAdd, pydantic.Field(discriminator="kind")]
    right: Annotated[DefaultNum | DefaultAdd, pydantic.Field(discriminator="kind")]


def is_read(model: type[pydantic.BaseModel], text: str) -> bool:
    try:
        model.model_validate_json(text)
    except pydantic.ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "pet"),
    [("llguidance", Cat | Dog), ("llguidance", StrictCat | Dog), ("xgrammar", StrictCat | Dog)],
)
def test_discriminated_unions_of_pydantic(name: str, pet: Any) -> None:
    if name == "xgrammar":
        pytest.importorskip("xgrammar")
    owner = pydantic.create_model("Owner", pet=Annotated[pet, pydantic.Field(discriminator="kind")])
    schema = json.dumps(owner.model_json_schema())
    template = backend(name).compile(Grammar("json_schema", schema))
    for text, is_right in (
        ('{"pet":{"kind":"cat","lives":9}}', True),
        ('{"pet":{"kind":"puppy","good":true}}', True),
        ('{"pet":{"kind":"cat","good":true}}', False),
        ('{"pet":{"lives":9}}', False),  # pydantic wants the property, default or not
    ):
        matcher = template.new()
        follows = all(matcher.accept(token) for token in tokenizer().encode(text)) and matcher.is_accepting
        assert follows is is_right, text
        assert is_right is is_read(owner, text)


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("has_default", [False, True])
def test_recursive_unions_of_pydantic(name: str, has_default: bool) -> None:
    if name == "xgrammar":
        pytest.importorskip("xgrammar")
    expression = DefaultNum | DefaultAdd if has_default else Num | Add
    root = pydantic.create_model("Root", root=Annotated[expression, pydantic.Field(discriminator="kind")])
    schema = json.dumps(root.model_json_schema())
    template = backend(name).compile(Grammar("json_schema", schema))
    number = '{"kind":"num","value":1}'
    for text, is_right in (
        (f'{{"root":{number}}}', True),
        (
            f'{{"root":{{"kind":"add","left":{number},"right":{{"kind":"add","left":{number},"right":{number}}}}}}}',
            True,
        ),
        (f'{{"root":{{"kind":"add","left":{number},"right":{{"value":1}}}}}}', False),
    ):
        matcher = template.new()
        follows = all(matcher.accept(token) for token in tokenizer().encode(text)) and matcher.is_accepting
        assert follows is is_right, text


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/oneOf/0"}}]},
        {"oneOf": [{"type": "integer"}, {"type": "string"}], "$defs": []},
        {
            "oneOf": [{"$ref": "#/properties/a"}, tagged("b", "y", required=False)],
            "discriminator": {"propertyName": "k"},
            "properties": {"a": tagged("a", "x", required=False)},
            "$defs": 5,
        },
    ],
)
def test_what_a_reference_would_miss_stays(schema: dict[str, Any]) -> None:
    written = copy.deepcopy(schema)
    normalize(written)
    assert written == schema


def test_formats_that_json_schema_does_not_define_are_notes(
    caplog: pytest.LogCaptureFixture, drawn: Drawn
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "format": "pass-phrase", "maxLength": 3},
            "b": {"type": "integer", "format": "int32"},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for name in ("llguidance", "llguidance"):
        for text in drawn(name, "json_schema", json.dumps(schema)):
            jsonschema.validate(json.loads(text), schema)
    assert [record.getMessage() for record in caplog.records if "format" in record.getMessage()] == [
        "the format 'pass-phrase' of a JSON schema is a note: JSON Schema defines none of this name"
    ]


@pytest.mark.parametrize("count", [100, 9_000])
def test_large_unions_are_looked_at_quickly(count: int) -> None:
    names = [f"n{index}" for index in range(count)]
    large = {"type": "object", "properties": {name: {"const": 1} for name in names}, "required": names}
    schema = {
        "allOf": [{"oneOf": [{"$ref": "#/$defs/large"}, {"$ref": "#/$defs/large"}]} for _ in range(6_000)],
        "oneOf": [{"const": number} for number in range(5_000)],
        "$defs": {"large": large},
    }
    began = time.process_time()
    normalize(schema)
    assert time.process_time() - began < 5
    assert "anyOf" in schema
    assert "oneOf" in schema["allOf"][0]
