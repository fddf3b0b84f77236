"""Objects of a JSON schema whose names are an enumeration, as pydantic writes `dict[Color, int]`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenmill.grammar.references import define, has_definitions, resolve

_VALUES = ("enum", "const")


def write_as_properties(schemas: Iterable[dict[str, Any]], root: Any) -> None:
    """Turn `propertyNames` of schemas within `root`, in place, into `properties` without others beside them.

    Only where the names are texts that are listed, and none has a pattern.
    """
    if not has_definitions(root):
        return
    for schema in schemas:
        names = _listed(resolve(schema.get("propertyNames"), root))
        properties = schema.get("properties", {})
        if names is not None and isinstance(properties, dict) and "patternProperties" not in schema:
            del schema["propertyNames"]
            others = _named(schema.get("additionalProperties", True), root)
            found = {name: properties.get(name, others) for name in names}
            schema["properties"] = {name: value for name, value in found.items() if value is not False}
            schema["additionalProperties"] = False


def _listed(names: Any) -> list[str] | None:
    """The texts that a schema lists; None if it says anything else."""
    if not isinstance(names, dict) or len([key for key in _VALUES if key in names]) != 1:
        return None
    if names.keys() - {*_VALUES, "type", "title", "description"} or names.get("type", "string") != "string":
        return None
    values = [names["const"]] if "const" in names else names["enum"]
    return values if isinstance(values, list) and all(isinstance(each, str) for each in values) else None


def _named(schema: Any, root: dict[str, Any]) -> Any:
    """A schema that may stand in many places: objects are defined once."""
    return {"$ref": define("value", schema, root)} if isinstance(schema, dict) else schema
