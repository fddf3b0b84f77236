"""`on_error="return"`: whatever is wrong with a row stays with it, in every way to generate."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as sgl
from tokenmill.errors import ERROR_TYPES, told

pytestmark = pytest.mark.cpu

SHORT: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0}
ENDLESS: dict[str, Any] = {"max_new_tokens": 1900, "ignore_eos": True}
PROMPT = "My name is"


def broken(logits: Any, params: Any) -> Any:
    raise RuntimeError("this processor does not work")


def types_of(results: Any) -> list[str | None]:
    """The type of each row's error; checks that an error is whole, and that finish_reason says the same."""
    types: list[str | None] = []
    for result in results:
        error = result["error"]
        types.append(error and error["type"])
        if error is not None:
            assert error["type"] in ERROR_TYPES
            assert isinstance(error["status_code"], int)
            reason = result["meta_info"]["finish_reason"]
            assert (reason["type"], reason["message"]) == ("abort", error["message"])
    assert json.loads(json.dumps(results))[0]["error"] == results[0]["error"]
    assert pickle.loads(pickle.dumps(list(results))) == results
    return types


@pytest.fixture(scope="module")
def bounded() -> Iterator[Any]:
    with sgl.Engine(
        model_path="tiny", max_running_requests=1, max_queued_requests=1, chunked_prefill_size=64
    ) as engine:
        yield engine


# ── what is a row's own fault ─────────────────────────────────────────────────────────────────

# What stands beside a sound prompt, in the batch that the arguments make: its fault's type, a word of it.
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "empty": ({"prompt": [PROMPT, ""]}, "bad_parameters", "prompt[1] is empty"),
    "no text": ({"prompt": [PROMPT, 5]}, "bad_parameters", "prompt[1] must be a string"),
    "half a character": ({"prompt": [PROMPT, "\ud800"]}, "bad_parameters", "prompt[1] has half a surrogate"),
    "long": ({"prompt": [PROMPT, "a b " * 3000]}, "too_long", "a sequence has at most 2048"),
    "no id": ({"input_ids": [[5], [5, "x"]]}, "bad_parameters", "input_ids[1][1] must be an integer"),
    "unknown id": ({"input_ids": [[5], [10**9]]}, "bad_parameters", "input_ids[1][0] is 1000000000"),
    "no ids": ({"input_ids": [[5], []]}, "bad_parameters", "input_ids[1] is empty"),
    "no row": ({"input_ids": [[5], None]}, "bad_parameters", "input_ids[1] must be a list"),
    "range": ({"sampling_params": [SHORT, {"top_p": 2}]}, "bad_parameters", "sampling_params[1]: top_p"),
    "name": ({"sampling_params": [SHORT, {"topp": 1}]}, "bad_parameters", "sampling_params[1]: 'topp'"),
    "kind": ({"sampling_params": [SHORT, 7]}, "bad_parameters", "sampling_params[1]: must be a dict"),
    "much": ({"sampling_params": [SHORT, {"max_new_tokens": 9999}]}, "too_long", "lower max_new_tokens"),
    "pattern": ({"sampling_params": [SHORT, {"regex": "("}]}, "bad_grammar", "sampling_params[1]: regex"),
    "schema": (
        {"sampling_params": [SHORT, {"json_schema": "{"}]},
        "bad_grammar",
        "sampling_params[1]: json_schema is not valid JSON",
    ),
    "rule": ({"sampling_params": [SHORT, {"ebnf": "root ::= x"}]}, "bad_grammar", "which no rule defines"),
    "stop": ({"sampling_params": [SHORT, {"stop_regex": "("}]}, "bad_parameters", "stop_regex '('"),
    "option": ({"timeout": [None, -1]}, "bad_parameters", "timeout[1] must be"),
    "ids of an option": (
        {"token_ids_logprob": [[1], [-1]], "return_logprob": True},
        "bad_parameters",
        "token_ids_logprob[1][0]",
    ),
    "processor": ({"custom_logit_processor": [None, "no such"]}, "bad_parameters", "processor[1] is"),
    "prompt's end": (
        {"logprob_start_len": [-1, 99], "return_logprob": True},
        "bad_parameters",
        "prompt[1] has only",
    ),
    "id": ({"rid": ["a", ""]}, "bad_parameters", "rid[1] is empty"),
    "same id": ({"rid": ["a", "a"]}, "bad_parameters", "rid 'a' (str) is there twice"),
    "fails": ({"custom_logit_processor": [None, broken]}, "internal", "this processor does not work"),
    "late": (
        {"sampling_params": [SHORT, ENDLESS], "timeout": [None, 0.05]},
        "timeout",
        "timed out after 0.05 s",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_other_rows_get_what_they_get_alone(tiny_engine: Any, name: str) -> None:
    arguments, kind, words = FAULTS[name]
    arguments = {"sampling_params": SHORT, **arguments}
    if "input_ids" not in arguments:
        arguments = {"prompt": [PROMPT, PROMPT], **arguments}
    results = tiny_engine.generate(**arguments, on_error="return")
    assert types_of(results) == [None, kind]
    assert words in results[1]["error"]["message"]
    assert results["error"] == [None, results[1]["error"]]
    sound = {"input_ids": [5]} if "input_ids" in arguments else {"prompt": PROMPT}
    assert results[0]["output_ids"] == tiny_engine.generate(**sound, sampling_params=SHORT)["output_ids"]
    if kind != "timeout":
        with pytest.raises((sgl.InvalidArgument, sgl.RequestFailed), match=r"\S"):
            tiny_engine.generate(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": [PROMPT], "no_such": 1},
        {"prompt": [PROMPT, PROMPT], "sampling_params": [SHORT]},
        {"prompt": [PROMPT, PROMPT], "timeout": [1, 2, 3]},
        {"prompt": [PROMPT, PROMPT], "rid": ["a"]},
        {"prompt": 5},
        {},
        # What is given once for several rows is the fault of none of them.
        {"prompt": [PROMPT, PROMPT], "sampling_params": {"top_p": 2}},
        {"prompt": [PROMPT, PROMPT], "timeout": -1},
        {"prompt": [PROMPT, PROMPT], "sampling_params": [{"n": 2}, {"n": 3}]},
        {"prompt": PROMPT, "session_params": {"id": "no such"}},
    ],
    ids=str,
)
def test_what_is_no_rows_fault_is_raised(tiny_engine: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(sgl.InvalidArgument):
        tiny_engine.generate(**arguments, on_error="return")


@pytest.mark.parametrize("value", ["ignore", True, 5, ["return"]])
def test_on_error_is_one_of_two_words(tiny_engine: Any, value: Any) -> None:
    with pytest.raises(sgl.InvalidArgument, match="on_error must be one of 'return', 'raise'"):
        tiny_engine.generate(PROMPT, SHORT, on_error=value)


def test_raise_is_the_default_and_results_then_have_no_error(tiny_engine: Any) -> None:
    for options in ({}, {"on_error": "raise"}, {"on_error": None}):
        assert "error" not in tiny_engine.generate(PROMPT, SHORT, **options)
        with pytest.raises(sgl.InvalidArgument, match=r"prompt\[1\] is empty"):
            tiny_engine.generate([PROMPT, ""], SHORT, **options)


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": ""},
        {"input_ids": []},
        {"input_ids": [10**9]},
        {"prompt": PROMPT, "sampling_params": {"top_p": 2}},
        {"prompt": PROMPT, "timeout": -1},
        {"prompt": PROMPT, "rid": ""},
        {"prompt": PROMPT, "token_ids_logprob": [-1]},
    ],
    ids=str,
)
def test_a_single_call_gives_one_dict(tiny_engine: Any, arguments: dict[str, Any]) -> None:
    result = tiny_engine.generate(**arguments, on_error="return")
    assert types_of([result]) == ["bad_parameters"]
    assert (result["text"], result["output_ids"], result["meta_info"]["completion_tokens"]) == ("", [], 0)


def test_results_keep_ids_and_shape(tiny_engine: Any) -> None:
    good, bad = tiny_engine.generate(["Hi", ""], SHORT, rid=["one", "two"], on_error="return")
    assert [each["meta_info"]["id"] for each in (good, bad)] == ["one", "two"]
    assert set(good) == set(bad)
    assert set(good["meta_info"]) == set(bad["meta_info"])


@pytest.mark.parametrize(
    ("prompts", "params", "errors"),
    [
        (["Hi", "", "Hi"], {"n": 2}, [0, 0, 1, 1, 0, 0]),
        (["Hi", "Hi"], [{"n": 2, "top_p": 2}, {"n": 2}], [1, 1, 0, 0]),
        (["Hi", "Hi"], [{"top_p": 2}, {"n": 3}], [1, 1, 1, 0, 0, 0]),
        ("", {"n": 2}, [1, 1]),
        ("Hi", {"n": 3, "top_p": 2}, [1, 1, 1]),
        ("Hi", {"n": -3}, [1]),
    ],
)
def test_a_row_at_fault_fills_all_its_samples(
    tiny_engine: Any, prompts: Any, params: Any, errors: list[int]
) -> None:
    common = {"max_new_tokens": 2}
    params = [{**common, **each} for each in params] if isinstance(params, list) else {**common, **params}
    results = tiny_engine.generate(prompts, params, on_error="return")
    results = [results] if isinstance(results, dict) else results
    assert [kind is not None for kind in types_of(results)] == [bool(each) for each in errors]


# ── seeds ─────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=12, deadline=None)
@given(
    rows=st.lists(st.sampled_from(["good", "other", "", "long", "params", "grammar"]), min_size=1, max_size=8)
)
def test_bad_rows_change_no_token_of_the_good_ones(tiny_engine: Any, rows: list[str]) -> None:
    texts = ["a b " * 3000 if row == "long" else row for row in rows]
    params = [
        {
            "max_new_tokens": 3,
            "sampling_seed": place,
            **({"top_k": -7} if row == "params" else {"regex": "("} if row == "grammar" else {}),
        }
        for place, row in enumerate(rows)
    ]
    mixed = tiny_engine.generate(texts, params, on_error="return")
    good = [place for place, row in enumerate(rows) if row in ("good", "other")]
    assert [place for place, kind in enumerate(types_of(mixed)) if kind is None] == good
    alone = tiny_engine.generate([texts[place] for place in good], [params[place] for place in good])
    assert [mixed[place]["output_ids"] for place in good] == [each["output_ids"] for each in alone]


def test_a_bad_row_takes_its_seeds_with_it() -> None:
    """Seeds of the engine's own are drawn in input order, also for rows that never run."""
    sound, params = ["a", "b", "c", "d"], {"n": 2, "max_new_tokens": 3}

    def tokens(prompts: list[str], own: list[Any]) -> list[Any]:
        with sgl.Engine(model_path="tiny", random_seed=7) as engine:
            results = engine.generate(prompts, own, on_error="return")
        return [None if each["error"] else each["output_ids"] for each in results]

    every = tokens(sound, [params] * 4)
    assert None not in every
    mixed = tokens(["a", "", "c", "d"], [params, params, {**params, "top_p": 7}, params])
    assert mixed == [*every[:2], None, None, None, None, *every[6:]]
    seeded = {**params, "sampling_seed": 1}
    mixed = tokens(["a", "b", "", "d"], [params, seeded, {**seeded, "top_p": 7}, params])
    assert mixed[:2] == every[:2]
    assert mixed[6:] == every[6:]


# ── what goes wrong later ─────────────────────────────────────────────────────────────────────


def test_a_full_queue_and_an_abort(bounded: Any) -> None:
    def aborted(logits: Any, params: Any) -> Any:
        bounded.abort("here")
        return logits

    results = bounded.generate(
        [PROMPT] * 4,
        ENDLESS,
        rid=["here", "there", "far", "away"],
        custom_logit_processor=[aborted, None, None, None],
        timeout=[None, 0.5, None, None],
        on_error="return",
    )
    assert types_of(results) == ["aborted", "timeout", "queue_full", "queue_full"]
    assert 0 < len(results[0]["output_ids"]) < ENDLESS["max_new_tokens"]
    assert results[0]["text"]
    assert [each["error"]["status_code"] for each in results] == [499, 408, 503, 503]


def test_a_stream_raises_on_demand(bounded: Any) -> None:
    """Without `on_error` its last chunks tell, as in SGLang."""
    prompts = [PROMPT] * 4
    with pytest.raises(sgl.QueueFull):
        list(bounded.generate(prompts, SHORT, stream=True, on_error="raise"))
    ends: dict[int, str] = {}
    for chunk in bounded.generate(prompts, SHORT, stream=True):
        if chunk["meta_info"]["finish_reason"] is not None:
            ends[chunk["index"]] = chunk["meta_info"]["finish_reason"]["type"]
    assert sorted(ends.values()) == ["abort", "abort", "length", "length"]

    async def run() -> None:
        stream = await bounded.async_generate(prompts, SHORT, stream=True, on_error="raise")
        async for _ in stream:
            pass

    with pytest.raises(sgl.QueueFull):
        asyncio.run(run())
    assert bounded.generate(PROMPT, SHORT)["meta_info"]["finish_reason"]["type"] == "length"


def test_an_id_that_is_in_flight_elsewhere(tiny_engine: Any) -> None:
    stream = tiny_engine.generate(PROMPT, ENDLESS, rid="mine", stream=True)
    next(stream)
    results = tiny_engine.generate(["a", "b"], SHORT, rid=["mine", "yours"], on_error="return")
    assert types_of(results) == ["bad_parameters", None]
    assert "'mine' is in flight" in results[0]["error"]["message"]
    assert next(stream)["meta_info"]["id"] == "mine"
    stream.close()


# ── streams, async, chat, sessions ────────────────────────────────────────────────────────────


def check_chunks(chunks: list[dict[str, Any]], whole: Any) -> None:
    """Each row's chunks make its result; a failed row has one chunk, with its error."""
    for index, result in enumerate(whole):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in own) == result["text"]
        assert [chunk["error"] for chunk in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["error"] == result["error"]
        assert own[-1]["meta_info"]["finish_reason"] == result["meta_info"]["finish_reason"]
        assert len(own) == 1 or result["error"] is None


def test_streams_and_async(tiny_engine: Any) -> None:
    arguments: dict[str, Any] = {
        "prompt": ["Hi", "", "Hello"],
        "sampling_params": SHORT,
        "custom_logit_processor": [None, None, broken],
        "on_error": "return",
    }
    whole = tiny_engine.generate(**arguments)
    assert types_of(whole) == [None, "bad_parameters", "internal"]
    check_chunks(list(tiny_engine.generate(**arguments, stream=True)), whole)

    async def main() -> None:
        again = await tiny_engine.async_generate(**arguments)
        assert again["error"] == whole["error"]
        assert again["text"] == whole["text"]
        stream = await tiny_engine.async_generate(**arguments, stream=True)
        check_chunks([chunk async for chunk in stream], whole)
        single = await tiny_engine.async_generate("", SHORT, on_error="return")
        assert types_of([single]) == ["bad_parameters"]

    asyncio.run(main())
    [chunk] = tiny_engine.generate("", SHORT, stream=True, on_error="return")
    assert types_of([chunk]) == ["bad_parameters"]


def test_chat(tiny_engine: Any) -> None:
    good = [{"role": "user", "content": "Hi"}]
    talks: list[Any] = [
        good,
        [],
        good,
        [{"role": "user"}],
        "Hi",
        [5],
        [{"role": "user", "content": "\ud800"}],
    ]
    wanted = [None, "bad_parameters", None, *["bad_parameters"] * 4]
    results = tiny_engine.chat(talks, SHORT, on_error="return")
    assert types_of(results) == wanted
    assert results[0]["output_ids"] == tiny_engine.chat(good, SHORT)["output_ids"]
    assert "messages[3][0] has neither content" in results[3]["error"]["message"]
    again = asyncio.run(tiny_engine.async_chat(talks, SHORT, on_error="return"))
    assert again["error"] == results["error"]
    assert types_of(tiny_engine.chat([None, [], 5, good], SHORT, on_error="return"))[3] is None
    assert types_of([tiny_engine.chat([{"role": "user"}], SHORT, on_error="return")]) == ["bad_parameters"]
    check_chunks(list(tiny_engine.chat(talks, SHORT, stream=True, on_error="return")), results)
    for arguments in ({"messages": 5}, {"messages": talks, "prompt": "x"}, {"messages": talks, "tools": 5}):
        with pytest.raises(sgl.InvalidArgument):
            tiny_engine.chat(**arguments, on_error="return")


def test_a_row_at_fault_is_no_turn_of_its_session(tiny_engine: Any) -> None:
    session = {"id": tiny_engine.open_session(1000)}
    results = tiny_engine.generate(
        ["Hi", "", "Hello", "Hello"],
        SHORT,
        rid=["a", "b", "c", "a"],
        session_params=session,
        on_error="return",
    )
    assert types_of(results) == [None, "bad_parameters", None, "bad_parameters"]
    for rid in ("a", "c"):
        more = tiny_engine.generate("!", SHORT, session_params={**session, "rid": rid})
        assert more["meta_info"]["prompt_tokens"] > 4
    with pytest.raises(sgl.InvalidArgument, match="has no turn 'b'"):
        tiny_engine.generate("!", SHORT, session_params={**session, "rid": "b"})
    tiny_engine.close_session(session["id"])


def test_a_processor_that_cannot_cross_is_its_rows_fault() -> None:
    class Stays:
        def __call__(self, logits: Any, params: Any) -> Any:
            return logits

        def __reduce__(self) -> Any:
            raise TypeError("it stays here")

    with sgl.Engine(model_path="tiny", core_process=True) as engine:
        results = engine.generate(
            ["a", "b"], SHORT, custom_logit_processor=[Stays(), None], on_error="return"
        )
        assert types_of(results) == ["bad_parameters", None]


def test_messages_of_others_can_be_written_to_a_file() -> None:
    """A processor's, say; the whole way through an engine would need a log that takes half a character."""
    assert told(ValueError("half \ud800, é")).encode() == "ValueError: half \\ud800, é".encode()


def test_without_a_tokenizer() -> None:
    with sgl.Engine(model_path="tiny", skip_tokenizer_init=True) as engine:
        results = engine.generate(input_ids=[[5], []], sampling_params=SHORT, on_error="return")
        assert types_of(results) == [None, "bad_parameters"]
        assert all("text" not in result for result in results)


# ── Ctrl-C ────────────────────────────────────────────────────────────────────────────────────


def ctrl_c(after: int) -> Callable[[Any, Any], Any]:
    """A logit processor that presses Ctrl-C when a row has so many tokens."""
    pressed = []

    def press(logits: Any, params: Any) -> Any:
        if not pressed and len(params[0]["__req__"].output_ids) >= after:
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return logits

    return press


def interrupt(engine: Any, on_error: str) -> Any:
    return engine.generate(
        [PROMPT, PROMPT, "", PROMPT][: 4 if on_error == "return" else 2],
        [SHORT, ENDLESS, SHORT, {**ENDLESS, "n": 1}][: 4 if on_error == "return" else 2],
        custom_logit_processor=[None, ctrl_c(8), None, None][: 4 if on_error == "return" else 2],
        on_error=on_error,
    )


def check_interrupted(engine: Any, results: Any) -> None:
    assert len(results[0]["output_ids"]) == 3
    assert results[1]["error"] == {
        "type": "aborted",
        "message": results[1]["meta_info"]["finish_reason"]["message"],
        "status_code": 499,
    }
    assert 8 <= len(results[1]["output_ids"]) < ENDLESS["max_new_tokens"]
    assert results[1]["text"]
    assert results[0]["output_ids"] == engine.generate(PROMPT, SHORT)["output_ids"]
    assert engine.flush_cache()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_returns_what_is_there(tiny_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    results = interrupt(tiny_engine, "return")
    assert types_of(results) == [None, "aborted", "bad_parameters", "aborted"]
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "interrupted when 1 of 4 rows had finished; what is there is returned"
    ]
    check_interrupted(tiny_engine, results)


def test_ctrl_c_is_raised_with_what_is_there(tiny_engine: Any) -> None:
    with pytest.raises(KeyboardInterrupt, match="1 of 2 rows had finished") as caught:
        interrupt(tiny_engine, "raise")
    assert isinstance(caught.value, sgl.Interrupted)
    assert types_of(caught.value.results) == [None, "aborted"]
    check_interrupted(tiny_engine, caught.value.results)


def test_ctrl_c_in_a_single_call(tiny_engine: Any) -> None:
    result = tiny_engine.generate(PROMPT, ENDLESS, custom_logit_processor=ctrl_c(3), on_error="return")
    assert types_of([result]) == ["aborted"]
    with pytest.raises(sgl.Interrupted) as caught:
        tiny_engine.generate(PROMPT, {**ENDLESS, "n": 2}, custom_logit_processor=ctrl_c(3))
    assert types_of(caught.value.results) == ["aborted"] * 2
    assert tiny_engine.generate(PROMPT, SHORT)["text"]


def test_ctrl_c_with_the_core_in_a_process() -> None:
    with sgl.Engine(model_path="tiny", core_process=True) as engine:
        main = threading.main_thread().ident
        assert main is not None
        stream = engine.generate(PROMPT, {"max_new_tokens": 1}, stream=True)
        list(stream)  # the core is awake
        timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        results = engine.generate([PROMPT] * 3, ENDLESS, on_error="return")
        timer.join()
        assert types_of(results) == ["aborted"] * 3
        assert engine.generate(PROMPT, SHORT)["text"]
        assert engine.flush_cache()
