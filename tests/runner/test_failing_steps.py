"""Steps that fail in a real engine: the row that makes them fail ends alone, and the others never notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenmill
from tokenmill.runner import drawing, results
from tokenmill.runner.executor import Executor
from tokenmill.runner.extras import Extras
from tokenmill.runner.quarantine import Losses, Quarantine

pytestmark = pytest.mark.cpu

POISON = 251  # a step that computes this token fails
SHARED = list(range(60, 100))


class Fault:
    """Raises what it is told to, when a step computes the poison, draws in a batch, or is brought home."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.poison = POISON
        self.where = ""
        self.num_raised = 0

    def strike(self, where: str) -> None:
        if self.error is not None and where == self.where:
            self.num_raised += 1
            raise self.error

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(executor: Executor, token_ids_T: torch.Tensor, layout: Any, **rest: Any) -> torch.Tensor:
            hidden: torch.Tensor = original(
                executor, token_ids_T, layout, **rest
            )  # keys and values are written
            if POISON in token_ids_T.tolist():
                self.strike("forward")
            return hidden

        return forward

    def sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(logits: torch.Tensor, *rest: Any) -> Any:
            if bool((logits.argmax(1) == self.poison).any()):
                self.strike("draw")
            return original(logits, *rest)

        return sample


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    fault = Fault()
    monkeypatch.setattr(Executor, "forward", fault.forward(Executor.forward))
    monkeypatch.setattr(drawing, "sample", fault.sample(drawing.sample))
    return fault


@pytest.fixture(scope="module")
def engine(make_model: Callable[..., Path]) -> Iterator[tokenmill.Engine]:
    """Few pages and short chunks: rows wait, share, and push each other back."""
    with tokenmill.Engine(
        model_path=str(make_model("qwen3")),
        device="cpu",
        dtype="float32",
        steps_in_flight=2,
        max_total_tokens=400,
        max_running_requests=6,
        chunked_prefill_size=24,
        page_size=4,
    ) as engine:
        yield engine


def prompts(poisoned: dict[int, int]) -> list[list[int]]:
    """Twelve prompts, two of three with a shared prefix; where the poison stands in some of them."""
    rng = np.random.default_rng(8)
    made = [SHARED * (index % 3 > 0) + rng.integers(0, 250, 2 + 3 * index).tolist() for index in range(12)]
    for index, place in poisoned.items():
        made[index][place] = POISON
    return made


PARAMS: list[dict[str, Any]] = [
    {
        "temperature": 0.9 * (index % 2),
        "top_p": 0.9 if index % 4 == 1 else 1.0,
        "frequency_penalty": 0.5 * (index % 5 == 3),
        "logit_bias": {str(POISON): -100.0},
        "min_new_tokens": 8 * (index % 7 == 2),
        "sampling_seed": index,
        "max_new_tokens": 14,
        "n": 2,
        "ignore_eos": True,
    }
    for index in range(12)
]
LOGPROBS = [index % 3 == 1 for index in range(12)]


def generate(engine: tokenmill.Engine, poisoned: dict[int, int], **options: Any) -> list[dict[str, Any]]:
    engine.flush_cache()
    return list(
        engine.generate(input_ids=prompts(poisoned), sampling_params=PARAMS, on_error="return", **options)
    )


def assert_alone(
    results: list[dict[str, Any]], expected: list[dict[str, Any]], poisoned: dict[int, int], error_type: str
) -> None:
    """Rows with the poison failed, with nothing; the others are as without it."""
    assert len(results) == 24
    for index, (result, whole) in enumerate(zip(results, expected, strict=True)):
        if index // 2 in poisoned:
            assert result["error"] is not None, index
            assert result["error"]["type"] == error_type
            assert result["output_ids"] == []
        else:
            assert result["error"] is None, index
            assert result["output_ids"] == whole["output_ids"], index
            shown, told = result["meta_info"], whole["meta_info"]
            assert ("output_token_logprobs" in shown) == ("output_token_logprobs" in told)
            if "output_token_logprobs" in told:
                numbers = [entry[0] for entry in shown["output_token_logprobs"]]
                wanted = [entry[0] for entry in told["output_token_logprobs"]]
                assert numbers == pytest.approx(wanted, abs=1e-4)


ERRORS = {"internal": ValueError("poison"), "out_of_memory": torch.OutOfMemoryError("no room")}
OPTIONS = {"return_logprob": LOGPROBS, "top_logprobs_num": 2, "return_hidden_states": LOGPROBS}


@pytest.fixture(scope="module")
def expected(engine: tokenmill.Engine) -> list[dict[str, Any]]:
    return generate(engine, {}, **OPTIONS)


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were postponed, step by step."""
    original, counts = Quarantine.collected, []

    def collected(quarantine: Quarantine, losses: Losses) -> None:
        counts.append(len(losses.postponed))
        original(quarantine, losses)

    monkeypatch.setattr(Quarantine, "collected", collected)
    return counts


@pytest.mark.parametrize("error_type", ERRORS)
@pytest.mark.parametrize(
    "poisoned",
    [
        {1: 20, 2: 20, 4: 45, 11: -1},  # in the prefix that others share up to there, twice, and behind it
        {0: 0, 3: -1, 5: 41},
    ],
)
def test_rows_with_the_poison_end_alone(
    engine: tokenmill.Engine,
    expected: list[dict[str, Any]],
    fault: Fault,
    tally: list[int],
    error_type: str,
    poisoned: dict[int, int],
) -> None:
    fault.error, fault.where = ERRORS[error_type], "forward"
    assert_alone(generate(engine, poisoned, **OPTIONS), expected, poisoned, error_type)
    assert 0 < fault.num_raised < 150
    assert sum(tally) > 0  # the second step in flight had been planned with what failed


def test_every_row_may_fail_and_the_engine_goes_on(
    engine: tokenmill.Engine, expected: list[dict[str, Any]], fault: Fault
) -> None:
    poisoned = dict.fromkeys(range(12), 0)
    fault.error, fault.where = ERRORS["internal"], "forward"
    results = generate(engine, poisoned, **OPTIONS)
    assert_alone(results, expected, poisoned, "internal")
    assert "its step failed: ValueError: poison" in results[0]["error"]["message"]
    fault.error = None
    assert_alone(generate(engine, {}, **OPTIONS), expected, {}, "")


GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.mark.parametrize("error_type", ERRORS)
def test_rows_whose_draw_fails_keep_what_they_had(
    engine: tokenmill.Engine, fault: Fault, error_type: str
) -> None:
    """The poison is a token that some of the rows would draw."""
    engine.flush_cache()
    expected = engine.generate(input_ids=prompts({}), sampling_params=GREEDY)
    outputs = [result["output_ids"] for result in expected]
    fault.poison = next(ids[5] for ids in outputs if ids.index(ids[5]) == 5)
    fault.error, fault.where = ERRORS[error_type], "draw"
    engine.flush_cache()
    results = engine.generate(input_ids=prompts({}), sampling_params=GREEDY, on_error="return")
    for result, ids in zip(results, outputs, strict=True):
        if fault.poison in ids:
            assert result["error"]["type"] == error_type
            assert result["output_ids"] == ids[: ids.index(fault.poison)]
        else:
            assert result["error"] is None
            assert result["output_ids"] == ids
    assert any(result["error"] is None for result in results)


def test_results_that_cannot_be_brought_to_the_host_fail_their_rows(
    engine: tokenmill.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(part: Any) -> Any:
        del part
        raise MemoryError("nothing left")

    with monkeypatch.context() as patch:
        patch.setattr(results, "_tokens", broken)
        failed = engine.generate(input_ids=[[1, 2], [3]], sampling_params=GREEDY, on_error="return")
    assert [result["error"]["type"] for result in failed] == ["out_of_memory"] * 2
    assert len(engine.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"]) == 12


def test_a_row_that_cannot_be_started_fails_alone(
    engine: tokenmill.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables are made when it enters its slot, before the step."""
    original = Extras.start

    def start(extras: Extras, starts: Any) -> None:
        if any(each is not None and each.presence_penalty == 0.5 for each in starts.extras):
            raise RuntimeError("no table")
        original(extras, starts)

    params = [GREEDY | {"presence_penalty": penalty} for penalty in (0, 0.5, 0.25)]
    engine.flush_cache()
    expected = engine.generate(input_ids=[SHARED] * 3, sampling_params=params)
    engine.flush_cache()
    monkeypatch.setattr(Extras, "start", start)
    found = engine.generate(input_ids=[SHARED] * 3, sampling_params=params, on_error="return")
    assert [result["error"] is None for result in found] == [True, False, True]
    assert [found[index]["output_ids"] for index in (0, 2)] == [expected[i]["output_ids"] for i in (0, 2)]


@pytest.mark.parametrize(
    "features", [{}, {"frequency_penalty": 0.5, "top_p": 0.9, "temperature": 0.7, "sampling_seed": 3}]
)
def test_a_model_that_computes_no_numbers_fails_the_rows_it_does_so_for(
    make_model: Callable[..., Path], features: dict[str, Any]
) -> None:
    """A token whose embedding is NaN; pages that held its keys and values harm nobody after it."""
    params = GREEDY | {"logit_bias": {str(POISON): -100.0}} | features
    poisoned = {1: 20, 4: 45, 11: -1}
    with tokenmill.Engine(
        model_path=str(make_model("qwen3")), device="cpu", max_total_tokens=300, steps_in_flight=2
    ) as engine:
        options: dict[str, Any] = {"sampling_params": params, "on_error": "return", "return_logprob": True}
        expected = engine.generate(input_ids=prompts({}), **options)
        name = "model.embed_tokens.weight"
        embedding = torch.tensor(engine.get_weights_by_name(name, truncate_size=300))
        embedding[POISON] = torch.nan
        engine.update_weights_from_tensor([(name, embedding)])
        for rows in (poisoned, {}):
            found = engine.generate(input_ids=prompts(rows), **options)
            for index, (result, whole) in enumerate(zip(found, expected, strict=True)):
                if index in rows:
                    assert result["error"]["type"] == "internal"
                    assert "not numbers (NaN)" in result["error"]["message"]
                else:
                    assert result["output_ids"] == whole["output_ids"]


def test_a_device_that_takes_no_more_work_ends_the_engine(
    make_model: Callable[..., Path], fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault.error, fault.where = RuntimeError("CUDA error: an illegal memory access was encountered"), "forward"
    monkeypatch.setattr(Quarantine, "_device_works", lambda quarantine: False)
    with (
        tokenmill.Engine(model_path=str(make_model("qwen3")), device="cpu") as engine,
        pytest.raises(tokenmill.EngineDead, match="illegal memory access"),
    ):
        engine.generate(input_ids=[[1], [POISON]], sampling_params=GREEDY)
    assert fault.num_raised == 1
