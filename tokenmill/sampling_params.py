"""The sampling parameters of one request, checked the moment they are made.

Owns their names, defaults and ranges, and the checks of plain values that other arguments share. It knows
no model: what depends on the context length or the vocabulary is checked by `frontend/inputs.py`.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from tokenmill import constraints
from tokenmill.errors import InvalidArgument, UnknownArgument, WrongType, did_you_mean, reading
from tokenmill.patterns import check_pattern, matches_nothing
from tokenmill.texts import plain_text

MAX_STOP_STRINGS = 32
MAX_PATTERN_BYTES = 1024
MAX_PARAMS_DEPTH = 8
MAX_SAMPLES = 65_536
MAX_ITEMS = 2**27  # of one array
# The fields of which at most one is set: what the output must follow.
CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")
_GREEDY_BELOW = 1e-6
# Limits beyond which a float32 on the device would overflow or underflow; the result is the same there.
_LARGEST_TEMPERATURE = 1e30
_SMALLEST_TOP_P = 1e-9
_WHOLE_VOCABULARY = 2**30
_LONGEST_SHOWN = 160  # characters of a value in a message
# Added to a logit it decides alone, and the sum is still finite; below its negative a token is forbidden.
_LARGEST_BIAS = 1e30


# ── checks of plain values ────────────────────────────────────────────────────────────────────


class _Short(reprlib.Repr):
    """`repr` that stays short, for values of any kind in error messages."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"<integer of {x.bit_length()} bits>"


def show(value: object) -> str:
    """A value and its type for an error message, at most a line long: `'hot' (str)`."""
    return f"{brief(value)} ({type(value).__name__[:_LONGEST_SHOWN]})"


def brief(value: object) -> str:
    """A value for an error message, at most a line long; never fails."""
    try:
        text = _Short().repr(value)
    except Exception:  # of a class that calls itself `list`, for example
        text = object.__repr__(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def plain(value: Any) -> Any:
    """The Python number inside a numpy scalar or a 0-dimensional array or tensor; else the value itself."""
    shape = getattr(value, "shape", None)
    item = getattr(value, "item", None)
    return (
        item() if shape is not None and isinstance(shape, tuple) and not shape and callable(item) else value
    )


def unpacked(name: str, value: Any) -> Any:
    """The list inside an array or tensor; anything else as it is."""
    if not callable(getattr(value, "tolist", None)):
        return value
    check_count(name, math.prod(getattr(value, "shape", ())))
    return value.tolist()


def check_count(name: str, count: int) -> None:
    """Raise for so many items that memory would not suffice: a view of one number may claim any shape."""
    if count > MAX_ITEMS:
        raise InvalidArgument(f"{name} has {brief(count)} items; at most {MAX_ITEMS} are allowed")


def _plain_of(name: str, value: object) -> Any:
    """As `plain`; a number of a class of its own becomes one of Python's, whose methods can be trusted."""
    with reading(name):
        number = plain(value)
        for kind in (bool, int, float):
            if isinstance(number, kind):
                return number if type(number) is kind else kind(number)
        return number


def check_whole(
    name: str, value: object, *, minimum: int, maximum: int | None = None, remedy: str = ""
) -> int:
    """`value` as an int within [minimum, maximum]; a bool or a float is a `WrongType`."""
    number = _plain_of(name, value)
    if isinstance(number, bool) or not isinstance(number, int):
        raise WrongType(f"{name} must be an integer, got {show(value)}{remedy}")
    if number < minimum or (maximum is not None and number > maximum):
        limit = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise InvalidArgument(f"{name} must be {limit}, got {brief(number)}{remedy}")
    return int(number)


def check_real(
    name: str,
    value: object,
    *,
    minimum: float,
    maximum: float = math.inf,
    above: bool = False,
    below: bool = False,
    remedy: str = "",
) -> float:
    """`value` as a finite float within the limits; `above` and `below` exclude the limit itself."""
    number = _plain_of(name, value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise WrongType(f"{name} must be a number, got {show(value)}{remedy}")
    low = number > minimum if above else number >= minimum
    high = number < maximum if below else number <= maximum
    # Integers too large for a float are as little finite as infinity itself.
    if not (low and high and -1e308 < number < 1e308):
        limit = f"{'above' if above else 'at least'} {minimum:g}"
        limit += "" if maximum == math.inf else f" and {'below' if below else 'at most'} {maximum:g}"
        raise InvalidArgument(f"{name} must be a finite number {limit}, got {brief(number)}{remedy}")
    return float(number)


def check_flag(name: str, value: object) -> bool:
    """`value` as a bool; numbers and words are a `WrongType`."""
    flag = _plain_of(name, value)
    if not isinstance(flag, bool):
        raise WrongType(f"{name} must be True or False, got {show(value)}")
    return flag


def check_text(name: str, value: object) -> str:
    """`value` as a str; bytes are a `WrongType`."""
    with reading(name):
        if isinstance(value, str):
            return plain_text(value)
    raise WrongType(f"{name} must be a string, got {show(value)}")


# ── rules of single parameters ────────────────────────────────────────────────────────────────


def _temperature(name: str, value: object) -> float:
    number = check_real(name, value, minimum=0, remedy="; use 0 for greedy decoding")
    return 0.0 if number < _GREEDY_BELOW else min(number, _LARGEST_TEMPERATURE)


def _top_p(name: str, value: object) -> float:
    number = check_real(name, value, minimum=0, maximum=1, above=True, remedy="; use 1 to keep every token")
    return max(number, _SMALLEST_TOP_P)


def _top_k(name: str, value: object) -> int:
    remedy = "; use -1 to keep the whole vocabulary, 1 for greedy decoding"
    number = check_whole(name, value, minimum=-1, remedy=remedy)
    if number == 0:
        raise InvalidArgument(f"{name} must be -1 or at least 1, got 0{remedy}")
    return -1 if number >= _WHOLE_VOCABULARY else number


def _max_new_tokens(name: str, value: object) -> int | None:
    remedy = "; use None to generate up to the context length"
    return None if value is None else check_whole(name, value, minimum=0, remedy=remedy)


def _max_repetitions(name: str, value: object) -> int | None:
    remedy = "; use None to let an output repeat itself"
    return None if value is None else check_whole(name, value, minimum=2, remedy=remedy)


def _listed(name: str, value: Any) -> list[Any]:
    """The items of a list, tuple, set, range, array or tensor; one bare string or number is no list."""
    if isinstance(value, range) and value:
        check_count(name, (value[-1] - value[0]) // value.step + 1)  # of very many, `len` fails
    if isinstance(value, list | tuple | set | frozenset | range):
        return list(value)
    items = unpacked(name, value)
    if not isinstance(items, list):
        raise WrongType(f"{name} must be a list, got {show(value)}; put a single item in brackets")
    return items


def _stop(name: str, value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else _listed(name, value)
    stops = [check_text(f"{name}[{index}]", item) for index, item in enumerate(items)]
    distinct = tuple(dict.fromkeys(stop for stop in stops if stop))
    if len(distinct) > MAX_STOP_STRINGS:
        raise InvalidArgument(f"{name} has {len(distinct)} strings; at most {MAX_STOP_STRINGS} are allowed")
    return distinct


def _stop_regex(name: str, value: object) -> tuple[str, ...]:
    patterns = _stop(name, value)
    for pattern in patterns:
        num_bytes = len(pattern.encode(errors="surrogatepass"))
        if num_bytes > MAX_PATTERN_BYTES:
            raise InvalidArgument(
                f"{name} has a pattern of {num_bytes} bytes, {show(pattern)}; at most "
                f"{MAX_PATTERN_BYTES} are allowed"
            )
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise InvalidArgument(f"{name} {pattern!r} is not a regular expression: {error}") from None
        check_pattern(name, pattern)
        if matches_nothing(name, pattern):
            raise InvalidArgument(
                f"{name} {pattern!r} matches the empty text, so every output would end before it begins; "
                "write it so that it needs at least one character"
            )
    return patterns


def _custom_params(name: str, value: object) -> dict[str, Any] | None:
    if not isinstance(value, Mapping):
        raise WrongType(f"{name} must be a dict, got {show(value)}")
    if "__req__" in value:
        raise InvalidArgument(f"{name} has the key '__req__', which stands for the request; use another name")
    return _json_like(name, value, MAX_PARAMS_DEPTH) or None


def _json_like(name: str, value: Any, depth: int) -> Any:
    """A copy of dicts with string keys, lists and plain values, nested at most `depth` deep."""
    if not depth:
        raise InvalidArgument(
            f"{name} lies too deep; at most {MAX_PARAMS_DEPTH} dicts and lists may be nested"
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise WrongType(f"{name} has the key {show(key)}; keys must be strings")
        return {
            plain_text(key): _json_like(f"{name}[{key!r}]", item, depth - 1) for key, item in value.items()
        }
    number = _plain_of(name, value)
    if number is None or isinstance(number, bool | int | float):
        return number
    if isinstance(number, str):
        return plain_text(number)
    items = unpacked(name, value)
    if not isinstance(items, list | tuple):
        raise WrongType(f"{name} must be a number, string, bool, None, list or dict, got {show(value)}")
    return [_json_like(f"{name}[{index}]", item, depth - 1) for index, item in enumerate(items)]


def _stop_token_ids(name: str, value: object) -> tuple[int, ...]:
    ids = [
        check_whole(f"{name}[{index}]", item, minimum=0, maximum=2**31 - 1)
        for index, item in enumerate(_listed(name, value))
        if item is not None
    ]
    return tuple(dict.fromkeys(ids))


def _refuse(name: str, value: object, *, neutral: object) -> InvalidArgument:
    """The error for a known parameter whose feature is not built yet."""
    return InvalidArgument(f"{name}={brief(value)} is not supported yet; leave it at {neutral!r}")


def _logit_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    if isinstance(value, tuple):  # as it is stored
        value = dict(value)
    if not isinstance(value, Mapping):
        raise WrongType(f"{name} must be a dict from token id to number, got {show(value)}")
    biases: dict[int, float] = {}
    for key, given in value.items():
        is_number = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 12
        token = check_whole(f"a key of {name}", int(key) if is_number else key, minimum=0, maximum=2**31 - 1)
        if token in biases:
            raise InvalidArgument(f"{name} has token {token} twice, got {show(value)}; keep one of them")
        number = plain(given)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise WrongType(f"{name}[{token}] must be a number, got {show(given)}")
        if number != number:
            raise InvalidArgument(f"{name}[{token}] must be a number or an infinity, got {show(given)}")
        biases[token] = -math.inf if number < -_LARGEST_BIAS else float(min(_LARGEST_BIAS, number))
    return tuple(biases.items())


def _beam_width(name: str, value: object) -> None:
    if check_whole(name, value, minimum=1) > 1:
        raise _refuse(name, value, neutral=None)


def _constraint(name: str, value: object) -> None:
    # Empty text and empty containers constrain nothing.
    empty = isinstance(value, str | list | tuple | set | Mapping | bool) and not value
    if value is not None and not empty:
        raise _refuse(name, value, neutral=None)


_Rule = Callable[[str, Any], Any]

_RULES: dict[str, _Rule] = {
    "max_new_tokens": _max_new_tokens,
    "min_new_tokens": partial(check_whole, minimum=0),
    "temperature": _temperature,
    "top_p": _top_p,
    "top_k": _top_k,
    "min_p": partial(check_real, minimum=0, maximum=1),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": check_flag,
    "max_repetitions": _max_repetitions,
    "skip_special_tokens": check_flag,
    "spaces_between_special_tokens": check_flag,
    "no_stop_trim": check_flag,
    "n": partial(check_whole, minimum=1, maximum=MAX_SAMPLES),
    "sampling_seed": partial(check_whole, minimum=-(2**63), maximum=2**64 - 1),
    "stream_interval": partial(check_whole, minimum=1),
    "frequency_penalty": partial(check_real, minimum=-2, maximum=2),
    "presence_penalty": partial(check_real, minimum=-2, maximum=2),
    "repetition_penalty": partial(check_real, minimum=0, maximum=2, above=True),
    "penalize_prompt": check_flag,
    "stop_regex": _stop_regex,
    "json_schema": constraints.json_schema,
    "regex": constraints.regex,
    "ebnf": constraints.ebnf,
    "structural_tag": constraints.structural_tag,
    "logit_bias": _logit_bias,
    "custom_params": _custom_params,
    "beam_width": _beam_width,
    "watermark": _constraint,
}


# ── the parameters ────────────────────────────────────────────────────────────────────────────


def _arg(default: Any, help: str, *, supported: bool = True, in_hash: bool = True) -> Any:
    """A field with its one-line meaning; `supported` is False while its feature is not built, `in_hash` for
    values that have none."""
    metadata = {"help": help, "supported": supported}
    return field(default=default, metadata=metadata, hash=None if in_hash else False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Any number type is taken and stored as a Python number, None means the default, `stop`, `stop_regex` and
    `stop_token_ids` are stored as tuples, and `custom_params` are copied. Raises `InvalidArgument` (a
    ValueError) for a value out of range or a feature that is not supported yet, and `WrongType` for a value
    of the wrong type.
    """

    max_new_tokens: int | None = _arg(128, "most tokens to generate; None: up to the context length")
    min_new_tokens: int = _arg(0, "tokens generated before the end-of-text and stop tokens are possible")
    temperature: float = _arg(1.0, "randomness; 0 is greedy")
    top_p: float = _arg(1.0, "keep the most likely tokens that reach this probability together")
    top_k: int = _arg(-1, "keep this many of the most likely tokens; -1: all")
    min_p: float = _arg(0.0, "drop tokens less likely than this share of the likeliest")
    stop: tuple[str, ...] = _arg((), "text that ends the output, one string or several")
    stop_regex: tuple[str, ...] = _arg((), "pattern whose match ends the output, one or several")
    stop_token_ids: tuple[int, ...] = _arg((), "token ids that end the output")
    ignore_eos: bool = _arg(False, "go on after the model's end-of-text tokens")
    max_repetitions: int | None = _arg(
        None, "ends an output whose last tokens are one cycle, standing so many times in a row"
    )
    skip_special_tokens: bool = _arg(True, "leave special tokens out of the text")
    spaces_between_special_tokens: bool = _arg(
        True, "keep the spaces that the tokenizer puts between special tokens in the text; False: none"
    )
    no_stop_trim: bool = _arg(False, "keep the stop string or token in the text")
    n: int = _arg(1, "samples for each prompt")
    sampling_seed: int | None = _arg(None, "seed of the random draws, signed or unsigned 64 bit")
    stream_interval: int | None = _arg(None, "tokens between two chunks of a stream")
    frequency_penalty: float = _arg(0.0, "lower tokens by their count in the output times this")
    presence_penalty: float = _arg(0.0, "lower tokens that are in the output by this")
    repetition_penalty: float = _arg(1.0, "scale down tokens that are in the output by this factor")
    penalize_prompt: bool = _arg(False, "the repetition penalty counts tokens of the prompt, too")
    custom_params: Mapping[str, Any] | None = _arg(
        None, "values for the custom logit processor", in_hash=False
    )
    json_schema: str | None = _arg(
        None, "JSON schema of the output: text, dict or pydantic model class; '$$ANY$$': any JSON"
    )
    regex: str | None = _arg(None, "regular expression that the whole output matches")
    ebnf: str | None = _arg(None, "grammar of the output, in GBNF with a rule `root`")
    structural_tag: str | None = _arg(None, "free text with constrained parts: JSON text or dict")
    logit_bias: tuple[tuple[int, float], ...] = _arg((), "numbers added to the logits of token ids")
    beam_width: None = _arg(None, "beams of a beam search", supported=False)
    watermark: None = _arg(None, "watermark of the output", supported=False)

    def __post_init__(self) -> None:
        for name, default, rule in _CHECKS:
            value = getattr(self, name)
            if value is default:
                continue
            # None stands for the default, except where it means something (or nothing sensible).
            if value is None and name not in ("max_new_tokens", "n"):
                object.__setattr__(self, name, default)
            else:
                with reading(name):
                    object.__setattr__(self, name, rule(name, value))
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidArgument(
                f"min_new_tokens is {brief(self.min_new_tokens)}, but max_new_tokens is only "
                f"{brief(self.max_new_tokens)}; lower the one or raise the other"
            )
        if len(given := [name for name in CONSTRAINTS if getattr(self, name) is not None]) > 1:
            raise InvalidArgument(f"{' and '.join(given)} are given together; an output follows only one")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that no draw is needed."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def stops_on_text(self) -> bool:
        """Whether the output may end by what its text says."""
        return bool(self.stop or self.stop_regex)

    def with_length(self, max_new_tokens: int) -> SamplingParams:
        """The same with another length, at least `min_new_tokens`; nothing is checked again."""
        other = object.__new__(SamplingParams)
        for name, _, _ in _CHECKS:
            object.__setattr__(other, name, getattr(self, name))
        object.__setattr__(other, "max_new_tokens", max_new_tokens)
        return other

    @classmethod
    def from_value(
        cls, value: Any, *, index: int | None = None, defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Parameters from whatever a caller gave: None, a mapping, `SamplingParams`, or another object.

        An object gives its public attributes. `defaults` apply below a mapping, key by key; an object is
        complete and takes none of them. `index` is the item's place in a batch, for messages. The value is
        never changed. Raises `UnknownArgument` for a name that no parameter has, `WrongType` for what holds
        none at all, else as the constructor.
        """
        if isinstance(value, cls):
            return value
        place = "sampling_params" if index is None else f"sampling_params[{index}]"
        try:
            with reading("a value"):
                if value is None or isinstance(value, Mapping):
                    given = {**(defaults or {}), **({} if value is None else value)}
                else:
                    given = _attributes(value)
                _check_names(given)
                return cls(**given)
        except InvalidArgument as error:
            raise type(error)(f"{place}: {error}") from None


_CHECKS: tuple[tuple[str, Any, _Rule], ...] = tuple(
    (entry.name, entry.default, _RULES[entry.name]) for entry in fields(SamplingParams)
)
_NAMES = frozenset(_RULES)

# What other engines call these; only used to suggest the right name.
_FOREIGN_NAMES = {
    "seed": "sampling_seed",
    "best_of": "n",
    "num_return_sequences": "n",
    "max_length": "max_new_tokens",
    "do_sample": "temperature",
    "stop_strings": "stop",
}
# SGLang's own object stores two parameters under other names, and some notes of its own.
_OBJECT_NAMES = {"stop_strs": "stop", "stop_regex_strs": "stop_regex"}
_OBJECT_NOTES = frozenset({"stop_str_max_len", "stop_regex_max_len", "is_normalized"})


def _check_names(given: Mapping[Any, Any]) -> None:
    for name in given:
        if not isinstance(name, str):
            raise WrongType(f"names of parameters must be strings, got {show(name)}")
        if name not in _NAMES:
            known = _FOREIGN_NAMES.get(name)
            hint = f" Did you mean {known!r}?" if known else did_you_mean(name, sorted(_NAMES))
            raise UnknownArgument(f"{brief(name)} is not a sampling parameter.{hint}")


def _attributes(value: Any) -> dict[str, Any]:
    """The public attributes of an object that holds parameters, under our names."""
    if not isinstance(value, type) and not callable(value):
        # What the object holds, where also what we do not know is seen, and what its class says.
        own = [name for name in getattr(value, "__dict__", {}) if not name.startswith("_")]
        known = sorted({*_NAMES, *_OBJECT_NAMES} - {*own})
        names = [*own, *(name for name in known if hasattr(value, name))]
        if names:
            kept = [name for name in names if name not in _OBJECT_NOTES]
            return {_OBJECT_NAMES.get(name, name): getattr(value, name) for name in kept}
    raise WrongType(f"must be a dict, SamplingParams or None, got {show(value)}")
