"""Rows that fail inside a step: they end alone, and every other request gets what it gets alone.

The mill of these tests loses what a failed row should have written, so that whoever reads it cannot go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.messages import Failure, StepPlan, StepResult

pytestmark = pytest.mark.unit

POISON_SEED = 99  # of requests whose rows fail once they compute this position,
DRAWN_POISON_SEED = 98  # or whose draw fails
POISON = Failure("poison", "out_of_memory", 503)


class FaultyMill:
    """Wraps a fake mill: rows of poisoned requests fail, rows that read what these left out are postponed."""

    def __init__(self, mill: Any, poison_position: int) -> None:
        self._mill = mill
        self._position = poison_position
        self.num_postponed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mill, name)

    def launch(self, plan: StepPlan) -> None:
        mill = self._mill
        mill._set_up(plan)
        ids = iter(plan.token_ids.tolist())
        tokens: list[int] = []
        failures: list[tuple[int, Failure]] = []
        postponed: list[int] = []
        lost: set[int] = set()
        for index, (slot, start) in enumerate(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True)):
            row, end = mill.rows[slot], start + int(plan.counts[index])
            given = [row.last_token] if index < plan.num_decodes else [next(ids) for _ in range(start, end)]
            fails = row.seed == POISON_SEED and end > self._position
            if fails or not self._can_read(row, start):
                if fails:
                    failures.append((index, POISON))
                else:
                    postponed.append(index)
                lost |= self._lose(row, start, end)
                tokens.append(-1)
                continue
            for position, token in zip(range(start, end), given, strict=True):
                mill._write(row, position, token, set())
            mill.num_computed += end - start
            if plan.samples[index]:
                row.last_token = mill._read(row, end)
                if row.seed == DRAWN_POISON_SEED and end > self._position:
                    failures.append((index, POISON))
                    row.last_token = 0
            tokens.append(row.last_token if plan.samples[index] else -1)
        self.num_postponed += len(postponed)
        token_ids = np.array(tokens, dtype=np.int32)
        mill.results.append(
            StepResult(
                token_ids,
                failures=tuple(failures),
                postponed=tuple(postponed),
                lost_pages=tuple(sorted(lost)),
            )
        )

    def _can_read(self, row: Any, start: int) -> bool:
        groups = range(self._mill.num_groups)
        return all(
            self._mill._place(row, group, position) in self._mill.entries
            for group in groups
            for position in range(start)
        )

    def _lose(self, row: Any, start: int, end: int) -> set[int]:
        for group in range(self._mill.num_groups):
            for position in range(start, end):
                self._mill.entries.pop(self._mill._place(row, group, position), None)
        return {self._mill._place(row, 0, position)[1] for position in range(start, end)}


_PREFIXES: tuple[list[int], ...] = ([], [1, 2, 3, 4], [1, 2, 3, 4, 0, 0, 0, 0, 2, 2])
requests = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            lambda prefix, tail: [*prefix, *tail],
            st.sampled_from(_PREFIXES),
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
        ),
        "max_new_tokens": st.integers(0, 14),
        "seed": st.sampled_from([0, 0, 1, POISON_SEED, DRAWN_POISON_SEED]),
        "report_interval": st.sampled_from([0, 1]),
    }
)
set_ups = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 4]),
        "max_rows": st.integers(1, 8),
        "max_step_tokens": st.one_of(st.integers(1, 10), st.just(60)),
        "depth": st.integers(1, 4),
        "prefix_caching": st.booleans(),
        "policy": st.sampled_from([None, "fcfs", "lpm"]),
    }
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    set_up=set_ups,
    spare_pages=st.integers(0, 20),
    groups=st.integers(1, 2),
    position=st.integers(0, 24),
    jobs=st.lists(st.tuples(requests, st.integers(0, 12)), min_size=1, max_size=14),
)
def test_others_get_what_they_get_alone(
    harness: Callable[..., Any],
    make_request: Callable[..., Any],
    alone: Callable[..., Any],
    set_up: dict[str, Any],
    spare_pages: int,
    groups: int,
    position: int,
    jobs: list[Any],
) -> None:
    queue = [(make_request(str(index), **job), start) for index, (job, start) in enumerate(jobs)]
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request, _ in queue)
    smallest = -(-longest // set_up["page_size"]) + spare_pages
    sizes = [smallest + 3 * group for group in range(groups)]
    loop = harness(num_pages=sizes, max_sequence_tokens=longest, **set_up)
    loop.mill = FaultyMill(loop.mill, position)

    for turn in range(13):
        loop.submit(*(request for request, start in queue if start == turn))
        if not loop.scheduler.idle:
            loop.step()
    loop.run()

    for request, _ in queue:
        tokens, finish = alone(request)
        told, last = loop.tokens(request.id), loop.last(request.id).finish
        if last.kind == "abort":
            assert request.seed in (POISON_SEED, DRAWN_POISON_SEED)
            assert (last.message, last.error_type, last.status_code) == ("poison", "out_of_memory", 503)
            assert told == tokens[: len(told)]
        else:
            assert (told, last) == (tokens, finish)
            reached = len(request.prompt_ids) + len(tokens) - 1 > position
            draws = request.max_new_tokens > 0
            assert not (reached and draws and request.seed in (POISON_SEED, DRAWN_POISON_SEED))
    assert loop.cache.num_used_pages == 0
    loop.cache.flush()
    assert loop.cache.num_free_pages == sum(sizes)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_who_shares_a_prefix_with_a_row_that_fails_computes_it_anew(
    harness: Callable[..., Any], make_request: Callable[..., Any], alone: Callable[..., Any], depth: int
) -> None:
    prompt = [1, 2, 3, 4] * 3
    loop = harness(depth=depth, max_step_tokens=10)
    loop.mill = FaultyMill(loop.mill, 6)
    poison = make_request("poison", [*prompt, 0], 5, seed=POISON_SEED)
    others = [make_request(f"other {index}", [*prompt, index], 6, seed=index) for index in range(4)]
    loop.submit(poison, *others)
    loop.run()
    assert loop.last("poison").finish.message == "poison"
    assert all(loop.tokens(request.id) == alone(request)[0] for request in others)
    assert depth == 1 or loop.mill.num_postponed > 0
