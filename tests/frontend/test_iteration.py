"""`engine.iter` and `engine.open_rows`: order, back-pressure, rows that fail alone, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import re
import signal
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokenmill as sgl
from tokenmill.frontend.iteration import Entry

pytestmark = pytest.mark.cpu

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def engine(cores: list[Any], byte_folder: Path) -> Iterator[sgl.Engine]:
    """An engine that answers a prompt with the prompt, a byte at a time."""
    with sgl.Engine(model_path=str(byte_folder), chat_template=TEMPLATE) as engine:
        yield engine


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_clean(engine: sgl.Engine, core: Any) -> bool:
    """Nothing is in flight, neither here nor there."""
    client = engine._client
    return not client._flying and not client._flying_ids and core.num_running == 0


class Counted:
    """Counts how many items were pulled from it."""

    def __init__(self, items: Any) -> None:
        self._items = iter(items)
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self.count += 1
        return item


class Dataset:
    """What PyTorch calls a map-style data set: it has a length and items, and no end of its own."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index] if index < len(self._items) else "an item past the end"


async def each(items: Any) -> AsyncIterator[Any]:
    for item in items:
        await asyncio.sleep(0)
        yield item


async def collected(results: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [result async for result in results]


# ── what comes out ────────────────────────────────────────────────────────────────────────────


TEXTS = [f"row {index} " + "é" * (index * 7 % 11) for index in range(60)]


@pytest.mark.parametrize("window", [1, 2, 7, 60, None])
@pytest.mark.parametrize("waits", ["for", "async for"])
def test_every_row_once_in_either_order(engine: sgl.Engine, window: int | None, waits: str) -> None:
    def run(**settings: Any) -> list[dict[str, Any]]:
        results = engine.iter(TEXTS, window=window, **settings)
        return list(results) if waits == "for" else asyncio.run(collected(results))

    ordered = run(order="input")
    assert [result["text"] for result in ordered] == TEXTS
    assert [result["index"] for result in ordered] == list(range(60))
    assert all(result["error"] is None for result in ordered)
    finished = run()
    assert sorted(result["index"] for result in finished) == list(range(60))
    assert all(result["text"] == TEXTS[result["index"]] for result in finished)
    if window is None:  # short rows overtake long ones
        assert [result["index"] for result in finished] != list(range(60))


def test_results_are_those_of_generate() -> None:
    prompts = ["The cat", "Hello, my name is", "One two three", "A dog"]
    params = {"max_new_tokens": 5, "n": 2, "temperature": 1.0}
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    with sgl.Engine(model_path="tiny", random_seed=4) as engine:
        wanted = engine.generate(prompts, params, **asked)
        stopped = engine.generate(prompts, {"stop": ["."], "temperature": 0})
        again = list(engine.iter(prompts, {"stop": ["."], "temperature": 0}, order="input"))
    with sgl.Engine(model_path="tiny", random_seed=4) as engine:
        got = list(engine.iter(iter(prompts), params, order="input", window=3, **asked))
    assert [(result["index"], result["sample"]) for result in got] == list(
        itertools.product(range(4), range(2))
    )
    for result, expected in zip(got, wanted, strict=True):
        assert result["output_ids"] == expected["output_ids"]
        assert result["text"] == expected["text"]
        for key in ("finish_reason", "input_token_logprobs", "output_top_logprobs"):
            assert result["meta_info"][key] == expected["meta_info"][key], key
    assert [result["text"] for result in again] == stopped["text"]


def test_everything_that_can_be_iterated_over(engine: sgl.Engine, tmp_path: Path) -> None:
    texts = ["one", "two  ", "three"]
    (tmp_path / "unix.txt").write_bytes(b"one\ntwo  \nthree")
    (tmp_path / "windows.txt").write_bytes(b"one\r\ntwo  \r\nthree\r\n")
    ids = [list(text.encode()) for text in texts]
    with open(tmp_path / "unix.txt") as unix, open(tmp_path / "windows.txt", newline="") as windows:
        for items in (
            texts,
            tuple(texts),
            (text for text in texts),
            dict.fromkeys(texts).keys(),
            Dataset(texts),
            unix,
            windows,
            io.StringIO("one\ntwo  \nthree\n"),
            ids,
            [np.array(row) for row in ids],
            [{"prompt": text} for text in texts],
            ({"input_ids": row} for row in ids),
        ):
            assert [result["text"] for result in engine.iter(items, order="input")] == texts, items
    for items in (texts, Dataset(texts), (text for text in texts), each(texts)):
        assert [r["text"] for r in asyncio.run(collected(engine.iter(items, order="input")))] == texts
    assert list(engine.iter([])) == list(engine.iter(iter(()))) == []
    assert asyncio.run(collected(engine.iter([]))) == asyncio.run(collected(engine.iter(each([])))) == []


def test_what_an_item_says_goes_before_what_holds_for_all(engine: sgl.Engine) -> None:
    chat = [{"role": "user", "content": "hi"}]
    items = [
        "abcdef",
        {"prompt": "abcdef", "sampling_params": {"max_new_tokens": 4}},
        {"prompt": "abcdef", "sampling_params": {"stop": "cd"}, "rid": "mine"},
        {"prompt": "abcdef", "sampling_params": {"stop": "zz"}},
        {"prompt": "abcdef", "sampling_params": sgl.SamplingParams(ignore_eos=True, max_new_tokens=8)},
        {"messages": chat, "sampling_params": {"max_new_tokens": 99}},
        {"messages": chat, "chat_template": "{{ messages[0].content }}!", "tools": None},
    ]
    results = list(engine.iter(items, {"max_new_tokens": 5}, order="input"))
    assert [result["text"] for result in results] == [
        *("abcde", "abcd", "ab", "abcde", "abcdefa", "<user>hi", "hi!")
    ]
    assert results[2]["meta_info"]["id"] == "mine"
    again = engine.iter(items[-2:], chat_template="{{ messages[0].role }}", order="input")
    assert [result["text"] for result in again] == ["user", "hi!"]


def test_an_object_for_all_items_is_complete(cores: list[Any], byte_folder: Path) -> None:
    preferred = {"max_new_tokens": 3, "stop": "c"}
    with sgl.Engine(model_path=str(byte_folder), preferred_sampling_params=preferred) as engine:
        for own, text in [({}, "abcdef"), ({"top_p": 0.5}, "abcdef"), ({"max_new_tokens": 5}, "abcde")]:
            items = [{"prompt": "abcdef", "sampling_params": own}]
            [result] = engine.iter(items, sgl.SamplingParams(temperature=0))
            assert result["text"] == text
        # What an object leaves at 128 nobody has asked for: it is shortened where it does not fit.
        long = {"input_ids": [97] * 99_990, "sampling_params": {"top_p": 0.5, "ignore_eos": True}}
        [result] = engine.iter([long], sgl.SamplingParams(temperature=0))
        assert len(result["output_ids"]) == 10
        [result] = engine.iter([long], {"max_new_tokens": 128})
        assert result["error"]["type"] == "too_long"


def test_parameters_made_anew_for_each_item_are_its_own(engine: sgl.Engine) -> None:
    """Also where what one item's were made of is gone when the next one's are made."""

    shared: dict[str, Any] = {"max_new_tokens": 6}

    class Item(Mapping[str, Any]):
        def __init__(self, number: int) -> None:
            self.number = number

        def __getitem__(self, name: str) -> Any:
            if name == "prompt":
                return "abcdef"
            params = shared if self.number % 2 else {"max_new_tokens": 6}
            params["stop_token_ids"] = [ord("a") + self.number % 6]
            return params

        def __iter__(self) -> Iterator[str]:
            return iter(("prompt", "sampling_params"))

        def __len__(self) -> int:
            return 2

    results = engine.iter([Item(number) for number in range(60)], order="input")
    assert [result["text"] for result in results] == ["abcdef"[: number % 6] for number in range(60)]


def test_equal_parameters_of_items_are_read_once(engine: sgl.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = [], sgl.SamplingParams.from_value

    def counting(value: Any, **options: Any) -> sgl.SamplingParams:
        read.append(value)
        return original(value, **options)

    monkeypatch.setattr(sgl.SamplingParams, "from_value", counting)
    items = [{"prompt": "abcdef", "sampling_params": {"max_new_tokens": 1 + at % 3}} for at in range(90)]
    items += [{"prompt": "abcdef", "sampling_params": {}}]
    results = list(engine.iter(items, {"max_new_tokens": 5}, order="input"))
    assert [len(result["output_ids"]) for result in results] == [*([1, 2, 3] * 30), 5]
    own = [value["max_new_tokens"] for value in read if value != {"max_new_tokens": 5}]
    assert own == [1, 2, 3], "in one piece, for which what holds for all is read once, too"


def test_samples_are_numbered_where_there_are_several(engine: sgl.Engine) -> None:
    items = [{"prompt": "ab", "sampling_params": {"n": 3}}, "cd"]
    results = list(engine.iter(items, order="input"))
    assert [(r["index"], r.get("sample"), r["text"]) for r in results] == [
        (0, 0, "ab"), (0, 1, "ab"), (0, 2, "ab"), (1, None, "cd"),
    ]  # fmt: skip


# ── rows that fail ────────────────────────────────────────────────────────────────────────────


BAD = {
    "no text": ("", "bad_parameters", "empty"),
    "a number": (7, "bad_parameters", "token ids"),
    "nothing": (None, "bad_parameters", "None"),
    "bytes": (b"raw", "bad_parameters", "open the file as text"),
    "messages alone": ([{"role": "user", "content": "a"}], "bad_parameters", "'messages'"),
    "half a character": ("a\ud800", "bad_parameters", "surrogate"),
    "no prompt": ({"rid": "a"}, "bad_parameters", "none of them"),
    "two prompts": ({"prompt": "a", "input_ids": [1]}, "bad_parameters", "prompt and input_ids"),
    "a list for a prompt": ({"prompt": ["a"]}, "bad_parameters", "must be a string"),
    "an unknown key": ({"prompt": "a", "sampling_parms": {}}, "bad_parameters", "sampling_params"),
    "a key that is no text": ({"prompt": "a", 5: 5}, "bad_parameters", "5"),
    "a bad parameter": ({"prompt": "a", "sampling_params": {"top_p": 2}}, "bad_parameters", "top_p"),
    "a bad option": ({"prompt": "a", "priority": "high"}, "bad_parameters", "priority"),
    "a key of chat": ({"prompt": "a", "tools": []}, "bad_parameters", "tools is for messages"),
    "a session": ({"prompt": "a", "session_params": {"id": "s"}}, "bad_parameters", "session_params"),
    "no message": ({"messages": []}, "bad_parameters", "messages is empty"),
    "two conversations": ({"messages": [[{"role": "u", "content": "a"}]] * 2}, "bad_parameters", "2 conv"),
    "an id too high": ([1, 300], "bad_parameters", "vocabulary"),
    "too long": ([1] * 100_001, "too_long", "at most 100000"),
    "too many new": (
        {"prompt": "abc", "sampling_params": {"max_new_tokens": 99_999}}, "too_long", "lower max_new_tokens",
    ),
    "a bad pattern": ({"prompt": "a", "sampling_params": {"regex": "("}}, "bad_grammar", "regex"),
    "a bad schema": ({"prompt": "a", "sampling_params": {"json_schema": "{"}}, "bad_grammar", "json_schema"),
}  # fmt: skip


@pytest.mark.parametrize("order", ["completion", "input"])
def test_a_row_fails_alone(engine: sgl.Engine, cores: list[Any], order: Any) -> None:
    items = [item for bad, _, _ in BAD.values() for item in (bad, "fine")]
    results = sorted(engine.iter(items, order=order, window=16), key=lambda result: result["index"])
    assert [result["index"] for result in results] == list(range(len(items)))
    for result, (_, kind, words) in zip(results[::2], BAD.values(), strict=True):
        assert result["error"]["type"] == kind, result
        assert result["error"]["status_code"] == 400
        assert words in result["error"]["message"], result["error"]
        assert (result["text"], result["output_ids"]) == ("", [])
        assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert [(result["text"], result["error"]) for result in results[1::2]] == [("fine", None)] * len(BAD)
    assert is_clean(engine, cores[0])


def test_a_row_that_fails_takes_its_seeds() -> None:
    params = {"max_new_tokens": 6, "n": 2}
    bad = [
        5,
        "",
        "word " * 9000,
        {"promt": "A"},
        {"prompt": "A", "rid": 5},
        {"prompt": "A", "priority": "high", "sampling_params": {"n": 2, "top_p": 0.5}},
        {"prompt": "A", "sampling_params": {"top_p": 7}},
        {"prompt": 5, "sampling_params": {"n": 3}},  # takes as many as it asks for:
        {"prompt": "A", "sampling_params": {"n": "many"}},  # three and one are two for each
    ]
    with sgl.Engine(model_path="tiny", random_seed=5) as engine:
        sound = engine.generate([*(["A cat"] * len(bad)), "My name", "x"], params)["output_ids"]
    with sgl.Engine(model_path="tiny", random_seed=5) as engine:
        results = list(engine.iter([*bad, "My name", "x"], params, order="input"))
    assert [result["error"] is None for result in results] == [*([False] * len(bad)), *([True] * 4)]
    assert [result["output_ids"] for result in results[-4:]] == sound[-4:]


def test_a_text_that_the_tokenizer_dislikes_fails_alone(
    engine: sgl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = engine._tokenizer.encode_batch

    def picky(texts: Any, **options: Any) -> Any:
        if any("7" in text for text in texts):
            raise RuntimeError("no sevens")
        return encode(texts, **options)

    monkeypatch.setattr(engine._tokenizer, "encode_batch", picky)
    results = list(engine.iter(map(str, range(1, 21)), order="input"))
    assert [r["index"] for r in results if r["error"]] == [6, 16]
    assert results[6]["error"] == {
        "type": "internal", "message": "RuntimeError: no sevens", "status_code": 500,
    }  # fmt: skip
    assert results[7]["text"] == "8"


def test_an_id_in_flight_fails_its_row_and_is_free_afterwards(engine: sgl.Engine, gate: Any) -> None:
    gate.clear()
    items = [{"prompt": text, "rid": "same"} for text in ("first", "second")]
    results = engine.iter(items)
    refused = next(results)
    assert (refused["index"], refused["meta_info"]["id"]) == (1, "same")
    assert "in flight already" in refused["error"]["message"]
    gate.set()
    assert next(results)["text"] == "first"
    assert [result["text"] for result in engine.iter(items[1:])] == ["second"]


class Torn(dict[str, Any]):
    """Cannot be asked."""

    def get(self, *_: Any) -> Any:
        raise OSError("torn")


@pytest.mark.parametrize(
    ("item", "name"),
    [({"rid": "a"}, "a"), (MappingProxyType({"rid": "a"}), "a"), (Torn(rid="a"), ""), ({"rid": 1}, "")],
)
def test_a_row_that_cannot_run_keeps_its_name(engine: sgl.Engine, item: Any, name: str) -> None:
    [result] = engine.iter([item])
    assert result["error"] is not None
    assert result["meta_info"]["id"] == name


def test_the_first_error_is_raised_on_demand(engine: sgl.Engine, cores: list[Any]) -> None:
    items = itertools.chain(["a", {"prompt": 5}], itertools.repeat("endless"))
    endless = {"ignore_eos": True, "max_new_tokens": 50_000}
    with pytest.raises(sgl.InvalidArgument, match="item 1: the prompt of an item must be a string"):
        list(engine.iter(items, endless, on_error="raise"))
    wait_until(lambda: is_clean(engine, cores[0]))

    def abort_once_it_runs() -> None:
        wait_until(lambda: cores[0].num_running == 1)
        engine.abort("mine")
        cores[0].gate.set()

    cores[0].gate.clear()
    threading.Thread(target=abort_once_it_runs).start()
    aborted = engine.iter([{"prompt": "a", "rid": "mine"}], endless, on_error="raise")
    assert next(aborted)["error"]["type"] == "aborted"  # what was there is an answer, as for generate
    with pytest.raises(sgl.InvalidArgument, match="item 1"):
        asyncio.run(collected(engine.iter(["a", 5], on_error="raise")))


def test_tables_are_refused_with_what_gives_their_rows(engine: sgl.Engine) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"prompt": ["ab", "c"]})
    for items in (table, table["prompt"], table["prompt"].chunk(0), table.to_batches()[0]):
        with pytest.raises(sgl.WrongType, match=rf"a {type(items).__name__}, .* to_pylist\(\)"):
            engine.iter(items)
        rows = engine.iter(items.to_pylist(), order="input")
        assert [row["text"] for row in rows] == ["ab", "c"]

    class DataFrame(list[str]):
        """As in pandas: its items are the names of columns."""

        iterrows = None

    assert [row["text"] for row in engine.iter(DataFrame(["ab"]))] == ["ab"]  # nobody knows its library
    DataFrame.__module__ = "pandas.core.frame"
    with pytest.raises(sgl.WrongType, match=r"a DataFrame, .* to_dict"):
        engine.iter(DataFrame(["prompt"]))


def test_what_holds_for_all_is_refused_at_once(engine: sgl.Engine) -> None:
    items = Counted(["a"])
    for arguments, words in (
        ({"prompts": "text"}, "iterable of prompts, got 'text'"),
        ({"prompts": {"prompt": "a"}}, "give a list of it"),
        ({"prompts": 7}, "iterable of prompts, got 7"),
        ({"order": "random"}, "order must be 'completion' or 'input', got 'random'"),
        ({"window": 0}, "window"),
        ({"window": True}, "window"),
        ({"on_error": "ignore"}, "on_error must be one of 'return', 'raise', got 'ignore'"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": [{}]}, "sampling_params"),
        ({"priority": "high"}, "priority"),
        ({"prioritty": 1}, "Did you mean 'priority'"),
        ({"session_params": {"id": "a"}}, "turn by turn"),
        ({"stream": True}, "stream is no keyword of all items, got True (bool); results of items come"),
        ({"rid": "zz"}, "rid is no keyword of all items, got 'zz' (str); give each item its own"),
        ({"input_ids": [1]}, "input_ids is no keyword of all items, got [1]"),
        ({"prompt": "a"}, "prompt is no keyword of all items, got 'a' (str); give each prompt as"),
    ):
        with pytest.raises(sgl.InvalidArgument, match=re.escape(words)):
            engine.iter(**{"prompts": items, **arguments})
    assert items.count == 0
    assert next(engine.iter(["a"], stream=False, rid=None))["text"] == "a"
    with pytest.raises(sgl.WrongType, match="use `async for`"):
        next(engine.iter(each(["a"])))


@pytest.mark.parametrize("order", ["completion", "input"])
def test_an_error_of_the_source_comes_after_what_came_before_it(engine: sgl.Engine, order: Any) -> None:
    def source() -> Iterator[str]:
        yield from map(str, range(30))
        raise OSError("the disk is gone")

    async def run(kind: str, taken: list[str], window: int | None) -> None:
        results = engine.iter(
            each(source()) if kind == "async for async" else source(), order=order, window=window
        )
        if kind == "for":
            for result in results:
                taken.append(result["text"])
        else:
            async for result in results:
                taken.append(result["text"])

    for window, kind in itertools.product((5, None), ("for", "async for", "async for async")):
        taken: list[str] = []
        with pytest.raises(OSError, match="the disk is gone"):
            asyncio.run(run(kind, taken, window))
        assert sorted(taken, key=int) == list(map(str, range(30)))


class Failing:
    """An iterator that raises what no iterator should, after three items."""

    def __init__(self, error: BaseException) -> None:
        self._error, self._left = error, 3

    def __iter__(self) -> Failing:
        return self

    def __next__(self) -> str:
        if not self._left:
            raise self._error
        self._left -= 1
        return "a"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (asyncio.CancelledError(), asyncio.CancelledError),
        (GeneratorExit(), GeneratorExit),
        (StopAsyncIteration(), RuntimeError),
    ],
)
def test_a_source_that_raises_anything_ends_async_for(
    engine: sgl.Engine, error: BaseException, expected: type[BaseException]
) -> None:
    """It went on for ever, or ended as if there were no more rows."""
    taken: list[str] = []

    async def run() -> None:
        async for result in engine.iter(Failing(error)):
            taken.append(result["text"])

    async def in_time() -> None:
        await asyncio.wait_for(run(), 20)

    with pytest.raises(expected):
        asyncio.run(in_time())
    assert taken == ["a"] * 3


def test_a_source_whose_task_was_cancelled_ends_async_for(engine: sgl.Engine) -> None:
    taken: list[str] = []

    async def source() -> AsyncIterator[str]:
        yield "a"
        task = asyncio.create_task(asyncio.sleep(10))
        task.cancel()
        await task

    async def run() -> None:
        async for result in engine.iter(source()):
            taken.append(result["text"])

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert taken == ["a"]


# ── back-pressure ─────────────────────────────────────────────────────────────────────────────


def test_reading_stays_within_the_window(engine: sgl.Engine, cores: list[Any]) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        window=st.integers(1, 40),
        count=st.integers(0, 90),
        leave_after=st.integers(0, 100),
        order=st.sampled_from(["completion", "input"]),
        kind=st.sampled_from(["for", "async for", "async for async"]),
        bad=st.sets(st.integers(0, 89), max_size=5),
    )
    def check(window: int, count: int, leave_after: int, order: Any, kind: str, bad: set[int]) -> None:
        items = Counted(7 if i in bad else {"prompt": f"{i}" * (1 + i % 9)} for i in range(count))
        seen: list[int] = []

        def see(result: dict[str, Any]) -> bool:
            assert items.count - len(seen) <= window
            seen.append(result["index"])
            assert (result["error"] is not None) == (result["index"] in bad)
            return len(seen) < leave_after

        async def watch() -> None:
            source = each(items) if kind == "async for async" else items
            async with engine.iter(source, window=window, order=order) as results:
                async for result in results:
                    if not see(result):
                        break

        if kind == "for":
            for result in engine.iter(items, window=window, order=order):
                if not see(result):
                    break
        else:
            asyncio.run(watch())
        assert len(seen) == min(count, max(leave_after, 1))
        assert len(set(seen)) == len(seen)
        assert order == "completion" or seen == list(range(len(seen)))
        wait_until(lambda: is_clean(engine, cores[0]))

    check()


def test_a_slow_row_does_not_let_the_others_pile_up(engine: sgl.Engine, cores: list[Any]) -> None:
    slow = {"prompt": "a", "sampling_params": {"ignore_eos": True, "max_new_tokens": 3000}}
    items = Counted([slow, *(["b"] * 200)])
    results = engine.iter(items, order="input", window=20)
    assert next(results)["index"] == 0
    assert items.count <= 21
    assert [result["index"] for result in results] == list(range(1, 201))


def test_memory_does_not_grow_with_the_rows(engine: sgl.Engine, cores: list[Any]) -> None:
    cores[0].submitted = deque(maxlen=0)  # it would remember every request

    def peak(count: int) -> int:
        gc.collect()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        for _ in engine.iter((f"{i}" for i in range(count)), window=64):
            pass
        return tracemalloc.get_traced_memory()[1] - before

    peak(100)
    tracemalloc.start()
    try:
        # A result takes more than 1000 bytes; garbage that waits for the collector, up to 200,000 in all.
        assert peak(4000) < peak(300) + 1_000_000
    finally:
        tracemalloc.stop()


def test_the_window_is_several_times_what_runs_at_once(engine: sgl.Engine, byte_folder: Path) -> None:
    assert engine.open_rows().window == 1024  # 64 run at once
    with sgl.Engine(model_path=str(byte_folder), max_queued_requests=100) as small:
        assert small.open_rows().window == 164


def test_results_are_not_kept_waiting_by_a_slow_source(engine: sgl.Engine) -> None:
    def source() -> Iterator[str]:
        for index in range(12):
            time.sleep(0.03)
            yield str(index)

    items = Counted(source())
    pulled = [items.count for _ in engine.iter(items)]
    assert pulled[0] <= 4
    assert pulled[5] <= 10


def test_an_answer_may_lead_to_the_next_question(engine: sgl.Engine) -> None:
    async def talk(count: int) -> list[str]:
        questions: asyncio.Queue[str | None] = asyncio.Queue()
        questions.put_nowait("0")

        async def asked() -> AsyncIterator[str]:
            while (question := await questions.get()) is not None:
                yield question

        answers = []
        async for result in engine.iter(asked()):
            answers.append(result["text"])
            questions.put_nowait(str(len(answers)) if len(answers) < count else None)
        return answers

    assert asyncio.run(asyncio.wait_for(talk(5), 30)) == ["0", "1", "2", "3", "4"]


def test_a_source_that_waits_does_not_hold_the_event_loop(engine: sgl.Engine) -> None:
    """Each of its items is given only after a task of the same event loop has run."""
    asked, given = threading.Semaphore(0), threading.Semaphore(0)

    def source() -> Iterator[str]:
        for index in range(5):
            asked.release()
            assert given.acquire(timeout=20), "the event loop stood still"
            yield str(index)

    async def give() -> None:
        for _ in range(5):
            while not asked.acquire(blocking=False):
                await asyncio.sleep(0.001)
            given.release()

    async def run() -> int:
        giving = asyncio.create_task(give())
        answers = await collected(engine.iter(source()))
        await giving
        return len(answers)

    assert asyncio.run(run()) == 5


# ── the end ───────────────────────────────────────────────────────────────────────────────────


ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 50_000}


def endless_after(count: int) -> Iterator[Any]:
    """Rows of which the first ones end."""
    for index in itertools.count():
        yield {"prompt": f"{index}", "sampling_params": {} if index < count else ENDLESS}


def test_leaving_cancels_what_has_not_finished(engine: sgl.Engine, cores: list[Any]) -> None:
    for _ in engine.iter(endless_after(3), window=50):
        break
    wait_until(lambda: is_clean(engine, cores[0]))

    with engine.iter(endless_after(3), window=50) as results:
        assert next(results)["index"] < 3
        assert not is_clean(engine, cores[0])
    assert list(results) == []
    results.close()
    wait_until(lambda: is_clean(engine, cores[0]))

    results = engine.iter(endless_after(3), window=50)
    next(results)
    del results
    wait_until(lambda: is_clean(engine, cores[0]))

    unused = engine.iter(endless_after(0))
    unused.close()
    assert list(unused) == []


def test_leaving_an_async_iterator(engine: sgl.Engine, cores: list[Any]) -> None:
    async def leave(source: Any) -> None:
        results = engine.iter(source, window=50)
        async for _ in results:
            break
        await results.aclose()
        await results.aclose()
        assert await collected(results) == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def forgotten(source: Any) -> None:
        async for _ in engine.iter(source, window=50):
            break
        for _ in range(200):  # until a thread has pulled its last item
            await asyncio.sleep(0.005)
            if asyncio.all_tasks() == {asyncio.current_task()}:
                return
        pytest.fail(f"{asyncio.all_tasks()} go on")

    async def waiting() -> AsyncIterator[str]:
        yield "a"
        await asyncio.Event().wait()

    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(collected(engine.iter(endless_after(3), window=50)), 0.2)

    asyncio.run(leave(endless_after(3)))
    wait_until(lambda: is_clean(engine, cores[0]))
    asyncio.run(leave(each(endless_after(3))))
    wait_until(lambda: is_clean(engine, cores[0]))
    asyncio.run(forgotten(endless_after(3)))
    asyncio.run(forgotten(waiting()))
    wait_until(lambda: is_clean(engine, cores[0]))
    asyncio.run(cancelled())
    wait_until(lambda: is_clean(engine, cores[0]))


def test_ctrl_c_ends_the_loop_and_nothing_else(engine: sgl.Engine, cores: list[Any], gate: Any) -> None:
    gate.clear()
    me = threading.get_ident()
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(me, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(engine.iter(["a", "b"]))  # nothing runs
    timer.join()
    gate.set()
    wait_until(lambda: is_clean(engine, cores[0]))
    assert [result["text"] for result in engine.iter(["a", "b"], order="input")] == ["a", "b"]


def test_one_kind_of_loop_for_an_iterator(engine: sgl.Engine) -> None:
    results = engine.iter(["a", "b"])
    next(results)
    with pytest.raises(sgl.WrongState, match="used by `for`"):
        asyncio.run(collected(results))

    async def mixed() -> None:
        results = engine.iter(["a", "b"])
        await anext(results)
        with pytest.raises(sgl.WrongState, match="used by `async for`"):
            next(results)
        await results.aclose()

    asyncio.run(mixed())


def test_a_second_task_is_refused_and_the_first_goes_on(engine: sgl.Engine) -> None:
    async def both() -> None:
        results = engine.iter(TEXTS, order="input")
        got, refusal = await asyncio.wait_for(
            asyncio.gather(collected(results), collected(results), return_exceptions=True), 10
        )
        assert isinstance(got, list)
        assert [result["text"] for result in got] == TEXTS
        assert isinstance(refusal, sgl.WrongState)
        assert "another thread or task waits" in str(refusal)

    asyncio.run(both())


def test_no_row_is_lost_among_threads_that_share_an_iterator(engine: sgl.Engine) -> None:
    results = engine.iter(TEXTS)
    texts: list[str] = []
    refusals: list[Exception] = []

    def use() -> None:
        try:
            texts.extend(result["text"] for result in results)
        except sgl.WrongState as refusal:
            refusals.append(refusal)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == sorted(TEXTS)
    assert len(refusals) < 4


def test_closing_ends_the_wait_of_others(engine: sgl.Engine, cores: list[Any], gate: Any) -> None:
    gate.clear()  # nothing runs
    for source in (["a"], endless_after(0)):
        results = engine.iter(source)
        got: list[Any] = []
        thread = threading.Thread(target=lambda got, results: got.append([*results]), args=(got, results))
        thread.start()
        wait_until(lambda: bool(engine._client._flying))
        results.close()
        thread.join(timeout=10)
        assert got == [[]]

    async def waiting(source: Any) -> None:
        results = engine.iter(source)
        waiter = asyncio.create_task(collected(results))
        while not engine._client._flying:
            await asyncio.sleep(0.002)
        await results.aclose()
        assert await asyncio.wait_for(waiter, 10) == []

    asyncio.run(waiting(["a"]))
    asyncio.run(waiting(each(["a"])))
    gate.set()
    wait_until(lambda: is_clean(engine, cores[0]))


def test_closing_while_rows_are_started_ends_the_loop(engine: sgl.Engine, cores: list[Any]) -> None:
    """By another thread: what was counted behind its back was waited for without end."""

    async def run() -> list[Any]:
        results = engine.iter(map(str, range(10_000)), window=16)
        submit, count = results._flow._submit, itertools.count(1)

        def submit_and_close(calls: Any) -> None:
            submit(calls)
            if next(count) == 3:
                thread = threading.Thread(target=results.close)
                thread.start()
                thread.join()

        results._flow._submit = submit_and_close  # type: ignore[method-assign]
        return await asyncio.wait_for(collected(results), 20)

    assert len(asyncio.run(run())) < 100
    wait_until(lambda: is_clean(engine, cores[0]))


def test_another_event_loop_is_refused(engine: sgl.Engine, cores: list[Any]) -> None:
    results = engine.iter(map(str, range(100)), window=8)
    asyncio.run(asyncio.wait_for(anext_of(results), 20))
    with pytest.raises(sgl.WrongState, match="begun in another event loop"):
        asyncio.run(anext_of(results))
    wait_until(lambda: is_clean(engine, cores[0]))


def test_leaving_in_another_event_loop_waits_for_nothing(engine: sgl.Engine, cores: list[Any]) -> None:
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def leave(results: Any) -> None:
        async with results:
            await anext(results)

    results = engine.iter(map(str, range(100)), window=8)
    first.run_until_complete(asyncio.wait_for(anext_of(results), 20))
    with pytest.raises(sgl.WrongState, match="begun in another event loop"):
        second.run_until_complete(asyncio.wait_for(leave(results), 20))
    for loop in (first, second):
        loop.run_until_complete(asyncio.sleep(0.01))  # what was cancelled ends
        loop.close()
    wait_until(lambda: is_clean(engine, cores[0]))


async def anext_of(results: Any) -> Any:
    return await anext(results)


@pytest.mark.parametrize("order", ["completion", "input"])
def test_the_end_of_the_engine_is_the_end_of_the_loop(
    engine: sgl.Engine, cores: list[Any], order: Any
) -> None:
    results = engine.iter(endless_after(3), order=order, window=32)
    taken = [next(results)["index"]]
    flying = engine._client._flying
    wait_until(lambda: all(row.request.params.ignore_eos for _, row in list(flying.values())))
    cores[0].die(RuntimeError("burnt"))
    wait_until(lambda: not flying)
    taken += [next(results)["index"] for _ in range(2)]  # what has finished is not lost
    assert taken == [0, 1, 2]
    with pytest.raises(sgl.EngineDead, match="burnt"):
        next(results)
    with pytest.raises(sgl.EngineDead):
        list(engine.iter(["a"]))
    engine.shutdown()
    with pytest.raises(sgl.EngineClosed):
        list(engine.iter(["a"]))


@pytest.mark.parametrize("waits", ["for", "async for"])
def test_what_a_short_queue_has_no_room_for_waits_outside(
    cores: list[Any], byte_folder: Path, waits: str
) -> None:
    with sgl.Engine(model_path=str(byte_folder), max_queued_requests=3, max_running_requests=2) as engine:
        results = engine.iter(TEXTS, {"n": 3}, window=30)
        found = list(results) if waits == "for" else asyncio.run(collected(results))
        assert len(found) == 3 * len(TEXTS)
        assert {result["error"] for result in found} == {None}
        results = engine.iter(endless_after(3), window=30)
        taken = [next(results)["index"] for _ in range(3)]
        cores[0].die(RuntimeError("burnt"))
        with pytest.raises(sgl.EngineDead, match="burnt"):
            taken += [result["index"] for result in results]
        assert taken == [0, 1, 2]


def test_rows_of_several_iterations_wait_for_room_in_one_queue() -> None:
    params = {"max_new_tokens": 4, "ignore_eos": True}
    errors: list[Any] = []
    with sgl.Engine(model_path="tiny", max_running_requests=2, max_queued_requests=3) as engine:

        def iterate(n: int) -> None:
            errors.extend(result["error"] for result in engine.iter(["a"] * 10, {**params, "n": n}))

        async def in_a_loop() -> None:
            errors.extend(r["error"] for r in await collected(engine.iter(["a"] * 10, params)))

        threads = [threading.Thread(target=iterate, args=(n,)) for n in (1, 2, 7)]
        threads.append(threading.Thread(target=lambda: asyncio.run(in_a_loop())))
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            engine.generate(["b"] * 6, params, on_error="return")  # takes what room there is, and more
        assert errors == [None] * (10 * (1 + 2 + 7 + 1))
        pairs = zip(engine.iter(["a"] * 9, params), engine.iter(["b"] * 9, params), strict=True)
        assert [(one["error"], other["error"]) for one, other in pairs] == [(None, None)] * 9


def test_a_row_that_waits_for_room_can_be_aborted() -> None:
    params = {"max_new_tokens": 400, "ignore_eos": True}
    with sgl.Engine(model_path="tiny", max_running_requests=1, max_queued_requests=0) as engine:
        stream = engine.generate("a", params, stream=True)
        next(stream)
        engine.pause_generation("in_place")
        items = [{"prompt": "b", "rid": "first"}, {"prompt": "c", "rid": "second"}]
        found = engine.iter(items, {"max_new_tokens": 2, "ignore_eos": True})
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(next, found)
            while not engine._client._lobby:
                time.sleep(0.001)
            engine.abort("first")
            result = taken.result()
        engine.continue_generation()
        assert (result["meta_info"]["id"], result["error"]["type"]) == ("first", "aborted")
        assert result["output_ids"] == []
        assert len(list(stream)) > 1
        assert [(each["meta_info"]["id"], len(each["output_ids"])) for each in found] == [("second", 2)]


def test_rows_wait_while_another_call_fills_the_queue() -> None:
    params = {"max_new_tokens": 150, "ignore_eos": True}
    with sgl.Engine(model_path="tiny", max_running_requests=1, max_queued_requests=1) as engine:
        stream = engine.generate("a", params, stream=True)
        waiting = engine.generate("a", params, stream=True)
        found = engine.iter(["b", "c"], {"max_new_tokens": 2, "ignore_eos": True}, order="input")
        assert [result["error"] for result in found] == [None, None]
        for each in (stream, waiting):
            assert len(list(each)) > 1


def test_many_at_once(engine: sgl.Engine, cores: list[Any]) -> None:
    failures: list[BaseException] = []

    def guarded(run: Callable[[], None]) -> Callable[[], None]:
        def thread() -> None:
            try:
                run()
            except BaseException as error:
                failures.append(error)

        return thread

    def iterate() -> None:
        texts = [f"{threading.get_ident()} {index}" for index in range(120)]
        assert [r["text"] for r in engine.iter(iter(texts), order="input", window=30)] == texts

    def generate() -> None:
        assert engine.generate(TEXTS)["text"] == TEXTS

    def in_a_loop() -> None:
        async def both() -> None:
            texts = [[f"{n} {index}" for index in range(60)] for n in range(2)]
            got = await asyncio.gather(
                *(collected(engine.iter(each(some), order="input", window=9)) for some in texts)
            )
            assert [[r["text"] for r in results] for results in got] == texts

        asyncio.run(both())

    threads = [threading.Thread(target=guarded(run)) for run in (iterate, generate, in_a_loop, iterate)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert is_clean(engine, cores[0])


# ── rows one by one ───────────────────────────────────────────────────────────────────────────


def test_rows_are_read_and_run(engine: sgl.Engine, cores: list[Any]) -> None:
    rows = engine.open_rows()
    entries = rows.read(
        ["ab", 7, {"prompt": "cd", "sampling_params": {"n": 3}}], first_index=10, options={"priority": 1}
    )
    assert [(e.index, e.job is None, e.error is None) for e in entries] == [
        (10, False, True), (11, True, False), (12, False, True),
    ]  # fmt: skip
    assert entries[0].job is not None
    assert entries[0].job.requests[0].priority == 1
    got = list(itertools.chain.from_iterable(rows.run([entries[:1], [], entries[1:]], order="input")))
    assert [(entry.index, [r["text"] for r in results]) for entry, results in got] == [
        (10, ["ab"]), (11, [""]), (12, ["cd"] * 3),
    ]  # fmt: skip
    assert [entry for entry, _ in got] == entries
    assert all(("index" in result, "error" in result) == (False, True) for _, rs in got for result in rs)
    with pytest.raises(sgl.InvalidArgument, match="temperature"):
        rows.read(["a"], sampling_params={"temperature": -1})
    assert is_clean(engine, cores[0])


def test_some_samples_of_a_row_are_the_same_as_all_of_them() -> None:
    params = {"n": 4, "max_new_tokens": 6, "sampling_seed": 3}
    with sgl.Engine(model_path="tiny") as engine:
        rows = engine.open_rows()
        [entry] = rows.read(
            ["The cat"], sampling_params=params, options={"return_logprob": True, "logprob_start_len": 0}
        )
        [[(_, everything)]] = rows.run([[entry]])
        [[(_, some)]] = rows.run([[entry.only([3, 1])]])
    assert [r["output_ids"] for r in some] == [everything[3]["output_ids"], everything[1]["output_ids"]]
    for result in some:
        told, expected = (r["meta_info"]["input_token_logprobs"] for r in (result, everything[0]))
        assert [token for _, token, _ in told] == [token for _, token, _ in expected]
        assert [value for value, _, _ in told[1:]] == pytest.approx(
            [value for value, _, _ in expected[1:]], abs=0.05
        )
    failed = Entry(0, None, {"type": "internal", "message": "", "status_code": 500})
    assert failed.only([0]) is failed


def test_sequences_of_rows_are_pulled_as_there_is_room(engine: sgl.Engine) -> None:
    rows = engine.open_rows()
    pulled = Counted(rows.read([f"{i}"] * 10) for i in range(8))
    handed = 0
    for some in rows.run(pulled, window=25):
        assert 10 * pulled.count - handed <= 25
        handed += len(some)
    assert handed == 80
    long = rows.read(["a"] * 50)
    assert sum(map(len, rows.run([long, long], window=5))) == 100
