"""Where a growing text ends: the first stop string or stop pattern in it, and what may still become one.

Owns the search and what is held back; what a token adds to the text is the matter of `detokenizer.py`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from tokenmill.errors import InvalidArgument
from tokenmill.patterns import PART, check_pattern, in_dialect, same

# What searching for patterns may take of a request's thread: some seconds, and more for a long text.
_SECONDS = 0.25
_SECONDS_PER_CHARACTER = 0.001
# A search takes microseconds, so it keeps the interpreter's lock; one that takes longer gives it up.
_LOCKED_SECONDS = 0.005


class PatternTooSlow(Exception):
    """The search for the pattern (the argument) took longer than a request is given."""


class Stops:
    """Finds the first stop string or pattern in a growing text and holds back what may be the start of one.

    A match ends the text as soon as it is in the text so far. Of several the one that starts first counts,
    then the longest, then strings before patterns. The text ends before the match, or after it if `keep`.
    """

    def __init__(self, strings: Sequence[str], patterns: Sequence[str] = (), *, keep: bool) -> None:
        """Raises `InvalidArgument` for a pattern that cannot be searched for."""
        self._strings = tuple(strings)
        self._patterns = tuple(map(_Pattern.of, patterns))
        self._keep = keep
        self._starts = frozenset(string[0] for string in strings)
        self._longest = max(map(len, strings), default=0)
        # What is held back; patterns look at what stands before it, too, so with them the whole text.
        self._text = ""
        self._num_released = 0  # characters of `_text`
        self._seconds_spent = 0.0  # searching for patterns
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is sure to stay; sets `matched` when a stop is complete.

        Raises `PatternTooSlow` when patterns took more time than a text of this length is given.
        """
        if not text:
            return ""
        # A match starts in the text held back: whatever was released cannot be the start of one.
        self._text += text
        found = [*self._find_strings(), *self._find_patterns()]
        if found:
            start, length, self.matched = min(found, key=lambda match: (match[0], -match[1]))
            return self._release(start + length if self._keep else start)
        return self._release(min(self._possible_starts()))

    def release(self) -> str:
        """What was held back, when no more text comes."""
        return self._release(len(self._text))

    def _release(self, end: int) -> str:
        released = self._text[self._num_released : end]
        if self._patterns:
            self._num_released = max(end, self._num_released)
        else:
            self._text = self._text[end:]
        return released

    def _find_strings(self) -> Iterator[tuple[int, int, str]]:
        """(start, length, string) of the first match of each string."""
        for string in self._strings:
            start = self._text.find(string, self._num_released)
            if start >= 0:
                yield start, len(string), string

    def _find_patterns(self) -> Iterator[tuple[int, int, str]]:
        for pattern in self._patterns:
            match = self._search(pattern, pattern.complete)
            if match is not None:
                start, end = match.span()
                yield start, end - start, pattern.text

    def _possible_starts(self) -> Iterator[int]:
        """For each way to stop the first character from which it may come about; the end if there is none."""
        yield self._possible_string()
        for pattern in self._patterns:
            if pattern.partial is None:
                yield self._num_released
            else:
                match = self._search(pattern, pattern.partial, partial=True)
                yield len(self._text) if match is None else match.start()

    def _possible_string(self) -> int:
        text = self._text
        for place in range(max(self._num_released, len(text) - self._longest + 1), len(text)):
            if text[place] in self._starts:
                tail = text[place:]
                if any(string.startswith(tail) for string in self._strings):
                    return place
        return len(text)

    def _search(self, pattern: _Pattern, compiled: Any, *, partial: bool = False) -> Any:
        """The first match that starts in the text held back."""
        allowed = _SECONDS + _SECONDS_PER_CHARACTER * len(self._text)
        is_locked = True
        while self._seconds_spent < allowed:
            start = time.thread_time()
            try:
                return compiled.search(
                    self._text,
                    self._num_released,
                    partial=partial,
                    timeout=_LOCKED_SECONDS if is_locked else allowed - self._seconds_spent,
                    concurrent=not is_locked,
                )
            except TimeoutError:
                # The library's clock runs for all threads of the process; that of this thread decides.
                is_locked = False
            finally:
                self._seconds_spent += time.thread_time() - start
        raise PatternTooSlow(pattern.text)


# ── patterns ──────────────────────────────────────────────────────────────────────────────────

# Ways of looking around, of not going back, of naming what was matched, and flags that this
# module would have to follow.
_NEGATIVE = re.compile(r"\(\?<?!")
_FIRM = re.compile(r"\(\?>|[*+?}]\+")
_AROUND = re.compile(r"\(\?<?[=!]")
_REFERENCE = re.compile(r"\\\d|\(\?P=|\(\?\(")
_FLAGS = re.compile(r"\(\?[a-zA-Z]*(x|m[a-zA-Z]*:|-[a-zA-Z]*m)")
# The end of the text so far is not the end of the text, and nobody knows whether a word goes on there. Said
# by looking ahead, this is understood by the library. (`[^\s\S]` is no character at all.)
_END = r"(?![\s\S])"
_AT_THE_EDGE = {
    r"\b": r"(?:(?<=\w)(?!\w)|(?<!\w)(?=\w))",
    r"\B": r"(?:(?<=\w)(?=\w)|(?<!\w)(?!\w))",
    r"\Z": _END,
    "$": rf"(?=\n?{_END})",
}
_LINE_END = rf"(?=\n|{_END})"


class _Pattern:
    """A pattern of Python's `re`, compiled twice by the library `regex`, which has time limits.

    `complete` finds matches. `partial` finds where the text so far may become one; None if nobody can say.
    """

    def __init__(self, text: str) -> None:
        import regex

        self.text = text
        check_pattern("stop_regex", text)
        try:
            self.complete = regex.compile(in_dialect(text), regex.VERSION0)
        except (regex.error, RecursionError, OverflowError) as error:
            raise InvalidArgument(f"stop_regex {text!r} cannot be searched for: {error}") from None
        self.partial = None
        if _is_foreseeable(text):
            with contextlib.suppress(regex.error):
                self.partial = regex.compile(_begun(text), regex.VERSION0)

    @staticmethod
    @lru_cache(maxsize=256)
    def of(text: str) -> _Pattern:
        """The pattern with this text, compiled once."""
        return _Pattern(text)


def _is_foreseeable(pattern: str) -> bool:
    """Whether `_begun` can be trusted: rare mixtures, such as white space to be ignored, are left alone."""
    is_mixed = _FIRM.search(pattern) and _NEGATIVE.search(pattern)
    is_mixed = is_mixed or (_AROUND.search(pattern) and _REFERENCE.search(pattern))
    return not is_mixed and not _FLAGS.search(pattern)


def _begun(pattern: str) -> str:
    """A pattern whose partial matches begin wherever a match of the given one may still come about.

    It never matches as a whole, or the library would look no further, and it tries every way.
    """
    has_lines = re.compile(pattern).flags & re.MULTILINE

    def replace(part: re.Match[str]) -> str:
        if part["quantifier"]:
            return part["quantifier"]  # neither lazy nor possessive
        if part["atomic"]:
            return "(?:"
        if part[0] == "$" and has_lines:
            return _LINE_END
        return _AT_THE_EDGE.get(part[0]) or same(part)

    return rf"(?:{PART.sub(replace, pattern)})[^\s\S]"
