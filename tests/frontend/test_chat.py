"""Conversations: messages in, the template's text to the model, results out; and what is said of prompts."""

from __future__ import annotations

import asyncio
import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenmill as sgl
from tokenmill.frontend.outputs import ResultList

pytestmark = pytest.mark.cpu

GREEDY = {"temperature": 0, "max_new_tokens": 24}
# Everything that a template can see, on one line; the core repeats it as its answer.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}>{% endfor %}"
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% if mood %}({{ mood }}){% endif %}{% if add_generation_prompt %}<me:{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def make_engine(cores: list[Any], byte_folder: Path) -> Iterator[Callable[..., sgl.Engine]]:
    made: list[sgl.Engine] = []

    def make(**arguments: Any) -> sgl.Engine:
        made.append(sgl.Engine(**{"model_path": str(byte_folder), **arguments}))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


@pytest.fixture
def llm(make_engine: Callable[..., sgl.Engine]) -> sgl.Engine:
    return make_engine(chat_template=TEMPLATE)


# ── what the model gets ──


def test_one_conversation_and_a_batch(llm: sgl.Engine) -> None:
    assert llm.chat(HELLO)["text"] == "<user:hello><me:"
    assert llm.chat(tuple(HELLO), {"max_new_tokens": 3}, rid="mine")["meta_info"]["id"] == "mine"
    outputs = llm.chat([HELLO, [{"role": "system", "content": "be kind"}, *HELLO]])
    assert isinstance(outputs, ResultList)
    assert outputs["text"] == ["<user:hello><me:", "<system:be kind><user:hello><me:"]
    assert llm.chat([HELLO])["text"] == ["<user:hello><me:"]
    assert llm.chat(HELLO, {"n": 2, "max_new_tokens": 2})["text"] == ["<u", "<u"]
    different = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    assert llm.chat([HELLO, HELLO], different)["text"] == ["<", "<u"]


def test_streams_and_async(llm: sgl.Engine) -> None:
    assert "".join(chunk["text"] for chunk in llm.chat(HELLO, stream=True)) == "<user:hello><me:"

    async def main() -> None:
        assert (await llm.async_chat(HELLO))["text"] == "<user:hello><me:"
        assert (await llm.async_chat([HELLO]))["text"] == ["<user:hello><me:"]
        text = ""
        async for chunk in await llm.async_chat(HELLO, stream=True):
            text += chunk["text"]
        assert text == "<user:hello><me:"

    asyncio.run(main())


def test_how_the_prompt_ends(llm: sgl.Engine) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    assert llm.chat(HELLO, add_generation_prompt=False)["text"] == "<user:hello>"
    assert llm.chat(begun, continue_final_message=True)["text"] == "<user:hello><assistant:I am"
    with pytest.raises(sgl.InvalidArgument, match=r"messages\[1\] has no content to go on with"):
        llm.chat([*HELLO, {"role": "assistant", "content": ""}], continue_final_message=True)


def test_parts_of_text_are_put_together(llm: sgl.Engine) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert llm.chat([{"role": "user", "content": parts}])["text"] == "<user:hello><me:"
    assert llm.chat([{"role": "user", "content": []}])["text"] == "<user:><me:"


def test_tools_and_their_results(llm: sgl.Engine) -> None:
    def weather(city: str) -> str:
        """
        The weather of a city.

        Args:
            city: which one
        """
        return city

    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    parsed = {**call, "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    answer = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
    schema = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    rendered = '<user:hello><assistant:!weather{"city": "Rome"}><tool:sunny#1>[weather][clock]<me:'
    for asked in (call, parsed):
        messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [asked]}, answer]
        before = copy.deepcopy(messages)
        assert llm.chat(messages, tools=[weather, schema])["text"] == rendered
        assert messages == before
    without = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    assert llm.chat([without], tools=[])["text"] == "<assistant:!f{}><me:"


def test_variables_of_the_template(llm: sgl.Engine) -> None:
    assert llm.chat(HELLO, chat_template_kwargs={"mood": "glad"})["text"] == "<user:hello>(glad)<me:"
    with pytest.raises(sgl.InvalidArgument, match="has 'tokenize', which is no variable"):
        llm.chat(HELLO, chat_template_kwargs={"tokenize": True})
    with pytest.raises(sgl.WrongType, match="chat_template_kwargs must be a dict"):
        llm.chat(HELLO, chat_template_kwargs="glad")


def test_other_options_reach_generate(llm: sgl.Engine, cores: list[Any]) -> None:
    with pytest.raises(sgl.UnknownArgument, match="Did you mean 'timeout'"):
        llm.chat(HELLO, timeot=3)
    with pytest.raises(sgl.InvalidArgument, match="image_data is not supported yet"):
        llm.chat(HELLO, image_data="a.png")
    for name in ("prompt", "input_ids"):
        with pytest.raises(sgl.UnknownArgument, match=rf"chat\(\) has no argument '{name}'"):
            llm.chat(HELLO, **{name: "a"})
    with pytest.raises(
        sgl.InvalidArgument, match=r"sampling_params is a list of 2, but messages is a single"
    ):
        llm.chat(HELLO, [{}, {}])
    long = [{"role": "user", "content": "x" * 100_000}]
    with pytest.raises(sgl.InvalidArgument, match=r"^messages has 100011 tokens"):
        llm.chat(long)
    with pytest.raises(sgl.InvalidArgument, match=r"^messages\[1\] has 100011 tokens"):
        asyncio.run(llm.async_chat([HELLO, long]))
    assert cores[0].submitted == []


def test_a_chat_in_a_session(llm: sgl.Engine, cores: list[Any]) -> None:
    s = {"id": llm.open_session(1000)}
    llm.chat(HELLO, {"max_new_tokens": 1}, session_params=s)
    llm.chat([{"role": "user", "content": "again"}], {"max_new_tokens": 1}, session_params=s)
    assert bytes(cores[0].submitted[1].prompt_ids.tolist()) == b"<user:hello><me:<<user:again><me:"


# ── which template ──


def test_where_the_template_comes_from(make_engine: Any, tokenizers: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(tokenizers["bytes"].get())
    tokenizer.chat_template = "model {{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "model")
    file = tmp_path / "own.jinja"
    file.write_text("file {{ messages[0].content }}")
    own = make_engine(model_path=str(tmp_path / "model"))
    assert own.chat(HELLO)["text"] == "model hello"
    assert own.chat(HELLO, chat_template="call {{ messages[0].content }}")["text"] == "call hello"
    assert own.chat(HELLO, chat_template=str(file))["text"] == "file hello"
    engine = make_engine(model_path=str(tmp_path / "model"), chat_template=str(file))
    assert engine.chat(HELLO)["text"] == "file hello"
    assert engine.chat(HELLO, chat_template="call {{ messages[0].content }}")["text"] == "call hello"


def test_no_template(make_engine: Any) -> None:
    with pytest.raises(sgl.InvalidArgument, match=r"no chat template; give one as chat_template"):
        make_engine().chat(HELLO)
    with pytest.raises(sgl.InvalidArgument, match="skip_tokenizer_init"):
        make_engine(skip_tokenizer_init=True).chat(HELLO)


def test_named_templates(make_engine: Any, tokenizers: dict[str, Any]) -> None:
    engine = make_engine()
    engine.get_tokenizer().chat_template = {"default": "d{{ 1 }}", "tool_use": "t{{ 1 }}"}
    assert engine.chat(HELLO)["text"] == "d1"
    assert engine.chat(HELLO, chat_template="tool_use")["text"] == "t1"


@pytest.mark.parametrize("value", ["llama-2", "/no/such/file.jinja", "", "a\0b", "x" * 5000])
def test_what_is_no_template(make_engine: Any, llm: sgl.Engine, value: str) -> None:
    with pytest.raises(
        sgl.InvalidArgument, match=r"chat_template .*(must be a Jinja template|cannot be read)"
    ):
        make_engine(chat_template=value)
    with pytest.raises(
        sgl.InvalidArgument, match=r"chat_template .*(must be a Jinja template|cannot be read)"
    ):
        llm.chat(HELLO, chat_template=value)
    with pytest.raises(sgl.WrongType, match="chat_template must be a string"):
        llm.chat(HELLO, chat_template=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content", "cannot render messages: "),
        ("{{ raise_exception('only two roles') }}", "cannot render messages: only two roles"),
        ("{{ messages[7].content + 1 }}", "cannot render messages: "),
        ("{{ messages[0].content + 1 }}", "cannot render messages: "),
        ("{{ ''.__class__.__mro__ }}", "cannot render messages: "),
        ("{{ '' }}", "makes no text of messages"),
    ],
)
def test_a_template_that_fails(llm: sgl.Engine, template: str, message: str) -> None:
    with pytest.raises(sgl.InvalidArgument, match=message):
        llm.chat(HELLO, chat_template=template)
    with pytest.raises(sgl.InvalidArgument, match=message.replace("messages", r"messages\[0\]")):
        llm.chat([HELLO], chat_template=template)


# ── messages that are none ──


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("hello", sgl.WrongType, "messages must be a list of messages, got 'hello'"),
        (HELLO[0], sgl.WrongType, "messages must be a list"),
        ([], sgl.InvalidArgument, "messages is empty"),
        ([[]], sgl.InvalidArgument, r"messages\[0\] is empty"),
        ([HELLO, []], sgl.InvalidArgument, r"messages\[1\] is empty"),
        ([HELLO, HELLO[0]], sgl.WrongType, r"messages\[1\] must be a list of messages"),
        ([HELLO[0], HELLO], sgl.WrongType, r"messages\[1\] must be a dict"),
        (["hello"], sgl.WrongType, r"messages\[0\] must be a dict with role and content, got 'hello'"),
        ([{"content": "a"}], sgl.InvalidArgument, r"messages\[0\] has no role"),
        ([{"role": "", "content": "a"}], sgl.InvalidArgument, r"messages\[0\].role is empty"),
        ([{"role": 1, "content": "a"}], sgl.WrongType, r"messages\[0\].role must be a string, got 1"),
        (
            [*HELLO, {"role": "user"}],
            sgl.InvalidArgument,
            r"messages\[1\] has neither content nor tool_calls",
        ),
        (
            [{"role": "user", "content": 5}],
            sgl.WrongType,
            r"messages\[0\].content must be a string or a list",
        ),
        ([{"role": "user", "content": ["a"]}], sgl.WrongType, r"messages\[0\].content\[0\] must be a dict"),
        (
            [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]],
            sgl.InvalidArgument,
            r"messages\[0\]\[0\].content\[0\] is of type 'image_url' \(str\), which is not supported yet",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            sgl.WrongType,
            r"messages\[0\].content\[0\].text must be a string",
        ),
        (
            [{"role": "assistant", "tool_calls": {"a": 1}}],
            sgl.WrongType,
            r"messages\[0\].tool_calls must be a list of calls",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f"}]}],
            sgl.WrongType,
            r"messages\[0\].tool_calls\[0\] must be a dict like",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            sgl.InvalidArgument,
            r"messages\[0\].tool_calls\[0\].function.arguments is not valid JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            sgl.WrongType,
            r"tool_calls\[0\].function.arguments must be a JSON object",
        ),
    ],
)
def test_messages_that_are_none(llm: sgl.Engine, messages: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("tools", "error", "message"),
    [
        ({"type": "function"}, sgl.WrongType, "tools must be a list"),
        (["weather"], sgl.WrongType, r"tools\[0\] must be a dict in OpenAI's shape or a Python function"),
        ([{"type": "function"}], sgl.InvalidArgument, r"tools\[0\] has no 'function' with a name"),
        ([lambda city: city], sgl.InvalidArgument, r"tools\[0\] cannot be described"),
    ],
)
def test_tools_that_are_none(llm: sgl.Engine, tools: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        llm.chat(HELLO, tools=tools)


# ── the token that starts a text ──


@pytest.fixture
def adding(make_engine: Any, tokenizers: dict[str, Any], tmp_path: Path) -> sgl.Engine:
    """An engine whose tokenizer puts <s> before a text, as its chat template does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tokenizers["bytes"].get())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    engine: sgl.Engine = make_engine(model_path=str(tmp_path))
    assert engine.get_tokenizer()("a")["input_ids"] == [256, 97]
    return engine


def test_a_chat_has_one_bos(adding: sgl.Engine, cores: list[Any]) -> None:
    adding.chat([{"role": "user", "content": "a"}])
    assert cores[0].submitted[0].prompt_ids.tolist() == [256, 97]


def test_two_bos_are_told_once(adding: sgl.Engine, make_engine: Any, cores: list[Any]) -> None:
    adding.generate("a <s> b")
    with pytest.warns(UserWarning, match="the tokenizer adds another"):
        adding.generate("<s>a")
    assert cores[0].submitted[-1].prompt_ids.tolist() == [256, 256, 97]  # and nothing is changed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adding.generate(["<s>a"])
        # This tokenizer adds none, so one in the prompt is right.
        make_engine().generate("<s>a")


def test_a_plain_prompt_for_a_chat_model_is_mentioned_once(
    make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(log_level="info")
    engine.get_tokenizer().chat_template = "{{ messages[0].content }}</s>"
    engine.generate(["a", "b"])
    engine.generate("a")
    assert [r.levelname for r in caplog.records if "chat() applies the template" in r.message] == ["INFO"]
    silent = make_engine(log_level="info")
    caplog.clear()
    silent.generate("a")
    assert caplog.records == []


# ── the tiny model ──


def test_the_tiny_model_answers(tiny_engine: Any) -> None:
    messages = [{"role": "user", "content": "What is the capital of Italy?"}]
    result = tiny_engine.chat(messages, GREEDY)
    assert "Rome" in result["text"]
    tokenizer = tiny_engine.get_tokenizer()
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert result["meta_info"]["prompt_tokens"] == len(ids)
    assert result["output_ids"] == tiny_engine.generate(input_ids=ids, sampling_params=GREEDY)["output_ids"]
    json.dumps(result)


def test_the_tiny_model_remembers_a_conversation(tiny_engine: Any) -> None:
    told = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "My name is Alice."},
        {"role": "assistant", "content": "Hello Alice."},
    ]
    untold = [*told[:1], {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]
    question = {"role": "user", "content": "What is my name?"}
    knows, does_not = tiny_engine.chat([[*told, question], [*untold, question]], GREEDY)["text"]
    assert "Alice" in knows
    assert "Alice" not in does_not


def test_the_tiny_model_goes_on_with_an_answer(tiny_engine: Any) -> None:
    begun = [
        {"role": "user", "content": "What is the capital of Italy?"},
        {"role": "assistant", "content": "The capital of Italy is"},
    ]
    assert tiny_engine.chat(begun, GREEDY, continue_final_message=True)["text"].startswith(" Rome")
