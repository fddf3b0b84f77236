"""Regular expressions of Python, read; and rewritten in the few signs that every grammar library reads alike.

What is written is a pattern for the whole output: literals, classes of code points, groups, `|` and counted
repetitions. Classes are computed by Python itself, so that `re.fullmatch` agrees with what a library allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache, lru_cache
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from tokenmill.grammar.base import BadGrammar
from tokenmill.grammar.characters import LAST, Ranges, char_class, complement, merge
from tokenmill.grammar.counts import with_small_counts
from tokenmill.grammar.expressions import (
    Characters,
    Choice,
    Expression,
    Reference,
    Repetition,
    Sequence,
    choice,
    count,
    no_deeper_than_python,
    repetition,
    sequence,
)

# Characters of a written pattern; `\w` alone has 11,000, for the letters of all scripts.
MAX_LENGTH = 8_000_000
# Flags of ours, beside Python's: no character is one that JSON escapes; or anchors are written, for a pattern
# that is searched for. With either, classes have only what JavaScript puts there, too.
_PLAIN, _SEARCHED = 1 << 28, 1 << 29
_BOTH = _PLAIN | _SEARCHED
_ALPHABETS = re.ASCII | re.UNICODE  # of these flags, one takes the other's place
_NEWLINE: Ranges = [(10, 10)]
_LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]  # of JavaScript
_ESCAPED: Ranges = [(0, 31), (34, 34), (92, 92)]  # control characters, the quote, the backslash
_QUOTES: Ranges = [(34, 34), (92, 92)]
_RARE: Ranges = [(0, 7), (11, 11), (14, 31)]  # control characters that JSON has no letter for
# What JavaScript calls so.
_JAVASCRIPT: dict[str, Ranges] = {
    "DIGIT": [(48, 57)],
    "WORD": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "SPACE": [
        *((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
        *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ],
}
_ENDLESS = _constants.MAXREPEAT
_REFUSED = {
    _constants.ASSERT: "look-ahead and look-behind",
    _constants.ASSERT_NOT: "look-ahead and look-behind",
    _constants.GROUPREF: "references to groups",
    _constants.GROUPREF_EXISTS: "references to groups",
    _constants.POSSESSIVE_REPEAT: "possessive repetitions",
    _constants.ATOMIC_GROUP: "atomic groups",
}
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_STARTS = (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
_ENDS = (_constants.AT_END, _constants.AT_END_STRING)


def read_pattern(pattern: str) -> Expression:
    """What a whole output is to match. Raises `BadGrammar` for what has no such form, or `re.error`."""
    return _read(pattern, 0)


def translate(pattern: str) -> str:
    """The same as a pattern of few signs, which all libraries read alike."""
    with no_deeper_than_python():
        return _written(read_pattern(pattern))


def translate_searched(pattern: str) -> str:
    """The same for a pattern of a JSON schema, which may be found anywhere in a text.

    Its classes have what both JSON Schema's dialect, JavaScript's, and Python's put there: whoever checks
    an output reads the pattern in one of them. Those without a quote or a backslash have no rare control
    characters either.
    """
    return _written(_read(pattern, _SEARCHED))


def translate_plain(pattern: str) -> str:
    """The same for a whole string of JSON, without characters that JSON writes as escapes, for xgrammar."""
    return _written(with_small_counts(_read(pattern, _PLAIN), lambda group: group))


def literals(pattern: str) -> list[int]:
    """The characters that a pattern names one by one as what an output may have there."""
    return list(_literals(_parser.parse(pattern)))


def _literals(tree: Any) -> Iterator[int]:
    for operation, argument in tree:
        if operation is _constants.LITERAL:
            yield argument
        elif operation is _constants.IN and argument[0][0] is not _constants.NEGATE:
            yield from _literals(argument)
        elif operation is _constants.BRANCH:
            for each in argument[1]:
                yield from _literals(each)
        elif operation is _constants.SUBPATTERN or operation in _REPEATS:
            yield from _literals(argument[-1])


# ── reading ───────────────────────────────────────────────────────────────────────────────────


def _read(pattern: str, flags: int) -> Expression:
    tree = _parser.parse(pattern)
    return _sequence(tree, tree.state.flags | flags, first=True, last=True)


def _sequence(tree: Any, flags: int, *, first: bool, last: bool) -> Expression:
    """`first` and `last` say whether the output begins and ends with it, so that anchors hold there."""
    items = list(tree)
    # What consumes nothing (an anchor) does not move the beginning or the end.
    consumes = [operation is not _constants.AT for operation, _ in items]
    return sequence(
        [
            _item(
                operation,
                argument,
                flags,
                first=first and not any(consumes[:at]),
                last=last and not any(consumes[at + 1 :]),
            )
            for at, (operation, argument) in enumerate(items)
        ]
    )


def _item(operation: Any, argument: Any, flags: int, *, first: bool, last: bool) -> Expression:
    if operation in _REFUSED:
        raise BadGrammar(f"{_REFUSED[operation]} cannot be followed token by token; write it without them")
    if operation is _constants.AT:
        return _anchor(argument, flags, first=first, last=last)
    if operation is _constants.BRANCH:
        return choice([_sequence(each, flags, first=first, last=last) for each in argument[1]])
    if operation is _constants.SUBPATTERN:
        _, added, removed, body = argument
        kept = flags & ~_ALPHABETS if added & _ALPHABETS else flags
        return _sequence(body, (kept | added) & ~removed, first=first, last=last)
    if operation in _REPEATS:
        low, high, body = argument
        once = high == 1
        inside = _sequence(body, flags, first=first and once, last=last and once)
        return repetition(inside, low, None if high is _ENDLESS else high)
    return _one(operation, tuple(argument) if isinstance(argument, list) else argument, flags)


@lru_cache(maxsize=256)
def _one(operation: Any, argument: Hashable, flags: int) -> Characters:
    """One character of a pattern; what has many ranges takes long to find, and often comes again."""
    ranges = _characters(operation, argument, flags)
    if flags & _PLAIN:
        ranges = _minus(ranges, _ESCAPED)
    elif flags & _SEARCHED and _minus(_QUOTES, ranges) and any(low > 31 for low, _ in _minus(ranges, _RARE)):
        # Where one of the rare ones may be, llguidance lets all escapes through, those of quotes, too.
        ranges = _minus(ranges, _RARE)
    return Characters(ranges)


def _anchor(where: Any, flags: int, *, first: bool, last: bool) -> Expression:
    if (where in _STARTS and first) or (where in _ENDS and last):
        return Reference("^" if where in _STARTS else "$") if flags & _SEARCHED else Sequence([])
    raise BadGrammar(
        "anchors inside the pattern (^, $, \\b) cannot be followed; the whole output matches the pattern, "
        "so ^ and $ are not needed"
    )


# ── writing ───────────────────────────────────────────────────────────────────────────────────


def _written(expression: Expression) -> str:
    match expression:
        case Characters(ranges):
            return char_class(ranges)
        case Reference(name):
            return name
        case Sequence(parts):
            return _joined(map(_written, parts))
        case Choice(options):
            return f"(?:{_joined(map(_written, options), '|')})"
        case Repetition(body, low, high):
            return _repeated(body, low, high)


def _repeated(body: Expression, low: int, high: int | None) -> str:
    """xgrammar misreads `?` behind some groups, and `{0,1}` behind some characters."""
    inside = _written(body)
    if isinstance(body, Characters):
        return inside + count(low, high)
    group = inside if isinstance(body, Choice) else f"(?:{inside})"
    return group + ("{0,1}" if (low, high) == (0, 1) else count(low, high))


def _joined(parts: Iterable[str], sign: str = "") -> str:
    written: list[str] = []
    length = 0
    for part in parts:
        length += len(part)
        check_length(length)
        written.append(part)
    return sign.join(written)


def check_length(length: int) -> None:
    """Raise for so many characters of a written pattern that a library would take too long to read them."""
    if length > MAX_LENGTH:
        raise BadGrammar(
            f"it has more than {MAX_LENGTH:,} characters with its classes written out; use a counted "
            "repetition like \\w{100}, or (?a) for classes of ASCII characters only"
        )


# ── sets of code points ───────────────────────────────────────────────────────────────────────


def _characters(operation: Any, argument: Any, flags: int) -> Ranges:
    """What one character of a pattern may be."""
    if operation is _constants.ANY:
        return [(0, LAST)] if flags & re.DOTALL else complement(_LINE_ENDS if flags & _BOTH else _NEWLINE)
    if operation is _constants.LITERAL:
        return _with_cases([(argument, argument)], flags)
    if operation is _constants.NOT_LITERAL:
        return _without([(argument, argument)], flags)
    assert operation is _constants.IN, operation
    negated = argument[0][0] is _constants.NEGATE
    parts = [_member(kind, value, flags, negated=negated) for kind, value in argument[negated:]]
    ranges = merge(each for part in parts for each in part)
    return _without(ranges, flags) if negated else _with_cases(ranges, flags)


def _member(operation: Any, argument: Any, flags: int, *, negated: bool) -> Ranges:
    if operation is _constants.CATEGORY:
        name = str(argument).rpartition("CATEGORY_")[2]
        if flags & _BOTH:
            return _category_of_both(name, bool(flags & re.ASCII), negated=negated)
        # Who asks for digits wants 0 to 9, not those of sixty other scripts, which `\d` matches, too.
        plain = name == "DIGIT" and not negated
        return _category(name, plain or bool(flags & re.ASCII))
    return [(argument, argument)] if operation is _constants.LITERAL else [argument]


@cache
def _category(name: str, ascii_only: bool) -> Ranges:
    """\\d, \\w, \\s and their opposites, as this Python understands them."""
    if name.startswith("NOT_"):
        return complement(_category(name.removeprefix("NOT_"), ascii_only))
    tests: dict[str, Callable[[str], bool]] = {
        "DIGIT": str.isdecimal,
        "SPACE": str.isspace,
        "WORD": lambda character: character.isalnum() or character == "_",
    }
    test = tests[name]
    # The four separators below the space are white space for `str`, but not for ASCII patterns.
    hidden = range(0x1C, 0x20) if ascii_only and name == "SPACE" else ()
    last = 127 if ascii_only else LAST
    return merge((code, code) for code in range(last + 1) if test(chr(code)) and code not in hidden)


@cache
def _category_of_both(name: str, ascii_only: bool, *, negated: bool) -> Ranges:
    """The same for a member of a class, so that the class has only what both dialects put there."""
    plain = name.removeprefix("NOT_")
    python, javascript = _category(plain, ascii_only), _JAVASCRIPT[plain]
    is_excluded = (name != plain) != negated
    ranges = merge([*python, *javascript]) if is_excluded else _minus(python, complement(javascript))
    return complement(ranges) if name != plain else ranges


def _minus(ranges: Ranges, others: Ranges) -> Ranges:
    return complement(merge([*complement(ranges), *others]))


def _with_cases(ranges: Ranges, flags: int) -> Ranges:
    """With the other case of each letter, where case does not count: of single letters, and of a to z."""
    if not flags & re.IGNORECASE:
        return ranges
    others = [
        ord(other)
        for low, high in ranges
        for code in (range(low, high + 1) if high - low < 26 else range(low, min(high, 127) + 1))
        for other in {chr(code).lower(), chr(code).upper()}
        if len(other) == 1 and (not flags & re.ASCII or (code < 128 and ord(other) < 128))
    ]
    return merge([*ranges, *((code, code) for code in others)])


def _without(ranges: Ranges, flags: int) -> Ranges:
    """What is not in the ranges; where case does not count, of ASCII only, by Python itself."""
    if not flags & re.IGNORECASE:
        return complement(ranges)
    members = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
    pattern = re.compile(f"[{members}]", flags & (re.IGNORECASE | re.ASCII))
    return merge((code, code) for code in range(128) if not pattern.fullmatch(chr(code)))
