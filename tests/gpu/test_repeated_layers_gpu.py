"""Layers that get into graphs without being launched compute what launched ones do."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenmill as sgl
from tokenmill.kernels.graph_nodes import KernelForm
from tokenmill.kernels.repeated_layers import RepeatedLayers
from tokenmill.runner.recorder import Recorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {"head_dim": 64, "max_position_embeddings": 1024}
PARAMS = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From which layer on the rest of a captured step was not run, for each."""
    add, seen = RepeatedLayers._add, []

    def observed(self: RepeatedLayers, before: Any, launched: Any) -> None:
        add(self, before, launched)
        seen.append(launched.layer + 1)

    monkeypatch.setattr(RepeatedLayers, "_add", observed)
    monkeypatch.setattr(RepeatedLayers, "_refused", set())
    monkeypatch.setattr(Recorder, "is_ready", True)  # no step depends on how soon kernels are compiled
    return seen


def tokens(folder: Path, dtype: str, **arguments: Any) -> list[list[int]]:
    """Of one row, of some with a prefix in common, and of many, so that steps of all kinds are captured."""
    rng = random.Random(3)
    shared = [rng.randrange(256) for _ in range(700)]
    jobs = [
        [[1, 2, 3]],
        [[*shared, *(rng.randrange(256) for _ in range(30))] for _ in range(24)],
        [[rng.randrange(256) for _ in range(rng.randint(5, 40))] for _ in range(100)],
    ]
    with sgl.Engine(
        model_path=str(folder),
        device="cuda",
        dtype=dtype,
        mem_fraction_static=0.2,
        max_running_requests=128,
        **arguments,
    ) as engine:
        results = [engine.generate(input_ids=prompts, sampling_params=PARAMS) for prompts in jobs]
    return [result["output_ids"] for job in results for result in job]


@pytest.mark.parametrize(
    ("family", "num_layers", "arguments"),
    [
        *((family, count, {}) for family in ("llama", "qwen2", "qwen3") for count in (9, 10)),
        *(("llama", count, {}) for count in (2, 4, 5)),
        ("qwen3", 9, {"enable_deterministic_inference": True}),
    ],
)
def test_tokens_are_those_of_plain_steps(
    make_model: Callable[..., Path],
    added: list[int],
    family: str,
    num_layers: int,
    arguments: dict[str, Any],
) -> None:
    folder = make_model(family, **SIZES, num_hidden_layers=num_layers)
    found = tokens(folder, "float32", **arguments)
    assert not RepeatedLayers._refused
    if num_layers < 5:
        assert added == []  # the first three and the last are always run
    else:
        assert len(added) >= 3
        assert set(added) == {3}
    assert found == tokens(folder, "float32", disable_cuda_graph=True, **arguments)


def test_graphs_follow_memory_that_was_released(make_model: Callable[..., Path], added: list[int]) -> None:
    """Keys and values are elsewhere afterwards."""
    folder = make_model("llama", **SIZES, num_hidden_layers=9)
    prompts = [[number, 7, 9] for number in range(40)]
    with sgl.Engine(
        model_path=str(folder), device="cuda", dtype="float32", mem_fraction_static=0.2
    ) as engine:
        before = engine.generate(input_ids=prompts, sampling_params=PARAMS)
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        num_added = len(added)
        after = engine.generate(input_ids=prompts, sampling_params=PARAMS)
    assert len(added) > num_added > 0
    assert [each["output_ids"] for each in before] == [each["output_ids"] for each in after]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bits_are_those_of_layers_that_are_launched(
    make_model: Callable[..., Path], added: list[int], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = make_model(family, **SIZES, num_hidden_layers=9)
    found = tokens(folder, "bfloat16")
    assert len(added) >= 3
    monkeypatch.setattr(RepeatedLayers, "begun", lambda tensors: None)
    del added[:]
    assert found == tokens(folder, "bfloat16")
    assert added == []


def test_without_the_driver_layers_are_launched(
    make_model: Callable[..., Path], added: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it refuses half-way: the capture is done again."""
    folder = make_model("llama", **SIZES, num_hidden_layers=9)
    expected = tokens(folder, "float32")

    def refuse(self: KernelForm, words: Any) -> None:
        raise RuntimeError("for the test")

    monkeypatch.setattr(KernelForm, "launch", refuse)
    del added[:]
    assert tokens(folder, "float32") == expected
    assert added == []
    assert RepeatedLayers._refused
