"""Grammars in llguidance's Lark.

The library has a lexer, which takes the longest match whatever the parser would need next. So a grammar
without recursion is written as one pattern, any other one character by character: both mean what GBNF means.
"""

from __future__ import annotations

from tokenmill.grammar.characters import Ranges, char_class
from tokenmill.grammar.expressions import (
    Characters,
    Choice,
    Expression,
    Reference,
    Repetition,
    RuleWriter,
    Sequence,
    count,
    no_deeper_than_python,
)
from tokenmill.grammar.gbnf import read_rules

# Longer patterns are written rule by rule instead; a chain of rules can double with every link.
_MAX_PATTERN = 50_000


def lark_of(text: str) -> str:
    """A grammar in GBNF, in Lark. Raises `BadGrammar` with the line of a mistake."""
    rules = read_rules(text)
    with no_deeper_than_python():
        pattern = _Pattern(rules).write()
        return _write_rules(rules) if pattern is None else f"start: /{pattern}/"


def _write_rules(rules: dict[str, Expression]) -> str:
    names = {name: f"rule_{index}" for index, name in enumerate(rules)}
    writer = RuleWriter(names, _class, repeated=_class, has_literals=False)
    lines = [f"{names[name]}: {writer.write(rule)}" for name, rule in rules.items()]
    return "\n".join([f"start: {names['root']}", *lines])


def _class(ranges: Ranges) -> str:
    return f"/{char_class(ranges)}/"


class _Pattern:
    """The whole grammar as one regular expression, if it has no recursion and stays short."""

    def __init__(self, rules: dict[str, Expression]) -> None:
        self._rules = rules
        self._written: dict[str, str | None] = {}

    def write(self) -> str | None:
        return self._rule("root")

    def _rule(self, name: str) -> str | None:
        if name not in self._written:
            self._written[name] = None  # what comes back here is recursive
            self._written[name] = self._expression(self._rules[name])
        return self._written[name]

    def _expression(self, expression: Expression) -> str | None:
        match expression:
            case Characters(ranges):
                return char_class(ranges)
            case Reference(name):
                return self._rule(name)
            case Sequence(parts):
                return self._joined(parts, "")
            case Choice(options):
                return self._joined(options, "|")
            case Repetition(body, low, high):
                inside = self._expression(body)
                return None if inside is None else f"(?:{inside}){count(low, high)}"

    def _joined(self, parts: list[Expression], sign: str) -> str | None:
        written: list[str] = []
        length = 0
        for part in parts:
            each = self._expression(part)
            if each is None or (length := length + len(each)) > _MAX_PATTERN:
                return None
            written.append(each)
        return f"(?:{sign.join(written)})"
