"""References within a JSON schema, and definitions added to it."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

NOTES = {"title", "description", "default"}  # keywords that say nothing about a value
_MAX_REFERENCES = 16


def has_definitions(root: Any) -> bool:
    """Whether `define` can add to this schema."""
    return isinstance(root, dict) and isinstance(root.get("$defs", {}), dict)


def resolve(schema: Any, root: Any) -> Any:
    """What a schema that is nothing but a reference refers to; others as they are."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema or schema.keys() - NOTES != {"$ref"}:
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


def define(name: str, schema: Any, root: dict[str, Any]) -> str:
    """Add a definition under this name, or a similar one that is free; gives the reference to it."""
    definitions: dict[str, Any] = root.setdefault("$defs", {})
    name = re.sub("[^A-Za-z0-9_]", "_", name)  # other characters may mean something in a reference
    if name in definitions:
        name += f"_{len(definitions)}"
    while name in definitions:
        name += "_"
    definitions[name] = schema
    return f"#/$defs/{name}"
