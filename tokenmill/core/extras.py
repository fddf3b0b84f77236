"""What a request needs beyond its tokens, and what it was shown of its computation so far.

Owned by its `RequestState`; written by the scheduler only. Most requests have none.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from tokenmill.core.logprob_ledger import LogprobLine
from tokenmill.messages import FloatArray, Insight, LogprobOptions, Logprobs, Request, RowExtras

_NO_PROCESSOR_PARAMS: dict[str, Any] = {}


class ProcessedRequest:
    """A request as its logit processor sees it, under the key `__req__`; it may keep its own notes on it."""

    def __init__(self, request: Request, tokens: array[int]) -> None:
        self.rid = request.rid
        self.origin_input_ids: list[int] = request.prompt_ids.tolist()
        self._tokens = tokens

    @property
    def output_ids(self) -> list[int]:
        """The tokens drawn so far."""
        return self._tokens[len(self.origin_input_ids) :].tolist()


class RequestExtras:
    """Wishes and results of one request. `tokens` is the list that the scheduler appends to."""

    def __init__(self, request: Request, tokens: array[int]) -> None:
        self._request = request
        self._tokens = tokens
        self._num_prompt = len(request.prompt_ids)
        # What was shown of the prompt: of all positions from the first wanted to the next that is missing.
        # The chunks of a preempted request come again, cut otherwise.
        options = request.logprobs
        self._is_prompt_told = bool(request.output_ids)
        self._prompt_logprobs: list[Logprobs] = []
        self._next_logprob = self._num_prompt if options is None else max(1, options.prompt_start)
        self._prompt_hidden: list[FloatArray] = []
        self._next_hidden = 0 if request.hidden_states == "all" else self._num_prompt
        if self._is_prompt_told:
            self._next_logprob = self._next_hidden = self._num_prompt
        # Of tokens not reported yet; None: they are to be shown without.
        self.logprob_line = None if options is None else LogprobLine(options)
        self._hidden: list[FloatArray] = []  # [1, hidden] each
        self.next_token: int | None = None  # see `Insight`
        self._processor_params = self._params_of_processor()

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the host must know all tokens before the next is drawn."""
        return self._request.processor is not None or self._request.grammar is not None

    @property
    def most_cached(self) -> int | None:
        """Most prompt tokens that need not be computed, because nothing is to be shown of them; None: all."""
        if not self._reads_prompt:
            return None
        # A token's log-probability follows from the position before it.
        return min(self._next_hidden, self._next_logprob - 1)

    def row(self) -> RowExtras:
        """What the row needs that the request enters now."""
        request, params = self._request, self._request.params
        return RowExtras(
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            prompt_ids=request.prompt_ids,
            output_ids=np.array(self._tokens[self._num_prompt :], dtype=np.int32),
            penalize_prompt=params.penalize_prompt,
            logprobs=request.logprobs,
            hidden_states=request.hidden_states,
            reads_prompt=self._reads_prompt,
            is_masked=request.grammar is not None,
            processor=request.processor,
            processor_params=self._processor_params,
        )

    # ── what was shown ──

    def show_prompt_logprobs(self, position: int, logprobs: Logprobs) -> None:
        """Of prompt positions from this one on."""
        known, count = self._next_logprob - position, len(logprobs.token_N)
        if 0 <= known < count:
            self._prompt_logprobs.append(logprobs.at(slice(known, None)))
            self._next_logprob += count - known

    def show_hidden_states(self, position: int, hidden: FloatArray) -> None:
        """Final hidden states from this position on: of the prompt, or of one that draws, or both."""
        if self._request.hidden_states == "last":
            self._hidden = [*self._hidden, hidden] if self._may_be_cut else [hidden]
        elif position >= self._num_prompt:
            self._hidden.append(hidden)
        elif 0 <= (known := self._next_hidden - position) < len(hidden):
            self._prompt_hidden.append(hidden[known:])
            self._next_hidden += len(hidden) - known

    def insight(self, *, is_last: bool) -> Insight:
        """Everything not reported yet; it belongs to the tokens not reported yet.

        Of a prompt that was cut short nothing is shown: a part would be taken for the whole.
        """
        options, line = self._request.logprobs, self.logprob_line
        logprobs = None if line is None else line.take()
        if line is not None and is_last:
            line.close()
        told, self._is_prompt_told = self._is_prompt_told, True
        return Insight(
            prompt_logprobs=None if told or options is None else self._all_prompt_logprobs(options),
            logprobs=logprobs,
            next_token=self.next_token,
            hidden_states=self._take_hidden(with_prompt=not told, is_last=is_last),
        )

    def _take_hidden(self, *, with_prompt: bool, is_last: bool) -> FloatArray | None:
        kind = self._request.hidden_states
        if kind is None or (kind == "last" and not (is_last or self._may_be_cut)):
            return None
        rows, self._hidden = self._hidden, []
        if with_prompt and not self._reads_prompt:
            rows, self._prompt_hidden = self._prompt_hidden + rows, []
        return np.concatenate(rows) if rows else None

    def _all_prompt_logprobs(self, options: LogprobOptions) -> Logprobs | None:
        parts, self._prompt_logprobs = self._prompt_logprobs, []
        if options.prompt_start >= self._num_prompt or self._reads_prompt:
            return None
        if options.prompt_start == 0 and (parts or self._has_drawn):  # nothing precedes the first token
            parts.insert(0, _unknown(options))
        return Logprobs.joined(parts) if parts else None

    @property
    def _has_drawn(self) -> bool:
        return len(self._tokens) > self._num_prompt or self.next_token is not None

    @property
    def _may_be_cut(self) -> bool:
        """Whether the last token of the output may be any of those reported, because its text ends it."""
        return self._request.params.stops_on_text

    @property
    def _reads_prompt(self) -> bool:
        """Whether something of the prompt is still to be shown."""
        return min(self._next_logprob, self._next_hidden) < self._num_prompt

    def _params_of_processor(self) -> dict[str, Any]:
        if self._request.processor is None:
            return _NO_PROCESSOR_PARAMS
        given: Mapping[str, Any] = self._request.params.custom_params or {}
        return {**given, "__req__": ProcessedRequest(self._request, self._tokens)}


def request_extras(request: Request, tokens: array[int]) -> RequestExtras | None:
    """The extras of a request; None where it needs nothing but tokens."""
    params = request.params
    plain = (
        request.logprobs is None
        and request.hidden_states is None
        and request.grammar is None
        and request.processor is None
        and not params.logit_bias
        and (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0, 0, 1)
    )
    return None if plain else RequestExtras(request, tokens)


def _unknown(options: LogprobOptions) -> Logprobs:
    """One position without any log-probability."""
    num_top, num_given = options.num_top, len(options.token_ids)
    return Logprobs(
        token_N=np.full(1, np.nan, dtype=np.float32),
        top_NK=np.full((1, num_top), np.nan, dtype=np.float32),
        top_ids_NK=np.full((1, num_top), -1, dtype=np.int32),
        given_NI=np.full((1, num_given), np.nan, dtype=np.float32),
    )
