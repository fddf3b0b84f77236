"""Steps that fail on a GPU, in graphs and out of them: rows end alone, and the others never notice."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenmill as sgl
from tokenmill.runner.executor import Executor
from tokenmill.runner.graphs import DecodeGraphs
from tokenmill.runner.prompt_graphs import PromptGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POISON = 251
LENGTH = 37  # of a prompt that no other has; the fault looks for it, as reading tokens would synchronise
FEATURES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 3},
    {"frequency_penalty": 0.8},
    {"temperature": 0.7, "sampling_seed": 4},
]


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    shared = [rng.randrange(250) for _ in range(64)]
    return [shared * (index % 2) + [rng.randrange(250) for _ in range(3 + index)] for index in range(12)]


def params(**more: Any) -> list[dict[str, Any]]:
    common = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, "logit_bias": {POISON: -100.0}}
    return [{**common, **FEATURES[index % len(FEATURES)], **more} for index in range(12)]


def generate(engine: Any, rows: list[list[int]], **more: Any) -> Any:
    engine.flush_cache()
    return engine.generate(input_ids=rows, sampling_params=params(**more), on_error="return")


def open_engine(folder: Path, **arguments: Any) -> Any:
    return sgl.Engine(model_path=str(folder), dtype="float32", mem_fraction_static=0.2, **arguments)


@pytest.mark.parametrize("more", [{}, {"logit_bias": None}, {"regex": "[a-z]*", "logit_bias": None}])
def test_rows_of_nan_fail_alone_in_captured_steps(make_model: Callable[..., Path], more: Any) -> None:
    """With penalties and biases, in plain graphs, and under masks."""
    if "regex" in more:
        pytest.importorskip("llguidance")
    poisoned = {1: 20, 4: 3, 9: -1}
    with open_engine(make_model("qwen3")) as engine:
        generate(engine, prompts(), **more)  # captures
        expected = generate(engine, prompts(), **more)
        name = "model.embed_tokens.weight"
        embedding = torch.tensor(engine.get_weights_by_name(name, truncate_size=300))
        embedding[POISON] = torch.nan
        engine.update_weights_from_tensor([(name, embedding)])
        rows = prompts()
        for index, place in poisoned.items():
            rows[index][place] = POISON
        for _ in range(3):
            found = generate(engine, rows, **more)
            for index, (result, whole) in enumerate(zip(found, expected, strict=True)):
                if index in poisoned:
                    assert result["error"]["type"] == "internal"
                    assert "NaN" in result["error"]["message"]
                elif POISON not in whole["output_ids"]:
                    assert result["output_ids"] == whole["output_ids"], index


@pytest.mark.parametrize("error", [ValueError("poison"), torch.OutOfMemoryError("poison")])
def test_a_row_that_makes_steps_fail_ends_alone(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    original, struck = Executor.forward, []

    def forward(executor: Executor, token_ids_T: torch.Tensor, layout: Any, **rest: Any) -> torch.Tensor:
        hidden = original(executor, token_ids_T, layout, **rest)
        # Under want of memory a prompt comes in pieces; any of them that reaches its last token is at fault.
        if struck and LENGTH in layout.host_lengths[layout.num_decodes :]:
            struck.append(1)
            raise error
        return hidden

    with open_engine(make_model("qwen3"), disable_cuda_graph=True) as engine:
        monkeypatch.setattr(Executor, "forward", forward)
        expected = generate(engine, prompts())
        rows = prompts()
        rows[2] = rows[2] + list(range(LENGTH - len(rows[2])))
        struck.append(0)
        found = generate(engine, rows)
    assert len(struck) > 2
    for index, (result, whole) in enumerate(zip(found, expected, strict=True)):
        if index == 2:
            assert result["error"]["type"] in ("internal", "out_of_memory")
        else:
            assert result["output_ids"] == whole["output_ids"], index


def test_graphs_that_fail_are_replaced_by_plain_steps(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graphs: Any, *arguments: Any, **rest: Any) -> Any:
        raise RuntimeError("no graph today")

    with open_engine(make_model("qwen3")) as engine:
        generate(engine, prompts())
        expected = generate(engine, prompts())
        monkeypatch.setattr(DecodeGraphs, "replay", broken)
        monkeypatch.setattr(PromptGraphs, "replay", broken)
        found = generate(engine, prompts())
    assert [result["output_ids"] for result in found] == [result["output_ids"] for result in expected]


def test_repetitions_end_rows_that_have_steps_in_flight(make_model: Callable[..., Path]) -> None:
    params = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True, "max_repetitions": 3}
    with open_engine(make_model("qwen3")) as engine:
        results = engine.generate(
            input_ids=prompts(), sampling_params=[params | {"logit_bias": {65: 100.0}}] * 12
        )
    for result in results:
        assert result["output_ids"] == [65] * 16
        assert result["meta_info"]["finish_reason"] == {"type": "repetition", "period": 1, "count": 16}
