"""Masks, int32 [words], of the tokens that may come whatever the grammar says, for xgrammar allows more."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tokenmill.messages import BoolArray, IntArray

# JSON has no place for control characters other than line ends, yet the library allows them in strings whose
# length is limited.
_CONTROLS = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
# Bytes that no character has, which the library allows in JSON strings: halves of surrogate pairs, too long
# forms, and what lies beyond the last character. The first byte decides what the second may be.
_SECOND_BYTES = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
_NO_TEXT = re.compile(
    b"".join(b"%c(?![%c-%c])[\x80-\xbf]|" % (byte, *ends) for byte, ends in _SECOND_BYTES.items())
    + rb"[\xc0\xc1\xf5-\xff]"
)
# Escapes of code points in JSON, in a token, and in one behind a backslash that escapes what it begins with.
# The library takes a name that is spelled so for another one than its plain spelling, and allows halves of
# surrogate pairs.
_CODE_POINT = re.compile(rb"(?s)(?:[^\\]|\\[^u])*\\u")
_REST_OF_CODE_POINT = re.compile(rb"(?s)u|.(?:[^\\]|\\[^u])*\\u")
_BACKSLASH = 0x5C


class KnownTokens:
    """The tokens that are text, by how the text before them ends.

    An end is the last byte; a backslash only if the next character is escaped by it, as in JSON.
    """

    def __init__(self, texts: list[bytes], anywhere: IntArray, after: Mapping[int, IntArray]) -> None:
        """The texts by id; the ids that may come, and those behind certain ends."""
        self._texts = texts
        self._anywhere = anywhere
        self._after = after

    @classmethod
    def of(cls, texts: list[bytes], known: IntArray) -> KnownTokens:
        """`texts` by id; ids that are not in the mask `known` are allowed nowhere."""
        anywhere = known & ~_mask_of(_NO_TEXT.search, texts, len(known))
        first = np.zeros(32 * len(known), dtype=np.uint8)
        first[: len(texts)] = [text[0] if text else 0 for text in texts]
        after = {
            byte: anywhere & _packed((low <= first) & (first <= high))
            for byte, (low, high) in _SECOND_BYTES.items()
        }
        return cls(texts, anywhere, after)

    def of_json(self, *, has_code_points: bool) -> KnownTokens:
        """Those of JSON; with or without escapes of code points. Without, free text is no matter of it."""
        num_words = len(self._anywhere)
        plain = self._without(_mask_of(_CONTROLS.search, self._texts, num_words))
        if has_code_points:
            return plain
        spelled = plain._without(_mask_of(_CODE_POINT.match, self._texts, num_words))
        rest = _mask_of(_REST_OF_CODE_POINT.match, self._texts, num_words)
        after = {**spelled._after, _BACKSLASH: plain._anywhere & ~rest}
        return KnownTokens(self._texts, spelled._anywhere, after)

    def with_ids(self, ids: list[int]) -> KnownTokens:
        """The same, and these ids where no character has begun."""
        num_words = len(self._anywhere)
        named = _mask([index for index in ids if 0 <= index < 32 * num_words], num_words)
        return KnownTokens(self._texts, self._anywhere | named, self._after)

    def _without(self, mask: IntArray) -> KnownTokens:
        """The same but for the ids of a mask."""
        after = {end: ids & ~mask for end, ids in self._after.items()}
        return KnownTokens(self._texts, self._anywhere & ~mask, after)

    def after(self, end: int) -> IntArray:
        """The ids that may follow a text with this end."""
        return self._after.get(end, self._anywhere)

    def end_after(self, end: int, token: int) -> int:
        """The end of a text with that end and the token behind it."""
        text = self._texts[token]
        num_others = len(text.rstrip(b"\\"))
        if num_others == len(text):
            return text[-1] if text else end
        is_escaped = end == _BACKSLASH and num_others == 0
        return _BACKSLASH if (len(text) - num_others + is_escaped) % 2 else 0


def known_ids(tokenizer: Any, num_words: int) -> IntArray:
    """The ids that are text; the library allows special ones, and ids beyond the tokenizer's."""
    special = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    return _mask(list(tokenizer.get_vocab().values()), num_words) & ~_mask(special, num_words)


def _mask_of(matches: Callable[[bytes], object], texts: list[bytes], num_words: int) -> IntArray:
    """The ids whose text matches."""
    return _mask([index for index, text in enumerate(texts) if matches(text)], num_words)


def _mask(ids: list[int], num_words: int) -> IntArray:
    bits = np.zeros(32 * num_words, dtype=np.bool_)
    bits[ids] = True
    return _packed(bits)


def _packed(bits: BoolArray) -> IntArray:
    """A mask of 32 ids to the word."""
    return np.packbits(bits, bitorder="little").view(np.int32)
