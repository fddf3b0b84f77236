"""Regular expressions of users: Python's dialect, said so that the library `regex` understands the same.

That library has time limits, which Python's own has not: a pattern may take longer than the world lasts.
"""

from __future__ import annotations

import math
import re

from tokenmill.errors import InvalidArgument

# A pattern's parts: escapes, sets, comments, groups without a way back, quantifiers; then single characters.
PART = re.compile(
    r"""(?P<escape>\\N\{[^}]*\}|\\.)
    | (?P<set>\[\^?\]?(?:\\.|[^]\\])*\])
    | (?P<comment>\(\?\#[^)]*\))
    | (?P<atomic>\(\?>)
    | (?P<group>\(\?)
    | (?P<quantifier>[*+?]|\{(?P<least>\d*)(?P<most>,\d*)?(?<!\{)\})(?P<manner>[?+]?)
    | (?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)
_BRACKET_IN_SET = re.compile(r"(\\.)|\[", re.DOTALL)
# Flags for a part of a pattern that say what a letter is; the library misses matches of parts that repeat.
_LETTERS_OF_A_PART = re.compile(r"[imsx]*[au][imsx]*(?:-[imsx]+)?:")
# Whoever repeats, writes out or walks through what is repeated.
_MOST_REPEATS = 100_000
_SECONDS = 0.25


def check_pattern(name: str, pattern: str) -> None:
    """Raise `InvalidArgument` for a pattern that the library cannot search for, or not as Python would."""
    parts = list(PART.finditer(pattern))
    if any(part["group"] and _LETTERS_OF_A_PART.match(pattern, part.end()) for part in parts):
        raise InvalidArgument(
            f"{name} {pattern!r} cannot be searched for: it has (?a:...) or (?u:...), flags for a part of "
            "it; write (?a) at its beginning, or name the characters in a set such as [a-z]"
        )
    least = [int(part["least"]) for part in parts if part["least"]]
    if math.prod(filter(None, least)) > _MOST_REPEATS:
        raise InvalidArgument(
            f"{name} {pattern!r} cannot be searched for: its counts of repeats multiply to more than "
            f"{_MOST_REPEATS}; lower them"
        )


def matches_nothing(name: str, pattern: str) -> bool:
    """Whether a valid pattern matches the empty text. Raises `InvalidArgument` if nobody can say soon."""
    import regex

    try:
        compiled = regex.compile(in_dialect(pattern), regex.VERSION0)
        return compiled.search("", timeout=_SECONDS) is not None
    except TimeoutError:
        raise InvalidArgument(f"{name} {pattern!r} takes too long even in an empty text") from None
    except (regex.error, RecursionError, OverflowError) as error:
        raise InvalidArgument(f"{name} {pattern!r} cannot be searched for: {error}") from None


def in_dialect(pattern: str) -> str:
    """The pattern, with braces and brackets escaped that mean more to the library than to Python."""
    return PART.sub(same, pattern)


def same(part: re.Match[str]) -> str:
    """One part of a pattern, in the dialect of the library."""
    if part["set"]:
        return "[" + _BRACKET_IN_SET.sub(lambda match: match[1] or r"\[", part[0][1:])
    return rf"\{part[0]}" if part["other"] in ("{", "}") else part[0]
