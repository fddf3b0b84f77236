"""What patterns and grammars consist of, whichever signs a language has for it, and rules of it, written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenmill.grammar.base import BadGrammar
from tokenmill.grammar.characters import Ranges, is_text


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


def sequence(parts: list[Expression]) -> Expression:
    """The parts, one after the other; what is alone is itself."""
    return parts[0] if len(parts) == 1 else Sequence(parts)


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
