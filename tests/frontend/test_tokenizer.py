"""The tokenizer of a model folder: encoding, facts, and what happens when it is missing."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tokenmill import EngineConfig, InvalidArgument, ModelNotFound
from tokenmill.frontend.tokenizer import Tokenizer
from tokenmill.messages import Request

pytestmark = pytest.mark.cpu


def test_facts_and_encoding(config: EngineConfig) -> None:
    tokenizer = Tokenizer.load(config)
    assert tokenizer.vocab_size == 259
    assert tokenizer.eos_token_ids == (257,)
    assert tokenizer.encode_batch(["hé", ""]) == [[104, 0xC3, 0xA9], []]
    assert tokenizer.get().decode([104, 105]) == "hi"


def test_imports_are_not_interrupted_half_way(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries end the process then; Ctrl-C comes once they are there."""
    imported = []

    class Libraries(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name != "AutoTokenizer":
                raise AttributeError(name)
            signal.raise_signal(signal.SIGINT)
            imported.append(name)
            return object()

    monkeypatch.setitem(sys.modules, "transformers", Libraries("transformers"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Tokenizer.load(config)
    finally:
        signal.signal(signal.SIGINT, before)
    assert imported == ["AutoTokenizer"]


def test_special_tokens_that_the_tokenizer_adds(byte_folder: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(str(byte_folder))
    inner.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode_batch(["a"]) == [[256, 97]]


def test_the_end_of_message_token_ends_outputs(byte_folder: Path) -> None:
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(str(byte_folder))
    inner.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})
    assert Tokenizer(inner).eos_token_ids == (257, 259)


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotFound, match="skip_tokenizer_init"):
        Tokenizer.load(EngineConfig(model_path=str(tmp_path)))


def test_a_tokenizer_path_that_is_not_there_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"tokenizer_path='/.*/no': there is no such folder"):
        Tokenizer.load(EngineConfig(model_path="tiny", tokenizer_path=f"{tmp_path}/no"))


def test_tokenizer_path_comes_first(tmp_path: Path, byte_folder: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = Tokenizer.load(EngineConfig(model_path=str(tmp_path), tokenizer_path=str(byte_folder)))
    assert tokenizer.vocab_size == 259


def test_invalid_unicode_names_the_item(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidArgument, match=r"prompt\[1\].*surrogate.*position 2"):
        tokenizers["bytes"].encode_batch(["fine", "no\ud800"])


@pytest.mark.parametrize(
    ("kind", "fast"),
    [
        ("bytes", True),
        ("byte level", True),
        ("byte fallback", True),
        ("word piece", False),
        ("metaspace", False),
    ],
)
def test_which_tokenizers_are_read_as_bytes(kind: str, fast: bool, tokenizers: dict[str, Tokenizer]) -> None:
    assert bool(tokenizers[kind]._pieces) == fast


def test_a_python_tokenizer(make_request: Callable[..., Request]) -> None:
    """Tokenizers without Rust work, too, also with ids that they do not have."""
    from transformers import PreTrainedTokenizer

    class Letters(PreTrainedTokenizer):
        @property
        def vocab_size(self) -> int:
            return 26

        def get_vocab(self) -> dict[str, int]:
            return {chr(97 + i): i for i in range(26)} | self.added_tokens_encoder

        def _tokenize(self, text: str, **more: Any) -> list[str]:
            return list(text)

        def _convert_token_to_id(self, token: str) -> int:
            return ord(token) - 97

        def _convert_id_to_token(self, index: int) -> str:
            return chr(97 + index)

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return " ".join(tokens)

    tokenizer = Tokenizer(Letters(eos_token="</s>"))
    assert tokenizer.eos_token_ids == (26,)
    request = make_request(tokenizer.encode_batch(["ab"])[0])
    ids = [2, 26, 3, 99]
    assert tokenizer.texts([(request, ids)]) == [" c d"]
    text = tokenizer.open_text(request)
    assert [text.push([token], None)[0] for token in ids] == [" c", "", " d", ""]


def test_threads_may_encode_at_once(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte level"]
    expected = tokenizer.encode_batch(["Hello, world"] * 20)
    wrong: list[Any] = []

    def encode() -> None:
        for _ in range(20):
            # A user's own call changes settings on the shared object in between.
            tokenizer.get()("x", verbose=False)
            if tokenizer.encode_batch(["Hello, world"] * 20) != expected:
                wrong.append("differs")

    threads = [threading.Thread(target=encode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_text_that_is_far_too_long_is_encoded_in_part(
    tokenizers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers["byte level"]
    monkeypatch.setattr(tokenizer, "most_tokens", 60)
    long, dense = "x" * 100_000, "<tool call>" * 100
    [ids, others, short] = tokenizer.encode_batch([long, dense, "x" * 59])
    assert 120 <= len(ids) < 2000
    assert tokenizer.decode_batch([others], skip_special_tokens=False) == [dense]  # it is not too long
    assert len(short) <= 59
