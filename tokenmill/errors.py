"""Every exception that tokenmill raises on purpose; nothing else of ours is imported here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, TypedDict


class TokenmillError(Exception):
    """Base of all errors that tokenmill raises on purpose."""


class InvalidArgument(TokenmillError, ValueError):
    """An argument has a value that cannot be served; raised before any work starts."""

    error_type = "bad_parameters"  # one of `ERROR_TYPES`
    status_code = 400  # the HTTP status that says the same

    def __init__(self, message: str) -> None:
        super().__init__(_shortened(message))


class WrongType(InvalidArgument, TypeError):
    """An argument has the wrong Python type."""


class UnknownArgument(InvalidArgument, TypeError):
    """A keyword or dictionary key that no parameter has."""


class TooLong(InvalidArgument):
    """A prompt, alone or with the output that is asked for, does not fit into a sequence."""

    error_type = "too_long"


class InvalidGrammar(InvalidArgument):
    """What an output is to follow is no schema, pattern, grammar or tag."""

    error_type = "bad_grammar"


class ModelNotFound(InvalidArgument, FileNotFoundError):
    """`model_path` is neither a folder, nor a model of the hub, nor a bundled model."""


class UnsupportedModel(InvalidArgument):
    """The checkpoint's architecture or one of its settings is not supported."""


class RequestFailed(TokenmillError, RuntimeError):
    """A request was accepted and then failed by itself; the engine lives on.

    `error_type` is one of `ERROR_TYPES`, `status_code` the HTTP status that says the same.
    """

    def __init__(self, message: str, *, error_type: str = "internal", status_code: int = 500) -> None:
        super().__init__(_shortened(message))
        self.error_type = error_type
        self.status_code = status_code


class InvalidRequest(RequestFailed, InvalidArgument):
    """What a request asked for turned out to be impossible when it was worked on: a grammar, for example."""


class RequestTimeout(RequestFailed, TimeoutError):
    """A request did not finish within its `timeout`.

    No call raises it, for such a request has a result; it is for programs that make exceptions of results.
    """


class QueueFull(RequestFailed):
    """`max_queued_requests` were waiting already, none of them less urgent."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a call that waited for results; the engine lives on.

    `results` is the list of them as far as they came: each has the key `error`, which is None where the row
    had finished, and of type `aborted` where it had not.
    """

    def __init__(self, message: str, *, results: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.results = results


class WrongState(TokenmillError, RuntimeError):
    """A call that the engine cannot serve in the state it is in: a second profile, or a prompt while its
    memory is released."""


class JobStopped(TokenmillError, RuntimeError):
    """A batch job cannot go on: the disk is full, or its journal is in use. What was finished is kept."""


class EngineDead(TokenmillError, RuntimeError):
    """The engine's loop ended by an error (its cause is chained) or stalled, and takes no more requests."""


class EngineClosed(TokenmillError, RuntimeError):
    """The engine was shut down and takes no more requests."""


def engine_dead(cause: BaseException) -> EngineDead:
    """What everybody hears who uses an engine that `cause` ended."""
    reason = str(cause) if isinstance(cause, EngineDead) else f"the engine ended by an error: {cause!r}"
    error = EngineDead(f"{reason}; make a new one")
    error.__cause__ = cause
    return error


def check_process(process_id: int) -> None:
    """Raise `WrongState` in any process but the one that opened the engine."""
    if os.getpid() != process_id:
        raise WrongState(
            f"this engine belongs to process {process_id}, of which {os.getpid()} is a fork; open an engine "
            "in the new process, and start that with multiprocessing's method 'spawn'"
        )


# What is told of anything at all, and of an error that came from elsewhere.
_LONGEST_TEXT = 1600
_LONGEST_MESSAGE = 600
_LONGEST_NAME = 60
_MOST_NAMES = 1000


class RowError(TypedDict):
    """Why a row has no result, or not all of it: plain data for files and other processes."""

    type: str  # one of `ERROR_TYPES`
    message: str
    status_code: int  # the HTTP status that says the same


# What may have become of a request that failed by itself, in one word.
ERROR_TYPES = (
    "too_long",
    "bad_parameters",
    "bad_grammar",
    "timeout",
    "queue_full",
    "out_of_memory",
    "aborted",
    "internal",
)


def request_error(message: str, *, error_type: str, status_code: int) -> RequestFailed:
    """The exception for a request that failed by itself."""
    kinds: dict[str, type[RequestFailed]] = {"timeout": RequestTimeout, "queue_full": QueueFull}
    kind = kinds.get(error_type, InvalidRequest if status_code == 400 else RequestFailed)
    return kind(message, error_type=error_type, status_code=status_code)


def _shortened(message: str) -> str:
    """The message without its middle where it repeats something huge that the caller gave."""
    if len(message) <= _LONGEST_TEXT:
        return message
    return f"{message[: _LONGEST_TEXT - 500]} [...] {message[-400:]}"


class reading:
    """A block that looks at an argument: whatever the methods of its value raise is an `InvalidArgument`.

    A value may be an object of any class, and so fail in any way when it is measured, compared or walked.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, TokenmillError | ImportError):
            raise InvalidArgument(f"{self._name} cannot be read: {told(error)}") from error


def told(error: BaseException) -> str:
    """Type and message of somebody else's error, at most a few lines long; never fails."""
    try:
        message = str(error)
    except Exception:
        message = "its message cannot be read"
    short = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
    text = f"{type(error).__name__[:_LONGEST_NAME]}: {short}"
    return text.encode(errors="backslashreplace").decode()  # half a surrogate pair cannot be written


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` (with a leading space) for the closest known name, else an empty string.

    Of very many names only the first ones are looked at, which takes 0.06 s.
    """
    some = list(islice(known, _MOST_NAMES))
    close = difflib.get_close_matches(name[:_LONGEST_NAME], some, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
