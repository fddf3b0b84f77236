"""What is told of a pile of requests before it runs, against what it then does."""

from __future__ import annotations

import json
import logging
import random
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as sgl
from tokenmill.frontend import planning
from tokenmill.frontend.planning import SAMPLE_ROWS, sample_of
from tokenmill.frontend.prefixes import cached_tokens
from tokenmill.frontend.speed import Speed, forecast
from tokenmill.kvcache import Cache
from tokenmill.messages import EngineFacts, Request
from tokenmill.sampling_params import SamplingParams

pytestmark = pytest.mark.cpu

# A step takes a second, whatever is in it.
STEPS = Speed(0.0, 0.0, (1, 1000), (1.0, 1.0), 0.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path="tiny", max_running_requests=8, random_seed=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def facts(llm: sgl.Engine) -> EngineFacts:
    return llm._client.facts


def shared_prompts(seed: int, count: int = 40) -> list[list[int]]:
    """Prompts of a forest: groups within groups, and some that are equal."""
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        known = draw.choice(prompts) if prompts and draw.random() < 0.7 else []
        kept = known[: draw.choice([len(known), draw.randint(0, len(known))])]
        prompts.append(kept + [draw.randrange(4) for _ in range(draw.choice([0, 1, 5, 16, 40])) or range(1)])
    return prompts


def request(prompt: list[int], new: int = 4, salt: bytes = b"") -> Request:
    params = SamplingParams(max_new_tokens=new)
    ids = np.array(prompt, dtype=np.int32)
    return Request("x", ids, params, new, 0, (), 0, cache_namespace=salt)


# ── tokens ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_salt": ["a", "b"] * 20},
        {"return_logprob": True, "logprob_start_len": [0, -1, 1, -1] * 10},
        {"return_hidden_states": [True, False] * 20},
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_tokens_are_those_that_the_engine_counts(llm: sgl.Engine, options: dict[str, Any], n: int) -> None:
    prompts = shared_prompts(n)
    params = [{"max_new_tokens": 1 + index % 3, "ignore_eos": True, "n": n} for index in range(40)]
    plan = llm.plan(None, params, prompts, **options)
    llm.flush_cache()
    results = llm.generate(None, params, prompts, **options)
    told = {
        key: sum(result["meta_info"][key] for result in results)
        for key in ("prompt_tokens", "cached_tokens", "completion_tokens")
    }
    assert plan.prompt_tokens == told["prompt_tokens"]
    assert plan.output_tokens == plan.max_output_tokens == told["completion_tokens"]
    assert plan.cached_tokens == told["cached_tokens"] > 0
    assert (plan.rows, plan.requests, plan.sampled_rows) == (40, 40 * n, None)


def test_the_order_is_that_of_the_engine(llm: sgl.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all can run at once, and where not."""
    seen: list[list[Request]] = []

    def cached(requests: list[Request], **sizes: Any) -> Any:
        seen.append(requests)
        return np.zeros(len(requests), dtype=np.int64)

    monkeypatch.setattr(planning, "cached_tokens", cached)
    draw = random.Random(3)
    for count in (8, 40):  # of eight rows
        prompts = [[index % 3] * 16 + [index] for index in range(count)]
        params = [{"max_new_tokens": draw.randint(1, 9), "ignore_eos": True} for _ in range(count)]
        llm.plan(None, params, prompts)
        order = [int(request.prompt_ids[-1]) for request in seen.pop()]
        lengths = [params[place]["max_new_tokens"] for place in order]
        groups = [place % 3 for place in order]
        num_changes = sum(one != other for one, other in pairwise(groups))
        assert (lengths == sorted(lengths, reverse=True)) == (count == 8)
        assert (num_changes == 2) == (count == 40)


def test_outputs_are_bounded_or_as_long_as_the_caller_knows(llm: sgl.Engine) -> None:
    params = [{"max_new_tokens": 10}, {"max_new_tokens": 50}, {"max_new_tokens": 50, "ignore_eos": True}]
    prompts = ["a", "b", "c"]
    assert llm.plan(prompts, params).output_tokens == 110
    plan = llm.plan(prompts, params, mean_output_tokens=20)
    assert plan.output_tokens == 10 + 20 + 50
    assert plan.max_output_tokens == 110
    assert llm.plan(prompts, params, mean_output_tokens=1e300).output_tokens == 110
    with pytest.raises(sgl.InvalidArgument, match="mean_output_tokens"):
        llm.plan(prompts, params, mean_output_tokens=-1)


def test_expected_outputs_keep_their_limits_and_their_sum(llm: sgl.Engine) -> None:
    assert llm.plan("a", {"max_new_tokens": 9, "min_new_tokens": 6}, mean_output_tokens=2).output_tokens == 6
    for mean, total in ((2.5, 250), (0.5, 50), (9.7, 900)):
        plan = llm.plan(["a"] * 100, {"max_new_tokens": 9}, mean_output_tokens=mean)
        assert plan.output_tokens == total


@pytest.mark.parametrize("room", [{"context_length": 16}, {"context_length": 2}, {"max_total_tokens": 16}])
def test_what_a_small_engine_runs_it_plans(room: dict[str, int]) -> None:
    with sgl.Engine(model_path="tiny", **room) as engine:
        prompt, params = {"input_ids": [5]}, {"max_new_tokens": 1, "ignore_eos": True}
        output = engine.generate(**prompt, sampling_params=params)
        plan = engine.plan(**prompt, sampling_params=params)
        assert plan.output_tokens == output["meta_info"]["completion_tokens"] == 1


def test_what_a_plan_measures_with_is_no_request(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "tokenmill"),
        sgl.Engine(model_path="tiny", enable_metrics=True, log_requests=True, log_level="info") as engine,
    ):
        engine.plan("Hi", {"max_new_tokens": 1})
        assert "Receive" not in caplog.text
        engine.generate("Hi", {"max_new_tokens": 1})
        figures = [line for line in engine.get_metrics().splitlines() if "num_requests_total" in line]
    assert [line.rpartition(" ")[2] for line in figures if not line.startswith("#")] == ["1.0"]


def test_faults_are_those_of_generate(llm: sgl.Engine) -> None:
    with pytest.raises(sgl.InvalidArgument, match="temperature"):
        llm.plan("a", {"temperature": -1})
    with pytest.raises(sgl.InvalidArgument, match="session_params"):
        llm.plan("a", session_params={"id": llm.open_session(1000)})
    with pytest.raises(sgl.InvalidArgument, match="prompt"):
        llm.plan(3)


def test_a_prefix_that_made_way_is_computed_again() -> None:
    """Two groups by turns, and a pool that holds one of them: nothing is found. With more room, all is."""
    requests = [request([group] * 160 + [index]) for index in range(6) for group in (1, 2)]
    small = cached_tokens(requests, page_size=16, pool_tokens=176)
    large = cached_tokens(requests, page_size=16, pool_tokens=2000)
    assert small.tolist() == [0] * 12
    assert large.tolist() == [0, 0] + [160] * 10


def test_evictions_are_those_of_the_books() -> None:
    """Against the page books of the core, with rows that come one by one."""
    for seed in range(8):
        prompts = [ids[:100] for ids in shared_prompts(seed, 120)]
        cache, expected = Cache(num_pages=40, page_size=4), []
        for ids in prompts:
            row = cache.match(np.array(ids, dtype=np.int32).tobytes())
            expected.append(4 * row.num_shared)
            assert cache.reserve(row, len(ids))
            cache.commit(row, array("i", ids), num_tokens=len(ids))
            cache.release(row)
        told = cached_tokens([request(ids, 0) for ids in prompts], page_size=4, pool_tokens=160)
        unlimited = cached_tokens([request(ids, 0) for ids in prompts], page_size=4, pool_tokens=10**6)
        assert told.sum() == pytest.approx(sum(expected), rel=0.1)
        assert told.sum() < 0.8 * unlimited.sum()


def test_the_last_token_is_always_computed() -> None:
    requests = [request([7] * 32), request([7] * 32), request([7] * 33), request([7] * 32, salt=b"other")]
    assert cached_tokens(requests, page_size=16, pool_tokens=10**6).tolist() == [0, 16, 32, 0]


# ── time ──────────────────────────────────────────────────────────────────────────────────────


def test_steps_are_those_of_the_scheduler(facts: EngineFacts, core_steps: Callable[..., int]) -> None:
    """Played through in advance, against a scheduler that plans them one by one."""
    for seed in range(6):
        draw = random.Random(seed)
        rows = [(draw.randint(1, 40), draw.choice([1, 3, 30])) for _ in range(60)]
        prompts, outputs = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
        limits = {"max_running_requests": 8, "max_step_tokens": 64, "max_total_num_tokens": 64 * 400}
        small = replace(facts, page_size=4, **limits)
        told = forecast(STEPS, small, prompts=prompts, cached=np.zeros_like(prompts), outputs=outputs)
        assert told.seconds == pytest.approx(core_steps(rows), rel=0.15)
        assert told.peak_rows == 8


def test_memory_limits_how_many_rows_run_at_once(facts: EngineFacts) -> None:
    prompts, outputs = np.full(100, 500), np.full(100, 100)
    small = replace(facts, max_running_requests=64, max_total_num_tokens=6000)
    told = forecast(STEPS, small, prompts=prompts, cached=np.zeros_like(prompts), outputs=outputs)
    assert told.peak_rows == 10
    assert 5000 <= told.peak_tokens <= 6000
    roomy = replace(small, max_total_num_tokens=10**6)
    assert forecast(STEPS, roomy, prompts=prompts, cached=prompts // 2, outputs=outputs).peak_rows == 64


def test_rows_of_one_token_are_there_for_a_step(facts: EngineFacts) -> None:
    def peaks(prompts: list[int], outputs: list[int], **room: int) -> tuple[int, int]:
        told = forecast(
            STEPS,
            replace(facts, **room),
            prompts=np.array(prompts),
            cached=np.zeros(len(prompts), np.int64),
            outputs=np.array(outputs),
        )
        return told.peak_rows, told.peak_tokens

    assert peaks([3] * 5, [1] * 5) == (5, 15)
    assert peaks([3] * 100, [1] * 100) == (8, 24)
    assert peaks([40] * 100, [1] * 100, max_step_tokens=128) == (3, 120)
    assert peaks([3] * 6, [1, 1, 1, 4, 4, 4]) == (6, 18 + 3)
    assert peaks([3] * 3, [4] * 3) == (3, 9 + 9)


def test_seconds_are_near_those_of_the_run(llm: sgl.Engine) -> None:
    """Other programs of the machine come and go: this tells an estimate from a wrong unit, no more."""
    prompts = [f"The capital of country {index} is" for index in range(48)]
    params = {"max_new_tokens": 24, "ignore_eos": True}
    plan = llm.plan(prompts, params)
    began = time.perf_counter()
    llm.generate(prompts, params)
    actual = time.perf_counter() - began
    assert actual / 6 < plan.seconds < actual * 6


# ── nothing else changes ──────────────────────────────────────────────────────────────────────


def test_a_plan_leaves_no_trace(make_model: Callable[..., Path]) -> None:
    """Neither in the seeds of later requests, nor in what is cached for them."""
    folder = str(make_model("llama"))

    def outputs(*, plans: bool) -> list[Any]:
        found = []
        with sgl.Engine(model_path=folder, device="cpu", random_seed=5) as engine:
            for _ in range(3):
                result = engine.generate(input_ids=[7] * 40, sampling_params={"max_new_tokens": 20})
                found.append((result["output_ids"], result["meta_info"]["cached_tokens"]))
                if plans:
                    engine.plan(["My name is", "Hello"], {"max_new_tokens": 4})
        return found

    without = outputs(plans=False)
    assert outputs(plans=True) == without
    assert without[0][0] != without[1][0]
    assert without[1][1] == 32


# ── many rows ─────────────────────────────────────────────────────────────────────────────────


def test_a_long_pile_is_guessed_from_a_sample_in_seconds(llm: sgl.Engine) -> None:
    draw = random.Random(1)
    systems = [[draw.randrange(500) for _ in range(64)] for _ in range(50)]
    prompts = [systems[index % 50] + [index % 500] * 3 for index in range(100_000)]
    llm.plan("measures the speed")
    began = time.perf_counter()
    plan = llm.plan(None, {"max_new_tokens": 3}, prompts)
    assert time.perf_counter() - began < 10
    assert plan.rows == plan.requests == 100_000
    assert plan.sampled_rows == SAMPLE_ROWS
    assert plan.prompt_tokens == pytest.approx(6_700_000, rel=0.001)
    assert plan.cached_share == pytest.approx(64 / 67, rel=0.01)
    assert plan.max_output_tokens == 300_000
    assert f"guessed from {SAMPLE_ROWS:,}" in str(plan)


def test_arguments_for_a_long_pile_are_read_as_for_a_short_one(llm: sgl.Engine) -> None:
    class Column:
        """What some libraries hold texts in: no list, but it gives one."""

        def __len__(self) -> int:
            return 9000

        def tolist(self) -> list[str]:
            return ["a"] * 9000

    params = {"max_new_tokens": 2}
    plan = llm.plan(Column(), [params] * 9000, priority=(1,) * 9000, token_ids_logprob=[1, 2, 3])
    assert (plan.rows, plan.sampled_rows, plan.max_output_tokens) == (9000, SAMPLE_ROWS, 18_000)
    for count in (SAMPLE_ROWS, 8999):
        for each in (llm.plan, llm.generate):
            with pytest.raises(sgl.InvalidArgument, match=f"params has length {count}, .* length 9000"):
                each(["a"] * 9000, [params] * count)
            with pytest.raises(sgl.InvalidArgument, match=f"priority has length {count}, .* 9000 prompts"):
                each(["a"] * 9000, params, priority=[1] * count)
    ids = np.zeros((9000, 2), np.int32)
    plan = llm.plan(None, params, ids, return_logprob=True, token_ids_logprob=ids)
    assert (plan.rows, plan.prompt_tokens) == (9000, 18_000)


def test_a_sample_is_made_of_neighbours_from_everywhere() -> None:
    assert sample_of(SAMPLE_ROWS) is None
    chosen = sample_of(100_000)
    assert chosen is not None
    assert len(set(chosen)) == SAMPLE_ROWS
    assert (chosen[0], chosen[-1]) == (0, 99_999)
    assert sum(after == before + 1 for before, after in pairwise(chosen)) > 8000


def test_a_plan_can_be_read_by_people_and_programs(llm: sgl.Engine) -> None:
    plan = llm.plan(["Hello"] * 3, {"max_new_tokens": 8})
    told = json.loads(json.dumps(plan.to_dict()))
    assert told["rows"] == 3
    assert told["cached_share"] == plan.cached_share
    assert told["speed"]["decode_rows"][0] == 1
    lines = str(plan).splitlines()
    assert [line.split()[0] for line in lines] == ["rows", "prompt", "output", "time", "memory"]
    assert "24, if none ends early" in lines[2]
    plan = llm.plan(["a b c"] * 100, {"max_new_tokens": 1})
    assert plan.running_rows == 8
    assert plan.peak_tokens == 8 * plan.prompt_tokens // 100
    empty = llm.plan([])
    assert (empty.rows, empty.prompt_tokens, empty.seconds) == (0, 0, pytest.approx(0, abs=0.1))


def test_rows_that_cannot_run_are_counted_if_they_are_returned(llm: sgl.Engine) -> None:
    prompts = ["Once upon a time", "The capital", "One, two"]
    params = [{"max_new_tokens": 3}, {"temperature": -1}, {"max_new_tokens": 5}]
    with pytest.raises(sgl.InvalidArgument, match=r"sampling_params\[1\]"):
        llm.plan(prompts, params)
    plan = llm.plan(prompts, params, on_error="return")
    assert (plan.rows, plan.requests, plan.invalid_rows, plan.max_output_tokens) == (3, 2, 1, 8)
    plan = llm.plan(prompts, {"max_new_tokens": 3, "n": 2}, on_error="return")
    assert (plan.rows, plan.requests, plan.invalid_rows) == (3, 6, 0)
    for rows in (["a", 5, "b", None], ["a", 5, "b", None] * 3000):
        plan = llm.plan(rows, {"max_new_tokens": 3}, on_error="return")
        assert (plan.rows, plan.requests, plan.invalid_rows) == (len(rows), len(rows) // 2, len(rows) // 2)
        with pytest.raises(sgl.WrongType, match=r"prompt\[1\] must be a string"):
            llm.plan(rows)
