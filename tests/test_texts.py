"""Texts of classes of their own are read as texts, wherever an engine takes one."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest

import tokenmill as sgl

pytestmark = pytest.mark.cpu


class Said(str, enum.Enum):  # noqa: UP042 - its `str()` is the name, unlike that of `enum.StrEnum`
    PROMPT = "Once upon a time"
    STOP = "a"
    PATTERN = r"[0-9]{3}|x\d"
    GRAMMAR = 'root ::= "b" | "c"'
    SCHEMA = '{"enum": [12, "ab"]}'
    ROLE = "user"
    TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.name }} {{ mood }}{% endfor %}"
    RETURN = "return"
    LAST = "last"
    NUMPY = "numpy"
    MODEL = "tiny"
    DTYPE = "float32"
    RANDOM = "dummy"


PARAMS = {"temperature": 0, "max_new_tokens": 12}
CALLS: dict[str, Callable[[Any, Callable[[Said], str]], Any]] = {
    "prompt": lambda llm, text: llm.generate(text(Said.PROMPT), PARAMS)["output_ids"],
    "prompts": lambda llm, text: llm.generate([text(Said.PROMPT)] * 2, PARAMS)["output_ids"],
    "items": lambda llm, text: [
        row["output_ids"] for row in llm.iter([text(Said.PROMPT), {"prompt": text(Said.PROMPT)}], PARAMS)
    ],
    "score": lambda llm, text: llm.score(text(Said.PROMPT), [text(Said.STOP)], [5, 6]),
    "chat": lambda llm, text: llm.chat(
        [{"role": text(Said.ROLE), "content": text(Said.PROMPT), "name": text(Said.STOP)}],
        PARAMS,
        chat_template=text(Said.TEMPLATE),
        chat_template_kwargs={"mood": text(Said.LAST)},
    )["meta_info"]["prompt_tokens"],
    "options": lambda llm, text: (
        llm.generate(
            ["", "a"],
            {"max_new_tokens": 1},
            on_error=text(Said.RETURN),
            return_hidden_states=text(Said.LAST),
            hidden_states_format=text(Said.NUMPY),
        )[1]["meta_info"]["hidden_states"][0].shape
    ),
    **{
        name: lambda llm, text, name=name, member=member: llm.generate(
            "Once", {**PARAMS, name: text(member)}
        )["text"]
        for name, member in {
            "stop": Said.STOP,
            "stop_regex": Said.STOP,
            "regex": Said.PATTERN,
            "ebnf": Said.GRAMMAR,
            "json_schema": Said.SCHEMA,
        }.items()
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_a_member_of_an_enumeration_is_its_text(tiny_engine: Any, name: str) -> None:
    assert str(Said.STOP) == "Said.STOP"
    assert CALLS[name](tiny_engine, lambda member: member) == CALLS[name](
        tiny_engine, lambda member: member.value
    )


def test_arguments_of_an_engine() -> None:
    with sgl.Engine(model_path=Said.MODEL, dtype=Said.DTYPE, load_format=Said.RANDOM) as engine:
        assert engine.get_server_info()["dtype"] == "float32"
        assert engine.get_server_info()["model_path"] == "tiny"
