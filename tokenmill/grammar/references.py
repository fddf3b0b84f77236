"""References within a JSON schema, and definitions added to it."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from tokenmill.grammar.base import BadGrammar

NOTES = {"title", "description", "default"}  # keywords that say nothing about a value
_MAX_REFERENCES = 16
_MOST_DIGITS = 10  # of a place in a list
# Of the whole text and of all that is referred to: libraries go through them by recursion (see stacks.py).
MAX_LEVELS = 5_000


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
        if isinstance(found, list) and step.isdecimal() and len(step) < _MOST_DIGITS:
            found = found[int(step)] if int(step) < len(found) else None
        elif isinstance(found, dict):
            found = found.get(step.replace("~1", "/").replace("~0", "~"))
        else:
            return None
    return found


def check_levels(root: Any, references: set[str]) -> None:
    """Raise `BadGrammar` for a schema with so many references that whoever follows them goes too deep.

    A path through the schema comes to each place that is referred to at most once before it is known.
    """
    levels: dict[int, int] = {}
    whole = _measure(root, levels)
    targets = [root if reference == "#" else _find(reference, root) for reference in references]
    # A target that is not found here may be anywhere.
    known = sum(levels[place] for place in {id(target) for target in targets} & levels.keys())
    most = whole + known + sum(whole for target in targets if id(target) not in levels)
    if most > MAX_LEVELS:
        raise BadGrammar(
            f"its references lead through up to {most:,} levels, the limit is {MAX_LEVELS:,}; use fewer or "
            "shorter chains of definitions"
        )


def _measure(value: Any, levels: dict[int, int]) -> int:
    """How deep a JSON value is nested; fills in the levels of each object and list within it, by `id`."""
    if not isinstance(value, dict | list):
        return 0
    parts = value.values() if isinstance(value, dict) else value
    levels[id(value)] = 1 + max((_measure(part, levels) for part in parts), default=0)
    return levels[id(value)]


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
