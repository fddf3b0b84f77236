"""The shipped tokenizer: what it does to text, and that transformers reads the files as they are meant."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from tools.tiny.recipe import PACKAGE_FOLDER
from tools.tiny.tokenizer import SPECIAL_TOKENS

pytestmark = pytest.mark.unit

TEXTS = (
    "The capital of France is Paris.",
    "Ça va? Où est l'école? Übergröße, ¡mañana!",
    "你好,世界。こんにちは 안녕하세요",
    "Привет, Γεια σας, مرحبا, नमस्ते",
    "😀 👩\u200d🚀 🇫🇷 \u2764\ufe0f",
    "  two  spaces\n\n\tand a tab \r\n end ",
    '{"name": "Zoë O\'Neil", "age": 42}',
    "\x00\x7f\ufffd",
    "",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PACKAGE_FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def loaded() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PACKAGE_FOLDER)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_transformers_gives_the_same_tokens(tokenizer: Tokenizer, loaded: Any, text: str) -> None:
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("1969-07-20 costs 42").ids]
    assert [piece for piece in pieces if any(map(str.isdigit, piece))] == list("1969072042")


def test_no_token_joins_a_mark_with_what_follows(tokenizer: Tokenizer) -> None:
    prompt, answer = "What is my name?", "Your name is Alice."
    for joint in ("", " ", "\n", "\n\n"):
        whole = tokenizer.encode(prompt + joint + answer).ids
        assert whole == tokenizer.encode(prompt).ids + tokenizer.encode(joint + answer).ids


def test_special_tokens_come_first_and_are_skipped(tokenizer: Tokenizer, loaded: Any) -> None:
    assert [tokenizer.id_to_token(token) for token in range(len(SPECIAL_TOKENS))] == list(SPECIAL_TOKENS)
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>").ids
    assert tokenizer.decode(ids) == "user\nHi"
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == ("<|endoftext|>", "<|pad|>", None)


def test_chat_template_of_a_conversation(loaded: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}, {"type": "image"}]},
    ]
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nBye<|image|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_template_with_tools(loaded: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    text = loaded.apply_chat_template(messages, tools=tools, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou may call these tools:\n"
        '{"type": "function", "function": {"name": "add"}}<|im_end|>\n'
        "<|im_start|>user\nAdd.<|im_end|>\n"
        '<|im_start|>assistant\n\n{"name": "add", "arguments": {"a": 1}}<|im_end|>\n'
        "<|im_start|>tool\n2<|im_end|>\n"
    )
