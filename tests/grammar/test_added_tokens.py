"""Grammars that name tokens which were added to a tokenizer: special ones are spelled, others may be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tests.conftest import byte_tokenizer
from tests.grammar.conftest import allowed
from tokenmill.config import EngineConfig
from tokenmill.grammar import Backend
from tokenmill.grammar.backends import BACKENDS, open_backend
from tokenmill.messages import Grammar, GrammarKind

pytestmark = pytest.mark.cpu

PLAIN = ["<tool>", "</tool>", "<na\u00efve tool>", "[TOOL]"]
SPECIAL = ["<|call|>", "[END]"]


def byte_level() -> Tokenizer:
    return byte_tokenizer().backend_tokenizer


def pieces() -> Tokenizer:
    """Byte-pair encoding in the manner of SentencePiece; two of the added tokens are in the vocabulary."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tool>", "<|call|>", *"\u2581tol"]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def unigram() -> Tokenizer:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"<>/tol"]
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    for text in [*PLAIN, *SPECIAL]:  # one by one, so that special ones stand between
        token = AddedToken(text, special=text in SPECIAL, normalized=False)
        (tokenizer.add_special_tokens if text in SPECIAL else tokenizer.add_tokens)([token])
    return tokenizer


TOKENIZERS = [byte_level, pieces, unigram]


@pytest.fixture(params=TOKENIZERS, ids=lambda make: make.__name__)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return with_added_tokens(request.param())


def test_every_token_keeps_its_id_and_has_its_text(tokenizer: Tokenizer) -> None:
    llguidance = pytest.importorskip("llguidance")
    from tokenmill.grammar.llguidance_vocabulary import rename_added_tokens

    renamed = llguidance.LLTokenizer(rename_added_tokens(json.loads(tokenizer.to_str())))
    assert renamed.vocab_size == tokenizer.get_vocab_size()
    for text in PLAIN:
        token = tokenizer.token_to_id(text)
        assert not renamed.is_special_token(token)
        assert renamed.decode_bytes([token]).decode() == text
    for text in SPECIAL:
        token = tokenizer.token_to_id(text)
        assert renamed.is_special_token(token)
        assert token not in renamed.tokenize_str(f"a{text}")
    assert renamed.decode_str(renamed.tokenize_str("to <tool>[TOOL]")) == "to <tool>[TOOL]"


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Backend, Tokenizer]:
    pytest.importorskip(request.param)
    tokenizer = byte_tokenizer()
    with_added_tokens(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(tmp_path)
    config = EngineConfig(tokenizer_path=str(tmp_path), grammar_backend=request.param)
    return open_backend(config, len(tokenizer)), tokenizer.backend_tokenizer


Draws = Callable[[GrammarKind, str], list[list[int]]]


@pytest.fixture
def draws(backend: tuple[Backend, Tokenizer]) -> Draws:
    """Outputs drawn at random, as ids; added tokens are taken where they can be in every second one."""
    library, tokenizer = backend
    added = range(256, tokenizer.get_vocab_size())

    def draw(kind: GrammarKind, text: str) -> list[list[int]]:
        template, outputs = library.compile(Grammar(kind, text)), []
        for seed in range(8):
            random, matcher = np.random.default_rng(seed), template.new()
            masks: Any = np.zeros((1, library.num_words), dtype=np.int32)
            outputs.append([])
            while True:
                is_complete = library.batch([matcher]).fill_masks(masks)[0]
                assert not matcher.error
                tokens = [token for token in allowed(masks[0]) if token != 257]
                if not tokens:
                    assert is_complete
                    break
                preferred = [token for token in tokens if token in added] if seed % 2 else []
                outputs[-1].append(int(random.choice(preferred or tokens)))
                assert matcher.accept(outputs[-1][-1])
        return outputs

    return draw


@pytest.mark.parametrize(
    ("kind", "text", "output"),
    [
        ("regex", r"<tool>x</tool>", "<tool>x</tool>"),
        ("regex", r"x<\|call\|>", "x<|call|>"),
        ("regex", r"\[END\]\[TOOL\]", "[END][TOOL]"),
        ("ebnf", 'root ::= "</s>" name "</tool>"\nname ::= "<tool>"', "</s><tool></tool>"),
        ("json_schema", '{"const": "</tool>"}', '"</tool>"'),
        ("json_schema", '{"enum": ["<|call|>"]}', '"<|call|>"'),
        ("json_schema", '{"const": "</s>"}', '"</s>"'),
    ],
)
def test_texts_of_added_tokens(
    backend: tuple[Backend, Tokenizer], draws: Draws, kind: GrammarKind, text: str, output: str
) -> None:
    _, tokenizer = backend
    found = draws(kind, text)
    assert {tokenizer.decode(ids, skip_special_tokens=False) for ids in found} == {output}
    special = {tokenizer.token_to_id(name) for name in (*SPECIAL, "<s>", "</s>")}
    assert not special & {token for ids in found for token in ids}
    for name in PLAIN[:2]:
        if name in output:
            uses = {tokenizer.token_to_id(name) in ids for ids in found}
            assert uses == {True, False}, "either may be drawn: the token, or its letters"


def test_a_tag_can_be_opened_and_closed_by_added_tokens(backend: tuple[Backend, Tokenizer]) -> None:
    library, tokenizer = backend
    tag = {"begin": "<tool>", "schema": {"type": "integer"}, "end": "</tool>"}
    document = {"structures": [tag], "triggers": ["<tool>"]}
    matcher = library.compile(Grammar("structural_tag", json.dumps(document))).new()
    masks: Any = np.zeros((1, library.num_words), dtype=np.int32)
    begin, end = (tokenizer.token_to_id(name) for name in PLAIN[:2])
    for token in (*b"Hi ", begin, *b"12", end, *b" there", begin):
        library.batch([matcher]).fill_masks(masks)
        assert token in allowed(masks[0])
        assert matcher.accept(token)
    library.batch([matcher]).fill_masks(masks)
    assert ord("7") in allowed(masks[0])
    assert end not in allowed(masks[0])
