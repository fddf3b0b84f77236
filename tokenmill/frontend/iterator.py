"""`Engine.iter`: the results of any number of prompts, for `for` and for `async for`.

Owns what may be iterated over, and how items are pulled from it in chunks; how far ahead, and the order of
the results, is the matter of `iteration.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Self

from tokenmill.errors import WrongState, WrongType, request_error
from tokenmill.frontend.event_loops import Threads, run_aside
from tokenmill.frontend.failures import returns_errors
from tokenmill.frontend.iteration import Entry, Finished, Flow, Prepared, RowRunner
from tokenmill.frontend.streams import LoopWake, OneUser
from tokenmill.sampling_params import show

# A window is filled in so many parts.
_CHUNKS_IN_WINDOW = 4
# Longest that items are gathered for a chunk: a slow source must not keep the first ones waiting.
_GATHER_SECONDS = 0.05
# Errors that `generate` does not raise: what was there when time was over, or somebody aborted, is an answer.
_HAVE_RESULTS = ("timeout", "aborted")


class ResultIterator(Iterator[dict[str, Any]], AsyncIterator[dict[str, Any]]):
    """Result dicts of rows that are read as it goes, for either `for` or `async for`.

    Closing it, letting go of it, or leaving its `with` block cancels what has not finished. One thread or
    task uses it at a time, and another one that comes meanwhile gets a `WrongState`; any may close it.
    """

    def __init__(
        self,
        runner: RowRunner,
        items: Any,
        sampling_params: Any,
        options: Mapping[str, Any],
        *,
        order: Any,
        window: Any,
    ) -> None:
        """Nothing is pulled from `items` yet. Raises `InvalidArgument` for what holds for all of them."""
        on_error = options.get("on_error")
        options = {name: value for name, value in options.items() if name != "on_error"}
        runner.read([], sampling_params=sampling_params, options=options)
        self._raises = on_error is not None and not returns_errors(on_error)
        self._flow = runner.open_flow(order=order, window=window)
        self._flow.chunk = max(1, self._flow.window // _CHUNKS_IN_WINDOW)
        self._items = _checked(items)
        self._read = _Reading(runner, sampling_params, options)
        self._rows: Iterator[list[Finished]] | None = None
        self._async_rows: _AsyncRows | None = None
        self._ready: deque[dict[str, Any]] = deque()  # samples of the row that is being handed out
        self._closed = False
        self._user = OneUser("iterator")

    # ── for ──

    def __next__(self) -> dict[str, Any]:
        with self._user:
            return self._next()

    def _next(self) -> dict[str, Any]:
        if not self._ready:
            if self._closed:
                raise StopIteration
            if self._async_rows is not None:
                raise WrongState("this iterator is used by `async for`; make another one")
            if self._rows is None:
                self._rows = self._flow.run(self._read_chunks())
            try:
                [finished] = next(self._rows)
                self._hand_out(*finished)
            except BaseException:
                self.close()
                raise
        return self._ready.popleft()

    def _read_chunks(self) -> Iterator[Sequence[Entry]]:
        return map(self._read, _gathered(_iterator(self._items), self._flow.chunk))

    def close(self) -> None:
        """End the iteration and cancel what has not finished. Idempotent."""
        self._closed = True
        self._ready.clear()
        self._flow.close()
        self._rows = None
        if self._async_rows is not None:
            self._async_rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):  # else its arguments were refused
            self.close()

    # ── async for ──

    async def __anext__(self) -> dict[str, Any]:
        with self._user:
            return await self._async_next()

    async def _async_next(self) -> dict[str, Any]:
        if not self._ready:
            if self._closed:
                raise StopAsyncIteration
            if self._rows is not None:
                raise WrongState("this iterator is used by `for`; make another one")
            if self._async_rows is None:
                self._async_rows = _AsyncRows(self._flow, self._items, self._read)
            elif not self._async_rows.is_at_home:
                self.close()
                raise WrongState(
                    "this iterator was begun in another event loop, which its rows come to; use it in that "
                    "one, or make another iterator"
                )
            try:
                finished = await self._async_rows.next()
                if finished is None:
                    raise StopAsyncIteration
                self._hand_out(*finished)
            except BaseException:
                await self.aclose()
                raise
        return self._ready.popleft()

    async def aclose(self) -> None:
        """As `close`."""
        self.close()
        if self._async_rows is not None:
            await self._async_rows.ended()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ── for both ──

    def _hand_out(self, entry: Entry, results: list[dict[str, Any]]) -> None:
        for sample, result in enumerate(results):
            error = result["error"]
            if self._raises and error is not None and error["type"] not in _HAVE_RESULTS:
                raise request_error(
                    f"item {entry.index}: {error['message']}",
                    error_type=error["type"],
                    status_code=error["status_code"],
                )
            result["index"] = entry.index
            if len(results) > 1:
                result["sample"] = sample
            self._ready.append(result)


class _Reading:
    """Reads chunks of items, one after the other, and counts them."""

    def __init__(self, runner: RowRunner, sampling_params: Any, options: Mapping[str, Any]) -> None:
        self._runner = runner
        self._sampling_params = sampling_params
        self._options = options
        self._count = 0

    def __call__(self, items: Sequence[Any]) -> list[Entry]:
        first, self._count = self._count, self._count + len(items)
        return self._runner.read(
            items, first_index=first, sampling_params=self._sampling_params, options=self._options
        )


# ── from items to chunks ──────────────────────────────────────────────────────────────────────


# The libraries of tables, how theirs are known, and what gives rows.
_TABLES = {
    "pandas": ("iterrows", "one of its columns, or its to_dict('records')"),
    "polars": ("iter_rows", "one of its columns, or its iter_rows(named=True)"),
    "pyarrow": ("to_pylist", "its to_pylist()"),
}


def _checked(items: Any) -> Any:
    """Something to iterate over that is no single prompt. Raises `WrongType`."""
    if isinstance(items, str | bytes | Mapping):
        raise WrongType(f"prompts must be an iterable of prompts, got {show(items)}; give a list of it")
    method, remedy = _TABLES.get(type(items).__module__.partition(".")[0], ("", ""))
    if method and hasattr(items, method):
        name = type(items).__name__
        raise WrongType(f"prompts is a {name}, whose items are no prompts; give {remedy}")
    if isinstance(items, Iterable | AsyncIterable) or _is_indexed(items):
        return items
    raise WrongType(f"prompts must be an iterable of prompts, got {show(items)}")


def _is_indexed(items: Any) -> bool:
    """Whether it is a data set that is only read by position."""
    return hasattr(items, "__getitem__") and hasattr(items, "__len__")


def _iterator(items: Any) -> Iterator[Any]:
    """The items one by one; the lines of a text file without their ends."""
    if isinstance(items, Iterable):
        return map(_without_line_end, items) if hasattr(items, "readline") else iter(items)
    if _is_indexed(items):
        return (items[index] for index in range(len(items)))
    raise WrongType("prompts is an asynchronous iterable; use `async for`")


def _without_line_end(line: Any) -> Any:
    return line.removesuffix("\n").removesuffix("\r") if isinstance(line, str) else line


def _gathered(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Chunks of `size` items, or of those that came in a short time; an error comes after what was before."""
    is_last = False
    while not is_last:
        chunk: list[Any] = []
        failure: Exception | None = None
        due = time.perf_counter() + _GATHER_SECONDS
        try:
            while len(chunk) < size and time.perf_counter() < due:
                chunk.append(next(items))
        except StopIteration:
            is_last = True
        except Exception as error:
            failure = error
        if chunk:
            yield chunk
        if failure is not None:
            raise failure


# ── async for ─────────────────────────────────────────────────────────────────────────────────


class _AsyncItems:
    """Items of an iterable of either kind, gathered by a task, or by a thread, while others go on."""

    def __init__(self, items: Any, size: int) -> None:
        self._size = size
        self._source = aiter(items) if isinstance(items, AsyncIterable) else _iterator(items)
        self._gathered: deque[Any] = deque()
        self._some = asyncio.Event()
        self._filling: asyncio.Task[bool] | None = None
        self._loop = asyncio.get_running_loop()
        self._closed = False

    async def next(self) -> list[Any]:
        """What came in a short time: at least one item, or nothing if there are no more."""
        if self._filling is None or (self._filling.done() and not self._gathered and self._filling.result()):
            self._filling = asyncio.create_task(self._fill())
            self._filling.add_done_callback(lambda _: self._some.set())
        while not self._gathered and not self._filling.done():
            self._some.clear()
            await self._some.wait()
        await asyncio.wait({self._filling}, timeout=_GATHER_SECONDS)
        if not self._gathered:
            self._filling.result()
        return [self._gathered.popleft() for _ in range(len(self._gathered))]

    async def _fill(self) -> bool:
        """Gather a chunk; whether there may be more."""
        if isinstance(self._source, Iterator):
            try:
                return await run_aside(partial(self._fill_in_thread, self._source))
            except asyncio.CancelledError:  # by `cancel`, or by the end of the loop
                self._closed = True
                raise
        for _ in range(self._size):
            try:
                self._gathered.append(await anext(self._source))
            except StopAsyncIteration:
                return False
            self._some.set()
        return True

    def _fill_in_thread(self, source: Iterator[Any]) -> bool:
        count = 0
        for item in islice(source, self._size):
            if self._closed:
                return False
            count += 1
            self._gathered.append(item)
            if len(self._gathered) == 1:
                self._loop.call_soon_threadsafe(self._some.set)
        return count == self._size

    def cancel(self) -> None:
        """Pull no more; a thread that waits for an item ends when it comes. Called in the event loop."""
        self._closed = True
        _cancel(self._filling)

    async def ended(self) -> None:
        """Returns when no task pulls any more."""
        await _ended(self._filling)


class _AsyncRows:
    """Finished rows of a flow that a task waits for, while another one reads more."""

    def __init__(self, flow: Flow, items: Any, read: _Reading) -> None:
        self._flow = flow
        self._threads = Threads(1)
        self._items = _AsyncItems(items, flow.chunk)
        self._read = read
        self._reading: asyncio.Task[None] | None = None
        self._is_open = True
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._wake = LoopWake()

    @property
    def is_at_home(self) -> bool:
        """Whether the running event loop is the one in which the tasks are."""
        return asyncio.get_running_loop() is self._loop

    async def next(self) -> Finished | None:
        """The next row that is ready; None after the last. An error of the items comes after their rows."""
        while not self._flow.is_closed and (self._is_open or self._flow.num_held):
            self._wake = LoopWake()  # before it is known that nothing is there
            if self._is_open and self._flow.has_room and self._reading is None:
                self._reading = asyncio.create_task(self._read_more())
            if self._reading is not None:
                await asyncio.sleep(0)  # lets it get on where results are always ready
            if finished := self._flow.pop(1):
                return finished[0]
            if not self._flow.take(self._wake):
                await self._wake.sleep()
        if isinstance(self._failure, StopIteration | StopAsyncIteration):  # `async for` would just end
            raise RuntimeError(f"prompts raised {type(self._failure).__name__}") from self._failure
        if self._failure is not None:
            raise self._failure
        return None

    async def _read_more(self) -> None:
        try:
            if items := await self._items.next():
                self._flow.start(await self._threads.run(self._prepare, items))
            else:
                self._is_open = False
        except BaseException as error:  # also a CancelledError that comes from the source
            if self._is_open:
                self._is_open, self._failure = False, error
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._reading = None
            self._wake()

    def _prepare(self, items: list[Any]) -> list[Prepared]:
        return self._flow.prepare(self._read(items))

    def close(self) -> None:
        """Read no more. May be called in any thread, as the garbage collector does."""
        self._is_open = False
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks have ended
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        _cancel(self._reading)
        self._items.cancel()
        self._threads.close()
        self._wake()

    async def ended(self) -> None:
        """Returns when no task reads any more, after `close`; in another event loop at once."""
        if not self.is_at_home:
            return
        await _ended(self._reading)
        await self._items.ended()


def _cancel(task: asyncio.Task[Any] | None) -> None:
    """End a task, or take note of how it ended: nobody else may ever ask."""
    if task is not None and not task.cancel() and not task.cancelled():
        task.exception()


async def _ended(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        await asyncio.wait({task})
