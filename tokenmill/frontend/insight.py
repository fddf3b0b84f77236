"""Log-probabilities and hidden states on their way to the caller: from columns to the keys of `meta_info`.

Owns SGLang's layout of them: a tuple (log-probability, token id, text or None) for each token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from tokenmill.messages import FloatArray, Insight, LogprobOptions, Logprobs, Request

TokenText = Callable[[int], str]
LogprobTuple = tuple[float | None, int, str | None]
# One entry for each position: of the token, of the likeliest, of the given ids, each if wanted.
Entries = tuple[list[Any], list[Any], list[Any]]

# Tuples made in one go, some tenths of a millisecond, before the core's thread gets its turn.
_TUPLES_AT_ONCE = 2048
_TUPLES_WITH_TEXT_AT_ONCE = 256
# So many positions are worth to be made into entries while more of the request are to come.
_WORTHWHILE = 32


class Shown:
    """What one request was shown so far, cut to the tokens of its output."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._prompt_logprobs: Logprobs | None = None
        self._logprobs: list[Logprobs] = []  # not made into entries yet
        self._entries = _no_entries()  # of the first tokens of the output
        self._hidden: list[FloatArray] = []
        self._next_token: list[int] = []  # drawn for its log-probability only

    def take(self, insight: Insight | None, *, num_arrived: int, num_kept: int) -> ShownPiece:
        """Add what came with `num_arrived` tokens, of which the first `num_kept` belong to the output."""
        if insight is None:
            return ShownPiece(None, None)
        if insight.prompt_logprobs is not None:
            self._prompt_logprobs = insight.prompt_logprobs
        if insight.next_token is not None:
            self._next_token = [insight.next_token]
        logprobs, hidden = insight.logprobs, insight.hidden_states
        num_cut = num_arrived - num_kept
        if logprobs is not None:
            logprobs = logprobs.at(slice(0, len(logprobs.token_N) - num_cut))
            self._logprobs.append(logprobs)
        if hidden is not None:
            if self._request.hidden_states == "all":
                hidden = hidden[: len(hidden) - num_cut]
            self._hidden.append(hidden)
        return ShownPiece(logprobs, hidden)

    def all(self) -> ShownPiece:
        """Everything so far."""
        return ShownPiece(
            Logprobs.joined(self._logprobs) if self._logprobs else None,
            np.concatenate(self._hidden) if self._hidden else None,
        )

    def make_entries(self, token_ids: Sequence[int], token_text: TokenText | None, *, is_last: bool) -> None:
        """Make entries of what came since the last time, if it is worth it or the last.

        `token_ids` are those of the whole output so far. What is made counts for `all_meta_info` only.
        """
        count, options = sum(len(part.token_N) for part in self._logprobs), self._request.logprobs
        if options is None or not count or (count < _WORTHWHILE and not is_last):
            return
        parts, self._logprobs = self._logprobs, []
        ids = [*token_ids[len(self._entries[0]) :], *self._next_token]
        made = _columns(Logprobs.joined(parts), ids, options, token_text if options.with_text else None)
        for known, new in zip(self._entries, made, strict=True):
            known += new

    def all_meta_info(self, token_ids: Sequence[int], token_text: TokenText | None) -> dict[str, Any]:
        """The keys for a finished request; asked for once. The lists are the caller's."""
        self.make_entries(token_ids, token_text, is_last=True)
        facts = self.meta_info(
            ShownPiece(None, self.all().hidden), token_ids=token_ids, has_prompt=True, token_text=token_text
        )
        options = self._request.logprobs
        if options is not None:
            facts |= _named("output", *self._entries, options)
            facts["output_token_logprobs_length"] = len(self._entries[0])
        return facts

    def meta_info(
        self, piece: ShownPiece, *, token_ids: Sequence[int], has_prompt: bool, token_text: TokenText | None
    ) -> dict[str, Any]:
        """The keys for a piece of the output or all of it.

        `token_ids` are the piece's tokens; `has_prompt` says whether it begins with the first of them.
        """
        facts: dict[str, Any] = {}
        options = self._request.logprobs
        if options is not None:
            text = token_text if options.with_text else None
            facts |= _output_logprobs(piece.logprobs, [*token_ids, *self._next_token], options, text)
            facts |= _input_logprobs(self._prompt_logprobs, self._request, options, text)
        if self._request.hidden_states is not None:
            facts["hidden_states"] = _hidden_states(piece.hidden, self._request, has_prompt=has_prompt)
        return facts


class ShownPiece:
    """What came with some tokens."""

    def __init__(self, logprobs: Logprobs | None, hidden: FloatArray | None) -> None:
        self.logprobs = logprobs
        self.hidden = hidden


def _output_logprobs(
    logprobs: Logprobs | None, token_ids: Sequence[int], options: LogprobOptions, text: TokenText | None
) -> dict[str, Any]:
    if logprobs is None:
        return _named("output", [], [], [], options) | {"output_token_logprobs_length": 0}
    named = _named("output", *_columns(logprobs, token_ids, options, text), options)
    return named | {"output_token_logprobs_length": len(logprobs.token_N)}


def _input_logprobs(
    logprobs: Logprobs | None, request: Request, options: LogprobOptions, text: TokenText | None
) -> dict[str, Any]:
    if logprobs is None:
        return _named("input", [], [], [], options)
    ids = request.prompt_ids[options.prompt_start :].tolist()
    return _named("input", *_columns(logprobs, ids, options, text), options)


def _named(
    side: str, tokens: list[Any], top: list[Any], given: list[Any], options: LogprobOptions
) -> dict[str, Any]:
    facts = {f"{side}_token_logprobs": tokens}
    if options.num_top:
        facts[f"{side}_top_logprobs"] = top
    if options.token_ids:
        facts[f"{side}_token_ids_logprobs"] = given
    return facts


def _columns(
    logprobs: Logprobs, ids: Sequence[int], options: LogprobOptions, text: TokenText | None
) -> Entries:
    """The entries of some positions, whose tokens are `ids`."""
    known = logprobs
    is_cut = len(ids) > 0 and logprobs.token_N[0] != logprobs.token_N[0]
    if is_cut:  # nothing precedes the first token of a prompt
        known, ids, first = logprobs.at(slice(1, None)), ids[1:], ids[0]
    tokens, tops, givens = entries = _no_entries()
    at_once = _TUPLES_AT_ONCE if text is None else _TUPLES_WITH_TEXT_AT_ONCE
    size = max(1, at_once // (1 + options.num_top + len(options.token_ids)))
    for start in range(0, len(known.token_N), size):
        if start:
            time.sleep(0)  # lets go of the interpreter
        piece = known.at(slice(start, start + size))
        tokens += _tuples(piece.token_N.tolist(), ids[start : start + size], text)
        if options.num_top:
            tops += _groups(piece.top_NK, piece.top_ids_NK.ravel().tolist(), text)
        if options.token_ids:
            givens += _groups(piece.given_NI, options.token_ids * len(piece.given_NI), text)
    if is_cut:
        tokens.insert(0, (None, first, None if text is None else text(first)))
        tops.insert(0, None)
        givens.insert(0, None)
    return entries


def _no_entries() -> Entries:
    return [], [], []


def _groups(values_NK: FloatArray, ids: Sequence[int], text: TokenText | None) -> list[list[LogprobTuple]]:
    """The tuples of each position; made all at once, which is several times as quick as one by one."""
    tuples, size = _tuples(values_NK.ravel().tolist(), ids, text), values_NK.shape[1]
    return [tuples[start : start + size] for start in range(0, len(tuples), size)]


def _tuples(values: Sequence[float], ids: Sequence[int], text: TokenText | None) -> list[LogprobTuple]:
    texts: Iterable[str | None] = repeat(None, len(ids)) if text is None else map(text, ids)
    return list(zip(values, ids, texts, strict=True))


def _hidden_states(hidden: FloatArray | None, request: Request, *, has_prompt: bool) -> Any:
    """One entry for each token: for the first the states of the whole prompt, then of one position each."""
    if hidden is None:
        return []
    if request.hidden_states == "last":
        return hidden[-1].tolist()
    num_prompt = len(request.prompt_ids) if has_prompt else 0
    states = hidden.tolist()
    return [states[:num_prompt], *states[num_prompt:]] if has_prompt else states
