"""Unions of a JSON schema whose members exclude each other, so that `oneOf` can be written as `anyOf`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any
from urllib.parse import unquote

_NOTES = {"title", "description", "default"}
_TAG_TYPES = {"str": "string", "bool": "boolean", "NoneType": "null", "int": "number"}
_MAX_REFERENCES = 16
# Many unions may refer to one large schema: what has more names, values or tags is not looked into.
_MAX_NAMES, _MAX_TAGS = 100, 16


def write_as_any(schema: dict[str, Any], root: Any) -> None:
    """Turn the `oneOf` of a schema, in place, into `anyOf`, if no value can fit two of its members.

    With OpenAPI's `discriminator` the members then require the property that tells them apart. `root` is what
    references start from.
    """
    members = schema.get("oneOf")
    if not isinstance(members, list) or not members or "anyOf" in schema:
        return
    discriminator = schema.get("discriminator")
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    resolved = [_resolve(member, root) for member in members]
    if isinstance(tag, str) and _are_distinct(_tags(member, tag) for member in resolved):
        del schema["oneOf"]
        schema["anyOf"] = [_requiring(*pair, tag) for pair in zip(members, resolved, strict=True)]
    elif _exclude_each_other(resolved):
        del schema["oneOf"]
        schema["anyOf"] = members


def _resolve(schema: Any, root: Any) -> Any:
    """What a schema that is nothing but a reference refers to; others as they are."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema or schema.keys() - _NOTES != {"$ref"}:
            return schema
        schema = _find(schema["$ref"], root)
    return None


def _find(reference: Any, root: Any) -> Any:
    """The schema that a path within the root names; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found = root
    for step in unquote(reference[2:]).split("/"):
        if not isinstance(found, dict):
            return None
        found = found.get(step.replace("~1", "/").replace("~0", "~"))
    return found


def _requiring(member: Any, resolved: dict[str, Any], name: str) -> Any:
    return member if name in _required(resolved) else {"allOf": [member, {"required": [name]}]}


def _exclude_each_other(members: list[Any]) -> bool:
    by_type: dict[str, list[dict[str, Any]]] = {}
    for member in members:
        types = _types(member)
        if types is None:
            return False
        for name in types:
            by_type.setdefault(name, []).append(member)
    return all(_differ(group) for group in by_type.values())


def _types(schema: Any) -> set[str] | None:
    """The types of a schema's values, whole numbers being numbers; None: not known."""
    if not isinstance(schema, dict):
        return None
    values = _values(schema)
    if values is not None:
        return {name for name, _ in values}
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return {"number" if name == "integer" else name for name in names}


def _values(schema: dict[str, Any]) -> list[tuple[str, Any]] | None:
    """The type and value of all that a schema allows, if it names plain ones; None if it does not."""
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(named, list) or len(named) > _MAX_NAMES:
        return None
    if not all(type(value).__name__ in _TAG_TYPES for value in named):
        return None
    return [(_TAG_TYPES[type(value).__name__], value) for value in named]


def _tags(schema: Any, name: str) -> list[tuple[str, Any]] | None:
    """What a property of an object may be, if plain values are named; None if not."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return None
    properties = schema.get("properties")
    tagged = properties.get(name) if isinstance(properties, dict) else None
    return _values(tagged) if isinstance(tagged, dict) else None


def _differ(members: list[dict[str, Any]]) -> bool:
    """Whether no value of one type fits two of the members."""
    if len(members) == 1 or _are_distinct(_values(member) for member in members):
        return True
    required = [_required(member) for member in members]
    shared = (name for name in required[0] if all(name in names for names in required))
    tags = (name for name in shared if _tags(members[0], name) is not None)
    return any(_are_distinct(_tags(member, name) for member in members) for name in islice(tags, _MAX_TAGS))


def _required(schema: dict[str, Any]) -> set[str]:
    names = schema.get("required")
    if not isinstance(names, list) or len(names) > _MAX_NAMES:
        return set()
    return {name for name in names if isinstance(name, str)}


def _are_distinct(values: Iterator[list[tuple[str, Any]] | None]) -> bool:
    """Whether all are known, and none is in two of the lists."""
    seen: set[tuple[str, Any]] = set()
    for each in values:
        if each is None or not seen.isdisjoint(each):
            return False
        seen.update(each)
    return True
