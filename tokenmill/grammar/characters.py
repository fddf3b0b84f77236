"""Sets of characters as ranges of code points, and how they are written in a pattern."""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.grammar.base import BadGrammar

Ranges = list[tuple[int, int]]  # code points, both ends included, in order and apart

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The union of ranges in any order."""
    merged: Ranges = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def complement(ranges: Ranges) -> Ranges:
    """Every character that is not in the ranges."""
    gaps: Ranges = []
    start = 0
    for low, high in ranges:
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    return [*gaps, (start, LAST)] if start <= LAST else gaps


def char_class(ranges: Ranges) -> str:
    """The set as a class; half surrogates are no text and never in it."""
    lower = [(low, min(high, _SURROGATES[0] - 1)) for low, high in ranges if low < _SURROGATES[0]]
    upper = [(max(low, _SURROGATES[1] + 1), high) for low, high in ranges if high > _SURROGATES[1]]
    parts = merge([*lower, *upper])
    if not parts:
        raise BadGrammar("a class of the pattern is empty, so no output can match it")
    if len(parts) == 1 and parts[0][0] == parts[0][1] and chr(parts[0][0]).isalnum() and parts[0][0] < 128:
        return chr(parts[0][0])
    return (
        "[" + "".join(_point(low) + (f"-{_point(high)}" if high > low else "") for low, high in parts) + "]"
    )


def _point(code: int) -> str:
    character = chr(code)
    return character if code < 128 and character.isalnum() else f"\\u{{{code:x}}}"
