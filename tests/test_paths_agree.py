"""Every way through the engine gives the tokens of transformers: alone, batched, chunked, cached, preempted,
with steps in flight, in a thread or in a process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokenmill as sgl

NUM_NEW = 48
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def prompts(count: int = 10, longest: int = 90) -> list[list[int]]:
    """Mixed lengths; half of them share their first 40 tokens."""
    rng = random.Random(7)
    shared = [rng.randrange(256) for _ in range(40)]
    return [
        shared * (index % 2) + [rng.randrange(256) for _ in range(rng.randint(1, longest - 40))]
        for index in range(count)
    ]


def greedy(**more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True, **more}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_running_requests": 1}, id="alone"),
        pytest.param({"chunked_prefill_size": 16, "max_running_requests": 4}, id="chunked"),
        pytest.param({"max_total_tokens": 304}, id="preempted"),
        pytest.param({"steps_in_flight": 3, "max_total_tokens": 400}, id="steps-in-flight"),
        pytest.param({"page_size": 1, "schedule_policy": "lpm"}, id="page-size-1"),
        pytest.param({"disable_radix_cache": True}, id="uncached"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    family: str,
    arguments: dict[str, Any],
) -> None:
    folder = make_model(family)
    given = prompts(4 if arguments.get("max_running_requests") == 1 else 10)
    with sgl.Engine(model_path=str(folder), device="cpu", **arguments) as engine:
        results = engine.generate(input_ids=given, sampling_params=greedy())
        again = engine.generate(input_ids=given, sampling_params=greedy())
    for prompt, result, repeated in zip(given, results, again, strict=True):
        expected = transformers_greedy(folder, prompt, NUM_NEW)
        assert result["output_ids"] == expected
        assert repeated["output_ids"] == expected
    retractions = sum(result["meta_info"]["num_retractions"] for result in results)
    assert (retractions > 0) == (arguments.get("max_total_tokens", 1000) < 1000)
    cached = sum(result["meta_info"]["cached_tokens"] for result in again)
    assert (cached > 0) == (not arguments.get("disable_radix_cache", False))


def test_the_core_in_its_own_process_gives_the_same(
    make_model: Callable[..., Path], transformers_greedy: Callable[..., list[int]]
) -> None:
    folder = make_model("llama")
    with sgl.Engine(model_path=str(folder), device="cpu", core_process=True) as engine:
        results = engine.generate(input_ids=prompts(4), sampling_params=greedy())
    for prompt, result in zip(prompts(4), results, strict=True):
        assert result["output_ids"] == transformers_greedy(folder, prompt, NUM_NEW)


def test_sampled_rows_are_the_same_alone_and_in_any_batch(make_model: Callable[..., Path]) -> None:
    folder = make_model("qwen3")
    params = [
        {
            "temperature": 0.9,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.02,
            "sampling_seed": seed,
            "max_new_tokens": 24,
        }
        for seed in range(8)
    ]
    batch = prompts(8)
    with sgl.Engine(model_path=str(folder), device="cpu") as engine:
        together = engine.generate(input_ids=batch, sampling_params=params)
        reversed_order = engine.generate(input_ids=batch[::-1], sampling_params=params[::-1])[::-1]
        engine.flush_cache()
        alone = [
            engine.generate(input_ids=prompt, sampling_params=param)
            for prompt, param in zip(batch, params, strict=True)
        ]
    for one, two, three in zip(together, reversed_order, alone, strict=True):
        assert one["output_ids"] == two["output_ids"] == three["output_ids"]
    assert len({tuple(result["output_ids"]) for result in together}) == len(batch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_random_crowd_on_a_small_pool(make_model: Callable[..., Path], dtype: str) -> None:
    """Hundreds of mixed requests with random aborts: every row answered, no page lost, no hang."""
    rng = random.Random(3)
    folder = make_model("llama")
    batch = [[rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(200)]
    lengths = [rng.randint(1, 40) for _ in batch]
    params = [{"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in lengths]
    with sgl.Engine(model_path=str(folder), device="cpu", dtype=dtype, max_total_tokens=512) as engine:
        streams = engine.generate(input_ids=batch, sampling_params=params, rid="row", stream=True)
        victims = set(rng.sample(range(len(batch)), 40))
        for index in victims:
            engine.abort(rid=f"row_{index}")
        finished: dict[int, dict[str, Any]] = {}
        tokens: dict[int, list[int]] = {index: [] for index in range(len(batch))}
        for chunk in streams:
            tokens[chunk["index"]] += chunk["output_ids"]
            if chunk["meta_info"]["finish_reason"] is not None:
                assert chunk["index"] not in finished
                finished[chunk["index"]] = chunk["meta_info"]["finish_reason"]
        assert set(finished) == set(range(len(batch)))
        for index, length in enumerate(lengths):
            if finished[index]["type"] == "length":
                assert len(tokens[index]) == length
            else:
                assert finished[index]["type"] == "abort"
                assert index in victims
        whole = engine.generate(input_ids=batch, sampling_params=params)
        for index, result in enumerate(whole):
            assert len(result["output_ids"]) == lengths[index]
            if dtype == "float32":
                assert tokens[index] == result["output_ids"][: len(tokens[index])]
        assert engine.flush_cache().success
