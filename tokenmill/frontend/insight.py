"""Log-probabilities and hidden states on their way to the caller: from columns to the keys of `meta_info`.

Owns SGLang's layout of them: a tuple (log-probability, token id, text or None) for each token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, Literal

import numpy as np

from tokenmill.messages import FloatArray, Insight, LogprobOptions, Logprobs, Request

TokenText = Callable[[int], str]
LogprobTuple = tuple[float | None, int, str | None]
# The keys that tell of the prompt.
PROMPT_LOGPROBS = {"input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"}
HiddenStatesFormat = Literal["list", "numpy", "torch"]
_LENGTH = "output_token_logprobs_length"

# Tuples made in one go, some tenths of a millisecond, before the core's thread gets its turn.
_TUPLES_AT_ONCE = 2048
_TUPLES_WITH_TEXT_AT_ONCE = 256
# So many positions are worth to be made into entries while more of the request are to come.
_WORTHWHILE = 32


class Shown:
    """What one request was shown so far, cut to the tokens of its output."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._options = request.logprobs
        self._prompt_logprobs: Logprobs | None = None
        self._logprobs: list[Logprobs] = []  # not made into entries yet
        self._output = Entries()  # of the first tokens of the output
        self._input: Entries | None = None  # of the prompt; None: not made yet
        self._hidden_states: Any = None  # as they are told, once the request is finished
        self._hidden: list[FloatArray] = []
        self._last_hidden: FloatArray | None = None  # of the last token so far, where only that is wanted
        self._next_token: list[int] = []  # drawn for its log-probability only

    def take(self, insight: Insight | None, *, num_arrived: int, num_kept: int, is_last: bool) -> ShownPiece:
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
            hidden = hidden[: len(hidden) - num_cut]
        if self._request.hidden_states == "last":
            hidden = self._take_last(hidden, is_last=is_last)
        if hidden is not None:
            self._hidden.append(hidden)
        return ShownPiece(logprobs, hidden)

    def _take_last(self, hidden: FloatArray | None, *, is_last: bool) -> FloatArray | None:
        """The state of the last token of a finished output, which may have come with an earlier piece."""
        if hidden is not None and len(hidden):
            self._last_hidden = hidden[-1:]
        return self._last_hidden if is_last else None

    def all(self) -> ShownPiece:
        """Everything so far."""
        return ShownPiece(
            Logprobs.joined(self._logprobs) if self._logprobs else None,
            np.concatenate(self._hidden) if self._hidden else None,
        )

    def make_entries(
        self,
        token_ids: Sequence[int],
        token_text: TokenText | None,
        *,
        is_last: bool,
        hidden_states_format: HiddenStatesFormat = "list",
    ) -> None:
        """Make entries of what came since the last time, if it is worth it or the last.

        `token_ids` are those of the whole output so far. What is made counts for `all_meta_info` only.
        """
        if self._options is not None:
            text = token_text if self._options.with_text else None
            count = sum(len(part.token_N) for part in self._logprobs)
            if count >= _WORTHWHILE or (count and is_last):
                parts, self._logprobs = self._logprobs, []
                ids = [*token_ids[len(self._output.tokens) :], *self._next_token]
                self._output.add(Logprobs.joined(parts), ids, self._options, text)
            if self._input is None and (is_last or self._prompt_logprobs is not None):
                self._input = _input_entries(self._prompt_logprobs, self._request, self._options, text)
        if is_last and self._request.hidden_states is not None:
            self._hidden_states = _hidden_states(
                self.all().hidden, self._request, has_prompt=True, format=hidden_states_format
            )

    def all_meta_info(self) -> dict[str, Any]:
        """The keys for a finished request, of which all entries are made; asked for once."""
        facts: dict[str, Any] = {}
        if self._options is not None:
            assert self._input is not None
            facts |= self._output.named("output", self._options) | {_LENGTH: len(self._output.tokens)}
            facts |= self._input.named("input", self._options)
        if self._request.hidden_states is not None:
            facts["hidden_states"] = self._hidden_states
        return facts

    def meta_info(
        self,
        piece: ShownPiece,
        *,
        token_ids: Sequence[int],
        has_prompt: bool,
        token_text: TokenText | None,
        hidden_states_format: HiddenStatesFormat = "list",
    ) -> dict[str, Any]:
        """The keys for a piece of the output or all of it.

        `token_ids` are the piece's tokens; `has_prompt` says whether it begins with the first of them.
        """
        facts: dict[str, Any] = {}
        if self._options is not None:
            text = token_text if self._options.with_text else None
            output = Entries()
            if piece.logprobs is not None:
                output.add(piece.logprobs, [*token_ids, *self._next_token], self._options, text)
            facts |= output.named("output", self._options) | {_LENGTH: len(output.tokens)}
            prompt = _input_entries(self._prompt_logprobs, self._request, self._options, text)
            facts |= prompt.named("input", self._options)
        if self._request.hidden_states is not None:
            facts["hidden_states"] = _hidden_states(
                piece.hidden, self._request, has_prompt=has_prompt, format=hidden_states_format
            )
        return facts


class ShownPiece:
    """What came with some tokens."""

    def __init__(self, logprobs: Logprobs | None, hidden: FloatArray | None) -> None:
        self.logprobs = logprobs
        self.hidden = hidden


class Entries:
    """The tuples of consecutive positions, and how `meta_info` groups them.

    Those of the likeliest and of the given ids stand one after the other until the end: the garbage collector
    would look through a list for each position again and again, and hold up the core's thread for it.
    """

    def __init__(self) -> None:
        self.tokens: list[LogprobTuple] = []
        self._tops: list[LogprobTuple] = []
        self._givens: list[LogprobTuple] = []
        self._is_first_unknown = False

    def add(
        self, logprobs: Logprobs, ids: Sequence[int], options: LogprobOptions, text: TokenText | None
    ) -> None:
        """Add positions whose tokens are `ids`."""
        if len(ids) > 0 and logprobs.token_N[0] != logprobs.token_N[0]:
            # Nothing precedes the first token of a prompt.
            self._is_first_unknown = True
            self.tokens.append((None, ids[0], None if text is None else text(ids[0])))
            logprobs, ids = logprobs.at(slice(1, None)), ids[1:]
        at_once = _TUPLES_AT_ONCE if text is None else _TUPLES_WITH_TEXT_AT_ONCE
        size = max(1, at_once // (1 + options.num_top + len(options.token_ids)))
        for start in range(0, len(logprobs.token_N), size):
            if start:
                time.sleep(0)  # lets go of the interpreter
            piece = logprobs.at(slice(start, start + size))
            self.tokens += _tuples(piece.token_N, ids[start : start + size], text)
            self._tops += _tuples(piece.top_NK, piece.top_ids_NK.ravel().tolist(), text)
            self._givens += _tuples(piece.given_NI, options.token_ids * len(piece.token_N), text)

    def named(self, side: str, options: LogprobOptions) -> dict[str, Any]:
        """The keys for them, as far as they are wanted. The lists are the caller's."""
        facts: dict[str, Any] = {f"{side}_token_logprobs": self.tokens}
        if options.num_top:
            facts[f"{side}_top_logprobs"] = self._grouped(self._tops, options.num_top)
        if options.token_ids:
            facts[f"{side}_token_ids_logprobs"] = self._grouped(self._givens, len(options.token_ids))
        return facts

    def _grouped(self, tuples: list[LogprobTuple], size: int) -> list[list[LogprobTuple] | None]:
        unknown: list[list[LogprobTuple] | None] = [None] if self._is_first_unknown else []
        return unknown + [tuples[start : start + size] for start in range(0, len(tuples), size)]


def _input_entries(
    logprobs: Logprobs | None, request: Request, options: LogprobOptions, text: TokenText | None
) -> Entries:
    entries = Entries()
    if logprobs is not None:
        entries.add(logprobs, request.prompt_ids[options.prompt_start :].tolist(), options, text)
    return entries


def _tuples(values: FloatArray, ids: Sequence[int], text: TokenText | None) -> list[LogprobTuple]:
    texts: Iterable[str | None] = repeat(None, len(ids)) if text is None else map(text, ids)
    return list(zip(values.ravel().tolist(), ids, texts, strict=True))


def _hidden_states(
    hidden: FloatArray | None, request: Request, *, has_prompt: bool, format: HiddenStatesFormat
) -> Any:
    """One entry for each token: for the first the states of the whole prompt, then of one position each."""
    if hidden is None:
        return []
    if request.hidden_states == "last":
        return _in_format(hidden[-1], format)
    num_prompt = len(request.prompt_ids) if has_prompt else 0
    states = _in_format(hidden, format)
    return [states[:num_prompt], *states[num_prompt:]] if has_prompt else [*states]


def _in_format(hidden: FloatArray, format: HiddenStatesFormat) -> Any:
    if format == "torch":
        import torch  # for those who ask; nothing else here may need it

        return torch.from_numpy(hidden)
    return hidden.tolist() if format == "list" else hidden
