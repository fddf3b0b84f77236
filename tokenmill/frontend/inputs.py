"""From any accepted shape of `prompt`, `input_ids`, `sampling_params` and `rid` to validated `Request`s.

Owns what single and batch mean, the limits that depend on the model, request ids and seeds. A call is read
as a whole: either every item is valid, or the first fault is raised and nothing has happened; or else faults
stay with their rows, and the others are read as if the rest were sound.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from tokenmill import logs
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument, RowError, reading
from tokenmill.frontend.failures import RAISED, Faults
from tokenmill.frontend.insight import HiddenStatesFormat
from tokenmill.frontend.lengths import Lengths
from tokenmill.frontend.options import (
    RequestOptions,
    grammar_of,
    logprob_options,
    read_options,
    state_format,
    without_prompt,
)
from tokenmill.frontend.prompts import Prompts, plain_rows, read_prompts, token_ids
from tokenmill.frontend.request_ids import request_ids
from tokenmill.frontend.seeds import Seeds
from tokenmill.frontend.sessions import NO_SESSION, Continuation
from tokenmill.frontend.settings import KnownSettings, Settings
from tokenmill.frozen import lightly_frozen
from tokenmill.garbage import uncollected
from tokenmill.messages import EngineFacts, IntArray, LogprobOptions, Request
from tokenmill.sampling_params import SamplingParams, show

_log = logging.getLogger("tokenmill")
# Tokens between two looks for a stop in the text when nobody watches the stream: each look costs the host
# some time, each token past the stop costs the device some.
_STOP_SEARCH_INTERVAL = 4
# The same where log-probabilities are to come: what came of them is made into results while more is computed.
_LOGPROB_INTERVAL = 64
_DEFAULT_MAX_NEW_TOKENS = SamplingParams().max_new_tokens
_NO_TOKENS: IntArray = np.empty(0, dtype=np.int32)


class Tokenizer(Protocol):
    """What reading needs of a tokenizer."""

    most_tokens: int | None

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def vocab_size(self) -> int: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


@lightly_frozen()
class Job:
    """One call of `generate`: its requests, prompt by prompt (sample j of prompt i is at `i * n + j`)."""

    requests: tuple[Request, ...]
    single: bool  # one prompt with one sample: the caller wants a dict, not a list
    session: Continuation = NO_SESSION
    hidden_states_format: HiddenStatesFormat = "list"
    returns_errors: bool = False  # results tell what fails; otherwise it is raised,
    raises_in_stream: bool = False  # in a stream only where somebody says so: its chunks tell it, too
    # What is wrong with requests, by their place among `requests`; these are never run.
    errors: Mapping[int, RowError] = field(default_factory=dict)

    def with_requests(self, requests: tuple[Request, ...]) -> Job:
        """The same of other requests; `dataclasses.replace` takes several times as long."""
        return Job(requests, *_behind_requests(self))


_behind_requests = attrgetter(*(each.name for each in fields(Job)[1:]))


class InputReader:
    """Reads the arguments of `generate` for one engine. Thread-safe."""

    def __init__(
        self,
        facts: EngineFacts,
        *,
        tokenizer: Tokenizer | None,
        defaults: Mapping[str, Any] | None,
        random_seed: int | None,
        stream_interval: int,
        grammar_backend: str = "llguidance",
        may_truncate: bool = False,
    ) -> None:
        self._facts = facts
        self._lengths = Lengths(facts, tokenizer, may_truncate=may_truncate)
        self._grammar_backend = grammar_backend
        self._tokenizer = tokenizer
        self._defaults = dict(defaults or {})
        self._stream_interval = stream_interval
        eos_ids = (*facts.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ()))
        self._eos_ids = tuple(i for i in dict.fromkeys(eos_ids) if 0 <= i < facts.vocab_size)
        self._seeds = Seeds(random_seed)

    @classmethod
    def of(cls, config: EngineConfig, facts: EngineFacts, tokenizer: Tokenizer | None) -> InputReader:
        """The reader of an engine with these arguments."""
        return cls(
            facts,
            tokenizer=tokenizer,
            defaults=config.preferred_sampling_params,
            random_seed=config.random_seed,
            stream_interval=config.stream_interval,
            grammar_backend=config.grammar_backend,
            may_truncate=config.allow_auto_truncate,
        )

    def apart(self) -> InputReader:
        """A reader that reads the same, and draws seeds of its own."""
        twin = copy.copy(self)
        twin._seeds = Seeds(None)
        return twin

    @uncollected()
    def read(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        rid: Any = None,
        stream: bool = False,
        options: Mapping[str, Any] | None = None,
        session: Continuation = NO_SESSION,
        source: str = "input_ids",
        faults: Faults = RAISED,
    ) -> Job:
        """The requests of one call, in input order.

        `prompt` is a string or a list of them. `input_ids` are ids, or a list of rows of ids, as lists,
        tuples, ranges, arrays or tensors; given beside `prompt`, they are what is run. `sampling_params` are
        for all, or a list with one item for each prompt. `rid` is a string (numbered for a batch) or a list.
        `options` are the other keywords of `generate`, see `options.py`. `session` is what the call
        continues, `source` the argument that messages are to name instead of `input_ids`. `faults` has the
        rows that were found to be at fault before, and takes up more, unless they are raised.
        Raises `InvalidArgument`, `WrongType` or `UnknownArgument`, which name the item and the limit.
        """
        with reading(source if prompt is None else "prompt"):
            prompts = read_prompts(prompt, input_ids, source, faults)
        name = prompts.name
        places = [session.place(prompts.place(index)) for index in range(len(prompts))]
        asked = read_options(options or {}, places, single=prompts.single, facts=self._facts, faults=faults)
        with reading("sampling_params"):
            settings = self._read_settings(sampling_params, prompts, faults, stream=stream)
        n = settings[0].params.n if settings else 1
        with reading("rid"):
            ids = request_ids(rid, len(prompts), single=prompts.single, n=n, faults=faults)
        with reading(name):
            read_rows = self._tokenize if name == "prompt" else self._check_ids
            rows = read_rows(prompts, faults, may_be_empty=session.has_context)
        rows = [session.join(row) for row in rows]
        counts = [len(row) for row in rows]
        rows = faults.each(name, rows, lambda i, row: self._fitted(row, settings[i], places[i]), _NO_TOKENS)
        limits = faults.each(name, rows, lambda i, row: self._limit(row, settings[i], places[i]), 0)
        logprobs = faults.each(
            name, rows, lambda i, row: logprob_options(asked[i], len(row), places[i], counts[i]), None
        )
        seeds = self._seeds.of((each.params.sampling_seed for each in settings), n)
        requests = []
        for number in range(n * len(rows)):
            index, sample = divmod(number, n)
            shares = sample > 0 and not stream  # the prompt's log-probabilities, with the first sample
            told = without_prompt(logprobs[index], len(rows[index])) if shares else logprobs[index]
            numbers = _Numbers(number, ids[number], seeds[number], limits[index])
            requests.append(_request(rows[index], settings[index], asked[index], told, numbers))
        return Job(
            tuple(requests),
            single=prompts.single and n == 1,
            session=session,
            hidden_states_format=state_format(options or {}),
            returns_errors=faults.returned,
            raises_in_stream=not faults.returned and (options or {}).get("on_error") is not None,
            errors={at * n + sample: error for at, error in faults.found.items() for sample in range(n)},
        )

    def seeds(self, given: int | None, n: int) -> list[int]:
        """The seeds of one prompt's samples; also of one at fault, so that others get the same beside it."""
        return self._seeds.of([given], n)

    def read_row(
        self,
        row: IntArray,
        settings: Settings,
        asked: RequestOptions,
        *,
        place: str,
        rid: Any,
        number: int,
        seeds: Sequence[int],
    ) -> tuple[Request, ...]:
        """The requests of one prompt, a sample each, from its tokens and from what was read for it before.

        `place` names the prompt in messages, `number` is its place among prompts that run together.
        """
        n = settings.params.n
        ids = request_ids(rid, 1, single=True, n=n)
        count, row = len(row), self._fitted(row, settings, place)
        limit = self._limit(row, settings, place)
        logprobs = logprob_options(asked, len(row), place, count)
        requests = []
        for sample in range(n):
            told = without_prompt(logprobs, len(row)) if sample else logprobs
            numbers = _Numbers(number + sample, ids[sample], seeds[sample], limit)
            requests.append(_request(row, settings, asked, told, numbers))
        return tuple(requests)

    # ── sampling parameters ──

    def _read_settings(self, value: Any, prompts: Prompts, faults: Faults, *, stream: bool) -> list[Settings]:
        """One entry for each prompt; a value used for several prompts, or an equal one, is read once."""
        count = len(prompts)
        if not isinstance(value, list | tuple):
            if not prompts.single:
                return [self.settings(value, None, stream=stream)] * count
            read = faults.each(
                "sampling_params", [value], lambda _, item: self.settings(item, None, stream=stream), None
            )
            return self._completed([value], read)
        if prompts.single:
            raise InvalidArgument(
                f"sampling_params is a list of {len(value)}, but {prompts.name} is a single one; "
                "give one dict"
            )
        if len(value) != count:
            raise InvalidArgument(
                f"sampling_params has length {len(value)}, but {prompts.name} has length {count}; "
                "give one dict for all, or one for each"
            )
        known = KnownSettings(lambda index, item: self.settings(item, index, stream=stream))
        settings = self._completed(value, faults.each("sampling_params", value, known.settings, None))
        for index, each in enumerate(settings):
            if each.params.n != settings[0].params.n:
                raise InvalidArgument(
                    f"sampling_params[{index}]: n is {each.params.n}, but {settings[0].params.n} in "
                    "sampling_params[0]; n must be the same in a batch"
                )
        return settings

    def _completed(self, given: Sequence[Any], read: list[Settings | None]) -> list[Settings]:
        """With something in place of parameters that are at fault, so that they take as many seeds."""
        sound = [each for each in read if each is not None]
        if len(sound) == len(read):
            return sound
        # One number holds for all; where it is at fault it counts as 1.
        params = SamplingParams(n=sound[0].params.n if sound else max(map(self.n_as_given, given)))
        stand_in = Settings(
            params, is_length_explicit=False, stop_ids=(), held_ids=(), report_interval=0, grammar=None
        )
        return [each or stand_in for each in read]

    def n_as_given(self, value: Any, *, otherwise: int | None = None) -> int:
        """`n` of parameters that are at fault together; 1 if it is at fault itself.

        `otherwise` is what holds where they have none; None: what the engine's defaults say.
        """
        try:
            given = value.get("n") if isinstance(value, Mapping) else getattr(value, "n", None)
            own = {} if given is None else {"n": given}
            defaults = self._defaults if otherwise is None else {"n": otherwise}
            return SamplingParams.from_value(own, defaults=defaults).n
        except Exception:  # an object may fail in any way when it is asked
            return 1

    def settings(self, value: Any, index: int | None = None, *, stream: bool = False) -> Settings:
        """The parameters of one prompt; `index` is its place in a batch, for messages."""
        params = SamplingParams.from_value(value, index=index, defaults=self._defaults)
        place = "sampling_params" if index is None else f"sampling_params[{index}]"
        if params.stops_on_text and self._tokenizer is None:
            name = "stop" if params.stop else "stop_regex"
            raise InvalidArgument(
                f"{place}: {name} needs a tokenizer, and this engine has none; use stop_token_ids instead"
            )
        stop_ids = self._stop_ids(params)
        self._check_biases(params, place)
        if stream:
            interval = params.stream_interval or self._stream_interval
        else:
            interval = _STOP_SEARCH_INTERVAL if params.stops_on_text else 0
        if isinstance(value, Mapping):
            is_explicit = value.get("max_new_tokens") is not None
        else:
            # An object does not tell what its maker wrote; the default value counts as not written.
            is_explicit = value is not None and params.max_new_tokens not in (None, _DEFAULT_MAX_NEW_TOKENS)
        grammar = grammar_of(
            params, place, has_tokenizer=self._tokenizer is not None, backend=self._grammar_backend
        )
        held_ids = self._held_ids(params, stop_ids, place, has_grammar=grammar is not None)
        return Settings(params, is_explicit, stop_ids, held_ids, interval, grammar)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        vocab_size = self._facts.vocab_size
        own = [token for token in params.stop_token_ids if token < vocab_size]
        if len(own) < len(params.stop_token_ids):  # as examples have them that were written for another model
            logs.warn_once(
                "stop_token_ids",
                f"stop_token_ids has ids beyond the {vocab_size} of the model's vocabulary; they end nothing",
            )
        eos_ids = () if params.ignore_eos else self._eos_ids
        return tuple(dict.fromkeys((*eos_ids, *own)))

    def _held_ids(
        self, params: SamplingParams, stop_ids: tuple[int, ...], place: str, *, has_grammar: bool
    ) -> tuple[int, ...]:
        """What `min_new_tokens` holds back: all ends, also those that `ignore_eos` would let pass.

        A grammar says itself where its output ends: with `ignore_eos`, the core holds them back
        (`core.grammars`), for there may be no other token after that.
        """
        if not params.min_new_tokens:
            return ()
        held_ids = stop_ids if has_grammar else tuple(dict.fromkeys((*self._eos_ids, *stop_ids)))
        if len(held_ids) >= self._facts.vocab_size:
            raise InvalidArgument(
                f"{place}: every id of the vocabulary is a stop token, so min_new_tokens="
                f"{params.min_new_tokens} cannot be reached; lower it to 0"
            )
        return held_ids

    def _check_biases(self, params: SamplingParams, place: str) -> None:
        vocab_size = self._facts.vocab_size
        for token, _ in params.logit_bias:
            if token >= vocab_size:
                raise InvalidArgument(
                    f"{place}: logit_bias has {token}, but the vocabulary has {vocab_size} ids "
                    f"(0 to {vocab_size - 1})"
                )

    # ── tokens ──

    def _tokenize(self, prompts: Prompts, faults: Faults, *, may_be_empty: bool) -> list[IntArray]:
        if not prompts.texts:
            return []
        rows: list[Sequence[int]] = faults.together("prompt", prompts.texts, self.encode, ())
        return plain_rows(rows, self._facts.vocab_size) or faults.each(
            "prompt",
            rows,
            lambda index, row: self.check_tokens(
                row, prompts.texts[index], prompts.place(index), may_be_empty=may_be_empty
            ),
            _NO_TOKENS,
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """What the tokenizer makes of texts. Raises `InvalidArgument` without a tokenizer."""
        if self._tokenizer is None:
            raise InvalidArgument(
                "prompt needs a tokenizer, and this engine has none (skip_tokenizer_init); use input_ids"
            )
        return self._tokenizer.encode_batch(texts)

    def check_tokens(
        self, tokens: Sequence[int] | IntArray, text: str, place: str, *, may_be_empty: bool = False
    ) -> IntArray:
        """Tokens that the tokenizer made of a text, as a row that the model can take."""
        row = np.asarray(tokens, dtype=np.int32)
        if not row.size:
            if may_be_empty:
                return row
            raise InvalidArgument(
                f"{place} is empty: the tokenizer makes no token of {show(text)}; give at least one character"
            )
        if row.max() >= self._facts.vocab_size:
            raise InvalidArgument(
                f"{place} holds token {row.max()}, but the model's vocabulary has {self._facts.vocab_size} "
                "ids; the tokenizer belongs to another model"
            )
        return row

    def _check_ids(self, prompts: Prompts, faults: Faults, *, may_be_empty: bool) -> list[IntArray]:
        vocab_size = self._facts.vocab_size
        return plain_rows(prompts.id_rows, vocab_size) or faults.each(
            prompts.name,
            prompts.id_rows,
            lambda index, row: token_ids(row, prompts.place(index), vocab_size, may_be_empty=may_be_empty),
            _NO_TOKENS,
        )

    def _fitted(self, row: IntArray, settings: Settings, place: str) -> IntArray:
        return self._lengths.fitted(row, settings.params.max_new_tokens, place)

    def _limit(self, row: IntArray, settings: Settings, place: str) -> int:
        asked, is_explicit = settings.params.max_new_tokens, settings.is_length_explicit
        return self._lengths.limit(row, asked, place, is_explicit=is_explicit)


@lightly_frozen()
class _Numbers:
    """What tells one sample of a call from the others."""

    place: int  # in the call
    id: str
    seed: int
    max_new_tokens: int


def _request(
    row: IntArray,
    settings: Settings,
    asked: RequestOptions,
    logprobs: LogprobOptions | None,
    numbers: _Numbers,
) -> Request:
    """One sample of a prompt, everything about it resolved."""
    return Request(
        id=numbers.id,
        prompt_ids=row,
        params=_with_min_tokens_at_most(settings.params, numbers.max_new_tokens),
        max_new_tokens=numbers.max_new_tokens,
        seed=numbers.seed,
        stop_ids=settings.stop_ids,
        report_interval=settings.report_interval or _logprob_interval(logprobs, numbers.place),
        priority=asked.priority,
        timeout_seconds=asked.timeout_seconds,
        cache_namespace=asked.cache_salt.encode(errors="surrogatepass"),
        logprobs=logprobs,
        hidden_states=asked.hidden_states,
        grammar=settings.grammar,
        processor=asked.processor,
        held_ids=settings.held_ids,
        rid=numbers.id,
    )


def _logprob_interval(logprobs: LogprobOptions | None, number: int) -> int:
    """The report interval of a request that nobody watches; not all of a batch report after the same step."""
    return 0 if logprobs is None else _LOGPROB_INTERVAL + number % _LOGPROB_INTERVAL


def _with_min_tokens_at_most(params: SamplingParams, limit: int) -> SamplingParams:
    return params if params.min_new_tokens <= limit else replace(params, min_new_tokens=limit)
