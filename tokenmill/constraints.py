"""The texts that constrain an output, checked as soon as they are given: schemas, patterns, grammars, tags.

Owns what is accepted in place of text and the limits that can be judged at once. Whether a backend can follow
a text is found out when `grammar/` compiles it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from tokenmill.errors import InvalidGrammar, WrongType
from tokenmill.texts import plain_text

MAX_CONSTRAINT_BYTES = 512 * 1024
MAX_REGEX_BYTES = 64 * 1024
MAX_JSON_DEPTH = 128
# Characters of a pattern with its counted repetitions written out: `(ab{10}){5}` has 55.
MAX_REGEX_LENGTH = 50_000
# SGLang's word for "any JSON value".
_ANY_JSON = "$$ANY$$"
# What JSON values consist of in the end; asking each of them whether it is a `Mapping` would take longer.
_LEAVES = frozenset({str, int, float, bool, type(None)})
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)


def json_schema(name: str, value: Any) -> str | None:
    """A schema as JSON text without spaces; takes text, a dict, a bool or a pydantic model class.

    Empty text is no schema (None), `$$ANY$$` and `{}` allow any JSON value.
    """
    if isinstance(value, str):
        return _schema_text(name, value)
    if isinstance(value, type) and callable(getattr(value, "model_json_schema", None)):
        value = value.model_json_schema()  # type: ignore[attr-defined]
    if not isinstance(value, Mapping | bool):
        raise WrongType(
            f"{name} must be a JSON schema as text or dict, or a pydantic model class, "
            f"got {type(value).__name__}"
        )
    return _json_text(name, value)


@lru_cache(maxsize=16)  # thousands of rows come with the same text
def _schema_text(name: str, text: str) -> str | None:
    if not text.strip():
        return None
    return json_schema(name, {} if text.strip() == _ANY_JSON else _parse_json(name, text))


def regex(name: str, value: Any) -> str | None:
    """A regular expression in Python's syntax that the whole output must match; empty text is none (None)."""
    text = _text(name, value, MAX_REGEX_BYTES)
    if not text:
        return None
    try:
        length = _length(_parser.parse(text))
    except (re.error, OverflowError) as error:
        raise InvalidGrammar(f"{name} is no regular expression of Python: {error}") from None
    except RecursionError:
        raise InvalidGrammar(f"{name} is nested too deeply; use fewer parentheses") from None
    if length > MAX_REGEX_LENGTH:
        raise InvalidGrammar(
            f"{name} is {length} characters long with its repetitions written out, the limit is "
            f"{MAX_REGEX_LENGTH}; use smaller counts, * or +"
        )
    return text


def ebnf(name: str, value: Any) -> str | None:
    """A grammar in GBNF (`root ::= ...`); empty text is none (None)."""
    text = _text(name, value, MAX_CONSTRAINT_BYTES)
    if not text.strip():
        return None
    if not re.search(r"^[ \t]*root[ \t]*::=", text, re.MULTILINE):
        raise InvalidGrammar(f"{name} has no rule `root ::= ...`, where the output begins; add one")
    return text


def structural_tag(name: str, value: Any) -> str | None:
    """A structural tag as JSON text without spaces; takes text or a dict. Empty text is none (None)."""
    if isinstance(value, str):
        if not value.strip():
            return None
        value = _parse_json(name, value)
    if not isinstance(value, Mapping):
        raise WrongType(f"{name} must be a JSON object, as text or dict, got {type(value).__name__}")
    is_legacy = "structures" in value and "triggers" in value
    if not is_legacy and not (value.get("type") == "structural_tag" and "format" in value):
        raise InvalidGrammar(
            f"{name} must be {{'structures': [...], 'triggers': [...]}} or "
            f"{{'type': 'structural_tag', 'format': ...}}; its keys are {sorted(map(str, value))[:10]}"
        )
    return _json_text(name, value)


def _text(name: str, value: Any, limit: int) -> str:
    if not isinstance(value, str):
        raise WrongType(f"{name} must be a string, got {type(value).__name__}")
    _check_size(name, value, limit)
    return plain_text(value)


def _check_size(name: str, text: str, limit: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidGrammar(
            f"{name} has half a surrogate pair at character {error.start}; remove it"
        ) from None
    if size > limit:
        raise InvalidGrammar(f"{name} has {size:,} bytes, the limit is {limit:,}; make it smaller")


def _parse_json(name: str, text: str) -> Any:
    _check_size(name, text, MAX_CONSTRAINT_BYTES)
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as error:
        raise InvalidGrammar(f"{name} is not valid JSON: {error}") from None


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON value")


def _json_text(name: str, value: Any) -> str:
    _check_depth(name, value)
    try:
        text = _encode(value)
    except (TypeError, ValueError) as error:
        raise InvalidGrammar(f"{name} cannot be written as JSON: {error}") from None
    _check_size(name, text, MAX_CONSTRAINT_BYTES)
    return text


def _check_depth(name: str, value: Any) -> None:
    """Raise for deep nesting, and for containers that hold themselves, level by level."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner: list[Any] = []
        for item in level:
            if type(item) in _LEAVES:
                continue
            if isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        if not inner:
            return
        if len(inner) > MAX_CONSTRAINT_BYTES:
            raise InvalidGrammar(f"{name} has more than {MAX_CONSTRAINT_BYTES:,} values; make it smaller")
        level = inner
    raise _too_deep(name)


def _too_deep(name: str) -> InvalidGrammar:
    return InvalidGrammar(f"{name} is nested more than {MAX_JSON_DEPTH} levels deep; make it flatter")


def _length(tree: Any) -> int:
    """Characters of a parsed pattern with its counted repetitions written out."""
    total = 0
    for operation, argument in tree:
        if operation in _REPEATS:
            low, high, body = argument
            count = low if high is _constants.MAXREPEAT else high
            total += max(1, count) * _length(body)
        elif operation is _constants.BRANCH:
            total += sum(map(_length, argument[1]))
        elif operation is _constants.SUBPATTERN:
            total += _length(argument[-1])
        else:
            total += 1
    return total
