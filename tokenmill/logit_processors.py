"""Custom logit processors: what users write, the ready-made ones, and how any of them is named.

Owns the protocol and the ways to give a processor: a callable, class, instance, serialized text or registered
name. It works on tensors by their methods only; who calls processors, and what becomes of one that fails,
is the runner's matter.
"""

from __future__ import annotations

import importlib
import inspect
import io
import itertools
import json
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.errors import InvalidArgument, WrongType, did_you_mean, told
from tokenmill.sampling_params import check_whole, show

# Parameters of one row: the request's `custom_params`, and the request itself under REQUEST_KEY.
RowParams = Mapping[str, Any]
ProcessorCall = Callable[[Any, Sequence[RowParams]], Any]
REQUEST_KEY = "__req__"
_MINUS_INFINITY = float("-inf")
_SGLANG_MODULE = "sglang.srt.sampling.custom_logit_processor"
# Processors that are remembered, so that requests which give the same one share a call.
_MOST_REMEMBERED = 256


class CustomLogitProcessor:
    """Base class of processors: changes the logits of the rows that use it, before a token is drawn.

    A class without arguments: one instance serves all requests that name the class. What belongs to one
    request is kept as an attribute of `__req__`.
    """

    def __call__(self, logits: Any, custom_param_list: Sequence[RowParams]) -> Any:
        """The new logits, float32 [rows, vocabulary] as given; changing them in place is fine.

        `custom_param_list` has one dict for each row: the request's `custom_params`, and under `__req__` an
        object with the lists `origin_input_ids` and `output_ids`, on which attributes may be set.
        """
        raise NotImplementedError

    @classmethod
    def to_str(cls) -> str:
        """The class as text, `{"callable": <hex of its pickle by dill>}`; needs the extra `processors`."""
        payload: bytes = _dill(f"{cls.__name__}.to_str()").dumps(cls, recurse=True)
        return json.dumps({"callable": payload.hex()})

    @classmethod
    def from_str(cls, text: str) -> CustomLogitProcessor:
        """An instance of the class that `to_str` wrote. Runs code in the text: read your own texts only."""
        processor: CustomLogitProcessor = _class_in("text", text)()
        return processor


# ── ready-made ────────────────────────────────────────────────────────────────────────────────


class AllowedTokens(CustomLogitProcessor):
    """Leaves only the tokens `token_ids`. Registered as `allowed_tokens`."""

    def __call__(self, logits: Any, custom_param_list: Sequence[RowParams]) -> Any:
        """As the base class."""
        rows, ids = _pairs(_token_ids(params, "token_ids", logits) for params in custom_param_list)
        kept = logits[rows, ids] if rows else None
        logits[:] = _MINUS_INFINITY
        if rows:
            logits[rows, ids] = kept
        return logits


class ForbiddenTokens(CustomLogitProcessor):
    """Removes the tokens `token_ids`. Registered as `forbidden_tokens`."""

    def __call__(self, logits: Any, custom_param_list: Sequence[RowParams]) -> Any:
        """As the base class."""
        return _forbid(logits, [_token_ids(params, "token_ids", logits) for params in custom_param_list])


class NoRepeatNgram(CustomLogitProcessor):
    """Removes tokens that would repeat a run of `ngram_size` tokens. Registered as `no_repeat_ngram`.

    Runs are looked for among the last `window_size` tokens of prompt and output together (default: all of
    them). Tokens of `whitelist_token_ids` are never removed.
    """

    def __call__(self, logits: Any, custom_param_list: Sequence[RowParams]) -> Any:
        """As the base class."""
        return _forbid(logits, [self._repeating(params, logits) for params in custom_param_list])

    def _repeating(self, params: RowParams, logits: Any) -> set[int]:
        size = check_whole("ngram_size", _needed(params, "ngram_size"), minimum=1)
        window = params.get("window_size")
        tokens = _tokens(params)
        if window is not None:
            tokens = tokens[-check_whole("window_size", window, minimum=1) :]
        kept = _token_ids(params, "whitelist_token_ids", logits) if "whitelist_token_ids" in params else []
        start = tokens[len(tokens) - size + 1 :] if size > 1 else []
        if len(start) < size - 1:
            return set()
        ends = range(size - 1, len(tokens))
        return {tokens[end] for end in ends if tokens[end - size + 1 : end] == start}.difference(kept)


class ThinkingBudget(CustomLogitProcessor):
    """Ends the model's thinking after `thinking_budget` tokens. Registered as `thinking_budget`.

    The tokens around a thought are attributes of a subclass, or parameters of the request:
    `start_token_id`, `end_token_id`, and `newline_token_id` for a token that stands before the end.
    """

    THINKING_START_TOKEN_ID: int | None = None
    THINKING_END_TOKEN_ID: int | None = None
    NEW_LINE_TOKEN_ID: int | None = None

    def __call__(self, logits: Any, custom_param_list: Sequence[RowParams]) -> Any:
        """As the base class."""
        forced = [self._forced(params, logits.shape[-1]) for params in custom_param_list]
        rows = [row for row, token in enumerate(forced) if token is not None]
        if rows:
            logits[rows] = _MINUS_INFINITY
            logits[rows, [forced[row] for row in rows]] = 0.0
        return logits

    def _forced(self, params: RowParams, vocab_size: int) -> int | None:
        """The token that must come now, if the thought has been long enough."""
        start = self._marker(params, "start_token_id", self.THINKING_START_TOKEN_ID, vocab_size)
        end = self._marker(params, "end_token_id", self.THINKING_END_TOKEN_ID, vocab_size)
        budget = check_whole("thinking_budget", _needed(params, "thinking_budget"), minimum=0)
        tokens = _tokens(params)
        length = next((count for count, token in enumerate(reversed(tokens)) if token in (start, end)), None)
        if length is None or tokens[-1 - length] == end or length < budget:
            return None
        newline = params.get("newline_token_id", self.NEW_LINE_TOKEN_ID)
        if newline is None or (length > budget and tokens[-1] == newline):
            return end
        return _token_id("newline_token_id", newline, vocab_size)

    def _marker(self, params: RowParams, name: str, default: int | None, vocab_size: int) -> int:
        value = _needed(params, name) if default is None else params.get(name, default)
        return _token_id(name, value, vocab_size)


class Qwen3ThinkingBudgetLogitProcessor(ThinkingBudget):
    """For Qwen3."""

    THINKING_START_TOKEN_ID = 151667
    THINKING_END_TOKEN_ID = 151668
    NEW_LINE_TOKEN_ID = 198


class DeepSeekR1ThinkingBudgetLogitProcessor(ThinkingBudget):
    """For DeepSeek-R1."""

    THINKING_START_TOKEN_ID = 128798
    THINKING_END_TOKEN_ID = 128799
    NEW_LINE_TOKEN_ID = 201


class Glm4MoeThinkingBudgetLogitProcessor(ThinkingBudget):
    """For GLM-4.5 and GLM-4.6."""

    THINKING_START_TOKEN_ID = 151350
    THINKING_END_TOKEN_ID = 151351
    NEW_LINE_TOKEN_ID = 198


# What SGLang calls the ready-made ones.
DisallowedTokensLogitsProcessor = ForbiddenTokens
DeepseekOCRNoRepeatNGramLogitProcessor = NoRepeatNgram
ThinkingBudgetLogitProcessor = ThinkingBudget


def _tokens(params: RowParams) -> list[int]:
    """Prompt and output of the row."""
    request = params[REQUEST_KEY]
    return [*request.origin_input_ids, *request.output_ids]


def _needed(params: RowParams, name: str) -> Any:
    if name not in params:
        raise InvalidArgument(f"custom_params has no {name!r}, which this logit processor needs")
    return params[name]


def _token_ids(params: RowParams, name: str, logits: Any) -> list[int]:
    value = _needed(params, name)
    if not isinstance(value, list | tuple):
        raise WrongType(f"{name} must be a list of token ids, got {show(value)}")
    size = logits.shape[-1]
    return [_token_id(f"{name}[{index}]", item, size) for index, item in enumerate(value)]


def _token_id(name: str, value: Any, vocab_size: int) -> int:
    return check_whole(f"custom_params: {name}", value, minimum=0, maximum=vocab_size - 1)


def _pairs(ids_of_rows: Iterable[Iterable[int]]) -> tuple[list[int], list[int]]:
    """Row and id of every entry, as two columns."""
    pairs = [(row, token) for row, ids in enumerate(ids_of_rows) for token in ids]
    return [row for row, _ in pairs], [token for _, token in pairs]


def _forbid(logits: Any, ids_of_rows: Sequence[Iterable[int]]) -> Any:
    rows, ids = _pairs(ids_of_rows)
    if rows:
        logits[rows, ids] = _MINUS_INFINITY
    return logits


# ── one object for each processor ─────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class LogitProcessor:
    """A processor as requests carry it; those with the same `key` share one call.

    It crosses to another process by its pickle (by dill where that is installed).
    """

    key: str
    call: ProcessorCall
    # What the user gave: alive as long as this is, so that no other object takes its identity.
    source: Any = field(default=None, repr=False)

    def __call__(self, logits: Any, custom_param_list: Sequence[RowParams]) -> Any:
        """As `CustomLogitProcessor`."""
        return self.call(logits, custom_param_list)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.key, *self._payload())

    def check_crosses(self, name: str) -> None:
        """Raise `InvalidArgument` if the processor cannot be sent to a core in another process."""
        try:
            _loads(*self._payload())
        except Exception as error:
            raise InvalidArgument(
                f"{name} must cross to the process of the core, but {show(self.call)} cannot be pickled: "
                f"{error}; define it at the top of a module, install tokenmill[processors], or use "
                "core_process=False"
            ) from error

    def _payload(self) -> tuple[str, bytes]:
        """The module that wrote the call, and what it wrote."""
        try:
            dill: Any = importlib.import_module("dill")
        except ImportError:
            if getattr(self.source, "__module__", None) == "__main__":
                raise pickle.PicklingError("the other process does not have the script it lives in") from None
            return "pickle", pickle.dumps(self.call)
        return "dill", dill.dumps(self.call, recurse=True)


_lock = threading.RLock()
_numbers = itertools.count()
_remembered: dict[Any, LogitProcessor] = {}
_registered: dict[str, LogitProcessor] = {}


def register_logit_processor(name: str, processor: Any) -> None:
    """Let `custom_logit_processor=name` mean this callable, class, instance or text, in all engines.

    A name that is there already then means the new one.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidArgument(f"name must be a word like 'my_processor', got {show(name)}")
    resolved = resolve_processor("processor", processor)
    with _lock:
        _registered[name] = resolved


def check_registered(name: str, value: Any) -> None:
    """Raise `InvalidArgument` unless the value is a registered name: for what comes from data."""
    known = _names()
    if not isinstance(value, str) or value not in known:
        hint = did_you_mean(value, known) if isinstance(value, str) else ""
        raise InvalidArgument(
            f"{name} must be the name of a registered logit processor ({', '.join(known)}) here, got "
            f"{show(value)}; register it, or give it as an argument for all rows.{hint}"
        )


def resolve_processor(name: str, value: Any) -> LogitProcessor:
    """The one object for whatever a caller gave as the argument `name`; the same one for the same value.

    Raises `InvalidArgument` for an unknown name, a text that cannot be read, or what cannot be called with
    two arguments. A text in the form of `to_str` runs code.
    """
    if isinstance(value, LogitProcessor):
        return value
    if isinstance(value, str):
        return _in_text(name, value) if value.lstrip().startswith("{") else _by_name(name, value)
    with _lock:
        known = _remembered.get(id(value))
        return known or _remember(id(value), _call_of(name, value), value, title=_title(value))


def _by_name(name: str, value: str) -> LogitProcessor:
    with _lock:
        if value in _registered:
            return _registered[value]
    known = _names()
    raise InvalidArgument(
        f"{name} is {show(value)}, which is neither a registered logit processor ({', '.join(known)}) nor "
        f"the text of one.{did_you_mean(value, known)}"
    )


def _names() -> list[str]:
    """The registered names."""
    with _lock:
        return sorted(_registered)


def _in_text(name: str, text: str) -> LogitProcessor:
    with _lock:
        known = _remembered.get(text)
        if known is not None:
            return known
        loaded = _class_in(name, text)
        return _remember(text, _call_of(name, loaded), text, title=_title(loaded))


def _title(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _remember(at: Any, call: ProcessorCall, source: Any, *, title: str) -> LogitProcessor:
    processor = LogitProcessor(f"{title}#{next(_numbers)}", call, source)
    while len(_remembered) >= _MOST_REMEMBERED:
        del _remembered[next(iter(_remembered))]
    _remembered[at] = processor
    return processor


def _call_of(name: str, value: Any) -> ProcessorCall:
    """What is called: the value itself, or an instance of the class."""
    call = value
    if isinstance(value, type):
        try:
            call = value()
        except Exception as error:
            raise InvalidArgument(
                f"{name}: {value.__qualname__}() fails: {error!r}; a class is made without arguments, so "
                "give an instance instead"
            ) from error
    if not callable(call):
        raise WrongType(
            f"{name} must be a callable, a class of such, a registered name, or the text of to_str(), got "
            f"{show(value)}"
        )
    try:
        inspect.signature(call).bind(None, [])
    except TypeError as error:
        raise InvalidArgument(
            f"{name}: {show(value)} cannot be called as processor(logits, custom_param_list): {error}"
        ) from None
    except ValueError:
        pass  # nothing is known of its arguments
    result: ProcessorCall = call
    return result


def _class_in(name: str, text: str) -> Any:
    """What is pickled in a text of `to_str`."""
    try:
        payload = bytes.fromhex(json.loads(text)["callable"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidArgument(
            f'{name} must be the text of to_str(), {{"callable": "<hex>"}}, got {show(text)}'
        ) from None
    dill = _dill(name)
    try:
        return _read_by_dill(dill, payload)
    except Exception as error:
        raise InvalidArgument(f"{name}: the class in the text cannot be loaded: {error!r}") from error


def _read_by_dill(dill: Any, payload: bytes) -> Any:
    """What is pickled; classes of SGLang's module of processors are ours of the same names."""

    class Reader(dill.Unpickler):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            if module == _SGLANG_MODULE and name in globals():
                return globals()[name]
            return super().find_class(module, name)

    return Reader(io.BytesIO(payload)).load()


def _dill(user: str) -> Any:
    try:
        return importlib.import_module("dill")
    except ImportError:
        raise InvalidArgument(
            f"{user} needs the package dill; install tokenmill[processors], or give the class itself"
        ) from None


def _loads(module: str, payload: bytes) -> Any:
    return importlib.import_module(module).loads(payload)


def _loaded(module: str, payload: bytes) -> Any:
    """The call; or, where it cannot be loaded here, one that says so to every request that uses it."""
    try:
        return _loads(module, payload)
    except BaseException as error:
        problem = f"it cannot be loaded in the process of the core: {told(error)}"

    def fail(logits: Any, custom_param_list: Sequence[RowParams]) -> Any:
        raise InvalidArgument(problem)

    return fail


def _restore(key: str, module: str, payload: bytes) -> LogitProcessor:
    """In the other process: the same object for the same key."""
    with _lock:
        known = _remembered.get(("key", key))
        if known is None:
            call = _loaded(module, payload)
            known = LogitProcessor(key, call, call)
            while len(_remembered) >= _MOST_REMEMBERED:
                del _remembered[next(iter(_remembered))]
            _remembered[("key", key)] = known
        return known


for _name, _class in {
    "allowed_tokens": AllowedTokens,
    "forbidden_tokens": ForbiddenTokens,
    "no_repeat_ngram": NoRepeatNgram,
    "thinking_budget": ThinkingBudget,
}.items():
    register_logit_processor(_name, _class)
