"""Python time of the scheduler per decode step: `schedule` plus `take_in`, no device, no model.

    python benchmarks/scheduler_overhead.py [--rows 256] [--steps 400] [--depth 2]

Prints the mean and the median over steps in which all rows decode, and apart from these the cost of others.
CPU time of the one thread, so that a busy machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

import numpy as np

from tokenmill.core.policy import create_policy
from tokenmill.core.scheduler import Scheduler, SchedulerLimits
from tokenmill.kvcache import Cache
from tokenmill.messages import Request, StepPlan, StepResult
from tokenmill.sampling_params import SamplingParams


def make_requests(count: int, *, num_prompt: int, num_new: int, interval: int) -> list[Request]:
    """Requests with random prompts of `num_prompt` to twice as many tokens and one stop id never drawn."""
    generator = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=num_new)
    lengths = generator.integers(num_prompt, 2 * num_prompt, size=count)
    return [
        Request(
            id=str(index),
            prompt_ids=generator.integers(0, 1000, size=length, dtype=np.int32),
            params=params,
            max_new_tokens=num_new,
            seed=index,
            stop_ids=(7,),
            report_interval=interval,
        )
        for index, length in enumerate(lengths)
    ]


def run(scheduler: Scheduler, *, depth: int, generator: np.random.Generator) -> list[tuple[int, bool, float]]:
    """Run until idle; for each turn: rows that decode, whether anything else happened, CPU seconds."""
    turns: list[tuple[int, bool, float]] = []
    plans: deque[StepPlan] = deque()
    while not scheduler.idle:
        result = None
        if len(plans) == depth:
            result = _result(plans.popleft(), generator)
        started = time.thread_time()
        outputs = scheduler.take_in(result) if result is not None else []
        plan = scheduler.plan_step()
        scheduler.settle()
        seconds = time.thread_time() - started
        if plan is None:
            if plans:
                scheduler.take_in(_result(plans.popleft(), generator))
            continue
        plans.append(plan)
        is_mixed = plan.num_decodes != len(plan.slots) or any(output.finish for output in outputs)
        turns.append((plan.num_decodes, is_mixed, seconds))
    return turns


def _result(plan: StepPlan, generator: np.random.Generator) -> StepResult:
    drawn = generator.integers(1000, 50_000, size=len(plan.slots), dtype=np.int32)
    return StepResult(token_ids=np.where(plan.samples, drawn, np.int32(-1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--report-interval", type=int, default=0)
    parser.add_argument("--no-prefix-caching", action="store_true")
    chosen = parser.parse_args()

    longest = 512 + chosen.steps
    cache = Cache(
        num_pages=chosen.rows * (longest // chosen.page_size + 2),
        page_size=chosen.page_size,
        prefix_caching=not chosen.no_prefix_caching,
    )
    limits = SchedulerLimits(max_rows=chosen.rows, max_step_tokens=8192, max_sequence_tokens=longest)
    scheduler = Scheduler(limits, cache=cache, policy=create_policy("fcfs", cache))
    scheduler.submit(
        make_requests(chosen.rows, num_prompt=256, num_new=chosen.steps, interval=chosen.report_interval)
    )
    turns = run(scheduler, depth=chosen.depth, generator=np.random.default_rng(1))
    steady = [1e6 * seconds for rows, is_mixed, seconds in turns if rows == chosen.rows and not is_mixed]
    other = [1e6 * seconds for rows, is_mixed, seconds in turns if rows != chosen.rows or is_mixed]
    print(
        f"{chosen.rows} rows decode, depth {chosen.depth}, page size {chosen.page_size}: "
        f"mean {statistics.mean(steady):.0f} us, median {statistics.median(steady):.0f} us per step "
        f"({len(steady)} steps)"
    )
    print(f"steps with prefill or ends: {len(other)}, {sum(other) / chosen.rows:.1f} us per request in all")


if __name__ == "__main__":
    main()
