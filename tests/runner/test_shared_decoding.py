"""An engine that reads shared prefixes once gives the tokens of transformers: kernels in the interpreter."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokenmill as sgl

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns one-element arrays into loop bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.fixture
def triton_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPU's kernels on the CPU; gives the number of items of each step that shared something."""
    interpreter = runpy.run_path(str(Path(__file__).parents[1] / "kernels" / "interpreter.py"))
    if interpreter["device"]() != "cpu":
        pytest.skip("there is a GPU, whose tests do the same")
    from tokenmill.attention import triton_backend
    from tokenmill.kernels import triton_decode
    from tokenmill.runner import hardware
    from tokenmill.runner.forest import Forest, Found

    monkeypatch.setattr(hardware, "_attention_backend", lambda *_: "triton")
    monkeypatch.setattr(triton_backend, "SHARING_BYTES", 0)  # these models are too small for it to pay
    monkeypatch.setattr(triton_decode, "SHARED_PROGRAMS", 5)
    items: list[int] = []
    shared = Forest.shared

    def counted(self: Forest, num_rows: int, found: Found) -> Any:
        prefixes = shared(self, num_rows, found)
        items.append(int(prefixes.num_items))
        return prefixes

    monkeypatch.setattr(Forest, "shared", counted)
    return items


def prompts() -> list[list[int]]:
    """Two levels: 40 ids for all, 40 more for most of them, a few of their own; and one that is alone."""
    rng = random.Random(5)
    ids = [rng.randrange(256) for _ in range(80)]
    own = [[rng.randrange(256) for _ in range(1 + 3 * index)] for index in range(5)]
    return [ids[: 40 if index == 1 else 80] + own[index] for index in range(4)] + [own[4]]


def test_greedy_tokens_are_those_of_transformers(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    triton_on_the_cpu: list[int],
) -> None:
    folder = make_model("qwen3", num_hidden_layers=1)
    lengths = [3, 5, 4, 7, 7]  # the forest changes whenever a row ends
    params = [{"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
    with sgl.Engine(
        model_path=str(folder), device="cpu", dtype="float32", disable_cuda_graph=True, max_running_requests=8
    ) as engine:
        results = engine.generate(input_ids=prompts(), sampling_params=params)
    for prompt, length, result in zip(prompts(), lengths, results, strict=True):
        assert result["output_ids"] == transformers_greedy(folder, prompt, length)
    # Both levels while rows 0 and 2 still decode, then one, then every row is alone.
    assert triton_on_the_cpu == [2, 2, 2, 1]


def test_nothing_is_shared_without_a_prefix_cache(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    triton_on_the_cpu: list[int],
) -> None:
    folder = make_model("llama", num_hidden_layers=1)
    with sgl.Engine(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        disable_cuda_graph=True,
        disable_radix_cache=True,
    ) as engine:
        results = engine.generate(
            input_ids=prompts()[:2],
            sampling_params={"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
        )
    for prompt, result in zip(prompts(), results, strict=False):
        assert result["output_ids"] == transformers_greedy(folder, prompt, 2)
    assert triton_on_the_cpu == []
