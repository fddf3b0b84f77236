"""Beside the event loops of callers: threads that keep work from them, and a loop for who has none."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, ParamSpec, TypeVar

from tokenmill.errors import EngineClosed

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Work(Generic[_R]):
    """Work in the context of who asked for it; done once, by the thread that comes first."""

    def __init__(self, work: Callable[[], _R]) -> None:
        self._work = work
        self._context = contextvars.copy_context()
        self._begun = threading.Lock()
        self.outcome: Future[_R] = Future()

    def __call__(self) -> None:
        if not self._begun.acquire(blocking=False) or not self.outcome.set_running_or_notify_cancel():
            return
        try:
            self.outcome.set_result(self._context.run(self._work))
        except BaseException as error:
            self.outcome.set_exception(error)
            del self  # else the error holds this, which holds the error

    async def over(self) -> _R:
        return await asyncio.wrap_future(self.outcome)


class Threads:
    """Threads for work that an event loop must not wait for.

    Not the loop's own: its executor has few, and each may hold a caller who waits for what this loop does.
    They start when they are needed and end after `close`, or when nobody holds this any more.
    """

    def __init__(self, most: int | None = None) -> None:
        """`most` at once; by default a few more than there are processors."""
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="tokenmill")

    async def run(self, work: Callable[_P, _R], /, *arguments: _P.args, **options: _P.kwargs) -> _R:
        """What `work` gives, while the event loop goes on; after `close` the loop waits."""
        job = _Work(partial(work, *arguments, **options))
        if not self._submit(job):
            job()
        return await job.over()

    def _submit(self, job: _Work[_R]) -> bool:
        """False: closed, or the system has no more threads. Then a thread that is there may do it yet."""
        try:
            self._pool.submit(job)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Let the threads end, each with the work it has begun. Idempotent."""
        self._pool.shutdown(wait=False)


async def run_aside(work: Callable[[], _R]) -> _R:
    """What `work` gives, which may never end: neither the event loop nor the end of Python waits for it.

    If the system has no more threads, the loop waits after all.
    """
    job = _Work(work)
    try:
        threading.Thread(target=job, name="tokenmill-aside", daemon=True).start()
    except RuntimeError:
        job()
    return await job.over()


class OwnLoop:
    """The event loop of an engine, made when somebody without one asks for it. Nothing of ours runs in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def get(self) -> asyncio.AbstractEventLoop:
        """The caller's running loop, or else the engine's. After `close`, which nothing follows that would
        close a new one, raises `EngineClosed` if there was none."""
        with contextlib.suppress(RuntimeError):
            return asyncio.get_running_loop()
        with self._lock:
            if self._loop is None and self._is_closed:
                raise EngineClosed("the engine was shut down before anybody asked for its event loop")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            return self._loop

    def close(self) -> None:
        """Close the engine's loop, unless something runs in it. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._loop is not None and not self._loop.is_running():
                self._loop.close()
