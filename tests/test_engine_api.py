"""`Engine` as its users meet it: every way to call it, over a core that repeats the prompt."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import importlib.util
import json
import pickle
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tokenmill as sgl
import tokenmill.test.doc_patch
from tokenmill.frontend.outputs import ResultList
from tokenmill.utils import async_stream_and_merge, print_highlight, stream_and_merge, trim_overlap

pytestmark = pytest.mark.cpu


def _load_echo() -> ModuleType:
    path = Path(__file__).parent / "frontend" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tokenmill_test_echo", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The core and tokenizer of the frontend's tests.
_echo = _load_echo()
gate, cores = _echo.gate, _echo.cores
tokenizers, byte_folder = _echo.tokenizers, _echo.byte_folder

MakeEngine = Callable[..., sgl.Engine]
ENDLESS = {"ignore_eos": True, "max_new_tokens": 50_000}


@pytest.fixture
def make_engine(cores: list[Any], byte_folder: Path) -> Iterator[MakeEngine]:
    made: list[weakref.ref[sgl.Engine]] = []

    def make(**arguments: Any) -> sgl.Engine:
        engine = sgl.Engine(model_path=str(byte_folder), **arguments)
        made.append(weakref.ref(engine))
        return engine

    yield make
    for reference in made:
        if (engine := reference()) is not None:
            engine.shutdown()


@pytest.fixture
def llm(make_engine: MakeEngine) -> sgl.Engine:
    return make_engine()


# ── the four modes ────────────────────────────────────────────────────────────────────────────


def test_one_prompt_and_a_batch(llm: sgl.Engine) -> None:
    assert llm.generate("hello")["text"] == "hello"
    assert llm.generate(prompt="hello", sampling_params={"max_new_tokens": 2})["text"] == "he"
    assert llm.generate(input_ids=[104, 105])["output_ids"] == [104, 105, 257]
    outputs = llm.generate(["one", "two"], {"temperature": 0.8, "top_p": 0.95})
    assert isinstance(outputs, ResultList)
    assert outputs["text"] == ["one", "two"]
    outputs = llm.generate(["one", "two"], [{"max_new_tokens": 1}, {"max_new_tokens": 2}])
    assert outputs["text"] == ["o", "tw"]
    assert [o["meta_info"]["finish_reason"] for o in outputs] == [
        {"type": "length", "length": 1},
        {"type": "length", "length": 2},
    ]
    assert llm.generate(["only"])["text"] == ["only"]
    assert llm.generate("two", {"n": 2})["text"] == ["two", "two"]
    assert llm.generate([]) == []


def test_streams(llm: sgl.Engine) -> None:
    assert "".join(chunk["text"] for chunk in llm.generate("é and ü", stream=True)) == "é and ü"
    merged = {0: "", 1: "", 2: "", 3: ""}
    for chunk in llm.generate(["ab", "cd"], {"n": 2}, stream=True):
        merged[chunk["index"]] += chunk["text"]
    assert merged == {0: "ab", 1: "ab", 2: "cd", 3: "cd"}


def test_async(llm: sgl.Engine) -> None:
    async def main() -> None:
        outputs = await llm.async_generate(["one", "two"], {"temperature": 0.8})
        assert outputs["text"] == ["one", "two"]
        assert (await llm.async_generate("one"))["text"] == "one"
        text = ""
        async for chunk in await llm.async_generate(prompt="stream", stream=True):
            text += chunk["text"]
        assert text == "stream"

    # Twice: nothing belongs to the first loop.
    asyncio.run(main())
    asyncio.run(main())


@pytest.mark.parametrize("name", ["stream_output", "incremental_streaming_output", "cumulative_stream"])
def test_cumulative_streams(make_engine: MakeEngine, name: str) -> None:
    llm = make_engine(**{name: name == "cumulative_stream"})
    assert [chunk["text"] for chunk in llm.generate("abc", stream=True)] == ["a", "ab", "abc", "abc"]


def test_results_name_their_request(llm: sgl.Engine) -> None:
    assert llm.generate("a", rid="mine")["meta_info"]["id"] == "mine"
    outputs = llm.generate(["a", "b"], rid=["x", "y"])
    assert [output["meta_info"]["id"] for output in outputs] == ["x", "y"]


def test_stop_strings(llm: sgl.Engine) -> None:
    output = llm.generate("one. two", {"stop": [" two", "."]})
    assert output["text"] == "one"
    assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": "."}
    kept = llm.generate("one. two", {"stop": ".", "no_stop_trim": True})
    assert kept["text"] == "one."


def test_stop_patterns(llm: sgl.Engine) -> None:
    params = {"stop_regex": [r"\d+\.", "x"], "stop": "zzz"}
    output = llm.generate("one 12. two", params)
    assert output["text"] == "one "
    assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"\d+\."}
    assert output["meta_info"]["completion_tokens"] == len("one 12.")
    chunks = list(llm.generate("one 12. two", params, stream=True))
    assert "".join(chunk["text"] for chunk in chunks) == "one "
    assert chunks[-1]["meta_info"]["finish_reason"] == output["meta_info"]["finish_reason"]
    assert llm.generate("one 12. two", {**params, "no_stop_trim": True})["text"] == "one 12."


def test_a_pattern_that_takes_too_long_fails_its_row_alone(llm: sgl.Engine) -> None:
    slow = {"stop_regex": r"(?:a|aa)+\d", "max_new_tokens": 100}
    with pytest.raises(sgl.InvalidRequest, match="takes too long") as caught:
        llm.generate("a" * 80, slow)
    assert caught.value.error_type == "bad_parameters"
    ends = {}
    for chunk in llm.generate(["a" * 80, "b" * 80], slow, stream=True):
        ends[chunk["index"]] = chunk["meta_info"]["finish_reason"]
    assert (ends[0]["type"], ends[0]["status_code"]) == ("abort", 400)
    assert ends[1] == {"type": "stop", "matched": 257}


def test_how_often_a_stream_speaks(make_engine: MakeEngine) -> None:
    """The first token at once, then so many at a time, and what is left at the end."""
    llm = make_engine(stream_interval=3, preferred_sampling_params={"max_new_tokens": 8})

    def sizes(**params: Any) -> list[int]:
        chunks = llm.generate("abcdefghijkl", params, stream=True)
        return [len(chunk["output_ids"]) for chunk in chunks]

    assert sizes() == [1, 3, 3, 1]
    assert sizes(stream_interval=5) == [1, 5, 2]
    assert sizes(stream_interval=1, max_new_tokens=3) == [1, 1, 1]
    assert sizes(max_new_tokens=None) == [1, 3, 3, 3, 3]


# ── anywhere ──────────────────────────────────────────────────────────────────────────────────


def test_sync_calls_inside_a_running_loop(llm: sgl.Engine) -> None:
    async def main() -> None:
        assert llm.generate("a")["text"] == "a"
        assert "".join(chunk["text"] for chunk in llm.generate("b", stream=True)) == "b"
        assert (await llm.async_generate("c"))["text"] == "c"

    asyncio.run(main())


def test_an_engine_made_inside_a_loop(make_engine: MakeEngine) -> None:
    async def main() -> sgl.Engine:
        llm = make_engine()
        assert (await llm.async_generate("a"))["text"] == "a"
        return llm

    assert asyncio.run(main()).generate("b")["text"] == "b"


def test_threads_and_loops_at_once(llm: sgl.Engine) -> None:
    wrong: list[Any] = []

    async def main(name: str) -> None:
        outputs = await asyncio.gather(*(llm.async_generate(f"{name} {i}") for i in range(5)))
        if [output["text"] for output in outputs] != [f"{name} {i}" for i in range(5)]:
            wrong.append(outputs)

    def work(name: str) -> None:
        asyncio.run(main(name))
        if (texts := llm.generate([name] * 3)["text"]) != [name] * 3:
            wrong.append(texts)

    threads = [threading.Thread(target=work, args=(f"thread {i}",)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_engines_at_once(make_engine: MakeEngine) -> None:
    first, second = make_engine(), make_engine()
    a, b = first.generate("first", stream=True), second.generate("second", stream=True)
    assert next(a)["text"] + next(b)["text"] == "fs"
    first.shutdown()
    assert "".join(chunk["text"] for chunk in b) == "econd"
    assert second.generate("on")["text"] == "on"


def test_tokenizing_does_not_block_the_loop(llm: sgl.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = llm._tokenizer.encode_batch

    def slowly(texts: Any) -> Any:
        time.sleep(0.1)
        return encode(texts)

    monkeypatch.setattr(llm._tokenizer, "encode_batch", slowly)

    async def main() -> int:
        task = asyncio.create_task(llm.async_generate("a"))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.005)
            ticks += 1
        return ticks

    assert asyncio.run(main()) >= 5


def test_threads_of_the_loop_may_wait_for_the_engine(llm: sgl.Engine) -> None:
    """All of them, so that none is left for what the engine does in threads."""

    async def iterate() -> list[str]:
        return [result["text"] async for result in llm.iter(iter("abc"), order="input")]

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        asked = [llm.async_generate("a"), llm.async_generate(["b", "c"]), iterate(), llm.async_generate("d")]
        return await asyncio.gather(
            *(asyncio.to_thread(asyncio.run_coroutine_threadsafe(each, loop).result, 20) for each in asked)
        )

    one, two, three, four = asyncio.run(main())
    assert (one["text"], two["text"], three, four["text"]) == ("a", ["b", "c"], ["a", "b", "c"], "d")


def test_loop_is_the_running_one_or_one_of_the_engine(make_engine: MakeEngine) -> None:
    llm = make_engine()

    async def main() -> bool:
        return llm.loop is asyncio.get_running_loop()

    assert asyncio.run(main())
    assert llm.loop.run_until_complete(main())
    assert llm.loop.run_until_complete(llm.async_generate("a"))["text"] == "a"
    with make_engine() as other:
        loop = other.loop
        assert loop is other.loop is not llm.loop
    assert loop.is_closed()
    # As the last thing that runs in it.
    llm.loop.run_until_complete(asyncio.to_thread(llm.shutdown))
    llm.loop.close()


# ── errors ────────────────────────────────────────────────────────────────────────────────────


def test_errors_of_a_stream_are_raised_at_the_call(llm: sgl.Engine, cores: list[Any]) -> None:
    with pytest.raises(ValueError, match="temperature"):
        llm.generate("a", {"temperature": -1.0}, stream=True)

    async def main() -> None:
        with pytest.raises(ValueError, match="temperature"):
            await llm.async_generate("a", {"temperature": -1.0}, stream=True)

    asyncio.run(main())
    assert cores[0].submitted == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"image_data": "picture.png"},
        {"video_data": ["a.mp4"]},
        {"lora_path": "math"},
        {"data_parallel_rank": 1},
    ],
)
def test_features_that_are_not_built(llm: sgl.Engine, arguments: dict[str, Any]) -> None:
    [name] = arguments
    with pytest.raises(sgl.InvalidArgument, match=f"{name} is not supported yet"):
        llm.generate(["a", "b"], **arguments)
    with pytest.raises(sgl.InvalidArgument, match=f"{name} is not supported yet"):
        asyncio.run(llm.async_generate(["a", "b"], **arguments))


def test_asking_for_nothing_is_fine(llm: sgl.Engine) -> None:
    outputs = llm.generate(
        ["a", "b"],
        None,
        None,
        None,
        [None, None],
        [],
        return_logprob=[False, False],
        logprob_start_len=-1,
        top_logprobs_num=0,
        lora_path=[None, None],
        custom_logit_processor=None,
        return_hidden_states=False,
        session_params=None,
        priority=None,
        data_parallel_rank=0,
        session_id="affinity",
        rid=None,
        stream=False,
    )
    assert outputs["text"] == ["a", "b"]


def test_wrong_arguments(llm: sgl.Engine, byte_folder: Path) -> None:
    with pytest.raises(sgl.UnknownArgument, match=r"'retrun_logprob'.*'return_logprob'"):
        llm.generate("a", retrun_logprob=True)
    with pytest.raises(TypeError):
        llm.generate("a", retrun_logprob=True)
    with pytest.raises(sgl.WrongType, match="stream"):
        llm.generate("a", stream="yes")
    with pytest.raises(sgl.WrongType, match="rid"):
        llm.abort(rid=3)
    with pytest.raises(sgl.UnknownArgument, match="model_path"):
        sgl.Engine(modelpath=str(byte_folder))


# ── control ───────────────────────────────────────────────────────────────────────────────────


def test_abort_gives_what_is_there(llm: sgl.Engine) -> None:
    streams = [llm.generate("abc", ENDLESS, rid=rid, stream=True) for rid in ("one", "two")]
    pieces = [next(stream)["text"] for stream in streams]
    llm.abort("one")
    last = list(streams[0])[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    llm.abort_request(abort_all=True)
    assert list(streams[1])[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert pieces == ["a", "a"]


def test_shutdown(make_engine: MakeEngine, cores: list[Any]) -> None:
    with make_engine() as llm:
        assert llm.generate("a")["text"] == "a"
    assert cores[0].closed
    llm.shutdown()
    with pytest.raises(sgl.EngineClosed):
        llm.generate("b")
    with pytest.raises(ZeroDivisionError), make_engine():
        raise ZeroDivisionError
    assert cores[1].closed


def test_an_engine_that_nobody_holds_is_shut_down(make_engine: MakeEngine, cores: list[Any]) -> None:
    llm = make_engine()
    stream = llm.generate("stream", stream=True)
    del llm
    gc.collect()
    # The stream still needs it.
    assert "".join(chunk["text"] for chunk in stream) == "stream"
    assert not cores[0].closed
    del stream
    gc.collect()
    assert cores[0].closed


def test_an_engine_that_fails_to_start(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*arguments: Any, **more: Any) -> Any:
        raise sgl.UnsupportedModel("no such architecture")

    monkeypatch.setattr("tokenmill.core.launch.start_core", start)
    with pytest.raises(sgl.UnsupportedModel, match="no such architecture"):
        make_engine()


def test_flush_cache(llm: sgl.Engine) -> None:
    assert llm.flush_cache().success
    stream = llm.generate("a", ENDLESS, stream=True)
    next(stream)
    refused = llm.flush_cache()
    assert not refused
    assert refused.message


def test_tokenizer(llm: sgl.Engine, make_engine: MakeEngine) -> None:
    assert llm.get_tokenizer().decode([104, 105]) == "hi"
    bare = make_engine(skip_tokenizer_init=True)
    output = bare.generate(input_ids=[104, 105])
    assert list(output) == ["output_ids", "meta_info"]
    assert [c["output_ids"] for c in bare.generate(input_ids=[104], stream=True)] == [[104], [257]]
    with pytest.raises(sgl.InvalidArgument, match="skip_tokenizer_init"):
        bare.get_tokenizer()


def test_facts(llm: sgl.Engine, byte_folder: Path) -> None:
    info = llm.get_server_info()
    json.dumps(info)
    assert info["model_path"] == str(byte_folder)
    assert info["max_total_tokens"] == info["max_total_num_tokens"] == 100_000
    assert info["tp_size"] == 1
    assert info["version"] == sgl.__version__
    assert info["internal_states"][0]["memory_usage"]["weight"] == 1.0
    assert info["internal_states"][0]["tp_size"] == 1, "all arguments once more"
    assert (info["tp_size"], info["quantization"], info["kv_cache_dtype"], info["host"]) == (
        1,
        None,
        "auto",
        "127.0.0.1",
    )
    assert info["stream_output"] is True
    assert json.loads(json.dumps(info))["max_prefill_tokens"] == 16384
    model = llm.get_model_info()
    assert model["served_model_name"] == str(byte_folder)
    assert model["is_generation"]
    assert llm.server_args.page_size == llm.config.page_size


def test_arguments_of_a_running_engine_do_not_change(cores: list[Any], byte_folder: Path) -> None:
    with sgl.Engine(str(byte_folder), page_size=32) as llm:
        theirs: Any = llm.server_args
        theirs.page_size = 64
        assert (theirs.page_size, llm.server_args.page_size, llm.config.page_size) == (64, 32, 32)
        with pytest.raises(dataclasses.FrozenInstanceError):
            llm.config.page_size = 64  # type: ignore[misc]


def test_arguments_are_read_by_names_of_sglang(cores: list[Any], byte_folder: Path) -> None:
    with sgl.Engine(str(byte_folder), page_size=32) as llm:
        given = llm.server_args
        assert (given.model, given.page_size, given.tp, given.tp_size) == (str(byte_folder), 32, 1, 1)
        assert (given.quantization, given.lora_paths, given.kv_cache_dtype) == (None, [], "auto")
        assert dataclasses.asdict(given)["page_size"] == pickle.loads(pickle.dumps(given)).page_size == 32
        with pytest.raises(AttributeError, match=r"no argument 'tp_sise'.* Did you mean 'tp_size'"):
            _ = given.tp_sise


def test_a_run_can_be_repeated_by_the_seed_that_was_drawn(cores: list[Any], byte_folder: Path) -> None:
    def seeds(**arguments: Any) -> tuple[int, list[int]]:
        with sgl.Engine(str(byte_folder), **arguments) as llm:
            llm.generate(["a", "b"], {"n": 2})
            assert llm.get_server_info()["random_seed"] == llm.server_args.random_seed
            return llm.server_args.random_seed, [request.seed for request in cores[-1].submitted]

    drawn, wanted = seeds()
    assert 0 <= drawn < 2**30
    assert seeds(random_seed=drawn) == (drawn, wanted)
    assert seeds() != (drawn, wanted)


def test_a_path_may_stand_alone(cores: list[Any], byte_folder: Path) -> None:
    with sgl.Engine(str(byte_folder)) as llm:
        assert llm.generate("a")["text"] == "a"


# ── names of sglang.utils ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("text", ["1000", " ha ha ha!", "banana"])
def test_merging_keeps_repeats(make_engine: MakeEngine, cumulative: bool, text: str) -> None:
    llm = make_engine(cumulative_stream=cumulative)

    async def main() -> list[str]:
        return [piece async for piece in async_stream_and_merge(llm, text, {})]

    assert stream_and_merge(llm, text, {}) == text
    assert "".join(asyncio.run(main())) == text


def test_merging_takes_one_prompt(llm: sgl.Engine) -> None:
    with pytest.raises(ValueError, match="one prompt"):
        stream_and_merge(llm, ["a", "b"])


@pytest.mark.parametrize("delta", [False, True])
def test_merging_streams_of_other_engines(delta: bool) -> None:
    class Arguments:
        incremental_streaming_output = delta

    class Foreign:
        server_args = Arguments()
        texts = ("ban", "an", "a") if delta else ("ban", "banan", "banana")

        def generate(self, prompt: str, sampling_params: Any, stream: bool) -> Iterator[dict[str, str]]:
            return ({"text": text} for text in self.texts)

        async def async_generate(
            self, prompt: str, sampling_params: Any, stream: bool
        ) -> AsyncIterator[dict[str, str]]:
            async def chunks() -> AsyncIterator[dict[str, str]]:
                for text in self.texts:
                    yield {"text": text}

            return chunks()

    async def main() -> list[str]:
        return [piece async for piece in async_stream_and_merge(Foreign(), "p", None)]

    assert stream_and_merge(Foreign(), "p", None) == "banana"
    assert asyncio.run(main()) == ["ban", "an", "a"]


def test_leaving_a_merge_early_cancels(llm: sgl.Engine, cores: list[Any]) -> None:
    async def main() -> None:
        pieces = async_stream_and_merge(llm, "abc", ENDLESS)
        assert await anext(pieces) == "a"
        await pieces.aclose()

    asyncio.run(main())
    assert llm.generate("next")["text"] == "next"
    assert len(cores[0].cancelled) == 1


@pytest.mark.parametrize(
    ("existing", "new", "expected"),
    [("abc", "bcd", "d"), ("abc", "xyz", "xyz"), ("", "a", "a"), ("aa", "aaa", "a"), ("abc", "abc", "")],
)
def test_trim_overlap(existing: str, new: str, expected: str) -> None:
    assert trim_overlap(existing, new) == expected


def test_notebooks_print_with_a_name_of_sglang(capsys: pytest.CaptureFixture[str]) -> None:
    print_highlight("Prompt: Hello\nGenerated text: there")
    assert capsys.readouterr().out == "Prompt: Hello\nGenerated text: there\n"


def test_doc_patch_changes_nothing() -> None:
    public = {name for name in vars(tokenmill.test.doc_patch) if not name.startswith("_")}
    assert public == set()
