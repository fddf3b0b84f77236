"""What a request asks for besides prompt and sampling parameters: from the keywords of `generate` to options.

Owns the names, defaults and checks of those keywords, and how a value for a whole batch, or a list of them,
becomes one value for each prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypedDict, cast, get_args

from tokenmill.errors import InvalidArgument, UnknownArgument, WrongType, did_you_mean, reading
from tokenmill.frontend.failures import RAISED, Faults
from tokenmill.frontend.insight import HiddenStatesFormat
from tokenmill.logit_processors import LogitProcessor, resolve_processor
from tokenmill.messages import EngineFacts, Grammar, GrammarKind, LogprobOptions
from tokenmill.sampling_params import (
    SamplingParams,
    brief,
    check_flag,
    check_real,
    check_text,
    check_whole,
    plain,
    show,
    unpacked,
)
from tokenmill.texts import plain_text


class GenerateOptions(TypedDict, total=False):
    """Arguments of `generate` that are given by keyword only, in SGLang's order.

    Those of `_LATER` belong to features that are not built yet; leave them at None.
    """

    mm_hashes: Any
    mm_content_hashes: Any
    return_logprob: Any
    logprob_start_len: Any
    top_logprobs_num: Any
    token_ids_logprob: Any
    return_text_in_logprobs: Any
    lora_path: Any
    custom_logit_processor: Any
    require_reasoning: Any
    return_hidden_states: Any
    hidden_states_format: Any
    return_routed_experts: Any
    routed_experts_start_len: Any
    bootstrap_host: Any
    bootstrap_port: Any
    bootstrap_room: Any
    routed_dp_rank: Any
    disagg_prefill_dp_rank: Any
    data_parallel_rank: Any
    kv_hints: Any
    external_trace_header: Any
    session_params: Any
    priority: Any
    session_id: Any
    cache_salt: Any
    timeout: Any
    on_error: Any


# Features to come, with what "off" looks like besides None; for the ranks, the only replica there is. Not
# among them are hints that never change a result: `kv_hints`, `external_trace_header` and `session_id`.
_LATER: dict[str, tuple[Any, ...]] = {
    "image_data": (),
    "audio_data": (),
    "video_data": (),
    "mm_hashes": (),
    "mm_content_hashes": (),
    "lora_path": (),
    "require_reasoning": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "routed_dp_rank": (0,),
    "disagg_prefill_dp_rank": (),
    "data_parallel_rank": (0,),
}
MEDIA = ("image_data", "audio_data", "video_data")
_GIVEN_IN_PLACE = ("prompt", "sampling_params", "input_ids", *MEDIA, "stream", "rid")

MAX_TOP_LOGPROBS = 1024
_64_BITS_SIGNED = 2**63


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one prompt."""

    return_logprob: bool = False
    logprob_start: int = -1  # -1: no log-probabilities of the prompt
    num_top_logprobs: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    text_in_logprobs: bool = False
    hidden_states: Literal["last", "all"] | None = None
    priority: int | None = None
    timeout_seconds: float | None = None
    cache_salt: str = ""
    processor: LogitProcessor | None = None


def read_options(
    given: Mapping[str, Any],
    places: Sequence[str],
    *,
    single: bool,
    facts: EngineFacts,
    faults: Faults = RAISED,
) -> list[RequestOptions]:
    """One entry for each prompt; `places` name them in messages.

    Raises `UnknownArgument` for a name that `generate` does not have, `InvalidArgument` and `WrongType` for
    values that cannot be served.
    """
    _check_names(given)
    options = _Options(given, places, single=single, faults=faults)
    flags = options.each("return_logprob", check_flag, False)
    starts = options.each("logprob_start_len", _start, -1)
    tops = options.each("top_logprobs_num", partial(_num_top, vocab_size=facts.vocab_size), 0)
    with reading("token_ids_logprob"):
        ids = options.token_ids("token_ids_logprob", vocab_size=facts.vocab_size)
    texts = options.each("return_text_in_logprobs", check_flag, False)
    hidden = options.each("return_hidden_states", _hidden_states, None)
    priorities = options.each("priority", _priority, None)
    timeouts = options.each("timeout", _timeout, None)
    salts = options.each("cache_salt", check_text, "")
    processors = options.each("custom_logit_processor", resolve_processor, None)
    logprobs = (flags, starts, tops, ids, texts)
    return [
        RequestOptions(*values)
        for values in zip(*logprobs, hidden, priorities, timeouts, salts, processors, strict=True)
    ]


def state_format(given: Mapping[str, Any]) -> HiddenStatesFormat:
    """In which form all results of a call hold hidden states."""
    value = given.get("hidden_states_format")
    if value is None:
        return "list"
    with reading("hidden_states_format"):
        word = plain_text(value) if isinstance(value, str) else ""
    if word not in get_args(HiddenStatesFormat):
        raise InvalidArgument(
            f"hidden_states_format must be 'list', 'numpy' or 'torch', the same for all, got {show(value)}"
        )
    return cast(HiddenStatesFormat, word)


def logprob_options(
    asked: RequestOptions, num_prompt: int, place: str, num_given: int
) -> LogprobOptions | None:
    """What the core is to compute for a prompt of so many tokens; None: no log-probabilities at all.

    `num_given` is how many it had before it was cut.
    """
    if not asked.return_logprob:
        return None
    start = num_given if asked.logprob_start == -1 else asked.logprob_start
    if start > num_given:
        raise InvalidArgument(
            f"logprob_start_len is {brief(start)}, but {place} has only {num_given} tokens; use -1 for no "
            "log-probabilities of the prompt"
        )
    start = min(start, num_prompt)
    return LogprobOptions(start, asked.num_top_logprobs, asked.logprob_token_ids, asked.text_in_logprobs)


def without_prompt(asked: LogprobOptions | None, num_prompt: int) -> LogprobOptions | None:
    """The same, but nothing of the prompt: for samples that are given the first one's list of it."""
    return None if asked is None else replace(asked, prompt_start=num_prompt)


def grammar_of(params: SamplingParams, place: str, *, has_tokenizer: bool, backend: str) -> Grammar | None:
    """What the output must follow, if anything; `place` names the parameters in messages."""
    kinds: tuple[GrammarKind, ...] = get_args(GrammarKind)
    for kind in kinds:
        text = getattr(params, kind)
        if text is None:
            continue
        if not has_tokenizer:
            raise InvalidArgument(
                f"{place}: {kind} needs a tokenizer, and this engine has none (skip_tokenizer_init=True)"
            )
        if backend == "none":
            raise InvalidArgument(
                f"{place}: {kind} needs a grammar backend, and this engine has grammar_backend='none'; "
                "leave grammar_backend out"
            )
        return Grammar(kind, text)
    return None


def _check_names(given: Mapping[str, Any]) -> None:
    """Raise for what `generate` does not know, or cannot do yet."""
    known = (*_GIVEN_IN_PLACE, *GenerateOptions.__annotations__)
    for name, value in given.items():
        if name not in known:
            raise UnknownArgument(f"generate() has no argument {name!r}.{did_you_mean(name, known)}")
        with reading(name):
            is_off = name not in _LATER or _is_off(value, _LATER[name])
        if not is_off:
            raise InvalidArgument(f"{name} is not supported yet, got {show(value)}; leave it out")


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """Whether the value, or each item of a list, asks for nothing."""
    if isinstance(value, list | tuple):
        return all(_is_off(item, off) for item in value)
    return value is None or any(type(value) is type(neutral) and value == neutral for neutral in off)


class _Options:
    """The keywords of one call, item by item."""

    def __init__(
        self, given: Mapping[str, Any], places: Sequence[str], *, single: bool, faults: Faults
    ) -> None:
        self._given = given
        self._count = len(places)
        self._single = single
        self._faults = faults

    def each(self, name: str, check: Any, default: Any) -> list[Any]:
        """The checked value of each prompt: one for all, or a list with one for each; None is the default."""
        with reading(name):
            return self._each(name, check, default)

    def _each(self, name: str, check: Any, default: Any) -> list[Any]:
        value = self._given.get(name)
        if value is None:
            return [default] * self._count
        if not isinstance(value, list | tuple):
            return self._for_all(name, value, check, default)
        if self._single:
            raise InvalidArgument(
                f"{name} is a list of {len(value)}, but there is one prompt; give one value"
            )
        if len(value) != self._count:
            raise InvalidArgument(
                f"{name} has length {len(value)}, but there are {self._count} prompts; give one value for "
                "all, or one for each"
            )
        return self._faults.each(
            name,
            value,
            lambda index, item: default if item is None else check(f"{name}[{index}]", item),
            default,
        )

    def _for_all(self, name: str, value: Any, check: Any, default: Any) -> list[Any]:
        # What is given for several prompts is the fault of none of them.
        if self._single:
            return self._faults.each(name, [value], lambda _, item: check(name, item), default)
        return [check(name, value)] * self._count

    def token_ids(self, name: str, *, vocab_size: int) -> list[tuple[int, ...]]:
        ids = partial(_token_ids, vocab_size=vocab_size)
        value = self._given.get(name)
        if self._single:
            return self._faults.each(name, [value], lambda _, item: ids(name, _flat(name, item)), ())
        items = _listed(name, value)
        if all(isinstance(plain(item), int) for item in items):
            return [ids(name, items)] * self._count
        if len(items) != self._count:
            raise InvalidArgument(
                f"{name} is a list of {len(items)} items, but there are {self._count} prompts; give a list "
                "for each"
            )
        return self._faults.each(name, items, lambda index, item: ids(f"{name}[{index}]", item), ())


def _start(name: str, value: Any) -> int:
    return check_whole(name, value, minimum=-1, remedy="; -1 means none of the prompt, 0 all of it")


def _num_top(name: str, value: Any, *, vocab_size: int) -> int:
    is_small = vocab_size < MAX_TOP_LOGPROBS
    remedy = "; the vocabulary has no more tokens" if is_small else ""
    return check_whole(name, value, minimum=0, maximum=min(MAX_TOP_LOGPROBS, vocab_size), remedy=remedy)


def _hidden_states(name: str, value: Any) -> Literal["last", "all"] | None:
    if isinstance(value, str):
        if value in ("last", "all", "full"):
            return "last" if value == "last" else "all"
        raise InvalidArgument(f"{name} must be True, False, 'last' or 'all', got {show(value)}")
    return "all" if check_flag(name, value) else None


def _priority(name: str, value: Any) -> int:
    return check_whole(name, value, minimum=-_64_BITS_SIGNED, maximum=_64_BITS_SIGNED - 1)


def _timeout(name: str, value: Any) -> float | None:
    if isinstance(value, float) and value == math.inf:
        return None
    return check_real(name, value, minimum=0, above=True, remedy="; seconds, or None for no limit")


def _flat(name: str, value: Any) -> list[Any]:
    """The ids for a single prompt, which are not in a list for each of several."""
    items = _listed(name, value)
    if any(not isinstance(plain(item), int) for item in items):
        raise InvalidArgument(
            f"{name} must be one list of token ids, because there is one prompt, got {show(value)}"
        )
    return items


def check_told_ids(name: str, count: int, vocab_size: int) -> None:
    """Raise for more ids than there are: every position is told the log-probability of each."""
    if count > vocab_size:
        raise InvalidArgument(
            f"{name} has {count} token ids, but the vocabulary has {vocab_size}; name each once"
        )


def _token_ids(name: str, value: Any, *, vocab_size: int) -> tuple[int, ...]:
    items = _listed(name, value)
    check_told_ids(name, len(items), vocab_size)
    return tuple(
        check_whole(f"{name}[{index}]", item, minimum=0, maximum=vocab_size - 1)
        for index, item in enumerate(items)
    )


def _listed(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    items = unpacked(name, value)
    if not isinstance(items, list | tuple):
        raise WrongType(f"{name} must be a list of token ids, got {show(value)}")
    return list(items)
