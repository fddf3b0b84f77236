"""Rules that are of no use, and those that come back to themselves with nothing beside: endless readings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Set

from tokenmill.grammar.expressions import (
    NOTHING,
    Choice,
    Expression,
    Reference,
    Repetition,
    Sequence,
    choice,
    has_end,
    may_be_empty,
    references,
    repetition,
    sequence,
)


def useful(rules: dict[str, Expression]) -> dict[str, Expression]:
    """The rules that `root` needs, without alternatives that need themselves for ever; none if `root` does.

    An output that has begun such an alternative would never come to its end.
    """
    ended = _rules_that(has_end, rules)
    needed = {"root"} & ended
    pending = list(needed)
    found: dict[str, Expression] = {}
    while pending:
        name = pending.pop()
        found[name] = _without_endless(rules[name], ended)
        others = references(found[name]) - needed
        needed |= others
        pending += sorted(others)
    return {name: found[name] for name in rules if name in found}


def _without_endless(expression: Expression, ended: Set[str]) -> Expression:
    match expression:
        case Reference(name) if name not in ended:
            return NOTHING
        case Sequence(parts):
            return sequence([_without_endless(part, ended) for part in parts])
        case Choice(options):
            return choice([_without_endless(option, ended) for option in options])
        case Repetition(body, low, high):
            return repetition(_without_endless(body, ended), low, high)
        case _:
            return expression


def find_cycle(rules: dict[str, Expression]) -> list[str]:
    """Names of rules of which each can stand for the next alone, and the last for the first; or none."""
    empty = _rules_that(may_be_empty, rules)
    following = {name: sorted(set(_alone(rule, empty))) for name, rule in rules.items()}
    done: set[str] = set()
    for start in rules:
        path: dict[str, Iterator[str]] = {}
        name: str | None = start
        while name is not None:
            if name in path:
                names = list(path)
                return names[names.index(name) :]
            if name not in done:
                path[name] = iter(following[name])
            name = _next(path, done)
    return []


def _next(path: dict[str, Iterator[str]], done: set[str]) -> str | None:
    """The rule to go to from the end of the path, which gets shorter where there is none."""
    while path:
        last = next(reversed(path))
        if (name := next(path[last], None)) is not None:
            return name
        del path[last]
        done.add(last)
    return None


def _rules_that(holds: Callable[[Expression, Set[str]], bool], rules: dict[str, Expression]) -> set[str]:
    """The rules of which something holds, given those of which it is known to hold."""
    users: dict[str, list[str]] = {}
    for name, rule in rules.items():
        for used in references(rule):
            users.setdefault(used, []).append(name)
    found: set[str] = set()
    pending = deque(rules)
    is_pending = set(rules)
    while pending:
        name = pending.popleft()
        is_pending.discard(name)
        if name in found or not holds(rules[name], found):
            continue
        found.add(name)
        again = [user for user in users.get(name, []) if user not in is_pending]
        pending.extend(again)
        is_pending.update(again)
    return found


def _alone(expression: Expression, empty: Set[str]) -> Iterator[str]:
    """References that may be all there is of an expression."""
    match expression:
        case Reference(name):
            yield name
        case Choice(options):
            for option in options:
                yield from _alone(option, empty)
        case Sequence(parts):
            full = [part for part in parts if not may_be_empty(part, empty)]
            for part in parts if not full else full if len(full) == 1 else []:
                yield from _alone(part, empty)
        case Repetition(body, low) if low <= 1 or may_be_empty(body, empty):
            yield from _alone(body, empty)
