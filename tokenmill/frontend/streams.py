"""Streams of result chunks, blocking and async, and how a task of an event loop is woken.

Owns the chunks that are ready and when a stream has ended; where they come from is the client's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from tokenmill.errors import WrongState
from tokenmill.frontend.calls import Call, Wake
from tokenmill.frontend.progress import Advance


class Source(Protocol):
    """Where the chunks of calls come from; see `Client`."""

    def advance(self, call: Call, wake: Wake) -> list[Advance]: ...
    def drop(self, *calls: Call) -> None: ...
    def let_go(self, *calls: Call) -> None: ...


class OneUser:
    """A block that one thread or task goes through at a time: another one that comes gets a `WrongState`."""

    def __init__(self, of: str) -> None:
        """`of` is what it is used for, in a word."""
        self._of = of
        self._in_use = threading.Lock()

    def __enter__(self) -> None:
        if not self._in_use.acquire(blocking=False):
            raise WrongState(
                f"another thread or task waits for a result of this {self._of}; make one for each, or let "
                "one of them hand the results on"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._in_use.release()


class _Stream:
    """What both kinds of streams share: chunks that are ready, and the end of the call."""

    def __init__(self, source: Source, call: Call, owner: object) -> None:
        self._source = source
        self._call = call
        # An engine that nobody holds is shut down; a stream must be able to end first.
        self._owner = owner
        self._ready: deque[dict[str, Any]] = deque()
        self._closed = False
        self._interrupted_by = ""
        self._user = OneUser("stream")

    def _fill(self, wake: Wake) -> bool:
        """Whether a chunk is ready, or the stream has ended; if not, `wake` is called when to look again."""
        if not self._ready and not self._ended:
            self._ready.extend(advance.chunk for advance in self._source.advance(self._call, wake))
        return bool(self._ready) or self._ended

    @contextlib.contextmanager
    def _closing_on_errors(self) -> Iterator[None]:
        """A block that takes chunks. Who was interrupted there must not take the end for a good one."""
        if self._interrupted_by:
            raise WrongState(
                f"a wait for a chunk of this stream was ended by {self._interrupted_by}, and its requests "
                "were cancelled; wait for chunks in a task of their own, without a time limit"
            )
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self._interrupted_by = "" if self._closed else type(error).__name__
            self._close()
            raise

    @property
    def _ended(self) -> bool:
        return self._closed or not self._call.num_unfinished

    def _close(self) -> None:
        self._end(self._source.drop)

    def _end(self, drop: Callable[[Call], None]) -> None:
        if not self._closed:
            self._closed = True
            self._ready.clear()
            drop(self._call)
            self._call.mail.close()  # another thread or task may wait for a chunk

    def __del__(self) -> None:
        self._end(self._source.let_go)


class ResultStream(_Stream, Iterator[dict[str, Any]]):
    """Chunks of one call. Closing it, or letting go of it, cancels what has not finished.

    One thread uses it at a time, and another one that comes meanwhile gets a `WrongState`. Any may close it;
    one that waits for a chunk meanwhile sees the end.
    """

    def __next__(self) -> dict[str, Any]:
        with self._user:
            return self._next()

    def _next(self) -> dict[str, Any]:
        woken = threading.Event()
        with self._closing_on_errors():
            while not self._fill(woken.set):
                woken.wait()
                woken.clear()
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def close(self) -> None:
        """End the stream and cancel what has not finished. Idempotent."""
        self._close()


class AsyncResultStream(_Stream, AsyncIterator[dict[str, Any]]):
    """As `ResultStream`, in any event loop."""

    async def __anext__(self) -> dict[str, Any]:
        with self._user:
            return await self._next()

    async def _next(self) -> dict[str, Any]:
        with self._closing_on_errors():
            while not self._fill(wake := LoopWake()):
                await wake.sleep()
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def aclose(self) -> None:
        """End the stream and cancel what has not finished. Idempotent."""
        self._close()


class LoopWake:
    """Wakes a task of the running event loop, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = self._loop.create_future()

    def __call__(self) -> None:
        # A closed loop has nobody left to wake.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        if not self._woken.done():  # the sleeping task was cancelled
            self._woken.set_result(None)

    async def sleep(self) -> None:
        await self._woken
