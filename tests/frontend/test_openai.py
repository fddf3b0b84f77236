"""OpenAI's bodies, both ways: nothing that is asked for is dropped, and answers have OpenAI's shapes."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import InvalidArgument, RowError
from tokenmill.frontend.openai import (
    chat_completion,
    error_body,
    read_chat,
    read_completions,
    text_completion,
)
from tokenmill.sampling_params import SamplingParams

pytestmark = pytest.mark.unit

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": SCHEMA}}


def chat(**body: Any) -> dict[str, Any]:
    return read_chat({"model": "gpt-4o-mini", "messages": HELLO, **body})


def completion(**body: Any) -> dict[str, Any]:
    [item] = read_completions({"model": "any", "prompt": "Hello", **body})
    return item


def params(**body: Any) -> dict[str, Any]:
    """The sampling parameters of a chat body, which the engine must take; without the default length."""
    read = dict(chat(**body)["sampling_params"])
    SamplingParams.from_value(read)
    return {name: value for name, value in read.items() if (name, value) != ("max_new_tokens", None)}


# ── requests ──────────────────────────────────────────────────────────────────────────────────


def test_a_plain_request_has_the_defaults_of_the_api() -> None:
    assert chat() == {"messages": HELLO, "sampling_params": {"max_new_tokens": None}}
    assert completion() == {"prompt": "Hello", "sampling_params": {"max_new_tokens": 16}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"temperature": 0.2, "top_p": 0.9, "n": 3}, {"temperature": 0.2, "top_p": 0.9, "n": 3}),
        ({"max_tokens": 9}, {"max_new_tokens": 9}),
        ({"max_completion_tokens": 9}, {"max_new_tokens": 9}),
        ({"max_tokens": 9, "max_completion_tokens": 9}, {"max_new_tokens": 9}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"seed": -3}, {"sampling_seed": -3}),
        ({"presence_penalty": 0.5, "min_p": 0.1}, {"presence_penalty": 0.5, "min_p": 0.1}),
        ({"logit_bias": {"50256": -100}}, {"logit_bias": {"50256": -100}}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        ({"response_format": SCHEMA_FORMAT}, {"json_schema": SCHEMA}),
        ({"frequency_penalty": -1, "top_k": 5}, {"frequency_penalty": -1, "top_k": 5}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"ignore_eos": True, "min_tokens": 2}, {"ignore_eos": True, "min_new_tokens": 2}),
        ({"stop_token_ids": [7], "stop_regex": "a"}, {"stop_token_ids": [7], "stop_regex": "a"}),
        ({"include_stop_str_in_output": True}, {"no_stop_trim": True}),
        ({"temperature": None, "stop": None, "seed": None, "response_format": None, "n": None}, {}),
    ],
)  # fmt: skip
def test_parameters_go_to_the_engine_under_its_names(body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert params(**body) == expected


@pytest.mark.parametrize(
    "body",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"},
        {"stream": False, "stream_options": None, "safety_identifier": "x", "prompt_cache_key": "k"},
        {"parallel_tool_calls": True, "modalities": ["text"], "tool_choice": "none", "best_of": 1},
        {"functions": [], "tools": [], "logprobs": False, "echo": False, "suffix": None},
    ],
)
def test_what_changes_no_answer_is_accepted(body: dict[str, Any]) -> None:
    assert chat(**body) == chat()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"stream": True}, "stream is not supported, got True"),
        ({"stream": 0}, "stream is not supported, got 0"),
        ({"tool_choice": "required"}, "tool_choice must be 'none' or 'auto', got 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice must be"),
        ({"tools": {}}, "tools must be a list of functions"),
        ({"tools": 0, "tool_choice": "none"}, "tools must be a list of functions"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls is not supported"),
        ({"functions": [{"name": "f"}]}, "give them as tools"),
        ({"modalities": ["text", "audio"]}, "modalities is not supported"),
        ({"web_search_options": {}}, "web_search_options is not supported"),
        ({"best_of": 3}, "best_of is not supported, got 3 (int); give n"),
        ({"temprature": 1}, "body has no parameter 'temprature'. Did you mean 'temperature'?"),
        ({"prompt": "Hello"}, "body has no parameter 'prompt'"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens and max_completion_tokens differ"),
        ({"max_tokens": "4"}, "max_tokens must be an integer"),
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"top_logprobs": 3}, "top_logprobs is 3, but logprobs is not true"),
        ({"logprobs": 3}, "logprobs must be True or False"),
        ({"response_format": "json"}, "response_format must have a type text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.json_schema must be"),
        (
            {"response_format": {"type": "json_object"}, "json_schema": {}},
            "response_format and json_schema say the same thing",
        ),
        (
            {"include_stop_str_in_output": True, "no_stop_trim": False},
            "include_stop_str_in_output and no_stop_trim say the same thing",
        ),
        ({"messages": "Hello"}, "messages must be a list"),
        ({"messages": [[{"role": "user", "content": "Hi"}]]}, "messages[0] must be an object"),
        ({"reasoning_effort": "low", "chat_template_kwargs": 3}, "chat_template_kwargs must be an object"),
        ({"chat_template": "{% for i in range(9) %}{% endfor %}"}, "give it to the engine, for all"),
        ({"custom_logit_processor": "no_repeat_ngam"}, "Did you mean 'no_repeat_ngram'?"),
        ({"custom_logit_processor": ["no_repeat_ngram"]}, "must be the name of a registered logit processor"),
    ],
)
def test_what_cannot_be_honoured_is_refused(body: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        chat(**body)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    "body", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"messages": HELLO}, {"tools": []}]
)
def test_completions_refuse_what_they_cannot_do(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        completion(**body)


def test_bodies_need_their_prompt() -> None:
    with pytest.raises(InvalidArgument, match="body has no messages"):
        read_chat({"model": "m"})
    with pytest.raises(InvalidArgument, match="body has no prompt"):
        read_completions({"prompt": None})
    with pytest.raises(InvalidArgument, match="body must be a JSON object"):
        read_chat([])


def test_tools_and_template_variables_go_to_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        assert chat(tools=tools, **choice)["tools"] == tools
    assert chat(reasoning_effort="low", chat_template_kwargs={"a": 1})["chat_template_kwargs"] == {
        "reasoning_effort": "low",
        "a": 1,
    }
    assert chat(continue_final_message=True, priority=3)["priority"] == 3


def test_a_body_cannot_bring_a_program_along(tmp_path: Path) -> None:
    """Loading the pickle in the text of a processor may do anything at all."""
    trace = tmp_path / "trace"

    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (trace,)

    text = json.dumps({"callable": pickle.dumps(Touch()).hex()})
    for read in (chat, completion):
        with pytest.raises(InvalidArgument, match="must be the name of a registered logit processor"):
            read(custom_logit_processor=text)
        assert read(custom_logit_processor="no_repeat_ngram")["custom_logit_processor"] == "no_repeat_ngram"
    assert not trace.exists()


def test_developers_are_what_templates_call_the_system() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
    item = read_chat({"messages": messages})
    assert item["messages"] == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert messages[0]["role"] == "developer"


def test_logprobs_are_asked_for() -> None:
    asked = {"return_logprob": True, "return_text_in_logprobs": True}
    assert chat(logprobs=True).items() >= {**asked, "top_logprobs_num": 0}.items()
    assert chat(logprobs=True, top_logprobs=4).items() >= {**asked, "top_logprobs_num": 4}.items()
    assert completion(logprobs=2).items() >= {**asked, "top_logprobs_num": 2}.items()
    assert completion(logprobs=0).items() >= {**asked, "top_logprobs_num": 0}.items()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hello", [{"prompt": "Hello"}]),
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([1, 2], [{"input_ids": [1, 2]}]),
        ([[1], [2, 3]], [{"input_ids": [1]}, {"input_ids": [2, 3]}]),
    ],
)
def test_prompts_of_completions(prompt: Any, expected: list[dict[str, Any]]) -> None:
    items = read_completions({"prompt": prompt, "max_tokens": 3})
    assert items == [{**each, "sampling_params": {"max_new_tokens": 3}} for each in expected]


@pytest.mark.parametrize("prompt", [[], ["a", 1], [True], [[1], "a"], 5, {"a": 1}])
def test_prompts_of_no_known_shape(prompt: Any) -> None:
    with pytest.raises(InvalidArgument, match="prompt must be a text, a list of texts, token ids"):
        read_completions({"prompt": prompt})


def test_defaults_stand_below_the_body() -> None:
    defaults = {"temperature": 0, "max_new_tokens": 4}
    read = read_chat({"messages": HELLO, "temperature": 1}, defaults=defaults)["sampling_params"]
    assert read == {"temperature": 1, "max_new_tokens": 4}
    [item] = read_completions({"prompt": "a", "max_tokens": 5}, defaults=defaults)
    assert item["sampling_params"] == {"temperature": 0, "max_new_tokens": 5}


NAMES = st.sampled_from([
    "messages", "prompt", "max_tokens", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice",
    "reasoning_effort", "stream", "functions", "chat_template_kwargs", "seed", "model",
])  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["json_schema", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "json_schema", "role", "content"]), inner, max_size=3)
    ),
)


@given(st.dictionaries(NAMES, VALUES))
def test_any_body_at_all_is_read_or_refused(body: dict[str, Any]) -> None:
    for read in (read_chat, read_completions):
        with contextlib.suppress(InvalidArgument):
            assert read(body)


# ── answers ───────────────────────────────────────────────────────────────────────────────────


def result(text: str, finish: dict[str, Any], *, num_output: int, **facts: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": 5, "completion_tokens": num_output, "cached_tokens": 4}
    return {"text": text, "output_ids": [], "meta_info": {"finish_reason": finish, **counts, **facts}}


STOP = {"type": "stop", "matched": 2}
LENGTH = {"type": "length", "length": 3}


def test_the_answer_to_a_chat() -> None:
    results = [result("Hi!", STOP, num_output=2), result("Hello there", LENGTH, num_output=3)]
    assert chat_completion(results, id="7f", model="tiny") == {
        "id": "chatcmpl-7f",
        "object": "chat.completion",
        "created": 0,
        "model": "tiny",
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate([("Hi!", "stop"), ("Hello there", "length")])
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10},
    }


def test_the_answer_to_completions_of_several_prompts() -> None:
    endless = {"type": "repetition", "period": 1, "count": 16}  # which the API does not know
    results = [result(text, endless if text == "c" else LENGTH, num_output=3) for text in "abcd"]
    answer = text_completion(results, id="7f", model="tiny", num_prompts=2)
    assert (answer["id"], answer["object"], answer["created"]) == ("cmpl-7f", "text_completion", 0)
    assert answer["choices"][2] == {"text": "c", "index": 2, "logprobs": None, "finish_reason": "length"}
    assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 12, "total_tokens": 22}


TOKENS = [(-0.1, 5, "Hé"), (-0.2, 6, "\ufffd"), (-3.0, 2, "</s>")]
TOPS = [
    [(-0.1, 5, "Hé"), (-2.0, 9, "x")],
    [(-0.1, 7, "y"), (-0.15, 8, "y")],
    [(-0.5, 1, "z"), (-3.0, 2, "</s>")],
]


def test_logprobs_of_a_chat_leave_out_the_token_that_ended_it() -> None:
    shown = result("Hé?", STOP, num_output=3, output_token_logprobs=TOKENS, output_top_logprobs=TOPS)
    [choice] = chat_completion([shown], id="1", model="m")["choices"]
    first, second = choice["logprobs"]["content"]
    assert first == {
        "token": "Hé",
        "logprob": -0.1,
        "bytes": [72, 195, 169],
        "top_logprobs": [
            {"token": "Hé", "logprob": -0.1, "bytes": [72, 195, 169]},
            {"token": "x", "logprob": -2.0, "bytes": [120]},
        ],
    }
    assert (second["token"], second["bytes"]) == ("\ufffd", None)
    assert choice["logprobs"]["refusal"] is None
    cut = result("Hé?", LENGTH, num_output=3, output_token_logprobs=TOKENS)
    [choice] = chat_completion([cut], id="1", model="m")["choices"]
    assert [len(choice["logprobs"]["content"]), choice["logprobs"]["content"][0]["top_logprobs"]] == [3, []]


def test_logprobs_show_no_token_where_none_was_asked_for() -> None:
    empty = result("", {"type": "length", "length": 0}, num_output=0, output_token_logprobs=TOKENS[:1])
    [choice] = chat_completion([empty], id="1", model="m")["choices"]
    assert choice["logprobs"]["content"] == []


@pytest.mark.parametrize(
    ("text", "shown"), [("", 0), ("H", 1), ("He", 1), ("Hel", 2), ("Hello", 2), ("Hello ", 3), ("other", 3)]
)
def test_logprobs_end_where_a_stop_string_has_cut_the_text(text: str, shown: int) -> None:
    tokens = [(-0.1, 1, "He"), (-0.2, 2, "llo"), (-0.3, 3, " you")]
    finish = {"type": "stop", "matched": "l"}
    cut = result(text, finish, num_output=3, output_token_logprobs=tokens)
    [choice] = chat_completion([cut], id="1", model="m")["choices"]
    assert len(choice["logprobs"]["content"]) == shown


@pytest.mark.parametrize(
    ("text", "texts", "offsets"),
    [
        ("one two", ["one", " two"], [0, 3]),
        ("one two three", ["one", "two", "three"], [0, 3, 7]),  # as SentencePiece names words
        ("hé!", ["h", "\ufffd", "\ufffd", "!"], [0, 1, 1, 2]),
        ("a日本b", ["a\ufffd", "\ufffd", "\ufffd", "\ufffd", "\ufffd", "\ufffd", "b"], [0, 1, 1, 1, 1, 1, 3]),
        ("x\ufffdy", ["x", "\ufffd", "y"], [0, 1, 2]),
        ("ab", ["a", "<s>", "b", "<s>"], [0, 1, 1, 2]),  # special tokens that the text leaves out
        ("x\ufffd녕y z", ["x", "\ufffd\ufffd", "\ufffd녕", "y", " z"], [0, 1, 1, 3, 4]),
        ("a😀\ufffdb c", ["a", "\ufffd\ufffd", "\ufffd\ufffd\ufffd", "b", " c"], [0, 1, 1, 3, 4]),
        ("fox elo w br", ["fox", "el", "##o", "w", "br"], [0, 3, 6, 8, 9]),  # found again behind it
    ],
)
def test_offsets_are_those_of_the_text(text: str, texts: list[str], offsets: list[int]) -> None:
    """Also where tokens add something else than their own text."""
    tokens = [(-0.1, index, own) for index, own in enumerate(texts)]
    shown = result(text, LENGTH, num_output=len(texts), output_token_logprobs=tokens)
    [choice] = text_completion([shown], id="1", model="m")["choices"]
    assert choice["logprobs"]["tokens"] == texts
    assert choice["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize(
    ("text", "texts", "shown"),
    [
        (" Paris.", [" Paris", "."], 2),  # with `include_stop_str_in_output`
        (" Paris", [" Paris", "."], 1),
        (" Paris", [" Paris", "<s>"], 1),
        ("one two.", ["one", "two", "."], 3),
        ("", ["."], 0),
    ],
)
def test_the_token_that_ended_a_text_is_shown_where_the_text_has_it(
    text: str, texts: list[str], shown: int
) -> None:
    tokens = [(-0.1, index, own) for index, own in enumerate(texts)]
    ended = result(text, {"type": "stop", "matched": 7}, num_output=len(texts), output_token_logprobs=tokens)
    [choice] = chat_completion([ended], id="1", model="m")["choices"]
    assert len(choice["logprobs"]["content"]) == shown


def test_tokens_are_cut_where_the_text_is_although_others_are_no_text() -> None:
    texts = ["\ufffd", "\ufffd", "\ufffd", "The", " future", " of"]
    tokens = [(-0.1, index, own) for index, own in enumerate(texts)]
    cut = result(
        "日The ", {"type": "stop", "matched": "future of"}, num_output=6, output_token_logprobs=tokens
    )
    [choice] = text_completion([cut], id="1", model="m")["choices"]
    assert choice["logprobs"]["tokens"] == texts[:5]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 4]


def test_logprobs_of_completions() -> None:
    shown = result("Hé\ufffd", LENGTH, num_output=3, output_token_logprobs=TOKENS, output_top_logprobs=TOPS)
    [choice] = text_completion([shown], id="1", model="m")["choices"]
    assert choice["logprobs"] == {
        "tokens": ["Hé", "\ufffd", "</s>"],
        "token_logprobs": [-0.1, -0.2, -3.0],
        "top_logprobs": [{"Hé": -0.1, "x": -2.0}, {"y": -0.1, "\ufffd": -0.2}, {"z": -0.5, "</s>": -3.0}],
        "text_offset": [0, 2, 3],
    }
    plain = result("Hé\ufffd", LENGTH, num_output=3, output_token_logprobs=TOKENS)
    [choice] = text_completion([plain], id="1", model="m")["choices"]
    assert choice["logprobs"]["top_logprobs"] is None


def test_errors_have_the_body_of_the_api() -> None:
    error = RowError(type="too_long", message="too long", status_code=400)
    assert error_body(error) == {
        "error": {"message": "too long", "type": "invalid_request_error", "param": None, "code": "too_long"}
    }
    assert (
        error_body(RowError(type="internal", message="x", status_code=500))["error"]["type"] == "server_error"
    )
