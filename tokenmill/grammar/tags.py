"""Structural tags: free text in which certain beginnings open a constrained part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill.grammar.base import BadGrammar
from tokenmill.grammar.schemas import normalize, read_json

_CONTENT = ("type", "json_schema", "style")
# Most white space between two parts of a JSON text; deep nesting with wide indents fits.
MAX_WHITESPACE = 32


@dataclass(frozen=True, slots=True)
class Tag:
    """A constrained part: after `trigger` in free text come the rest of `begin`, JSON, and `end`."""

    trigger: str
    begin: str
    schema: Any
    end: str


def read_tags(text: str) -> list[Tag]:
    """The tags of SGLang's first form, {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, or of
    the newer {"type": "structural_tag", "format": ...} if it says the same. Raises `BadGrammar`."""
    document = read_json(text)
    name = "structures"
    if name not in document:
        name, document = "tags", _first_form(document.get("format"))
    structures, triggers = document["structures"], document["triggers"]
    if not isinstance(structures, list) or not structures:
        raise BadGrammar("'structures' must be a list of at least one {'begin', 'schema', 'end'}")
    if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
        raise BadGrammar("'triggers' must be a list of strings that are not empty")
    return [_read_tag(f"{name}[{index}]", each, triggers) for index, each in enumerate(structures)]


def _first_form(form: Any) -> dict[str, Any]:
    """A `triggered_tags` with JSON schemas in SGLang's first form; xgrammar defines the newer one."""
    if not isinstance(form, dict) or form.get("type") != "triggered_tags":
        raise BadGrammar(
            "llguidance follows a 'format' of type 'triggered_tags' alone; for others use xgrammar"
        )
    if extra := [key for key in form if key not in ("type", "triggers", "tags") and form[key]]:
        raise BadGrammar(f"llguidance does not follow {extra[0]!r} of 'triggered_tags'; use xgrammar")
    tags = form.get("tags")
    if not isinstance(tags, list) or not tags:
        raise BadGrammar("'tags' must be a list of at least one {'begin', 'content', 'end'}")
    structures = [_structure(index, tag) for index, tag in enumerate(tags)]
    return {"structures": structures, "triggers": form.get("triggers")}


def _structure(index: int, tag: Any) -> dict[str, Any]:
    content = tag.get("content") if isinstance(tag, dict) else None
    if not isinstance(content, dict) or content.get("type") != "json_schema" or "json_schema" not in content:
        raise BadGrammar(f"tags[{index}] must have a 'content' of type 'json_schema'; others need xgrammar")
    if extra := [key for key in content if key not in _CONTENT and content[key]]:
        raise BadGrammar(f"tags[{index}]: llguidance does not follow {extra[0]!r} of 'content'; use xgrammar")
    if content.get("style", "json") != "json":
        raise BadGrammar(f"tags[{index}]: llguidance writes schemas in the style 'json' alone; use xgrammar")
    return {**tag, "schema": content["json_schema"]}


def _read_tag(name: str, structure: Any, triggers: list[str]) -> Tag:
    if not isinstance(structure, dict):
        raise BadGrammar(f"{name} must be an object with 'begin', 'schema' and 'end'")
    begin, schema, end = (structure.get(key) for key in ("begin", "schema", "end"))
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict | bool):
        raise BadGrammar(f"{name} must have texts as 'begin' and 'end' and a JSON schema")
    # The shortest is complete first in the text, and then nothing but a tag may follow.
    trigger = min((each for each in triggers if begin.startswith(each)), key=len, default=None)
    if trigger is None:
        raise BadGrammar(f"{name} begins with {begin!r}, which no trigger opens")
    normalize(schema)
    return Tag(trigger, begin, schema, end)
