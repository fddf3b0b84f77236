"""Batch jobs: a file of prompts in, a file of answers out, and nothing lost in between.

`run` is imported when it is first used, so that the command line starts quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.batch.job import run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module 'tokenmill.batch' has no attribute {name!r}")
    from tokenmill.batch.job import run

    globals()["run"] = run
    return run
