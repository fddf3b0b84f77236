"""The tiny model through our own Engine, made once for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tools.tiny.evaluate import Generate


@pytest.fixture(scope="session")
def generate() -> Iterator[Generate]:
    import tokenmill as sgl

    engine: Any = sgl.Engine(model_path="tiny")

    def ask(prompts: Sequence[str], temperature: float, most: int) -> list[str]:
        parameters = {"temperature": temperature, "max_new_tokens": most}
        return [output["text"] for output in engine.generate(list(prompts), parameters)]

    yield ask
    engine.shutdown()
