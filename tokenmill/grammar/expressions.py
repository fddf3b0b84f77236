"""What patterns and grammars consist of, whichever signs a language has for it, and rules of it, written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

from tokenmill.grammar.base import BadGrammar
from tokenmill.grammar.characters import Ranges, has_text, is_text


@dataclass(frozen=True, slots=True)
class Characters:
    """One character out of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Reference:
    """Another rule; or `^` and `$`, in a pattern that is searched for."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One part after the other."""

    parts: list[Expression]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several."""

    options: list[Expression]


@dataclass(frozen=True, slots=True)
class Repetition:
    """From `low` to `high` times; None: without end."""

    body: Expression
    low: int
    high: int | None


Expression = Characters | Reference | Sequence | Choice | Repetition
NOTHING = Characters([])  # no text matches it


def sequence(parts: list[Expression]) -> Expression:
    """The parts, one after the other; what is alone is itself, and one part without a text leaves none."""
    if none := next(filter(_has_no_text, parts), None):
        return none
    return parts[0] if len(parts) == 1 else Sequence(parts)


def choice(options: list[Expression]) -> Expression:
    """One of the options, without those that have no text unless all are such."""
    possible = [option for option in options if not _has_no_text(option)] or options[:1]
    return possible[0] if len(possible) == 1 else Choice(possible)


def repetition(body: Expression, low: int, high: int | None) -> Expression:
    """The body from `low` to `high` times, None: without end.

    What may be empty is not repeated without end, for a text would have endless readings then: of such a
    body its parts are repeated (star normal form; Brüggemann-Klein 1993).
    """
    if high == 0 or (low == 0 and _has_no_text(body)):
        return Sequence([])
    if (low, high) == (1, 1) or _has_no_text(body):
        return body
    if high is None and may_be_empty(body):
        parts = list(_repeated_parts(body))
        return Repetition(choice(parts), 0, None) if parts else Sequence([])
    return Repetition(body, low, high)


def _has_no_text(expression: Expression) -> bool:
    return isinstance(expression, Characters) and not has_text(expression.ranges)


def may_be_empty(expression: Expression, empty: Set[str] = frozenset()) -> bool:
    """Whether a text of it can have no character; `empty` names the rules that are known to be such."""
    return _has_one(expression, empty, lambda _: False)


def has_end(expression: Expression, ended: Set[str]) -> bool:
    """Whether any text is all of it; `ended` names the rules of which some are."""
    return _has_one(expression, ended, has_text)


def _has_one(expression: Expression, rules: Set[str], is_one: Callable[[Ranges], bool]) -> bool:
    """Whether an expression has a text of some kind, given the rules and the classes that have one."""
    match expression:
        case Characters(ranges):
            return is_one(ranges)
        case Reference(name):
            return name in rules
        case Sequence(parts):
            return all(_has_one(part, rules, is_one) for part in parts)
        case Choice(options):
            return any(_has_one(option, rules, is_one) for option in options)
        case Repetition(body, low):
            return low == 0 or _has_one(body, rules, is_one)


def references(expression: Expression) -> set[str]:
    """The names of the rules that it uses."""
    match expression:
        case Reference(name):
            return {name}
        case Sequence(parts) | Choice(parts):
            return {name for part in parts for name in references(part)}
        case Repetition(body):
            return references(body)
        case Characters():
            return set()


def _repeated_parts(expression: Expression) -> Iterator[Expression]:
    """What gives the same texts if one of it comes again and again; none of it may be empty."""
    match expression:
        case Choice(parts):
            for part in parts:
                yield from _repeated_parts(part)
        case Sequence(parts) if may_be_empty(expression):
            for part in parts:
                yield from _repeated_parts(part)
        case Repetition(body, low) if low == 0 or may_be_empty(body):
            yield from _repeated_parts(body)
        case _:
            yield expression


def count(low: int, high: int | None) -> str:
    """How often something is there, as all the languages write it."""
    return {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(
        (low, high), f"{{{low},{'' if high is None else high}}}"
    )


@contextmanager
def no_deeper_than_python() -> Iterator[None]:
    """A block that goes through an expression: what is nested deeper than calls can be is a `BadGrammar`."""
    try:
        yield
    except RecursionError:
        raise BadGrammar(
            "it is nested too deeply; use fewer parentheses or shorter chains of rules"
        ) from None


class RuleWriter:
    """Writes rule by rule, with new names, character by character or with literals in one piece."""

    def __init__(
        self,
        names: dict[str, str],
        characters: Callable[[Ranges], str],
        *,
        repeated: Callable[[Ranges], str],
        has_literals: bool,
    ) -> None:
        """`characters` writes a class that stands by itself, `repeated` one with a count behind it."""
        self._names = names
        self._characters = characters
        self._repeated = repeated
        self._has_literals = has_literals

    def write(self, expression: Expression) -> str:
        """The right side of a rule."""
        match expression:
            case Characters(ranges):
                return self._characters(ranges)
            case Reference(name):
                return self._names[name]
            case Sequence(parts) if self._has_literals and (codes := _literal(parts)):
                return '"' + "".join(f"\\U{code:08x}" for code in codes) + '"'
            case Sequence(parts):
                return " ".join(f"({self.write(part)})" for part in parts) if parts else '""'
            case Choice(options):
                return " | ".join(map(self.write, options))
            case Repetition(Characters(ranges), low, high):
                return f"({self._repeated(ranges)}){count(low, high)}"
            case Repetition(body, low, high):
                return f"({self.write(body)}){count(low, high)}"


def _literal(parts: list[Expression]) -> list[int]:
    """The characters of a literal; empty if the parts are anything else."""
    codes: list[int] = []
    for part in parts:
        match part:
            case Characters([(low, high)]) if low == high and is_text(low):
                codes.append(low)
            case _:
                return []
    return codes
