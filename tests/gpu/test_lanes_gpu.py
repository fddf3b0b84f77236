"""Prompts beside rows that decode, each on multiprocessors of their own: the tokens of one step at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenmill as sgl
from tokenmill.kernels.repeated_layers import RepeatedLayers
from tokenmill.messages import Lane, StepPlan
from tokenmill.runner.runner import LocalRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a CUDA device that can be parted",
    ),
]
COUNT = 32
ARGUMENTS = {
    "device": "cuda",
    "mem_fraction_static": 0.2,
    "chunked_prefill_size": 512,
    "max_running_requests": 64,
}
MOST_TRIES = 20


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[Lane]:
    """The lane of each step that is launched."""
    launch, seen = LocalRunner.launch, []

    def observed(self: LocalRunner, plan: StepPlan) -> None:
        seen.append(plan.lane)
        launch(self, plan)

    monkeypatch.setattr(LocalRunner, "launch", observed)
    return seen


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(256) for _ in range(rng.randint(40, 300))] for _ in range(COUNT)]


def params(*, temperature: float = 0.0) -> list[dict[str, Any]]:
    """The longest outputs first, so that who decodes outlasts who waits."""
    return [
        {
            "temperature": temperature,
            "max_new_tokens": 400 - 12 * at,
            "ignore_eos": True,
            "sampling_seed": at,
        }
        for at in range(COUNT)
    ]


def run_in_lanes(engine: sgl.Engine, lanes: list[Lane], **arguments: Any) -> list[dict[str, Any]]:
    """The results of the first run that had lanes; they open beside other work."""
    for _ in range(MOST_TRIES):
        lanes.clear()
        engine.flush_cache()
        results = engine.generate(input_ids=prompts(), **arguments)
        if Lane.PROMPTS in lanes:
            return results
        time.sleep(0.5)
    raise AssertionError("lanes never opened")


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_of_one_step_at_a_time(
    make_model: Callable[..., Path], lanes: list[Lane], family: str, temperature: float
) -> None:
    folder = str(make_model(family, head_dim=64, max_position_embeddings=1024, num_hidden_layers=6))
    asked = params(temperature=temperature)
    with sgl.Engine(model_path=folder, dtype="float32", steps_in_flight=1, **ARGUMENTS) as engine:
        plain = engine.generate(input_ids=prompts(), sampling_params=asked)
    assert set(lanes) == {Lane.WHOLE}
    with sgl.Engine(model_path=folder, dtype="float32", **ARGUMENTS) as engine:
        apart = [run_in_lanes(engine, lanes, sampling_params=asked) for _ in range(2)]
    assert lanes.count(Lane.PROMPTS) > 2
    assert lanes.count(Lane.DECODES) > 2
    assert not RepeatedLayers._refused  # layers that repeat others have their lane's processors, too
    for results in apart:
        assert [each["output_ids"] for each in results] == [each["output_ids"] for each in plain]


def test_fewer_processors_compute_the_same(make_model: Callable[..., Path], lanes: list[Lane]) -> None:
    """In bfloat16 other tiles round otherwise, so texts part some time; the first tokens are the same."""
    folder, asked = str(make_model("qwen2", head_dim=64, max_position_embeddings=1024)), params()
    with sgl.Engine(model_path=folder, dtype="bfloat16", steps_in_flight=1, **ARGUMENTS) as engine:
        plain = engine.generate(input_ids=prompts(), sampling_params=asked)
    with sgl.Engine(model_path=folder, dtype="bfloat16", **ARGUMENTS) as engine:
        apart = run_in_lanes(engine, lanes, sampling_params=asked)
    same = [one["output_ids"][:4] == other["output_ids"][:4] for one, other in zip(plain, apart, strict=True)]
    assert sum(same) >= 0.8 * COUNT
    for each, told in zip(apart, asked, strict=True):
        assert len(each["output_ids"]) == told["max_new_tokens"]


def test_what_rows_ask_for_comes_from_lanes_too(make_model: Callable[..., Path], lanes: list[Lane]) -> None:
    """Log-probabilities, penalties, and ends that must not come yet."""
    folder = str(make_model("llama", head_dim=64, max_position_embeddings=1024))
    asked: list[dict[str, Any]] = [
        each | {"frequency_penalty": 0.5, "min_new_tokens": 5} if at % 3 else each
        for at, each in enumerate(params(temperature=0.7))
    ]
    wanted = {"sampling_params": asked, "return_logprob": True, "logprob_start_len": -1}
    with sgl.Engine(model_path=folder, dtype="float32", steps_in_flight=1, **ARGUMENTS) as engine:
        plain = engine.generate(input_ids=prompts(), **wanted)
    with sgl.Engine(model_path=folder, dtype="float32", **ARGUMENTS) as engine:
        apart = run_in_lanes(engine, lanes, **wanted)
    for one, other in zip(plain, apart, strict=True):
        assert one["output_ids"] == other["output_ids"]
        ours, theirs = (
            [entry[0] for entry in each["meta_info"]["output_token_logprobs"]] for each in (one, other)
        )
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_an_engine_in_lanes_stops_and_goes_on(make_model: Callable[..., Path], lanes: list[Lane]) -> None:
    """Requests are aborted in the middle of it; memory is released and taken back; no page is lost."""
    folder, asked = str(make_model("qwen2", head_dim=64, max_position_embeddings=1024)), params()
    with sgl.Engine(model_path=folder, dtype="float32", **ARGUMENTS) as engine:
        before = run_in_lanes(engine, lanes, sampling_params=asked)
        stream = engine.generate(input_ids=prompts(), sampling_params=asked, stream=True)
        next(stream)
        stream.close()
        engine.abort(abort_all=True)
        engine.generate(input_ids=[[1]], sampling_params={"max_new_tokens": 1})  # they have ended by then
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        after = run_in_lanes(engine, lanes, sampling_params=asked)
        assert engine.flush_cache().success
    assert [each["output_ids"] for each in before] == [each["output_ids"] for each in after]
