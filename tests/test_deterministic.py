"""`enable_deterministic_inference`: the bits of a row depend on nothing but the row.

`tests/gpu/test_deterministic_gpu.py` does the same on a GPU.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokenmill as sgl
from tests import random_calls
from tokenmill import batch
from tokenmill.errors import InvalidArgument

# Wide enough for the libraries to cut long sums where the number of rows tells them to.
WIDE = {"hidden_size": 640, "head_dim": 64, "intermediate_size": 1024, "initializer_range": 0.05}
LONG = {"max_position_embeddings": 1024}
WAYS = [
    pytest.param({}, 1, id="alone"),
    pytest.param({"chunked_prefill_size": 48, "max_running_requests": 4}, 8, id="chunked"),
    pytest.param({"disable_radix_cache": True}, 5, id="uncached"),
    pytest.param({"max_total_tokens": 400}, 8, id="preempted"),
]


def prompts() -> list[list[int]]:
    """Mixed lengths; half of them share their first 200 tokens."""
    rng = random.Random(7)
    shared = [rng.randrange(256) for _ in range(200)]
    return [
        shared * (index % 2) + [rng.randrange(256) for _ in range(rng.choice((1, 9, 130)))]
        for index in range(8)
    ]


def params(index: int) -> dict[str, Any]:
    """Drawn, some from the likeliest only, one with penalties."""
    chosen: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 10, "ignore_eos": True}
    return chosen | [{}, {"top_p": 0.9}, {"top_k": 20}, {"frequency_penalty": 0.5}][index % 4]


def numbers_of(engine: sgl.Engine, size: int) -> list[tuple[Any, ...]]:
    """What each row gets, computed `size` rows at a time: tokens, the log-probabilities of all of it, and the
    last hidden state."""
    given = prompts()
    found = []
    for begin in range(0, len(given), size):
        rows = range(begin, min(begin + size, len(given)))
        for result in engine.generate(
            input_ids=[given[row] for row in rows],
            sampling_params=[params(row) | {"sampling_seed": row} for row in rows],
            return_logprob=True,
            logprob_start_len=0,
            return_hidden_states="last",
        ):
            about = result["meta_info"]
            logprobs = [entry[0] for entry in about["input_token_logprobs"] + about["output_token_logprobs"]]
            found.append((result["output_ids"], logprobs, about["hidden_states"]))
    return found


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def rows_together(
    request: pytest.FixtureRequest, make_model: Callable[..., Path]
) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Arguments of an engine, and what each row gets when all are computed at once."""
    arguments = {
        "model_path": str(make_model("qwen3", **WIDE, **LONG)),
        "device": "cpu",
        "dtype": request.param,
        "enable_deterministic_inference": True,
    }
    with sgl.Engine(**arguments) as engine:
        numbers = numbers_of(engine, 8)
        assert numbers_of(engine, 8) == numbers  # the second time from the cache
    return arguments, numbers


@pytest.mark.parametrize(("arguments", "size"), WAYS)
def test_rows_have_the_same_bits_on_every_way(
    rows_together: tuple[dict[str, Any], list[tuple[Any, ...]]], arguments: dict[str, Any], size: int
) -> None:
    common, expected = rows_together
    with sgl.Engine(**common, **arguments) as engine:
        assert numbers_of(engine, size) == expected


def assert_calls_are_equal(folder: Path, device: str, dtype: str, seed: int) -> None:
    """Rows with random features, under random pressure, against each of them computed alone and plainly."""
    rng = random.Random(seed)
    calls = random_calls.draw_calls(rng, 14)
    common = {"model_path": str(folder), "device": device, "dtype": dtype, "max_total_tokens": 30_000}
    common |= {"enable_deterministic_inference": True}
    with sgl.Engine(**common, **random_calls.PLAIN) as engine:
        expected = random_calls.one_by_one(engine, calls)
    with sgl.Engine(**common | random_calls.draw_pressure(rng)) as engine:
        for _ in range(2):  # the second time from the cache, and on a GPU by graphs
            found = random_calls.at_once(engine, calls, rng)
            for call, result, wanted in zip(calls, found, expected, strict=True):
                assert result == wanted, call


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("family", "settings"), [("qwen3", {}), ("mistral", {"sliding_window": 24})], ids=["qwen3", "mistral"]
)
def test_random_rows_under_pressure(
    make_model: Callable[..., Path], family: str, settings: dict[str, Any], seed: int
) -> None:
    folder = make_model(family, head_dim=64, **LONG, **settings)
    assert_calls_are_equal(folder, "cpu", "bfloat16", seed)


def outputs_of_jobs(engine: sgl.Engine, folder: Path, name: str, stops: list[int]) -> bytes:
    """The output of a job that found only so many rows at first, and went on with more of them later."""
    rows = [{"input_ids": prompt, "sampling_params": params(index)} for index, prompt in enumerate(prompts())]
    source, output = folder / f"{name}.jsonl", folder / f"{name}-out.jsonl"
    for stop in (*stops, len(rows)):
        source.write_text("".join(json.dumps(row) + "\n" for row in rows[:stop]))
        batch.run(source, output, engine=engine, options={"return_logprob": True})
        engine.flush_cache()
    return output.read_bytes()


def test_a_job_in_parts_ends_with_the_bytes_of_a_whole_one(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = str(make_model("qwen3", **WIDE, **LONG))
    with sgl.Engine(
        model_path=folder, device="cpu", dtype="bfloat16", enable_deterministic_inference=True
    ) as engine:
        whole = outputs_of_jobs(engine, tmp_path, "whole", [])
        assert outputs_of_jobs(engine, tmp_path, "parts", [1, 3, 6]) == whole


def test_the_tokens_are_those_of_transformers(
    make_model: Callable[..., Path], transformers_greedy: Callable[..., list[int]]
) -> None:
    folder = make_model("qwen3", **WIDE, **LONG)
    with sgl.Engine(model_path=str(folder), device="cpu", enable_deterministic_inference=True) as engine:
        results = engine.generate(
            input_ids=prompts(), sampling_params={"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        )
    for prompt, result in zip(prompts(), results, strict=True):
        assert result["output_ids"] == transformers_greedy(folder, prompt, 24)


def test_kernels_that_cannot_promise_it_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"enable_deterministic_inference=True cannot go .*'torch'"):
        sgl.Engine(device="cpu", attention_backend="torch", enable_deterministic_inference=True)
