"""Objects of a JSON schema whose names are an enumeration, as pydantic writes `dict[Color, int]`."""

from __future__ import annotations

from typing import Any

from tokenmill.grammar.references import NOTES, define, has_definitions, resolve

_VALUES = ("enum", "const")
# Where a reference may lead to what is moved.
_MOVED = ("/propertyNames", "/additionalProperties", "/properties/")


def write_as_properties(schemas: list[dict[str, Any]], root: Any) -> None:
    """Turn `propertyNames` of schemas within `root`, in place, into `properties` without others beside them.

    Only where the names are texts that are listed, and none has a pattern; where they may be any text, the
    keyword is taken away. Nothing is changed if a reference may lead to what would be moved.
    """
    if not has_definitions(root) or any(_leads_to_moved(schema.get("$ref")) for schema in schemas):
        return
    for schema in schemas:
        if _is_open(schema.get("propertyNames")):
            del schema["propertyNames"]
        names = _listed(resolve(schema.get("propertyNames"), root))
        properties = schema.get("properties", {})
        if names is not None and isinstance(properties, dict) and "patternProperties" not in schema:
            del schema["propertyNames"]
            others = _named(schema.get("additionalProperties", True), root)
            found = {name: properties.get(name, others) for name in names}
            schema["properties"] = {name: value for name, value in found.items() if value is not False}
            schema["additionalProperties"] = False


def _leads_to_moved(reference: Any) -> bool:
    return isinstance(reference, str) and any(step in reference for step in _MOVED)


def _is_open(names: Any) -> bool:
    """Whether a schema allows any text."""
    if not isinstance(names, dict):
        return names is True
    return names.get("type", "string") == "string" and not names.keys() - NOTES - {"type"}


def _listed(names: Any) -> list[str] | None:
    """The texts that a schema lists; None if it says anything else."""
    if not isinstance(names, dict) or len([key for key in _VALUES if key in names]) != 1:
        return None
    if names.keys() - NOTES - {*_VALUES, "type"} or names.get("type", "string") != "string":
        return None
    values = [names["const"]] if "const" in names else names["enum"]
    return values if isinstance(values, list) and all(isinstance(each, str) for each in values) else None


def _named(schema: Any, root: dict[str, Any]) -> Any:
    """A schema that may stand in many places: objects are defined once."""
    return {"$ref": define("value", schema, root)} if isinstance(schema, dict) else schema
