"""Calls of `Engine` that are not about one request: checked here, answered by the core between two steps.

Caches, pauses, profiles, weights, memory and figures; also what SGLang's users reach through
`engine.tokenizer_manager`.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tokenmill.arguments import ServerArgs, anchored, check_path
from tokenmill.errors import (
    EngineClosed,
    EngineDead,
    InvalidArgument,
    UnknownArgument,
    WrongState,
    WrongType,
    did_you_mean,
    reading,
)
from tokenmill.frontend.facts import server_info
from tokenmill.frontend.failures import returns_errors
from tokenmill.frontend.outputs import FlushResult
from tokenmill.sampling_params import brief, check_flag, check_text, check_whole, show
from tokenmill.texts import plain_text

if TYPE_CHECKING:
    from tokenmill.frontend.client import Client

PAUSE_MODES = ("abort", "retract", "in_place")
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
_ACTIVITIES = ("CPU", "GPU", "MEM")
# Keywords of `start_profile` that older programs use.
_PROFILE_ALIASES = {"profile_dir": "output_dir", "profile_name": "profile_prefix"}
_PROFILE_NAMES = (
    "output_dir",
    "start_step",
    "num_steps",
    "activities",
    "profile_by_stage",
    "profile_stages",
    "with_stack",
    "record_shapes",
    "profile_id",
    "profile_prefix",
    "merge_profiles",
    "detailed_annotations",
)
# Keywords that ask for what we do not write, with the reason.
_NOT_OFFERED = {
    "profile_by_stage": "steps mix prompts and decoding, so no trace belongs to one stage",
    "profile_stages": "steps mix prompts and decoding, so no trace belongs to one stage",
    "merge_profiles": "there is one rank, and so one trace",
    "detailed_annotations": "there are none besides the operators' names",
}


# Methods of SGLang's engine for features to come.
_LATER = {
    "encode": "embeddings",
    "async_encode": "embeddings",
    "rerank": "cross-encoders",
    "async_rerank": "cross-encoders",
    "load_lora_adapter": "LoRA adapters",
    "async_load_lora_adapter": "LoRA adapters",
    "load_lora_adapter_from_tensors": "LoRA adapters",
    "unload_lora_adapter": "LoRA adapters",
    "async_unload_lora_adapter": "LoRA adapters",
    "collective_rpc": "methods of SGLang's scheduler",
    "save_sharded_model": "sharded checkpoints",
    "save_remote_model": "checkpoints on other machines",
    "start_expert_distribution_record": "mixtures of experts",
    "stop_expert_distribution_record": "mixtures of experts",
    "dump_expert_distribution_record": "mixtures of experts",
    "init_weights_update_group": "weights from other processes",
    "update_weights_from_distributed": "weights from other processes",
    "update_weights_from_ipc": "weights from other processes",
    "destroy_weights_update_group": "weights from other processes",
    "attach_tokenizer_worker": "processes that only encode text",
    "template_manager": "SGLang's own templates",
    "port_args": "ports between SGLang's processes",
}


class _NotSupported(InvalidArgument, AttributeError):
    """A method that SGLang has: `hasattr` says no, and who calls it gets an error of ours."""


def missing(engine: object, name: str) -> AttributeError:
    """The error for an attribute that `Engine` has not, with the feature it stands for in SGLang."""
    message = f"{type(engine).__name__!r} object has no attribute {name!r}"
    if name in _LATER:
        return _NotSupported(f"Engine.{name} is not supported yet ({_LATER[name]})")
    return AttributeError(message, name=name, obj=engine)


class Control:
    """Checks the arguments of control calls and asks the core. Every method may be called from any thread."""

    def __init__(self, client: Client) -> None:
        self._client = client

    # ── cache, pauses, garbage ────────────────────────────────────────────────────────────────

    def flush_cache(self, on_error: Any) -> FlushResult:
        """See `Engine.flush_cache`."""
        raises = not returns_errors(on_error)
        success, message = self._client.call_core("flush_cache")
        if raises and not success:
            raise WrongState(message)
        return FlushResult(success, message)

    def pause_generation(self, mode: Any) -> None:
        """See `Engine.pause_generation`."""
        self._client.call_core("pause_generation", mode=_one_of("mode", mode, PAUSE_MODES))

    def continue_generation(self) -> None:
        """See `Engine.continue_generation`."""
        self._client.call_core("continue_generation")

    def freeze_gc(self) -> None:
        """See `Engine.freeze_gc`."""
        gc.collect()
        gc.freeze()
        self._client.call_core("freeze_gc")

    def child_pids(self) -> list[int]:
        """See `Engine.get_all_child_pids`."""
        try:
            process_id = self._client.call_core("process_id")
        except (EngineClosed, EngineDead):
            return []
        return [] if process_id == os.getpid() else [process_id]

    def server_info(self, config: ServerArgs, version: str, startup_seconds: float) -> dict[str, Any]:
        """See `Engine.get_server_info`."""
        try:
            state = self.state()
        except (EngineClosed, EngineDead):
            state = None
        rest = {
            "weight_version": self._client.weight_version,
            "startup_time": startup_seconds,
            "version": version,
        }
        return server_info(config, self._client.facts, state, rest)

    # ── profiles ──────────────────────────────────────────────────────────────────────────────

    def start_profile(self, options: Mapping[str, Any]) -> None:
        """See `Engine.start_profile`."""
        given = _profile_options(options)
        folder = _trace_folder(given)
        self._client.call_core(
            "start_profile",
            folder=str(folder),
            title=_trace_title(given, folder),
            activities=_activities(given.get("activities", ["CPU", "GPU"]), self._client.facts.device),
            with_stack=check_flag("with_stack", given.get("with_stack", True)),
            record_shapes=check_flag("record_shapes", given.get("record_shapes", True)),
            start_step=_optional_count(given, "start_step", minimum=0),
            num_steps=_optional_count(given, "num_steps", minimum=1),
        )

    def stop_profile(self) -> None:
        """See `Engine.stop_profile`."""
        self._client.call_core("stop_profile")

    # ── weights ───────────────────────────────────────────────────────────────────────────────

    def update_weights_from_disk(
        self, model_path: Any, load_format: Any, on_error: Any, *, weight_version: Any
    ) -> tuple[bool, str, int]:
        """See `Engine.update_weights_from_disk`."""
        raises = not returns_errors(on_error)
        _check_load_format(load_format, ("auto", "safetensors"))
        success, message, num_paused = self._client.update_weights(
            "update_weights_from_disk",
            version=_version(weight_version),
            tensor_update="",
            model_path=anchored(check_path("model_path", model_path)),
        )
        if raises and not success:
            raise InvalidArgument(message)
        return success, message, num_paused

    def update_weights_from_tensor(
        self, named_tensors: Any, load_format: Any, flush_cache: Any, on_error: Any, *, weight_version: Any
    ) -> tuple[bool, str]:
        """See `Engine.update_weights_from_tensor`."""
        raises = not returns_errors(on_error)
        _check_load_format(load_format, ("auto", "direct"))
        success, message = self._client.update_weights(
            "update_weights_from_tensor",
            version=_version(weight_version),
            tensor_update=uuid.uuid4().hex,
            named_tensors=_named_tensors(named_tensors),
            flush_cache=check_flag("flush_cache", flush_cache),
        )
        if raises and not success:
            raise InvalidArgument(message)
        return success, message

    def get_weights_by_name(self, name: Any, truncate_size: Any) -> list[Any] | None:
        """See `Engine.get_weights_by_name`."""
        values: list[Any] | None = self._client.call_core(
            "get_weights_by_name",
            tensor_name=check_text("name", name),
            truncate_size=check_whole("truncate_size", truncate_size, minimum=1),
        )
        return values

    # ── memory ────────────────────────────────────────────────────────────────────────────────

    def release_memory(self, tags: Any) -> None:
        """See `Engine.release_memory_occupation`."""
        self._client.release_memory(_tags(tags))

    def resume_memory(self, tags: Any) -> None:
        """See `Engine.resume_memory_occupation`."""
        self._client.resume_memory(_tags(tags))

    # ── figures ───────────────────────────────────────────────────────────────────────────────

    def state(self) -> dict[str, Any]:
        """Numbers of the moment, from the core."""
        numbers: dict[str, Any] = self._client.call_core("state")
        return numbers

    def metrics_text(self) -> str:
        """See `Engine.get_metrics`."""
        metrics = self._client.metrics
        if metrics is None:
            raise InvalidArgument("there are no metrics: make the engine with enable_metrics=True")
        self._client.observers.tell()
        return metrics.text(self.state())


def _version(given: Any) -> str | None:
    return None if given is None else check_text("weight_version", given)


def _one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    with reading(name):
        word = plain_text(value) if isinstance(value, str) else ""
    if word not in allowed:
        raise InvalidArgument(f"{name} must be one of {', '.join(map(repr, allowed))}, got {show(value)}")
    return word


def _profile_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `start_profile` that were given, by their names today; None is as if not given."""
    given: dict[str, Any] = {}
    for spelled, value in options.items():
        name = _PROFILE_ALIASES.get(spelled, spelled)
        if name not in _PROFILE_NAMES:
            known = (*_PROFILE_NAMES, *_PROFILE_ALIASES)
            raise UnknownArgument(
                f"start_profile() has no argument {brief(spelled)}.{did_you_mean(spelled, known)}"
            )
        if value is None or (
            name in _NOT_OFFERED and (value is False or (type(value) is list and not value))
        ):
            continue
        if name in _NOT_OFFERED:
            raise InvalidArgument(f"{name} is not supported ({_NOT_OFFERED[name]}); leave it out")
        if name in given:
            raise InvalidArgument(f"{name} was given twice, once as {spelled}; give it once")
        given[name] = value
    return given


def _trace_folder(given: Mapping[str, Any]) -> Path:
    """Where a trace goes, which need not exist yet."""
    standard = os.environ.get("SGLANG_TORCH_PROFILER_DIR") or tempfile.gettempdir()
    text = _file_text("output_dir", check_path("output_dir", given.get("output_dir", standard)))
    with reading("output_dir"):
        folder = Path(text).absolute()
        _look_for(folder)
    return folder


def _trace_title(given: Mapping[str, Any], folder: Path) -> str:
    """What its files are called, before what kind of file each is."""
    prefix = _trace_word("profile_prefix", given.get("profile_prefix", ""))
    name = _trace_word("profile_id", given.get("profile_id", f"{time.time():.6f}"))
    title = f"{prefix}-{name}-TP-0" if prefix else f"{name}-TP-0"
    with reading("profile_prefix and profile_id" if prefix else "profile_id"):
        _look_for(folder / f"{title}.trace.json.gz")
    return title


def _trace_word(name: str, value: Any) -> str:
    word = _file_text(name, check_text(name, value))
    if word and Path(word).name != word:
        raise InvalidArgument(f"{name}: a trace cannot be called {show(word)}: leave out the slashes")
    return word


def _file_text(name: str, text: str) -> str:
    """Text that names of files can hold, and that torch can pass on to the system."""
    if "\0" in text:
        raise InvalidArgument(f"{name} must be the name of a file, without a NUL character, got {show(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{name} has half a surrogate pair at character {error.start}, which no file is called; remove it"
        ) from None
    return text


def _look_for(file: Path) -> None:
    """Raises what the system says of a name that is too long, wherever in the path it is."""
    file.exists()
    there = next(folder for folder in file.parents if folder.exists())
    for part in file.relative_to(there).parts:
        (there / part).exists()  # of a folder that is missing the system would not read on


def _activities(value: Any, device: str) -> list[str]:
    with reading("activities"):
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple | set) or not names:
            raise WrongType(
                f"activities must be a list of {', '.join(map(repr, _ACTIVITIES))}, got {show(value)}"
            )
        words = [check_text("activities", name).upper() for name in names]
    for word in words:
        if word not in _ACTIVITIES:
            known = ", ".join(map(repr, _ACTIVITIES))
            raise InvalidArgument(f"activities has {brief(word)}; known are {known}")
    if device == "cpu" and "MEM" in words:
        raise InvalidArgument(f"activities: 'MEM' needs a GPU, and this engine runs on {device}")
    if device == "cpu" and "CPU" not in words:
        raise InvalidArgument(f"activities {words} trace nothing on {device}; add 'CPU'")
    return words


def _optional_count(given: Mapping[str, Any], name: str, *, minimum: int) -> int | None:
    return check_whole(name, given[name], minimum=minimum) if name in given else None


def _check_load_format(value: Any, allowed: tuple[str, ...]) -> None:
    if value is not None:
        _one_of("load_format", value, allowed)


def _named_tensors(value: Any) -> list[tuple[str, Any]]:
    """Pairs of name and tensor, of a dict or of any iterable of pairs."""
    wanted = "named_tensors must be a list of pairs (name, tensor), or a dict"
    checked = []
    with reading("named_tensors"):
        pairs = value.items() if isinstance(value, Mapping) else value
        if isinstance(pairs, str) or not isinstance(pairs, Iterable):
            raise WrongType(f"{wanted}, got {show(value)}")
        for index, pair in enumerate(pairs):
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
                raise WrongType(f"{wanted}; item {index} is {show(pair)}")
            checked.append((str(pair[0]), pair[1]))
    return checked


def _tags(value: Any) -> tuple[str, ...]:
    """Which parts of the memory are meant; none named: all."""
    with reading("tags"):
        if value is None or (isinstance(value, list | tuple | set) and not value):
            return MEMORY_TAGS
        if not isinstance(value, str | list | tuple | set):
            raise WrongType(f"tags must be a list of names or None, got {show(value)}")
        names = [check_text("tags", name) for name in ([value] if isinstance(value, str) else value)]
    for name in names:
        if name not in MEMORY_TAGS:
            known = ", ".join(map(repr, MEMORY_TAGS))
            raise InvalidArgument(f"tags has {show(name)}; known are {known}, and None for all of them")
    return tuple(dict.fromkeys(names))


class Served(Protocol):
    """What `TokenizerManager` needs of an engine."""

    @property
    def server_args(self) -> Any: ...
    def get_tokenizer(self) -> Any: ...
    def get_server_info(self) -> dict[str, Any]: ...
    def abort(self, rid: str = "", abort_all: bool = False) -> None: ...
    def pause_generation(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None: ...
    def continue_generation(self) -> None: ...
    def flush_cache(self) -> FlushResult: ...
    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None: ...
    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is read of `engine.tokenizer_manager.model_config`, under SGLang's names."""

    path: str
    context_len: int
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    is_generation: bool = True


class TokenizerManager:
    """What SGLang's users reach as `engine.tokenizer_manager`; it only passes on to the engine."""

    def __init__(self, engine: Served) -> None:
        self._engine = engine

    @property
    def server_args(self) -> Any:
        """The engine's arguments."""
        return self._engine.server_args

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer."""
        return self._engine.get_tokenizer()

    @property
    def model_config(self) -> ModelFacts:
        """The model's sizes."""
        info = self._engine.get_server_info()
        return ModelFacts(
            path=info["model_path"],
            context_len=info["context_length"],
            vocab_size=info["vocab_size"],
            hidden_size=info["hidden_size"],
            num_hidden_layers=info["num_layers"],
        )

    @property
    def context_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.model_config.context_len

    @property
    def model_path(self) -> str:
        """The engine's argument."""
        return str(self.server_args.model_path)

    @property
    def served_model_name(self) -> str:
        """The engine's argument, or the model's path as it was given."""
        return str(self.server_args.served_model_name)

    @property
    def is_generation(self) -> bool:
        """Whether the model writes text."""
        return self.model_config.is_generation

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """See `Engine.abort`."""
        self._engine.abort(rid, abort_all)

    async def pause_generation(self, request: Any = None) -> None:
        """See `Engine.pause_generation`; `request` is a mode, or an object with a `mode`."""
        with reading("request"):
            mode: Any = request if isinstance(request, str) else getattr(request, "mode", "abort")
        self._engine.pause_generation(mode)  # it waits for at most the steps that are launched

    async def continue_generation(self, request: Any = None) -> None:
        """See `Engine.continue_generation`."""
        self._engine.continue_generation()

    async def flush_cache(self) -> FlushResult:
        """See `Engine.flush_cache`."""
        return self._engine.flush_cache()

    async def release_memory_occupation(self, request: Any = None, _http_request: Any = None) -> None:
        """See `Engine.release_memory_occupation`; `request` has `tags`, or is None for all of them."""
        self._engine.release_memory_occupation(_tags_of(request))

    async def resume_memory_occupation(self, request: Any = None, _http_request: Any = None) -> None:
        """See `Engine.resume_memory_occupation`; `request` as for releasing."""
        self._engine.resume_memory_occupation(_tags_of(request))


def _tags_of(request: Any) -> Any:
    with reading("request"):
        return getattr(request, "tags", request)
