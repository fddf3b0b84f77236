"""The whole engine on a GPU: the tokens of transformers on every path, in float32."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenmill as sgl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_NEW = 64
SMALL_POOL = {"max_total_tokens": 400}


def prompts(count: int = 12) -> list[list[int]]:
    rng = random.Random(11)
    shared = [rng.randrange(256) for _ in range(40)]
    return [
        shared * (index % 2) + [rng.randrange(256) for _ in range(rng.randint(1, 100))]
        for index in range(count)
    ]


def greedy() -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="batched"),
        pytest.param({"attention_backend": "torch"}, id="torch-attention"),
        pytest.param({"chunked_prefill_size": 16, "max_running_requests": 4}, id="chunked"),
        pytest.param({**SMALL_POOL, "steps_in_flight": 3}, id="preempted"),
        pytest.param({"disable_cuda_graph": True}, id="no-graphs"),
        pytest.param({"page_size": 1, "steps_in_flight": 1}, id="page-size-1"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    family: str,
    arguments: dict[str, Any],
) -> None:
    folder = make_model(family, head_dim=64)
    with sgl.Engine(
        model_path=str(folder), device="cuda", dtype="float32", mem_fraction_static=0.2, **arguments
    ) as engine:
        results = engine.generate(input_ids=prompts(), sampling_params=greedy())
        again = engine.generate(input_ids=prompts(), sampling_params=greedy())
    for prompt, result, repeated in zip(prompts(), results, again, strict=True):
        expected = transformers_greedy(folder, prompt, NUM_NEW)
        assert result["output_ids"] == expected
        assert repeated["output_ids"] == expected


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every short step with prompts gets a graph at once; says of each whether it was replayed."""
    from tokenmill.runner import prompt_graphs, recorder

    monkeypatch.setattr(recorder.Recorder, "is_ready", True)  # it waits for kernels that are compiled
    monkeypatch.setattr(prompt_graphs, "_PADDING_SECONDS", 0.0)
    replay, steps = prompt_graphs.PromptGraphs.replay, []

    def observed(self: Any, plan: Any, **options: Any) -> Any:
        made = replay(self, plan, **options)
        steps.append(made is not None)
        return made

    monkeypatch.setattr(prompt_graphs.PromptGraphs, "replay", observed)
    return steps


@pytest.mark.parametrize("chunk", [24, 40, 150])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_replayed_steps_with_prompts_give_the_tokens_of_transformers(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    replayed: list[bool],
    head_dim: int,
    chunk: int,
) -> None:
    folder = make_model("qwen3", head_dim=head_dim)
    with sgl.Engine(
        model_path=str(folder),
        device="cuda",
        dtype="float32",
        mem_fraction_static=0.2,
        chunked_prefill_size=chunk,
        max_running_requests=9,
    ) as engine:
        results = engine.generate(input_ids=prompts(30), sampling_params=greedy())
    assert len(replayed) > 10
    assert all(replayed)
    for prompt, result in zip(prompts(30), results, strict=True):
        assert result["output_ids"] == transformers_greedy(folder, prompt, NUM_NEW)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_replayed_long_steps_give_the_tokens_of_plain_ones(
    make_model: Callable[..., Path], replayed: list[bool], head_dim: int
) -> None:
    """Rows end one by one, and prompts take their places; so many rows draw that rounding parts a few."""
    folder, rng = make_model("qwen3", head_dim=head_dim), random.Random(5)
    inputs = [[rng.randrange(256) for _ in range(rng.randint(2, 60))] for _ in range(1500)]
    params = [{**greedy(), "max_new_tokens": rng.randint(1, 12)} for _ in inputs]
    rows = []
    for more in ({}, {"disable_cuda_graph": True}):
        with sgl.Engine(
            model_path=str(folder),
            device="cuda",
            dtype="float32",
            mem_fraction_static=0.3,
            chunked_prefill_size=3000,
            max_running_requests=700,
            disable_radix_cache=True,
            **more,
        ) as engine:
            rows.append([r["output_ids"] for r in engine.generate(input_ids=inputs, sampling_params=params)])
    assert sum(replayed) > 10
    same = sum(ours == plain for ours, plain in zip(*rows, strict=True))
    assert same >= 0.99 * len(inputs)


def test_replayed_steps_use_the_prompt_kernel_for_long_prefixes(
    make_model: Callable[..., Path], replayed: list[bool]
) -> None:
    """In short numbers, which that kernel takes, tokens part at near ties: but not most, and not at once."""
    folder, rng = make_model("llama", dtype="bfloat16", head_dim=128), random.Random(3)
    shared = [rng.randrange(256) for _ in range(180)]
    batch = [shared + [rng.randrange(256) for _ in range(20)] for _ in range(40)]
    first = []
    for more in ({}, {"disable_cuda_graph": True}):
        with sgl.Engine(
            model_path=str(folder),
            device="cuda",
            mem_fraction_static=0.2,
            chunked_prefill_size=45,
            max_running_requests=20,
            **more,
        ) as engine:
            engine.generate(input_ids=shared, sampling_params={"max_new_tokens": 1})
            results = engine.generate(input_ids=batch, sampling_params={**greedy(), "max_new_tokens": 2})
            first.append([result["output_ids"][0] for result in results])
    assert sum(replayed) > 10
    same = sum(ours == plain for ours, plain in zip(*first, strict=True))
    assert same >= 36


@pytest.mark.parametrize("more", [{}, {"disable_cuda_graph": True}], ids=["graphs", "no-graphs"])
def test_shared_prefixes_read_once_give_the_same_tokens(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
) -> None:
    """Three levels of prefixes, and rows that end at different steps."""
    from tokenmill.attention import triton_backend
    from tokenmill.runner.forest import Forest

    monkeypatch.setattr(triton_backend, "SHARING_BYTES", 0)  # these models are too small for it to pay
    found: list[Any] = []
    update = Forest.update
    monkeypatch.setattr(
        Forest,
        "update",
        lambda self, *columns: found.append(update(self, *columns)) or found[-1],
    )
    rng = random.Random(17)
    ids = [rng.randrange(256) for _ in range(150)]
    batch = [
        ids[: 50 + 40 * (row % 3)] + [rng.randrange(256) for _ in range(rng.randint(1, 30))]
        for row in range(12)
    ]
    folder = make_model("qwen3", head_dim=64)
    lengths = [8 + 4 * row for row in range(12)]
    params = [{"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
    with sgl.Engine(
        model_path=str(folder), device="cuda", dtype="float32", mem_fraction_static=0.2, **more
    ) as engine:
        results = engine.generate(input_ids=batch, sampling_params=params)
    for prompt, length, result in zip(batch, lengths, results, strict=True):
        assert result["output_ids"] == transformers_greedy(folder, prompt, length)
    assert sum(each is not None for each in found) > 30


def test_two_engines_share_the_gpu_and_give_it_back(make_model: Callable[..., Path]) -> None:
    folder = str(make_model("llama", head_dim=64))
    before = torch.cuda.memory_allocated()
    # cuBLAS keeps a workspace for each thread and stream that used it, for the next one.
    workspaces = 256 * 2**20
    with (
        sgl.Engine(model_path=folder, device="cuda", dtype="float32") as one,
        sgl.Engine(model_path=folder, device="cuda", dtype="float32") as two,
    ):
        first = one.generate(input_ids=prompts(), sampling_params=greedy())
        second = two.generate(input_ids=prompts(), sampling_params=greedy())
    assert [result["output_ids"] for result in first] == [result["output_ids"] for result in second]
    assert one.get_server_info()["cache_bytes"] > workspaces
    assert torch.cuda.memory_allocated() <= before + workspaces


def test_others_may_use_the_device_as_they_like_once_a_job_is_done(make_model: Callable[..., Path]) -> None:
    """Nobody may wait for the whole device while a graph is captured."""
    rng = random.Random(3)
    folder = make_model("qwen3", head_dim=64)
    batch = [[rng.randrange(256) for _ in range(200)] for _ in range(80)]
    with sgl.Engine(model_path=str(folder), device="cuda", chunked_prefill_size=1024) as engine:
        for _ in range(3):
            engine.generate(input_ids=batch, sampling_params={"max_new_tokens": 24, "ignore_eos": True})
            for _ in range(100):
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                time.sleep(0.003)


def test_a_crowd_with_aborts_leaves_no_page_behind(make_model: Callable[..., Path]) -> None:
    rng = random.Random(5)
    folder = make_model("qwen3", head_dim=64)
    batch = [[rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(600)]
    params = [
        {
            "temperature": 0.7,
            "top_p": 0.9,
            "max_new_tokens": rng.randint(1, 60),
            "sampling_seed": index,
            "ignore_eos": True,
        }
        for index in range(len(batch))
    ]
    with sgl.Engine(
        model_path=str(folder), device="cuda", dtype="float32", max_total_tokens=2048, max_running_requests=64
    ) as engine:
        stream = engine.generate(
            input_ids=batch, sampling_params=params, rid=[f"r{index}." for index in range(600)], stream=True
        )
        victims = set(rng.sample(range(600), 100))
        for index in victims:
            engine.abort(rid=f"r{index}.")
        tokens: dict[int, list[int]] = {index: [] for index in range(600)}
        kinds: dict[int, str] = {}
        for chunk in stream:
            tokens[chunk["index"]] += chunk["output_ids"]
            if chunk["meta_info"]["finish_reason"] is not None:
                kinds[chunk["index"]] = chunk["meta_info"]["finish_reason"]["type"]
        assert set(kinds) == set(range(600))
        assert {index for index, kind in kinds.items() if kind == "abort"} <= victims
        whole = engine.generate(input_ids=batch, sampling_params=params)
        for index, result in enumerate(whole):
            assert len(result["output_ids"]) == params[index]["max_new_tokens"]
            assert tokens[index] == result["output_ids"][: len(tokens[index])]
        assert engine.flush_cache().success
