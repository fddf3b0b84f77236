"""Offline inference for large language models, with the API of SGLang's `Engine`.

The names below are the whole public surface. `Engine` and `ServerArgs` are imported when they are first used,
so that importing the package is quick and touches neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tokenmill.config import EngineConfig
from tokenmill.errors import (
    EngineClosed,
    EngineDead,
    Interrupted,
    InvalidArgument,
    InvalidRequest,
    JobStopped,
    ModelNotFound,
    QueueFull,
    RequestFailed,
    RequestTimeout,
    RowError,
    TokenmillError,
    UnknownArgument,
    UnsupportedModel,
    WrongState,
    WrongType,
)
from tokenmill.imports import kept_byte_code
from tokenmill.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.arguments import ServerArgs
    from tokenmill.engine import Engine

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "Interrupted",
    "InvalidArgument",
    "InvalidRequest",
    "JobStopped",
    "ModelNotFound",
    "QueueFull",
    "RequestFailed",
    "RequestTimeout",
    "RowError",
    "SamplingParams",
    "ServerArgs",
    "TokenmillError",
    "UnknownArgument",
    "UnsupportedModel",
    "WrongState",
    "WrongType",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "batch":
        return importlib.import_module("tokenmill.batch")
    if name == "ServerArgs":
        return importlib.import_module("tokenmill.arguments").ServerArgs
    if name != "Engine":
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    with kept_byte_code("torch"):
        from tokenmill.engine import Engine

    globals()["Engine"] = Engine
    return Engine


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
