"""Every exception that tokenmill raises on purpose; nothing else of ours is imported here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TokenmillError(Exception):
    """Base of all errors that tokenmill raises on purpose."""


class InvalidArgument(TokenmillError, ValueError):
    """An argument has a value that cannot be served; raised before any work starts."""


class WrongType(InvalidArgument, TypeError):
    """An argument has the wrong Python type."""


class UnknownArgument(InvalidArgument, TypeError):
    """A keyword or dictionary key that no parameter has."""


class ModelNotFound(InvalidArgument, FileNotFoundError):
    """`model_path` is neither a folder, nor a model of the hub, nor a bundled model."""


class UnsupportedModel(InvalidArgument):
    """The checkpoint's architecture or one of its settings is not supported."""


class EngineDead(TokenmillError, RuntimeError):
    """The engine's loop ended by an error (its cause is chained) and takes no more requests."""


class EngineClosed(TokenmillError, RuntimeError):
    """The engine was shut down and takes no more requests."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` (with a leading space) for the closest known name, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
