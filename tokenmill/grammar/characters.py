"""Sets of characters as ranges of code points, and how they are written in a pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

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
    """The set as a class of a pattern, or as the character that is its only one."""
    return _char_class(tuple(ranges))


@lru_cache(maxsize=256)  # some have hundreds of ranges, and stand in many places
def _char_class(ranges: tuple[tuple[int, int], ...]) -> str:
    parts = _texts(ranges)
    if len(parts) == 1 and parts[0][0] == parts[0][1] and _is_plain(parts[0][0]):
        return chr(parts[0][0])
    return _class(parts, lambda code: chr(code) if _is_plain(code) else f"\\u{{{code:x}}}")


def wide_class(ranges: Ranges) -> str:
    """The set as a class whose members are all written with eight digits."""
    return _wide_class(tuple(ranges))


@lru_cache(maxsize=256)
def _wide_class(ranges: tuple[tuple[int, int], ...]) -> str:
    return _class(_texts(ranges), lambda code: f"\\U{code:08x}")


def is_text(code: int) -> bool:
    """Whether it is a character, and not half a surrogate pair."""
    return not _SURROGATES[0] <= code <= _SURROGATES[1]


def has_text(ranges: Ranges) -> bool:
    """Whether any of them is a character."""
    return any(not (_SURROGATES[0] <= low and high <= _SURROGATES[1]) for low, high in ranges)


def _texts(ranges: tuple[tuple[int, int], ...]) -> Ranges:
    """Without half surrogates, which are no text; raises `BadGrammar` if nothing is left."""
    lower = [(low, min(high, _SURROGATES[0] - 1)) for low, high in ranges if low < _SURROGATES[0]]
    upper = [(max(low, _SURROGATES[1] + 1), high) for low, high in ranges if high > _SURROGATES[1]]
    parts = merge([*lower, *upper])
    if not parts:
        raise BadGrammar("a class of the pattern is empty, so no output can match it")
    return parts


def _class(ranges: Ranges, point: Callable[[int], str]) -> str:
    return "[" + "".join(point(low) + (f"-{point(high)}" if high > low else "") for low, high in ranges) + "]"


def _is_plain(code: int) -> bool:
    return code < 128 and chr(code).isalnum()
