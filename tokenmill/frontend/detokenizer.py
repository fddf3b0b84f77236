"""Token ids to text, piece by piece: never half a character, never a part of a stop string or pattern.

Owns how the text of one request grows and ends. It knows no tokenizer library: `tokenizer.py` says what a
token contributes, and `stops.py` where in the text a stop begins.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from tokenmill.frontend.stops import PatternTooSlow, Stops
from tokenmill.messages import Finish

REPLACEMENT = "\ufffd"
# No character is longer than 4 bytes, and a token adds at least one; more waiting tokens are no character.
_LONGEST_HOLD = 8


class Detokenizer(Protocol):
    """Grows the text of one request."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; an incomplete character waits for the next call."""
        ...

    def finish(self) -> str:
        """What was still waiting, with U+FFFD for an incomplete character."""
        ...


# ── tokenizers whose tokens are bytes ─────────────────────────────────────────────────────────


class TokenBytes(dict[int, bytes]):
    """Token id -> the bytes it adds to a text; computed when first asked for."""

    def __init__(self, compute: Callable[[int], bytes], *, strips_first_space: bool) -> None:
        super().__init__()
        self._compute = compute
        # SentencePiece puts a space before the first word of a text, and takes it away again.
        self.strips_first_space = strips_first_space

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = value = self._compute(token_id)
        return value


class BytesDetokenizer:
    """For byte-level BPE and for SentencePiece with byte fallback: the text is the UTF-8 of all bytes.

    The text is the same however the tokens were cut into calls, also where the bytes are no valid UTF-8.
    """

    def __init__(self, pieces: TokenBytes, context: Sequence[int]) -> None:
        self._piece = pieces.__getitem__
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        before = self._join(context)
        self._decoder.decode(before)
        # The prompt may end inside a character. If the output completes it, the character is output;
        # if not, its U+FFFD belongs to the prompt.
        self._dangling = self._decoder.getstate()[0].decode("utf-8", errors="replace")
        self._strips = pieces.strips_first_space and not before

    def push(self, token_ids: Iterable[int]) -> str:
        return self._decode(self._join(token_ids), final=False)

    def finish(self) -> str:
        return self._decode(b"", final=True)

    def _join(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(map(self._piece, token_ids))

    def _decode(self, added: bytes, *, final: bool) -> str:
        if self._strips and added:
            self._strips = False
            added = added.removeprefix(b" ")
        text = self._decoder.decode(added, final=final)
        if self._dangling and text:
            text = text.removeprefix(self._dangling)
            self._dangling = ""
        return text


# ── all other tokenizers ──────────────────────────────────────────────────────────────────────


class WindowDetokenizer:
    """For any tokenizer that can decode: the new text is decode(window + new) minus decode(window).

    The window is the tokens of the last piece of text, so that spaces between words come out right.
    `adjoining` are tokens that follow each other without a space, whatever the tokenizer would put there.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int],
        *,
        adjoining: Mapping[int, str],
    ) -> None:
        self._decode = decode
        self._adjoining = adjoining
        self._last: int | None = None
        self._move_window(list(context))

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self._push, token_ids))

    def finish(self) -> str:
        return self._new_text(self._decode(self._window + self._waiting))

    def _push(self, token_id: int) -> str:
        previous, self._last = self._last, token_id
        if token_id in self._adjoining and previous in self._adjoining:
            text = self.finish() + self._adjoining[token_id]
            self._move_window([token_id])
            return text
        self._waiting.append(token_id)
        text = self._decode(self._window + self._waiting)
        if text.endswith(REPLACEMENT) and len(self._waiting) < _LONGEST_HOLD:
            return ""
        new = self._new_text(text)
        if new:
            self._move_window(self._waiting)
        elif self._window_text:
            self._waiting.clear()  # a token without text, such as a special one
        return new

    def _new_text(self, text: str) -> str:
        if text.startswith(self._window_text):
            return text[len(self._window_text) :]
        # The window ends inside a character of the prompt, and the new tokens complete it.
        pairs = zip(text, self._window_text, strict=False)
        return text[next((place for place, (new, old) in enumerate(pairs) if new != old), len(text)) :]

    def _move_window(self, token_ids: list[int]) -> None:
        self._window = token_ids
        self._window_text = self._decode(token_ids)
        self._waiting: list[int] = []


# ── the text of one request ───────────────────────────────────────────────────────────────────


class TextStream:
    """The text of one request, ended by a stop string or pattern, or by whatever ended its tokens.

    `special_stops` maps ids of special tokens that the text leaves out to the stop strings they spell.
    `keep_stop` keeps the stop (string, match or token) in the text. How the tokens were cut into calls never
    changes a result.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        patterns: Sequence[str] = (),
        *,
        special_stops: Mapping[int, str],
        keep_stop: bool,
    ) -> None:
        self._detokenizer = detokenizer
        self._has_stops = bool(stops or patterns)
        self._stops = Stops(stops, patterns, keep=keep_stop)
        self._special_stops = special_stops
        self._keep_stop = keep_stop

    def push(self, token_ids: Sequence[int], finish: Finish | None) -> tuple[str, int, Finish | None]:
        """(text they add, how many of them belong to the output, why it ended) for the next tokens.

        Fewer tokens than given belong to the output when a stop is complete before the last.
        """
        visible = token_ids if self._keep_stop else without_stop_token(token_ids, finish)
        if not self._has_stops:
            text = self._detokenizer.push(visible)
            return (text if finish is None else text + self._detokenizer.finish()), len(token_ids), finish
        parts: list[str] = []
        count = 0
        try:
            for count, token_id in enumerate(visible, 1):
                matched = self._push_token(token_id, parts)
                if matched is not None:
                    return "".join(parts), count, Finish("stop", matched=matched)
            if finish is not None:
                finish = self._push_rest(finish, parts)
        except PatternTooSlow as slow:
            return "".join(parts), count, _too_slow(slow)
        return "".join(parts), len(token_ids), finish

    def _push_token(self, token_id: int, parts: list[str]) -> str | None:
        """Appends the text that is sure to stay; the stop string that this token completes, if any."""
        special = self._special_stops.get(token_id)
        text = self._detokenizer.push((token_id,)) if special is None else self._detokenizer.finish()
        parts.append(self._stops.push(text))
        if special is not None and self._stops.matched is None:
            parts.append(self._stops.release())
            return special
        return self._stops.matched

    def _push_rest(self, finish: Finish, parts: list[str]) -> Finish:
        """Appends what was still waiting; a stop that it completes is why the output ended.

        An output that was aborted has no end of its own: half a character is no stop there.
        """
        rest = self._detokenizer.finish()
        if finish.kind == "abort":
            parts += [self._stops.release(), rest]
            return finish
        parts.append(self._stops.push(rest))
        if self._stops.matched is not None:
            return Finish("stop", matched=self._stops.matched)
        parts.append(self._stops.release())
        return finish


def _too_slow(slow: PatternTooSlow) -> Finish:
    return Finish(
        "abort",
        message=f"searching the output for stop_regex {str(slow)!r} takes too long; write it so that it can "
        "match in one way only, without repeats inside of repeats",
        status_code=400,
        error_type="bad_parameters",
    )


def without_stop_token(token_ids: Sequence[int], finish: Finish | None) -> Sequence[int]:
    """The tokens that have text: all but the last, if that one is the token that ended the output."""
    ended_by_token = finish is not None and finish.kind == "stop" and isinstance(finish.matched, int)
    return token_ids[:-1] if ended_by_token else token_ids
