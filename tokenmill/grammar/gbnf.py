"""Grammars in GBNF (`root ::= "a" digit*`), read; lark.py and ebnf.py write them for the libraries."""

from __future__ import annotations

import re

from tokenmill.grammar.base import BadGrammar
from tokenmill.grammar.characters import LAST, Ranges, complement, merge
from tokenmill.grammar.expressions import (
    Characters,
    Choice,
    Expression,
    Reference,
    Repetition,
    Sequence,
    choice,
    no_deeper_than_python,
    references,
    repetition,
    sequence,
)
from tokenmill.grammar.recursion import useful

# Characters and references of all rules, with counted repetitions written out.
_MAX_SIZE = 20_000
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_RULE = re.compile(r"[A-Za-z0-9_.-]+[ \t]*::=")
_SPACE = re.compile(r"(?:\s+|#[^\n]*)*")
_COUNT = re.compile(r"\{\s*(\d{0,9})\s*(,?)\s*(\d{0,9})\s*\}")
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|U([0-9a-fA-F]{8})|(.))"
)
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_ESCAPED_AS_ITSELF = set("\"'\\[]-^/?.*+(){}|$")


def read_rules(text: str) -> dict[str, Expression]:
    """The rules by name that `root` needs, and itself. Raises `BadGrammar` with the line of a mistake."""
    with no_deeper_than_python():
        rules = _Reader(text).rules()
        _check_references(rules)
        rules = useful(rules)
    if not rules:
        raise BadGrammar("no output can follow it: what `root` stands for has no end")
    return rules


def _check_references(rules: dict[str, Expression]) -> None:
    if "root" not in rules:
        raise BadGrammar("it has no rule `root`")
    for name, rule in rules.items():
        for used in references(rule):
            if used not in rules:
                raise BadGrammar(f"rule {name!r} uses {used!r}, which no rule defines")


def _size(expression: Expression) -> int:
    match expression:
        case Sequence(parts) | Choice(parts):
            return 1 + sum(map(_size, parts))
        case Repetition(body, low, high):
            return max(1, low, high or 0) * _size(body)
        case _:
            return 1


class _Reader:
    """Reads rules from a text, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, Expression]:
        found: dict[str, Expression] = {}
        size = 0
        self._skip(_SPACE)
        while self._at < len(self._text):
            if not _RULE.match(self._text, self._at):
                raise self._error("expected `name ::= ...`")
            name = self._take(_NAME)
            if name in found:
                raise self._error(f"rule {name!r} is there twice")
            self._skip(re.compile(r"[ \t]*::="))
            found[name] = self._choice()
            if (size := size + _size(found[name])) > _MAX_SIZE:
                raise self._error(
                    f"the grammar has {size:,} parts up to here with its repetitions written out, the limit "
                    f"is {_MAX_SIZE:,}; use smaller counts, * or +, or fewer rules"
                )
        return found

    def _choice(self) -> Expression:
        options = [self._sequence()]
        while self._next("|"):
            options.append(self._sequence())
        return choice(options)

    def _sequence(self) -> Expression:
        """Parts up to `|`, `)`, the next rule or the end."""
        parts: list[Expression] = []
        while True:
            self._skip(_SPACE)
            if self._at == len(self._text) or self._text[self._at] in "|)":
                break
            if _RULE.match(self._text, self._at):
                break
            parts.append(self._repeated(self._part()))
        return sequence(parts)

    def _part(self) -> Expression:
        sign = self._text[self._at]
        if sign == '"':
            return self._literal()
        if sign == "[":
            return self._class()
        if self._next("."):
            return Characters(complement([(10, 10)]))
        if self._next("("):
            inside = self._choice()
            if not self._next(")"):
                raise self._error("expected `)`")
            return inside
        if not _NAME.match(self._text, self._at):
            raise self._error(f"unexpected {sign!r}")
        return Reference(self._take(_NAME))

    def _repeated(self, part: Expression) -> Expression:
        for sign, low, high in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._text.startswith(sign, self._at):
                self._at += 1
                return self._repeated(repetition(part, low, high))
        if not self._text.startswith("{", self._at):
            return part
        count = _COUNT.match(self._text, self._at)
        if count is None or not (count[1] or count[3]):
            raise self._error("expected {count}, {least,} or {least,most}")
        self._at = count.end()
        low = int(count[1] or 0)
        high = (int(count[3]) if count[3] else None) if count[2] else low
        if high is not None and high < low:
            raise self._error(f"a repetition counts from {low} to {high}")
        return self._repeated(repetition(part, low, high))

    def _literal(self) -> Expression:
        self._at += 1
        codes: list[int] = []
        while not self._text.startswith('"', self._at):
            codes.append(self._character())
        self._at += 1
        return Sequence([Characters([(code, code)]) for code in codes])

    def _class(self) -> Expression:
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: Ranges = []
        while not self._text.startswith("]", self._at):
            low = high = self._character()
            if self._text.startswith("-", self._at) and not self._text.startswith("]", self._at + 1):
                self._at += 1
                high = self._character()
                if high < low:
                    raise self._error("a range of characters runs backwards")
            ranges.append((low, high))
        self._at += 1
        return Characters(complement(merge(ranges)) if negated else merge(ranges))

    def _character(self) -> int:
        if self._at >= len(self._text) or self._text[self._at] == "\n":
            raise self._error("a string or class has no end")
        if self._text[self._at] != "\\":
            self._at += 1
            return ord(self._text[self._at - 1])
        escape = _ESCAPE.match(self._text, self._at)
        if escape is None:
            raise self._error("a backslash stands alone")
        number = escape[1] or escape[2] or escape[3] or escape[4]
        plain = escape[5]
        if number is None and plain not in _PLAIN_ESCAPES and plain not in _ESCAPED_AS_ITSELF:
            raise self._error(f"unknown escape \\{plain}")
        code = int(number, 16) if number else ord(_PLAIN_ESCAPES.get(plain, plain))
        if code > LAST:
            raise self._error("there is no such character")
        self._at = escape.end()
        return code

    def _next(self, sign: str) -> bool:
        self._skip(_SPACE)
        found = self._text.startswith(sign, self._at)
        self._at += len(sign) * found
        return found

    def _skip(self, pattern: re.Pattern[str]) -> None:
        if (match := pattern.match(self._text, self._at)) is not None:
            self._at = match.end()

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return match[0]

    def _error(self, what: str) -> BadGrammar:
        line = self._text.count("\n", 0, self._at) + 1
        return BadGrammar(f"line {line}: {what}")
