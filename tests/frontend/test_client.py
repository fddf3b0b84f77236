"""Requests out, results in: routing, closing early, death, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tokenmill import EngineClosed, EngineConfig, EngineDead, Interrupted, InvalidArgument
from tokenmill.errors import WrongState
from tokenmill.frontend.calls import Call, Mailbox
from tokenmill.frontend.client import Client
from tokenmill.frontend.inputs import Job
from tokenmill.frontend.outputs import Arrival
from tokenmill.frontend.tokenizer import Tokenizer
from tokenmill.messages import Output, Request

pytestmark = pytest.mark.cpu

_numbers = itertools.count()


@pytest.fixture
def client(cores: list[Any], config: EngineConfig, tokenizers: dict[str, Tokenizer]) -> Iterator[Client]:
    client = Client(config, tokenizers["bytes"])
    yield client
    client.close()


@pytest.fixture
def prepare(client: Client, make_request: Callable[..., Request]) -> Callable[..., Call]:
    """`prepare("text", ...)` makes a call of these prompts; one prompt is a single one."""

    def make(*texts: str, stream: bool = False, **settings: Any) -> Call:
        interval = settings.pop("report_interval", 1 if stream or "stop" in settings else 0)
        requests = tuple(
            make_request(
                list(text.encode()),
                request_id=settings.pop("rid", f"r{next(_numbers)}"),
                report_interval=interval,
                **settings,
            )
            for text in texts
        )
        return client.prepare(Job(requests, single=len(texts) == 1), stream=stream)

    return make


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_clean(client: Client, core: Any) -> bool:
    """Nothing is in flight, neither here nor there."""
    return not client._flying and not client._flying_ids and core.num_running == 0


ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 50_000}


# ── four ways to wait ─────────────────────────────────────────────────────────────────────────


def test_a_single_result_and_a_batch_in_input_order(client: Client, prepare: Any, cores: list[Any]) -> None:
    assert client.run(prepare("hi"))["text"] == "hi"
    texts = [f"row {index}" * (1 + index * 7 % 5) for index in range(40)]
    results = client.run(prepare(*texts))
    assert results["text"] == texts
    assert [result["output_ids"] for result in results] == [[*text.encode(), 257] for text in texts]
    assert all("index" not in result for result in results)
    assert is_clean(client, cores[0])


def test_an_empty_batch(client: Client) -> None:
    job = Job((), single=False)
    assert client.run(client.prepare(job, stream=False)) == []
    assert list(client.stream(client.prepare(job, stream=True), owner=None)) == []


@pytest.mark.parametrize("interval", [1, 3])
def test_a_stream_of_pieces(client: Client, prepare: Any, interval: int) -> None:
    chunks = list(client.stream(prepare("été 😀", stream=True, report_interval=interval), owner=None))
    assert "".join(chunk["text"] for chunk in chunks) == "été 😀"
    assert [token for chunk in chunks for token in chunk["output_ids"]] == [*"été 😀".encode(), 257]
    assert all("\ufffd" not in chunk["text"] for chunk in chunks)
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 257}
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts))


def test_a_stream_of_a_batch_has_an_index(client: Client, prepare: Any) -> None:
    texts = ["a", "longer text", "mid"]
    merged = ["", "", ""]
    for chunk in client.stream(prepare(*texts, stream=True), owner=None):
        merged[chunk["index"]] += chunk["text"]
    assert merged == texts


def test_cumulative_chunks(
    cores: list[Any], config: EngineConfig, tokenizers: dict[str, Tokenizer], make_request: Any
) -> None:
    client = Client(replace(config, cumulative_stream=True), tokenizers["bytes"])
    job = Job((make_request(list(b"abc")),), single=True)
    chunks = list(client.stream(client.prepare(job, stream=True), owner=None))
    assert [chunk["text"] for chunk in chunks] == ["a", "ab", "abc", "abc"]
    assert [len(chunk["output_ids"]) for chunk in chunks] == [1, 2, 3, 4]
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks] == [True, True, True, False]


def test_async_results_and_streams(client: Client, prepare: Any, cores: list[Any]) -> None:
    async def main() -> None:
        results = await asyncio.gather(*(client.run_async(prepare(f"task {index}")) for index in range(20)))
        assert [result["text"] for result in results] == [f"task {index}" for index in range(20)]
        assert (await client.run_async(prepare("a", "b")))["text"] == ["a", "b"]
        pieces = [c["text"] async for c in client.stream_async(prepare("xyz", stream=True), owner=None)]
        assert "".join(pieces) == "xyz"

    asyncio.run(main())
    asyncio.run(main())
    assert is_clean(client, cores[0])


def test_the_loop_goes_on_while_a_task_waits(client: Client, prepare: Any, gate: threading.Event) -> None:
    gate.clear()

    async def main() -> int:
        waiting = asyncio.create_task(client.run_async(prepare("later")))
        ticks = 0
        while not waiting.done():
            await asyncio.sleep(0.001)
            ticks += 1
            if ticks == 10:
                gate.set()
        assert (await waiting)["text"] == "later"
        return ticks

    assert asyncio.run(main()) >= 10


def test_a_stream_may_move_to_another_loop(client: Client, prepare: Any) -> None:
    stream = client.stream_async(prepare("abc", stream=True), owner=None)

    async def first() -> str:
        return (await anext(stream))["text"]

    async def rest() -> str:
        return "".join([chunk["text"] async for chunk in stream])

    assert asyncio.run(first()) + asyncio.run(rest()) == "abc"


def test_many_threads(client: Client, prepare: Any, cores: list[Any]) -> None:
    wrong: list[str] = []

    def work(name: int) -> None:
        for turn in range(10):
            text = f"thread {name} turn {turn}"
            if turn % 2:
                got = client.run(prepare(text))["text"]
            else:
                chunks = client.stream(prepare(text, stream=True), owner=None)
                got = "".join(chunk["text"] for chunk in chunks)
            if got != text:
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert is_clean(client, cores[0])


# ── stop strings ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("interval", [1, 4, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_request(
    client: Client, prepare: Any, cores: list[Any], interval: int, stream: bool
) -> None:
    """However the tokens come: the same text, tokens and reason; the core is told."""
    call = prepare("one STOP two", stop=["STOP"], stream=stream, report_interval=interval)
    if stream:
        chunks = list(client.stream(call, owner=None))
        result = {
            "text": "".join(chunk["text"] for chunk in chunks),
            "output_ids": [token for chunk in chunks for token in chunk["output_ids"]],
            "meta_info": chunks[-1]["meta_info"],
        }
    else:
        result = client.run(call)
    assert result["text"] == "one "
    assert result["output_ids"] == list(b"one STOP")
    assert result["meta_info"]["completion_tokens"] == 8
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": "STOP"}
    wait_until(lambda: is_clean(client, cores[0]))


def test_a_stop_string_cancels_what_would_go_on(client: Client, prepare: Any, cores: list[Any]) -> None:
    result = client.run(prepare("ab.", stop=".", **ENDLESS))
    assert result["text"] == "ab"
    wait_until(lambda: is_clean(client, cores[0]))
    assert len(cores[0].cancelled) == 1


def test_chunks_hold_back_the_start_of_a_stop_string(client: Client, prepare: Any) -> None:
    chunks = [c["text"] for c in client.stream(prepare("a<b<end>c", stop="<end>", stream=True), owner=None)]
    assert "".join(chunks) == "a<b"
    assert chunks == ["a", "", "<b", "", "", "", "", ""]


def test_tokens_after_a_stop_string_do_not_end_the_wait(
    client: Client, prepare: Any, gate: threading.Event
) -> None:
    """They may arrive alone, before the core has heard of the stop."""
    gate.clear()
    call = prepare("a", "b", stop=".")
    client.submit(call)
    first, second = call.rows

    def arrive(row: Any, token: int) -> None:
        call.put([(row, Arrival(Output(row.name, (token,), None, 0, 0), time.perf_counter()))])

    woken: list[str] = []
    arrive(first, ord("."))
    assert [advance.finished for advance in client.advance(call, lambda: woken.append("early"))] == [True]
    arrive(first, ord("x"))
    assert client.advance(call, lambda: woken.append("woken")) == []
    assert woken == []
    arrive(second, ord("y"))
    assert woken == ["woken"]
    assert first.token_ids == [ord(".")]
    client.drop(call)


# ── letting go ────────────────────────────────────────────────────────────────────────────────


def break_off(client: Client, call: Call) -> None:
    for _ in client.stream(call, owner=None):
        break


def close_early(client: Client, call: Call) -> None:
    stream = client.stream(call, owner=None)
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []


def never_look(client: Client, call: Call) -> None:
    client.stream(call, owner=None)


def collect_garbage(client: Client, call: Call) -> None:
    ring: dict[str, Any] = {"stream": client.stream(call, owner=None)}
    ring["self"] = ring
    del ring
    gc.collect()


def close_async(client: Client, call: Call) -> None:
    async def main() -> None:
        stream = client.stream_async(call, owner=None)
        await anext(stream)
        await stream.aclose()
        assert [chunk async for chunk in stream] == []

    asyncio.run(main())


def break_async(client: Client, call: Call) -> None:
    async def main() -> None:
        async for _ in client.stream_async(call, owner=None):
            break

    asyncio.run(main())


def cancel_task_of_stream(client: Client, call: Call) -> None:
    async def consume() -> None:
        async for _ in client.stream_async(call, owner=None):
            await asyncio.sleep(0)

    asyncio.run(cancel_soon(consume()))


def cancel_task(client: Client, call: Call) -> None:
    asyncio.run(cancel_soon(client.run_async(call)))


async def cancel_soon(coroutine: Any) -> None:
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "let_go",
    [
        break_off,
        close_early,
        never_look,
        collect_garbage,
        close_async,
        break_async,
        cancel_task_of_stream,
        cancel_task,
    ],
)
def test_letting_go_cancels(
    let_go: Callable[[Client, Call], None], client: Client, prepare: Any, cores: list[Any]
) -> None:
    let_go(client, prepare("one", "two", stream=let_go is not cancel_task, **ENDLESS))
    wait_until(lambda: len(cores[0].cancelled) == 2 and is_clean(client, cores[0]))
    assert client.run(prepare("still alive"))["text"] == "still alive"


def test_closing_a_stream_ends_the_wait_of_another_thread(
    client: Client, prepare: Any, gate: threading.Event
) -> None:
    gate.clear()
    stream = client.stream(prepare("abc", stream=True, **ENDLESS), owner=None)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(next(stream, "the end")), daemon=True)
    waiting.start()
    time.sleep(0.05)
    assert not got
    stream.close()
    waiting.join(5)
    gate.set()
    assert got == ["the end"]


def test_closing_a_stream_ends_the_wait_of_another_task(
    client: Client, prepare: Any, gate: threading.Event
) -> None:
    async def main() -> Any:
        stream = client.stream_async(prepare("abc", stream=True, **ENDLESS), owner=None)
        waiting = asyncio.create_task(anext(stream, "the end"))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await stream.aclose()
        return await asyncio.wait_for(waiting, 5)

    gate.clear()
    try:
        assert asyncio.run(main()) == "the end"
    finally:
        gate.set()


def test_a_second_thread_is_refused_and_the_first_goes_on(
    client: Client, prepare: Any, gate: threading.Event
) -> None:
    gate.clear()
    stream = client.stream(prepare("abc", stream=True), owner=None)
    got: list[str] = []
    first = threading.Thread(target=lambda: got.extend(chunk["text"] for chunk in stream), daemon=True)
    first.start()
    wait_until(lambda: stream._call.mail._wake is not None)
    with pytest.raises(WrongState, match="another thread or task waits for a result of this stream"):
        next(stream)
    gate.set()
    first.join(5)
    assert "".join(got) == "abc"


def test_a_stream_whose_wait_was_cancelled_has_no_good_end(
    client: Client, prepare: Any, cores: list[Any], gate: threading.Event
) -> None:
    async def main() -> None:
        stream = client.stream_async(prepare("ab", stream=True), owner=None)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        with pytest.raises(WrongState, match="ended by CancelledError"):
            await anext(stream)

    gate.clear()
    asyncio.run(main())
    gate.set()
    wait_until(lambda: len(cores[0].cancelled) == 1 and is_clean(client, cores[0]))


def test_a_second_task_is_refused_and_the_first_goes_on(
    client: Client, prepare: Any, gate: threading.Event
) -> None:
    async def texts(stream: Any) -> str:
        return "".join([chunk["text"] async for chunk in stream])

    async def both() -> str:
        stream = client.stream_async(prepare("abc", stream=True), owner=None)
        first = asyncio.create_task(texts(stream))
        await asyncio.sleep(0)  # until it waits
        with pytest.raises(WrongState, match="another thread or task waits for a result of this stream"):
            await anext(stream)
        gate.set()
        return await asyncio.wait_for(first, 10)

    gate.clear()
    assert asyncio.run(both()) == "abc"


class WokenMeanwhile(Mailbox):
    """Something arrives, and takes its waker along, as soon as somebody has looked at it."""

    @property
    def _wake(self) -> Any:
        wake, self._there = self._there, None
        return wake

    @_wake.setter
    def _wake(self, wake: Any) -> None:
        self._there = wake


def test_a_mailbox_is_closed_while_something_arrives() -> None:
    woken: list[bool] = []
    mail = WokenMeanwhile()
    mail.take(lambda: woken.append(True))
    mail.close()
    assert woken == [True]


@pytest.mark.parametrize("stream", [False, True])
def test_ctrl_c_cancels_and_is_raised(
    client: Client, prepare: Any, cores: list[Any], gate: threading.Event, stream: bool
) -> None:
    gate.clear()
    call = prepare("long", stream=stream, **ENDLESS)
    main = threading.main_thread().ident

    def press() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        gate.set()

    timer = threading.Timer(0.05, press)
    timer.start()
    wait = (lambda: next(client.stream(call, owner=None))) if stream else (lambda: client.run(call))
    with pytest.raises(KeyboardInterrupt):
        wait()
    timer.join()
    wait_until(lambda: len(cores[0].cancelled) == 1 and is_clean(client, cores[0]))


def press_ctrl_c(*seconds: float) -> list[threading.Timer]:
    """At these times, in the main thread, however the tests were started."""
    main = threading.main_thread().ident
    timers = [threading.Timer(each, signal.pthread_kill, (main, signal.SIGINT)) for each in seconds]
    for timer in timers:
        timer.start()
    return timers


@pytest.mark.parametrize("returns_errors", [False, True])
def test_ctrl_c_does_not_wait_long_for_a_core_that_hangs(
    client: Client,
    cores: list[Any],
    gate: threading.Event,
    make_request: Any,
    monkeypatch: pytest.MonkeyPatch,
    returns_errors: bool,
) -> None:
    monkeypatch.setattr("tokenmill.frontend.client._GIVE_UP_SECONDS", 0.05)
    gate.clear()
    job = Job((make_request(**ENDLESS),), single=True, returns_errors=returns_errors)
    [timer] = press_ctrl_c(0.05)
    if returns_errors:
        result = client.run(client.prepare(job, stream=False))
    else:
        with pytest.raises(Interrupted, match="0 of 1 rows") as caught:
            client.run(client.prepare(job, stream=False))
        [result] = caught.value.results
    timer.join()
    assert result["error"] == {"type": "aborted", "message": "the call was interrupted", "status_code": 499}
    assert not client._flying
    gate.set()
    wait_until(lambda: is_clean(client, cores[0]))


def test_a_second_ctrl_c_does_not_wait_at_all(
    client: Client, prepare: Any, cores: list[Any], gate: threading.Event
) -> None:
    gate.clear()
    timers = press_ctrl_c(0.05, 0.2)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        client.run(prepare("long", **ENDLESS))
    assert time.monotonic() - started < 3
    assert not isinstance(caught.value, Interrupted)
    for timer in timers:
        timer.join()
    assert not client._flying
    gate.set()
    wait_until(lambda: is_clean(client, cores[0]))


@pytest.mark.parametrize("stream", [False, True])
def test_ctrl_c_does_not_cut_what_is_sent_to_the_core(
    client: Client, prepare: Any, cores: list[Any], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    submit = cores[0].submit

    def interrupted(requests: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        submit(requests)

    monkeypatch.setattr(cores[0], "submit", interrupted)
    call = prepare("long", stream=stream, **ENDLESS)
    with pytest.raises(KeyboardInterrupt):
        client.stream(call, owner=None) if stream else client.run(call)
    wait_until(lambda: len(cores[0].submitted) == 1 and is_clean(client, cores[0]))


def test_ctrl_c_that_another_thread_receives(client: Client, prepare: Any, gate: threading.Event) -> None:
    """Nothing wakes the main thread then, and nothing arrives for it."""
    gate.clear()
    timer = threading.Timer(0.05, signal.raise_signal, (signal.SIGINT,))
    opener = threading.Timer(1.0, gate.set)
    timer.start()
    opener.start()
    with pytest.raises(Interrupted):
        client.run(prepare("long", **ENDLESS))
    timer.join()
    opener.join()


# ── ids ───────────────────────────────────────────────────────────────────────────────────────


def test_an_id_in_flight_is_refused(client: Client, prepare: Any, cores: list[Any]) -> None:
    stream = client.stream(prepare("one", rid="mine", stream=True, **ENDLESS), owner=None)
    with pytest.raises(InvalidArgument, match="'mine' is in flight"):
        client.run(prepare("two", rid="mine"))
    assert next(stream)["meta_info"]["id"] == "mine"
    stream.close()
    # At once, although the core may not have let go of the first yet.
    result = client.run(prepare("three", rid="mine"))
    assert result["text"] == "three"
    assert result["meta_info"]["id"] == "mine"
    wait_until(lambda: is_clean(client, cores[0]))


def test_late_tokens_of_a_cancelled_request_reach_nobody(
    client: Client, prepare: Any, gate: threading.Event
) -> None:
    for turn in range(30):
        stream = client.stream(prepare("x", rid="same", stream=True, **ENDLESS), owner=None)
        next(stream)
        stream.close()
        result = client.run(prepare(f"turn {turn}", rid="same"))
        assert result["text"] == f"turn {turn}"
        assert result["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize(
    ("rid", "every", "ended"),
    [
        ("job", False, {"job", "job_1", "job_10"}),
        ("job_1", False, {"job_1"}),
        ("set", False, {"set-a", "set_1"}),
        ("se", False, set()),
        ("", False, set()),
        ("unknown", False, set()),
        ("", True, {"job", "job_1", "job_10", "jobs", "set-a", "set_1"}),
    ],
)
def test_abort(
    client: Client, prepare: Any, cores: list[Any], rid: str, every: bool, ended: set[str]
) -> None:
    names = ["job", "job_1", "job_10", "jobs", "set-a", "set_1"]
    streams = {
        name: client.stream(prepare("x", rid=name, stream=True, **ENDLESS), owner=None) for name in names
    }
    client.abort(rid, every=every)
    # One that is not meant ends after those that are.
    client.run(prepare("done"))
    assert len(cores[0].cancelled) == len(ended)
    for name in ended:
        last = list(streams[name])[-1]
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert client._flying_ids == set(names) - ended


# ── death and shutdown ────────────────────────────────────────────────────────────────────────


def test_death_reaches_everybody_who_waits(
    client: Client, prepare: Any, cores: list[Any], gate: threading.Event
) -> None:
    gate.clear()
    caught: list[BaseException] = []

    def wait(wait_for: Callable[[], object]) -> None:
        try:
            wait_for()
        except EngineDead as error:
            caught.append(error)

    async def iterate() -> None:
        async for _ in client.stream_async(prepare("d", stream=True), owner=None):
            pass

    ways: list[Callable[[], object]] = [
        lambda: client.run(prepare("a", "b")),
        lambda: list(client.stream(prepare("b", stream=True), owner=None)),
        lambda: asyncio.run(client.run_async(prepare("c"))),
        lambda: asyncio.run(iterate()),
    ]
    threads = [threading.Thread(target=wait, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(client._flying) == 5)
    cause = RuntimeError("the device is gone")
    cores[0].die(cause)
    for thread in threads:
        thread.join(5)
    assert len(caught) == 4
    assert all(error.__cause__ is cause for error in caught)
    assert len(set(map(id, caught))) == 4
    with pytest.raises(EngineDead, match="the device is gone") as error:
        client.run(prepare("e"))
    assert error.value.__cause__ is cause
    with pytest.raises(EngineDead):
        client.call_core("flush_cache")
    assert not client._flying


@pytest.mark.parametrize("way", ["run", "run_async", "stream"])
def test_death_leaves_what_finished_to_those_who_want_errors_returned(
    client: Client, cores: list[Any], make_request: Any, way: str
) -> None:
    rows = [(b"a", {}), (b"bc", {}), (b"bc", ENDLESS)]
    requests = tuple(
        make_request(list(text), request_id=text.decode() + str(place), **params)
        for place, (text, params) in enumerate(rows)
    )
    job = Job(requests, single=False, returns_errors=True)
    ways: dict[str, Callable[[Call], Any]] = {
        "run": client.run,
        "run_async": lambda call: asyncio.run(client.run_async(call)),
        "stream": lambda call: list(client.stream(call, owner=None)),
    }
    results: list[dict[str, Any]] = []
    call = client.prepare(job, stream=way == "stream")
    thread = threading.Thread(target=lambda: results.extend(ways[way](call)))
    thread.start()
    wait_until(lambda: call.num_unfinished == 1)
    cores[0].die(RuntimeError("the device is gone"))
    thread.join(5)
    if way == "stream":
        results = [[each for each in results if each["index"] == place][-1] for place in range(3)]
    else:
        assert [each["text"] for each in results[:2]] == ["a", "bc"]
    assert [each["error"] and each["error"]["type"] for each in results] == [None, None, "internal"]
    assert "the device is gone" in results[2]["error"]["message"]
    with pytest.raises(EngineDead):
        client.run(client.prepare(job, stream=False))


def test_a_stream_gives_what_came_before_the_death(
    client: Client, prepare: Any, cores: list[Any], gate: threading.Event
) -> None:
    stream = client.stream(prepare("abc", stream=True, **ENDLESS), owner=None)
    pieces = [next(stream)["text"]]
    cores[0].die(RuntimeError("gone"))
    with pytest.raises(EngineDead):
        pieces.extend(chunk["text"] for chunk in stream)
    assert "".join(pieces).startswith("abc"[: len(pieces)])
    assert list(stream) == []


def test_shutdown_reaches_everybody_who_waits(
    client: Client, prepare: Any, cores: list[Any], gate: threading.Event
) -> None:
    gate.clear()
    stream = client.stream(prepare("a", stream=True), owner=None)
    threading.Timer(0.02, client.close).start()
    with pytest.raises(EngineClosed):
        next(stream)
    client.close()
    with pytest.raises(EngineClosed, match="make a new one"):
        client.run(prepare("b"))
    with pytest.raises(EngineClosed):
        client.call_core("flush_cache")
    assert cores[0].closed


# ── costs ─────────────────────────────────────────────────────────────────────────────────────


def test_text_without_stream_or_stop_strings_is_made_once(
    client: Client, prepare: Any, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = Tokenizer.texts

    def counting(self: Tokenizer, finished: Any) -> list[str]:
        calls.append(len(finished))
        return original(self, finished)

    def forbidden(self: Tokenizer, request: Request) -> Any:
        raise AssertionError("no text is needed before the end")

    monkeypatch.setattr(Tokenizer, "texts", counting)
    monkeypatch.setattr(Tokenizer, "open_text", forbidden)
    client.run(prepare("a", "b", "c"))
    assert calls == [3]


def test_results_are_made_while_other_rows_run(
    client: Client, prepare: Any, cores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, original, num_made = cores[0], Tokenizer.texts, 0

    class Gate(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            """Holds the core before the last steps of the last row."""
            return core.num_running > 1 or super().wait(5)

    def counting(self: Tokenizer, finished: Any) -> list[str]:
        nonlocal num_made
        num_made += len(finished)
        if num_made == 40:
            core.gate.set()
        return original(self, finished)

    monkeypatch.setattr(Tokenizer, "texts", counting)
    core.gate = Gate()
    results = client.run(prepare(*["a", "bc"] * 20, "long"))
    assert [result["text"] for result in results] == [*["a", "bc"] * 20, "long"]
    assert num_made == 41
    assert core.gate.is_set(), "forty were made before the last one had finished"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("show", "is_terminal", "num_rows", "expected"),
    [
        (None, True, 2, True),
        (None, False, 2, False),
        (True, False, 2, True),
        (False, True, 2, False),
        (True, True, 1, False),
    ],
)
def test_progress_bar(
    client: Client,
    prepare: Any,
    monkeypatch: pytest.MonkeyPatch,
    show: bool | None,
    is_terminal: bool,
    num_rows: int,
    expected: bool,
) -> None:
    written = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr("tokenmill.frontend.progress._QUIET_SECONDS", 0)
    client._config = replace(client._config, show_progress=show)
    threads = threading.active_count()
    client.run(prepare(*["text"] * num_rows))
    assert ("2/2" in written.getvalue() and "tokens/s" in written.getvalue()) == expected
    assert bool(written.getvalue()) == expected
    assert threading.active_count() == threads


def test_a_short_job_shows_no_bar(client: Client, prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Terminal()
    monkeypatch.setattr(sys, "stderr", written)
    client.run(prepare("a", "b"))
    assert written.getvalue() == ""
