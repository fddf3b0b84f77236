"""Structural tags in SGLang's first form: free text in which certain beginnings open a constrained part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill.grammar.base import BadGrammar
from tokenmill.grammar.schemas import normalize, read_json

# Most white space between two parts of a JSON text; deep nesting with wide indents fits.
MAX_WHITESPACE = 32


@dataclass(frozen=True, slots=True)
class Tag:
    """A constrained part: after `trigger` in free text come the rest of `begin`, JSON, and `end`."""

    trigger: str
    begin: str
    schema: Any
    end: str


def read_legacy(text: str) -> list[Tag]:
    """The tags of {"structures": [{"begin", "schema", "end"}], "triggers": [...]}. Raises `BadGrammar`."""
    document = read_json(text)
    if "structures" not in document:
        raise BadGrammar(
            "llguidance follows tags of the form {'structures': [...], 'triggers': [...]}; for 'format' use "
            "grammar_backend='xgrammar'"
        )
    structures, triggers = document["structures"], document["triggers"]
    if not isinstance(structures, list) or not structures:
        raise BadGrammar("'structures' must be a list of at least one {'begin', 'schema', 'end'}")
    if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
        raise BadGrammar("'triggers' must be a list of strings that are not empty")
    return [_read_tag(index, structure, triggers) for index, structure in enumerate(structures)]


def _read_tag(index: int, structure: Any, triggers: list[str]) -> Tag:
    if not isinstance(structure, dict):
        raise BadGrammar(f"structures[{index}] must be an object with 'begin', 'schema' and 'end'")
    begin, schema, end = (structure.get(key) for key in ("begin", "schema", "end"))
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict | bool):
        raise BadGrammar(
            f"structures[{index}] must have texts as 'begin' and 'end' and a JSON schema as 'schema'"
        )
    # The shortest is complete first in the text, and then nothing but a tag may follow.
    trigger = min((each for each in triggers if begin.startswith(each)), key=len, default=None)
    if trigger is None:
        raise BadGrammar(f"structures[{index}] begins with {begin!r}, which no trigger opens")
    normalize(schema)
    return Tag(trigger, begin, schema, end)
