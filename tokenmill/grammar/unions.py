"""Unions of a JSON schema whose members exclude each other, so that `oneOf` can be written as `anyOf`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from tokenmill.grammar.references import define, has_definitions, resolve

_TAG_TYPES = {"str": "string", "bool": "boolean", "NoneType": "null", "int": "number"}
# Why a `oneOf` that is left is refused.
OVERLAP = "members of a 'oneOf' may fit the same value, which no library follows; use 'anyOf'"
# Many unions may refer to one large schema: what has more names, values or tags is not looked into.
_MAX_NAMES, _MAX_TAGS = 100, 16


def write_as_any(schemas: Iterable[dict[str, Any]], root: Any) -> None:
    """Turn `oneOf` of schemas within `root`, in place, into `anyOf`, where no value fits two members.

    With OpenAPI's `discriminator` the members then require the property that tells them apart. Nothing is
    changed if a reference goes through a `oneOf`, or definitions are no object.
    """
    pending = list(schemas)
    if isinstance(root, dict) and not has_definitions(root):
        return
    if any("/oneOf/" in each["$ref"] for each in pending if isinstance(each.get("$ref"), str)):
        return
    writer = _Writer(root, pending)
    while pending:
        writer.write(pending.pop())


class _Writer:
    """Writes the unions of one schema, whose definitions it adds to."""

    def __init__(self, root: Any, pending: list[dict[str, Any]]) -> None:
        """What is defined anew is put into `pending`."""
        self._root = root
        self._pending = pending
        self._defined: dict[tuple[str, str], str] = {}  # reference and required property -> reference

    def write(self, schema: dict[str, Any]) -> None:
        members = schema.get("oneOf")
        if not isinstance(members, list) or not members or "anyOf" in schema:
            return
        discriminator = schema.get("discriminator")
        tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        resolved = [resolve(member, self._root) for member in members]
        if isinstance(tag, str) and _are_distinct(_tags(member, tag) for member in resolved):
            members = [self._requiring(*pair, tag) for pair in zip(members, resolved, strict=True)]
        elif not _exclude_each_other(resolved):
            return
        schema["anyOf"] = members
        del schema["oneOf"]
        # llguidance knows it not, and takes no such keyword where references come back to where they stand.
        schema.pop("discriminator", None)

    def _requiring(self, member: dict[str, Any], resolved: dict[str, Any], tag: str) -> dict[str, Any]:
        """The member, requiring a property; not by `allOf`, which recursion makes too much for libraries."""
        if tag in _listed(resolved, "required"):
            return member
        if member is resolved:
            return self._with_required(resolved, tag)
        pair = (member["$ref"], tag)
        if pair not in self._defined:
            name = f"{member['$ref'].rpartition('/')[2]}_with_{tag}"
            self._defined[pair] = define(name, self._with_required(resolved, tag), self._root)
        return {**member, "$ref": self._defined[pair]}

    def _with_required(self, schema: dict[str, Any], tag: str) -> dict[str, Any]:
        written = {**schema, "required": [*_listed(schema, "required"), tag]}
        self._pending.append(written)
        return written


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
    names = _listed(schema, "required")
    return {name for name in names if isinstance(name, str)} if len(names) <= _MAX_NAMES else set()


def _listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _are_distinct(values: Iterator[list[tuple[str, Any]] | None]) -> bool:
    """Whether all are known, and none is in two of the lists."""
    seen: set[tuple[str, Any]] = set()
    for each in values:
        if each is None or not seen.isdisjoint(each):
            return False
        seen.update(each)
    return True
