"""Backends over the bundled model's tokenizer, and a model that draws at random under their masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from tokenmill.config import EngineConfig
from tokenmill.grammar import Backend, Template
from tokenmill.grammar.backends import open_backend
from tokenmill.grammar.vocabulary import load_tokenizer
from tokenmill.messages import Grammar, GrammarKind

# The bundled model knows 6,144 ids; this one has more, as models do that round their vocabulary up.
VOCABULARY = 6200
# Letters of two halves in turns, and states that double with each place behind an `a` or `b`.
CROWDED = "([a-m][n-z])*(a[n-z]([a-m][n-z]){4}aq|b[n-z]([a-m][n-z]){4}bz)"


@cache
def backend(name: str) -> Backend:
    pytest.importorskip(name)
    return open_backend(EngineConfig(grammar_backend=name), VOCABULARY)  # type: ignore[arg-type]


@cache
def tokenizer() -> Any:
    return load_tokenizer(EngineConfig())


def allowed(row: Any) -> list[int]:
    return list(allowed_ids(row).tolist())


def allowed_ids(row: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def follows(template: Template, output: str) -> bool:
    """Whether it may be an output."""
    matcher = template.new()
    return all(matcher.accept(token) for token in tokenizer().encode(output)) and matcher.is_accepting


def draw(
    name: str, kind: GrammarKind, text: str, *, seed: int, most: int = 150, end: float = 0.2
) -> str | None:
    """An output drawn at random, ended with this probability wherever it may end; None if it got too long."""
    random = np.random.default_rng(seed)
    library, end_id, num_ids = backend(name), tokenizer().eos_token_id, len(tokenizer())
    matcher = library.compile(Grammar(kind, text)).new()
    masks = np.zeros((1, library.num_words), dtype=np.int32)
    ids: list[int] = []
    for _ in range(most):
        library.batch([matcher]).fill_masks(masks)
        assert not matcher.error
        tokens = allowed_ids(masks[0])
        tokens = tokens[tokens != end_id]
        if matcher.is_accepting and (not tokens.size or random.random() < end):
            return str(tokenizer().decode(ids))
        assert tokens.size, "a dead end"
        assert tokens.max() < num_ids
        ids.append(int(random.choice(tokens)))
        assert matcher.accept(ids[-1])
    return None


@pytest.fixture
def drawn() -> Callable[..., list[str]]:
    """`drawn(backend, kind, text)`: the outputs of some draws that came to an end."""

    def outputs(name: str, kind: GrammarKind, text: str, *, count: int = 8, **options: Any) -> list[str]:
        found = [draw(name, kind, text, seed=seed, **options) for seed in range(count)]
        finished = [text for text in found if text is not None]
        assert finished, "no draw came to an end"
        return finished

    return outputs


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What llguidance compiles from now on, once for each time."""
    from tokenmill.grammar.llguidance_backend import LlguidanceBackend

    sources, compile_once = [], LlguidanceBackend._matcher

    def counted(library: LlguidanceBackend, source: str) -> Any:
        sources.append(source)
        return compile_once(library, source)

    monkeypatch.setattr(LlguidanceBackend, "_matcher", counted)
    return sources
