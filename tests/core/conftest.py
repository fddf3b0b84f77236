"""A fake mill that computes nothing but checks everything, and a loop that drives a scheduler with it."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tokenmill.core.loop import Cancel, Close, Inbox, Loop, Submit
from tokenmill.core.policy import choose_policy, create_policy
from tokenmill.core.priority import Priorities
from tokenmill.core.scheduler import Scheduler, SchedulerLimits
from tokenmill.kvcache import Cache
from tokenmill.messages import EngineFacts, Finish, Lane, Output, Request, StepPlan, StepResult
from tokenmill.sampling_params import SamplingParams

VOCABULARY = 5  # small, so that different requests come to share prefixes

# Of a core whose runner is a fake.
FACTS = EngineFacts(
    architecture="Fake",
    device="cpu",
    device_name="none",
    dtype="float32",
    attention_backend="none",
    vocab_size=1000,
    hidden_size=1,
    num_layers=1,
    num_parameters=0,
    context_length=128,
    max_sequence_tokens=128,
    max_total_num_tokens=256,
    page_size=4,
    max_running_requests=8,
    max_step_tokens=32,
    steps_in_flight=2,
    eos_token_ids=(),
    weight_bytes=0,
    cache_bytes=0,
    load_seconds=0.0,
)


def fold(chain: int, token: int) -> int:
    """What a key/value entry stands for: its token and everything before it."""
    return (chain * 6364136223846793005 + token * 1442695040888963407 + 97) % 2**61


def draw(chain: int, seed: int) -> int:
    """The next token after a sequence; depends on nothing else."""
    return ((chain ^ seed) >> 17) % VOCABULARY


def run_alone(request: Request) -> tuple[list[int], Finish]:
    """What a request must produce, computed without pages, rows or neighbours."""
    chain = 0
    for token in request.prompt_ids.tolist():
        chain = fold(chain, token)
    tokens: list[int] = []
    while len(tokens) < request.max_new_tokens:
        token = draw(chain, request.seed)
        chain = fold(chain, token)
        tokens.append(token)
        if token in request.stop_ids:
            return tokens, Finish("stop", matched=token)
    return tokens, Finish("length", length=len(tokens))


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    """What the outputs of one request tell, in their order."""
    return [token for output in outputs for token in output.token_ids]


@dataclass
class FakeRow:
    """A row of the device: nothing of its last occupant is left."""

    seed: int
    last_token: int | None = None
    pages: dict[tuple[int, int], int] = field(default_factory=dict)  # (group, column) -> page


class FakeMill:
    """Runs plans in launch order. A page remembers the entries written to it, and every read is checked.

    Plans for `Lane.PROMPTS` run at once, or as late as they may if it `lags`.
    """

    def __init__(self, page_size: int, num_groups: int, *, lags: bool = False) -> None:
        self.lags = lags
        self.waiting_prompts: deque[StepPlan] = deque()
        self.prompt_results: deque[StepResult] = deque()
        self.page_size = page_size
        self.num_groups = num_groups
        self.rows: dict[int, FakeRow] = {}
        self.entries: dict[tuple[int, int, int], tuple[int, int]] = {}  # group, page, offset -> token, chain
        self.results: deque[StepResult] = deque()
        self.num_computed = 0

    def launch(self, plan: StepPlan) -> None:
        if plan.lane is Lane.PROMPTS:
            assert not plan.num_decodes
            self.waiting_prompts.append(plan)
            if not self.lags:
                self._run_prompts()
            return
        if plan.lane is Lane.WHOLE or plan.awaits_prompts:
            self._run_prompts()
        self.results.append(self._run(plan))

    def collect(self, lane: Lane = Lane.WHOLE) -> StepResult:
        if lane is Lane.WHOLE:
            return self.results.popleft()
        if not self.prompt_results:
            self._run_prompts(most=1)
        return self.prompt_results.popleft()

    def _run_prompts(self, most: int = 100) -> None:
        while self.waiting_prompts and most:
            self.prompt_results.append(self._run(self.waiting_prompts.popleft()))
            most -= 1

    def _run(self, plan: StepPlan) -> StepResult:
        self._set_up(plan)
        slots, counts = plan.slots.tolist(), plan.counts.tolist()
        assert len(set(slots)) == len(slots)
        assert counts[: plan.num_decodes] == [1] * plan.num_decodes
        assert min(counts) > 0
        assert len(plan.token_ids) == sum(counts[plan.num_decodes :])
        prompt_ids = iter(plan.token_ids.tolist())
        written: set[tuple[int, int, int]] = set()
        drawn = []
        for index, (slot, start) in enumerate(zip(slots, plan.starts.tolist(), strict=True)):
            row = self.rows[slot]
            for position in range(start, start + counts[index]):
                token = row.last_token if index < plan.num_decodes else next(prompt_ids)
                assert token is not None
                self._write(row, position, token, written)
            self.num_computed += counts[index]
            if plan.samples[index]:
                row.last_token = self._read(row, start + counts[index])
            drawn.append(row.last_token if plan.samples[index] else -1)
        return StepResult(token_ids=np.array(drawn, dtype=np.int32))

    def _set_up(self, plan: StepPlan) -> None:
        if plan.new_rows is not None:
            for slot, seed in zip(plan.new_rows.slots.tolist(), plan.new_rows.seeds.tolist(), strict=True):
                self.rows[slot] = FakeRow(seed)
        columns = (plan.page_slots, plan.page_groups, plan.page_columns, plan.page_ids)
        for slot, group, column, page in zip(*(each.tolist() for each in columns), strict=True):
            self.rows[slot].pages[group, column] = page

    def _place(self, row: FakeRow, group: int, position: int) -> tuple[int, int, int]:
        column, offset = divmod(position, self.page_size)
        return group, row.pages[group, column], offset

    def _write(self, row: FakeRow, position: int, token: int, written: set[tuple[int, int, int]]) -> None:
        for group in range(self.num_groups):
            chain = self.entries[self._place(row, group, position - 1)][1] if position else 0
            place = self._place(row, group, position)
            assert place not in written, "two rows of a step write to one place"
            written.add(place)
            self.entries[place] = (token, fold(chain, token))

    def _read(self, row: FakeRow, length: int) -> int:
        for group in range(self.num_groups):
            chain = 0
            for position in range(length):
                token, stored = self.entries[self._place(row, group, position)]
                chain = fold(chain, token)
                assert stored == chain, f"position {position} reads keys of another sequence"
        return draw(chain, row.seed)


class Unprepared:
    """A runner that has nothing to prepare."""

    preparation_seconds = 0.0

    def prepare_more(self, num_rows: int) -> bool:
        return False


class Harness:
    """A scheduler, its cache and a fake mill; `step` is one turn of the loop with `depth` steps in flight.

    With `lanes`, the seed of when they do, prompts run beside rows that decode; see `FakeMill` for `lags`.
    """

    def __init__(
        self,
        *,
        num_pages: int | Sequence[int] = 64,
        page_size: int = 4,
        max_rows: int = 8,
        max_step_tokens: int = 64,
        max_sequence_tokens: int = 64,
        depth: int = 1,
        prefix_caching: bool = True,
        policy: str | None = "fcfs",
        priorities: Priorities | None = None,
        max_queued: int | None = None,
        lanes: int | None = None,
        lags: bool = False,
    ) -> None:
        # Whoever is more urgent than others needs the rows at once: there are no lanes, then.
        priorities = priorities or Priorities()
        self.moments = None if lanes is None or priorities.enabled else random.Random(lanes)
        if self.moments is not None:  # more rows may come to decode at once
            max_step_tokens = max(max_step_tokens, max_rows)
        self.cache = Cache(num_pages=num_pages, page_size=page_size, prefix_caching=prefix_caching)
        limits = SchedulerLimits(
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_sequence_tokens=max_sequence_tokens,
            max_queued=max_queued,
        )
        self.limits = limits
        self.scheduler = Scheduler(
            limits,
            cache=self.cache,
            policy=create_policy(policy, self.cache)
            if policy
            else choose_policy(self.cache, max_rows=max_rows, has_priorities=priorities.enabled),
            priorities=priorities,
        )
        num_groups = 1 if isinstance(num_pages, int) else len(num_pages)
        self.mill = FakeMill(page_size, num_groups, lags=lags)
        self.depth = depth
        self.plans: list[StepPlan] = []
        self.outputs: dict[str, list[Output]] = {}

    def submit(self, *requests: Request) -> list[Output]:
        return self.keep(self.scheduler.submit(requests))

    def launch(self) -> StepPlan | None:
        plan = self._launched(self.scheduler.plan_step())
        self.scheduler.settle()
        self.scheduler.check_invariants()
        return plan

    def launch_prompts(self) -> StepPlan | None:
        """A step with prompts beside those that decode, if there are any."""
        plan = self._launched(self.scheduler.plan_prompts())
        self.scheduler.check_invariants()
        return plan

    def _launched(self, plan: StepPlan | None) -> StepPlan | None:
        if plan is not None:
            assert int(plan.counts.sum()) <= self.limits.max_step_tokens
            rows, decoding = self.scheduler._rows, plan.slots[: plan.num_decodes]
            assert all(plan.starts[: plan.num_decodes] < rows.room[decoding]), "a row without a page"
            self.plans.append(plan)
            self.mill.launch(plan)
        return plan

    def take_in(self, lane: Lane = Lane.WHOLE) -> list[Output]:
        return self.keep(self.scheduler.take_in(self.mill.collect(lane), lane))

    def step(self) -> None:
        if self.moments is not None:
            self._launch_prompts(self.moments)
        plan = self.launch() if self.scheduler.num_in_flight < self.depth else None
        if self.scheduler.num_in_flight == self.depth or plan is None:
            assert self.scheduler.awaits_steps, "nothing runs and nothing can"
            self.take_in(Lane.WHOLE if self.scheduler.num_in_flight else Lane.PROMPTS)
        while self.scheduler.num_prompts_in_flight and self.moments.random() < 0.3:
            self.take_in(Lane.PROMPTS)

    def _launch_prompts(self, moments: random.Random) -> None:
        while self.scheduler.num_prompts_in_flight < 3 and moments.random() < 0.5:
            if self.launch_prompts() is None:
                return

    def run(self) -> None:
        for _ in range(20_000):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("the scheduler never becomes idle")

    def keep(self, outputs: list[Output]) -> list[Output]:
        self.scheduler.check_invariants()
        for output in outputs:
            earlier = self.outputs.setdefault(output.request_id, [])
            assert not earlier or earlier[-1].finish is None, "an output after the last"
            earlier.append(output)
        return outputs

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def last(self, request_id: str) -> Output:
        return self.outputs[request_id][-1]


def run_loop(
    world: Harness,
    runner: Any,
    requests: Sequence[Request],
    *,
    cancelled: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[Output]]:
    """The outputs of each request; whenever some come, one more of those to be cancelled is."""
    inbox, ended = Inbox(), set()
    outputs: dict[str, list[Output]] = {}
    waiting = list(cancelled)

    def deliver(delivered: Sequence[Output]) -> None:
        for output in delivered:
            outputs.setdefault(output.request_id, []).append(output)
            if output.finish is not None:
                ended.add(output.request_id)
        if waiting:
            inbox.put(Cancel([waiting.pop()]))
        if len(ended) == len(requests):
            inbox.put(Close())

    grammars: Any = SimpleNamespace(close=lambda: None)
    inbox.put(Submit(requests))
    loop: Any = partial(Loop, runner, world.scheduler, world.cache, grammars=grammars)
    loop(inbox=inbox, deliver=deliver, clock=clock).run()
    return outputs


@pytest.fixture
def harness() -> Callable[..., Harness]:
    """`harness(num_pages=…, depth=…, …)`: a scheduler with a fake mill."""
    return Harness


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """`make_request("a", [1, 2], 5, …)`: a request for the fake mill."""

    def make(
        name: str,
        prompt: Sequence[int],
        max_new_tokens: int = 4,
        *,
        seed: int = 0,
        stop_ids: tuple[int, ...] = (),
        held_ids: tuple[int, ...] = (),
        report_interval: int = 0,
        priority: int | None = None,
        timeout_seconds: float | None = None,
        cache_namespace: bytes = b"",
        **params: Any,
    ) -> Request:
        return Request(
            id=name,
            prompt_ids=np.array(prompt, dtype=np.int32),
            params=SamplingParams(max_new_tokens=max_new_tokens, **params),
            max_new_tokens=max_new_tokens,
            seed=seed,
            stop_ids=stop_ids,
            report_interval=report_interval,
            priority=priority,
            timeout_seconds=timeout_seconds,
            cache_namespace=cache_namespace,
            held_ids=held_ids,
        )

    return make


@pytest.fixture
def alone() -> Callable[[Request], tuple[list[int], Finish]]:
    """What a request must produce."""
    return run_alone
