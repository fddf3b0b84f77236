"""A step for which memory does not suffice runs in parts, with the tokens of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenmill
from tokenmill.messages import StepPlan
from tokenmill.runner import drawing, eager
from tokenmill.runner.executor import Executor

pytestmark = pytest.mark.cpu


def random_plan(rng: np.random.Generator) -> StepPlan:
    num_decodes, num_prefills = rng.integers(0, 6), rng.integers(0, 5)
    if num_decodes + num_prefills == 0:
        num_prefills = 1
    counts = np.concatenate([np.ones(num_decodes), rng.integers(1, 9, num_prefills)]).astype(np.int32)
    samples = rng.random(len(counts)) < 0.7
    samples[:num_decodes] = True
    nothing = np.zeros(0, dtype=np.int32)
    return StepPlan(
        slots=rng.permutation(20)[: len(counts)].astype(np.int32),
        starts=rng.integers(0, 50, len(counts)).astype(np.int32),
        counts=counts,
        samples=samples,
        num_decodes=int(num_decodes),
        token_ids=rng.integers(0, 99, counts[num_decodes:].sum()).astype(np.int32),
        page_slots=nothing,
        page_groups=nothing,
        page_columns=nothing,
        page_ids=nothing,
    )


def tokens_of(plan: StepPlan) -> list[tuple[int, int, int | None]]:
    """(slot, position, token id; None if the device knows it) of all tokens in their order."""
    ids = iter(plan.token_ids.tolist())
    tokens = []
    for row, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
        assert row >= plan.num_decodes or count == 1
        tokens += [
            (int(slot), int(start) + step, None if row < plan.num_decodes else next(ids))
            for step in range(count)
        ]
    assert next(ids, None) is None
    return tokens


def draws_of(plan: StepPlan) -> list[tuple[int, int]]:
    """(slot, position) of the tokens that are drawn."""
    ends = plan.starts + plan.counts
    return list(zip(plan.slots[plan.samples].tolist(), ends[plan.samples].tolist(), strict=True))


def test_both_parts_of_a_split_are_the_whole() -> None:
    rng = np.random.default_rng(4)
    for _ in range(300):
        plan = random_plan(rng)
        total = int(plan.counts.sum())
        for num_tokens in range(1, total):
            first, second = eager.split(plan, num_tokens)
            assert first.counts.sum() == num_tokens
            assert min(*first.counts, *second.counts) > 0
            assert tokens_of(first) + tokens_of(second) == tokens_of(plan)
            assert draws_of(first) + draws_of(second) == draws_of(plan)


# ── a whole engine that runs out of memory ────────────────────────────────────────────────────


class Memory:
    """Room for a number of tokens; steps beyond it fail, some of them after they wrote half of their work."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.draws = 10**9
        self.num_failures = 0
        self.longest = 0

    def take(self, num_tokens: int, limit: int) -> None:
        if num_tokens > limit:
            self.num_failures += 1
            raise torch.OutOfMemoryError(f"no room for {num_tokens}")

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(executor: Executor, token_ids_T: torch.Tensor, layout: Any, **rest: Any) -> torch.Tensor:
            hidden: torch.Tensor = original(executor, token_ids_T, layout, **rest)
            self.take(len(token_ids_T), self.tokens)
            self.longest = max(self.longest, len(token_ids_T))
            return hidden

        return forward

    def sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.take(len(logits), self.draws)
            tokens: torch.Tensor = original(logits, *rest)
            return tokens

        return sample


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory(10**9)
    monkeypatch.setattr(Executor, "forward", memory.forward(Executor.forward))
    monkeypatch.setattr(drawing, "sample", memory.sample(drawing.sample))
    return memory


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(8)
    shared = rng.integers(0, 250, 40).tolist()
    return [shared * (index % 2) + rng.integers(0, 250, 3 + 9 * index).tolist() for index in range(9)]


def params() -> list[dict[str, Any]]:
    return [
        {
            "temperature": 0.8 * (index % 3),
            "top_p": 0.9,
            "sampling_seed": index,
            "max_new_tokens": 12,
            "min_new_tokens": 4 * (index % 2),
        }
        for index in range(9)
    ]


@pytest.mark.parametrize(("tokens", "draws"), [(64, 10**9), (10, 10**9), (1, 10**9), (10**9, 3), (17, 2)])
def test_an_engine_short_of_memory_gives_the_same_tokens(
    make_model: Callable[..., Path], memory: Memory, tokens: int, draws: int
) -> None:
    with tokenmill.Engine(model_path=str(make_model("qwen3")), device="cpu", dtype="float32") as engine:
        expected = engine.generate(input_ids=prompts(), sampling_params=params())
        engine.flush_cache()
        memory.tokens, memory.draws = tokens, draws
        results = engine.generate(input_ids=prompts(), sampling_params=params())
    assert memory.num_failures > 0
    assert [r["output_ids"] for r in results] == [r["output_ids"] for r in expected]


def test_memory_that_comes_back_is_used_again(make_model: Callable[..., Path], memory: Memory) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
    with tokenmill.Engine(model_path=str(make_model()), device="cpu", dtype="float32") as engine:
        memory.tokens = 4
        engine.generate(input_ids=[list(range(40))], sampling_params=greedy)
        failures = memory.num_failures
        assert failures <= 5  # the limit is remembered
        memory.tokens, memory.longest = 10**9, 0
        for _ in range(6):
            engine.flush_cache()
            engine.generate(input_ids=[list(range(40))], sampling_params=greedy)
        assert memory.longest == 40
        assert memory.num_failures == failures


def test_a_row_of_which_no_token_fits_fails_and_the_engine_goes_on(
    make_model: Callable[..., Path], memory: Memory
) -> None:
    with tokenmill.Engine(model_path=str(make_model()), device="cpu", dtype="float32") as engine:
        memory.tokens = 0
        with pytest.raises(tokenmill.RequestFailed, match="no room for 1") as failed:
            engine.generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 2})
        assert (failed.value.error_type, failed.value.status_code) == ("out_of_memory", 503)
        memory.tokens = 10**9
        assert engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 2})["output_ids"]
        assert memory.longest == 3  # that row left no limit behind
