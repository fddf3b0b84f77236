"""Beside the event loops of callers: threads that keep work from them, and a loop for who has none."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Threads:
    """Threads for work that an event loop must not wait for.

    Not the loop's own: its executor has few, and each may hold a caller who waits for what this loop does.
    They start when they are needed and end after `close`, or when nobody holds this any more.
    """

    def __init__(self, most: int | None = None) -> None:
        """`most` at once; by default a few more than there are processors."""
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="tokenmill")

    async def run(self, work: Callable[_P, _R], *arguments: _P.args, **options: _P.kwargs) -> _R:
        """What `work` gives, while the event loop goes on; after `close` the loop waits."""
        bound = partial(contextvars.copy_context().run, work, *arguments, **options)
        try:
            done = asyncio.get_running_loop().run_in_executor(self._pool, bound)
        except RuntimeError:  # closed, or the system has no more threads
            return bound()
        return await done

    def close(self) -> None:
        """Let the threads end, each with the work it has begun. Idempotent."""
        self._pool.shutdown(wait=False)


class OwnLoop:
    """The event loop of an engine, made when somebody without one asks for it. Nothing of ours runs in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        """The caller's running loop, or else the engine's."""
        with contextlib.suppress(RuntimeError):
            return asyncio.get_running_loop()
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            return self._loop

    def close(self) -> None:
        """Close the engine's loop, unless something runs in it. Idempotent."""
        if self._loop is not None and not self._loop.is_running():
            self._loop.close()
