"""Repetitions without large counts, for xgrammar.

Beyond 128 times the library (0.2.8) allows tokens that it refuses then, or fails, and beyond 32 it takes
seconds to compile large classes.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.grammar.expressions import Choice, Expression, Repetition, Sequence, repetition

_MOST = 32
Group = Callable[[Expression], Expression]


def with_small_counts(expression: Expression, group: Group) -> Expression:
    """The same with groups of what is repeated often, and groups of groups.

    `group` gives what stands for a group, which may be the group. A text has as many readings as before.
    """
    match expression:
        case Sequence(parts):
            return Sequence([with_small_counts(part, group) for part in parts])
        case Choice(options):
            return Choice([with_small_counts(option, group) for option in options])
        case Repetition(body, low, high):
            return _repeated(with_small_counts(body, group), low, high, group)
        case _:
            return expression


def _repeated(body: Expression, low: int, high: int | None, group: Group) -> Expression:
    if max(low, high or 0) <= _MOST:
        return repetition(body, low, high)
    rest = repetition(body, 0, None) if high is None else _up_to(body, high - low, group)
    return Sequence([_times(body, low, group), rest])


def _times(body: Expression, times: int, group: Group) -> Expression:
    if times <= _MOST:
        return repetition(body, times, times)
    groups, rest = divmod(times, _MOST)
    grouped = group(repetition(body, _MOST, _MOST))
    return Sequence([_times(grouped, groups, group), repetition(body, rest, rest)])


def _up_to(body: Expression, most: int, group: Group) -> Expression:
    """At most so many times: all groups and up to the rest, or fewer groups and less than another one."""
    if most <= _MOST:
        return repetition(body, 0, most)
    groups, rest = divmod(most, _MOST)
    grouped = group(repetition(body, _MOST, _MOST))
    fewer = Sequence([_up_to(grouped, groups - 1, group), repetition(body, 0, _MOST - 1)])
    return Choice([fewer, Sequence([_times(grouped, groups, group), repetition(body, 0, rest)])])
