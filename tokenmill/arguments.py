"""From the keywords of `Engine(...)` to one `EngineConfig`: our own names, and every name of SGLang's engine.

Owns the alias table and the checks of single values. It knows no hardware and loads nothing.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tokenmill import constraints, logs
from tokenmill.config import MOST_STEPS_IN_FLIGHT, EngineConfig
from tokenmill.errors import InvalidArgument, UnknownArgument, WrongType, did_you_mean, reading
from tokenmill.flags import add_engine_flags, add_hidden_engine_flags, given
from tokenmill.sampling_params import (
    SamplingParams,
    brief,
    check_flag,
    check_real,
    check_text,
    check_whole,
    plain,
    show,
)
from tokenmill.sglang_names import (
    ATTENTION_BACKENDS,
    DTYPES,
    FOREIGN_NAMES,
    GRAMMAR_BACKENDS,
    IGNORED,
    LISTS,
    LOG_LEVELS,
    POLICIES,
    REFUSED,
    SPELLINGS,
)

Fate = Literal["mapped", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class ArgumentName:
    """One accepted keyword that is not a field of `EngineConfig`, and what happens to it."""

    name: str
    fate: Fate
    note: str  # mapped: what it sets; ignored: why; refused: the feature that is missing
    neutral: tuple[object, ...] = ()  # values besides None that ask for nothing


def _negated_flag(name: str, value: object) -> bool:
    return not check_flag(name, value)


def _one_step(name: str, value: object) -> int | None:
    return 1 if check_flag(name, value) else None


_NOT_CUMULATIVE = ("cumulative_stream", _negated_flag, "the opposite of `cumulative_stream`")
# Name -> our field, conversion (None: as if not given), what it means.
_MAPPED: dict[str, tuple[str, Callable[[str, Any], Any], str]] = {
    "stream_output": _NOT_CUMULATIVE,
    "incremental_streaming_output": _NOT_CUMULATIVE,
    "disable_decode_cuda_graph": ("disable_cuda_graph", check_flag, "`disable_cuda_graph`"),
    "disable_overlap_schedule": ("steps_in_flight", _one_step, "True: `steps_in_flight=1`"),
}
# The way back: what such a name says of an engine.
_READ: dict[str, Callable[[EngineConfig], bool]] = {
    "stream_output": lambda config: not config.cumulative_stream,
    "incremental_streaming_output": lambda config: not config.cumulative_stream,
    "disable_decode_cuda_graph": lambda config: config.disable_cuda_graph,
    "disable_overlap_schedule": lambda config: config.steps_in_flight == 1,
}


def _rows(table: Mapping[str, Mapping[str, object]], fate: Fate) -> list[ArgumentName]:
    return [
        ArgumentName(name, fate, note, default if isinstance(default, tuple) else (default,))
        for note, names in table.items()
        for name, default in names.items()
    ]


_OTHERS = {
    row.name: row
    for row in [
        *(ArgumentName(name, "mapped", f"`{target}`") for name, target in SPELLINGS.items()),
        *(ArgumentName(name, "mapped", note) for name, (_, _, note) in _MAPPED.items()),
        *_rows(IGNORED, "ignored"),
        *_rows(REFUSED, "refused"),
    ]
}
_SEED_BITS = 30  # as SGLang draws it
# Variables of the environment that turn a flag of ours on where no argument says otherwise.
_ENVIRONMENT = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "logprobs_ignore_temperature"}
_FIELDS = {entry.name: entry for entry in dataclasses.fields(EngineConfig)}


def argument_names() -> tuple[str, ...]:
    """Every keyword that `Engine` takes: the fields of `EngineConfig`, then SGLang's other names."""
    return (*_FIELDS, *_OTHERS)


def other_names() -> tuple[ArgumentName, ...]:
    """Every accepted keyword that is not a field of `EngineConfig`, in the order of the tables."""
    return tuple(_OTHERS.values())


def _values_like(name: str) -> tuple[object, ...]:
    """Some values of the type that one of SGLang's other names takes; None may be among them."""
    return (False,) if name in _MAPPED else _OTHERS[name].neutral


class ServerArgs(EngineConfig):
    """The arguments for an engine, given, read and changed by any of SGLang's names.

    Where no seed is given one is drawn, so that whoever reads it can repeat a run. Both
    `Engine(**dataclasses.asdict(server_args))` and `Engine(server_args=server_args)` open an engine with
    them; an engine keeps its own copy. Raises as `resolve_arguments`.
    """

    def __init__(self, **arguments: Any) -> None:
        values = dict(vars(resolve_arguments(arguments)))
        if values["random_seed"] is None:
            values["random_seed"] = random.SystemRandom().getrandbits(_SEED_BITS)
        super().__init__(**values)

    def __setattr__(self, name: str, value: Any) -> None:
        """Change one argument, checked as the constructor does; None means its default there, too."""
        values = _translate({name: value})
        spelled = SPELLINGS.get(name, name)
        if spelled in _FIELDS:
            values = {spelled: getattr(EngineConfig(), spelled), **values}
        for target, checked in values.items():
            object.__setattr__(self, target, checked)

    def fixed(self) -> EngineConfig:
        """The same for an engine: nothing changes it, and its folders stay where they are after a chdir."""
        values = vars(self) | {
            "model_path": anchored(self.model_path),
            "tokenizer_path": self.tokenizer_path and anchored(self.tokenizer_path),
            "download_dir": self.download_dir and str(Path(self.download_dir).expanduser().absolute()),
            "served_model_name": self.served_model_name or self.model_path,
        }
        return EngineConfig(**values)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Give a parser a flag for each argument, in our names (which its help shows) and SGLang's others."""
        add_engine_flags(parser, without=())
        names = [name for name in _OTHERS if name != "model"]
        examples = {name: _values_like(SPELLINGS.get(name, name)) for name in names}
        add_hidden_engine_flags(parser, examples, lists=LISTS)

    @classmethod
    def from_cli_args(cls, options: argparse.Namespace) -> ServerArgs:
        """The arguments whose flags stood on the command line."""
        return cls(**given(options, "engine"))

    def others(self) -> dict[str, Any]:
        """SGLang's names that are no fields of ours, each with what reading it gives."""
        return {name: getattr(self, name) for name in _OTHERS if name not in SPELLINGS}

    def __getattr__(self, name: str) -> Any:
        """What one of SGLang's other names says of ours, or its default there: it is what is done here."""
        if name in SPELLINGS:
            return getattr(self, SPELLINGS[name])
        if name in _READ:
            return _READ[name](self)
        if name not in _OTHERS:
            raise AttributeError(f"Engine has no argument {name!r}.{_suggestion(name)}")
        return copy.copy(_OTHERS[name].neutral[0])


# ── values of our fields ──────────────────────────────────────────────────────────────────────


def _choice(
    name: str,
    value: object,
    *,
    synonyms: Mapping[str, str] | None = None,
    replaced: Mapping[str, str] | None = None,
) -> str:
    """One of the field's choices; `synonyms` mean the same, `replaced` is the nearest with a warning."""
    word = check_text(name, value).lower()
    word = (synonyms or {}).get(word, word)
    if replaced and word in replaced:
        logs.warn_once(f"{name}={word!r}", f"{name}={word!r} is not offered; using {replaced[word]!r}")
        word = replaced[word]
    choices = _FIELDS[name].metadata["choices"]
    if word not in choices:
        allowed = ", ".join(map(repr, choices))
        raise InvalidArgument(f"{name} must be one of {allowed}, got {show(value)}")
    return word


def _dtype(name: str, value: object) -> str:
    # torch.bfloat16 is taken by its name, so that torch need not be imported here.
    word = str(value) if type(value).__module__ == "torch" else check_text(name, value)
    return _choice(name, word.removeprefix("torch."), synonyms=DTYPES)


def _device(name: str, value: object) -> str:
    """'auto', 'cpu', 'cuda' or 'cuda:<index>'."""
    word = str(value) if type(value).__module__ == "torch" else check_text(name, value).lower()
    kind, colon, index = word.partition(":")
    if colon and not (kind in ("cpu", "cuda") and index.isdecimal() and index.isascii()):
        raise InvalidArgument(f"{name} must be 'auto', 'cpu', 'cuda' or 'cuda:<index>', got {show(value)}")
    return _choice(name, kind) + (f":{int(index[:9])}" if kind == "cuda" and colon else "")


def _word(name: str, value: object) -> str:
    """A folder, hub id or revision; `pathlib` paths are taken, too."""
    with reading(name):
        text = check_text(name, os.fspath(value) if isinstance(value, os.PathLike) else value)
    if not text.strip() or "\0" in text:
        raise InvalidArgument(f"{name} must be a name that is not empty, got {show(value)}")
    return text


def check_path(name: str, value: object) -> str:
    """A folder or a hub id that the system can look for, whether it is there or not."""
    text = _word(name, value)
    with reading(name):
        Path(text).expanduser().exists()  # raises for a name that is too long, and for ~ of nobody
    return text


def anchored(name: str) -> str:
    """The same model's name after a chdir and for another process: of what exists here the absolute path."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def _json_object(name: str, value: object) -> dict[str, Any]:
    """A JSON object, as text or as a mapping (copied)."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise WrongType(f"{name} must be a JSON object, as text or as a dict, got {show(value)}")
    return dict(value)


def _overrides(name: str, value: object) -> dict[str, Any]:
    given = _json_object(name, value)
    try:
        json.dumps(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise WrongType(f"{name} holds what JSON does not: {error}") from None
    return given


def _preferred_sampling_params(name: str, value: object) -> dict[str, Any]:
    given = _json_object(name, value)
    try:
        SamplingParams.from_value(given)
    except InvalidArgument as error:
        raise type(error)(f"{name}: {error}") from None
    return given


def _chunk(name: str, value: object) -> int:
    remedy = "; use -1 for no chunks"
    number = check_whole(name, value, minimum=-1, maximum=2**31 - 1, remedy=remedy)
    if number == 0:
        raise InvalidArgument(f"{name} must be -1 or at least 1, got 0{remedy}")
    return number


def _pattern(name: str, value: object) -> str | None:
    return constraints.regex(name, value)


_count = partial(check_whole, minimum=1, maximum=2**31 - 1)

_FLAGS = (
    "skip_tokenizer_init trust_remote_code core_process disable_radix_cache disable_cuda_graph"
    " logprobs_ignore_temperature cumulative_stream show_progress log_requests enable_metrics"
    " enable_priority_scheduling schedule_low_priority_values_first"
    " disable_priority_preemption abort_on_priority_when_disabled constrained_json_disable_any_whitespace"
    " enable_deterministic_inference allow_auto_truncate"
)
_RULES: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_FLAGS.split(), check_flag),
    **dict.fromkeys(("model_path", "tokenizer_path", "download_dir"), check_path),
    **dict.fromkeys(("context_length", "max_total_tokens", "stream_interval"), _count),
    "revision": _word,
    "load_format": _choice,
    "dtype": _dtype,
    "json_model_override_args": _overrides,
    "chat_template": check_text,
    "served_model_name": check_text,
    "weight_version": check_text,
    "device": _device,
    "base_gpu_id": partial(check_whole, minimum=0, maximum=1023),
    "attention_backend": partial(_choice, synonyms={"torch_native": "torch"}, replaced=ATTENTION_BACKENDS),
    "mem_fraction_static": partial(check_real, minimum=0, maximum=1, above=True, below=True),
    "page_size": partial(check_whole, minimum=1, maximum=4096),
    "max_running_requests": partial(check_whole, minimum=1, maximum=65_536),
    "chunked_prefill_size": _chunk,
    "schedule_policy": partial(_choice, replaced=POLICIES),
    "max_queued_requests": partial(check_whole, minimum=0, maximum=2**31 - 1),
    "default_priority_value": partial(check_whole, minimum=-(2**63), maximum=2**63 - 1),
    "priority_scheduling_preemption_threshold": partial(check_whole, minimum=0, maximum=2**63 - 1),
    "steps_in_flight": partial(check_whole, minimum=1, maximum=MOST_STEPS_IN_FLIGHT),
    "watchdog_timeout": partial(check_real, minimum=0, remedy="; seconds, or 0 for never"),
    "preferred_sampling_params": _preferred_sampling_params,
    "random_seed": partial(check_whole, minimum=-(2**63), maximum=2**64 - 1),
    "grammar_backend": partial(_choice, replaced=GRAMMAR_BACKENDS),
    "constrained_json_whitespace_pattern": _pattern,
    "log_requests_level": partial(check_whole, minimum=0, maximum=3),
    "log_level": partial(_choice, synonyms=LOG_LEVELS),
}


# ── resolving ─────────────────────────────────────────────────────────────────────────────────


def resolve_arguments(arguments: Mapping[str, Any]) -> EngineConfig:
    """The configuration that keyword arguments of `Engine` ask for.

    None means "not given", and so do SGLang's own defaults for names that are not ours. `server_args` may
    hold a mapping or an object whose attributes are arguments; keywords beside it win. Where neither says it,
    `SGLANG_RETURN_ORIGINAL_LOGPROB=1` in the environment is `logprobs_ignore_temperature=True`.
    Names that change nothing for us are ignored with one warning per process. Raises `UnknownArgument` for a
    name that nobody knows, `InvalidArgument` or `WrongType` for a value that cannot be served.
    """
    keywords = dict(arguments)
    source = keywords.pop("server_args", None)
    with reading("server_args"):
        values: dict[str, Any] = {} if source is None else _translate(_read_server_args(source))
    config = EngineConfig(**{**_environment(), **values, **_translate(keywords)})
    _check_priorities(config)
    return config


def _environment() -> dict[str, bool]:
    names = {field: os.environ.get(variable, "") for variable, field in _ENVIRONMENT.items()}
    return {field: True for field, value in names.items() if value.lower() in ("1", "true")}


def _translate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Checked values of our fields, from accepted names of any kind."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, value in arguments.items():
        with reading(f"{name!s:.100}"):
            target, checked = _translate_one(name, value)
            if checked is None:
                continue
            is_other = target in values and values[target] != checked
        if is_other:
            raise InvalidArgument(
                f"{origins[target]} and {name} contradict each other; give only one of them"
            )
        values[target] = checked
        origins[target] = name
    return _split_device(values)


def _translate_one(name: str, value: Any) -> tuple[str, Any]:
    """The field that one argument sets and its checked value, which is None if it asks for nothing."""
    spelled = SPELLINGS.get(name, name)
    if spelled == "model_path" and value is None:
        raise WrongType(f"{name} must be a path or a hub id, got None; leave it out for the bundled model")
    if spelled not in _FIELDS and spelled not in _OTHERS:
        raise UnknownArgument(f"Engine has no argument {brief(name)}.{_suggestion(name)}")
    if value is None:
        return spelled, None
    if spelled in _FIELDS:
        return spelled, _RULES[spelled](spelled, value)
    if spelled in _MAPPED:
        target, convert, _ = _MAPPED[spelled]
        return target, convert(name, value)
    _judge(name, value, _OTHERS[spelled])
    return spelled, None


# Arguments that change nothing while priorities are off.
_OF_PRIORITIES = (
    "schedule_low_priority_values_first",
    "default_priority_value",
    "disable_priority_preemption",
    "priority_scheduling_preemption_threshold",
)
_POLICIES_WITH_PRIORITIES = ("fcfs", "lof")


def _check_priorities(config: EngineConfig) -> None:
    """Raise for an order that priorities cannot refine; warn about what has no effect without them."""
    if config.enable_priority_scheduling:
        if config.schedule_policy not in (None, *_POLICIES_WITH_PRIORITIES):
            allowed = " or ".join(map(repr, _POLICIES_WITH_PRIORITIES))
            raise InvalidArgument(
                f"enable_priority_scheduling needs schedule_policy {allowed}, got "
                f"{config.schedule_policy!r}; set one of them or leave priorities off"
            )
        return
    for name in _OF_PRIORITIES:
        if getattr(config, name) != _FIELDS[name].default:
            logs.warn_once(name, f"{name} has no effect without enable_priority_scheduling=True")


def _split_device(values: dict[str, Any]) -> dict[str, Any]:
    """Turn `device="cuda:1"` into a device and its `base_gpu_id`."""
    device, colon, index = values.get("device", "").partition(":")
    if not colon:
        return values
    gpu = _RULES["base_gpu_id"]("the index of device", int(index))
    # An explicit 0 is SGLang's default, so it asks for nothing.
    if values.get("base_gpu_id", 0) not in (0, gpu):
        raise InvalidArgument(
            f"device names GPU {gpu}, but base_gpu_id is {values['base_gpu_id']}; give only one of them"
        )
    return {**values, "device": device, "base_gpu_id": gpu}


def _suggestion(name: str) -> str:
    known = FOREIGN_NAMES.get(name)
    return f" Did you mean {known!r}?" if known else did_you_mean(name, argument_names())


def _judge(name: str, value: Any, row: ArgumentName) -> None:
    """Pass a value that asks for nothing; warn about one that is ignored; refuse one that is not served."""
    if _asks_for_nothing(value, row.neutral):
        return
    if row.fate == "ignored":
        logs.warn_once(name, f"{name} is ignored: {row.note}")
        return
    raise InvalidArgument(
        f"{name}={show(value)} is not supported yet ({row.note}); use {row.neutral[0]!r} or leave it out"
    )


def _asks_for_nothing(value: Any, neutral: tuple[object, ...]) -> bool:
    value = plain(value)
    if isinstance(value, list | tuple | set | frozenset | dict):
        # Containers are compared only by being empty: their items may be anything.
        return not value and any(item is None or item in ([], {}) for item in neutral)
    return isinstance(value, str | int | float) and any(value == item for item in neutral if item is not None)


def _read_server_args(source: Any) -> dict[str, Any]:
    """Arguments held by a mapping or an object; unknown attributes of an object are left out."""
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, type) or not hasattr(source, "__dict__"):
        raise WrongType(f"server_args must be an object or a dict of arguments, got {show(source)}")
    values = {name: value for name, value in vars(source).items() if not name.startswith("_")}
    # An object sets every attribute of its release, whether the user cares or not.
    unknown = [name for name in values if name not in _FIELDS and name not in _OTHERS]
    for name in unknown:
        value = values.pop(name)
        if value is not None and not _asks_for_nothing(value, (False, 0, "", [])):
            logs.warn_once(f"server_args.{name}", f"server_args.{name} is ignored: the argument is not known")
    return values
