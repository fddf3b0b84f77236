"""Memory and speed of `engine.iter` over many short rows, and its throughput beside plain `generate`.

Run `python benchmarks/iteration.py [--model tiny] [--sizes 1000 10000] [--rounds 3] [--rows 2000]
[--max-new-tokens 1] [--stand-in]`. Prints for each size by how much the peak of the process' memory grew and
rows per second, then rows per second of both calls on the same rows, in turns, and the median ratio.
With `--stand-in` the core answers every row at once, without a model: what is left is the frontend's work.
The cache is small and full before anything is measured, so that it does not grow with the rows.
"""

from __future__ import annotations

import argparse
import gc
import queue
import resource
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tokenmill as sgl
from tokenmill.core import launch
from tokenmill.messages import EngineFacts, Finish, Output, Request

_ROWS_IN_A_STEP = 64
_CACHE_TOKENS = 16_384
_TOKENS_IN_A_ROW = 16


class StandIn:
    """A core that ends every request with one token."""

    def __init__(
        self, facts: EngineFacts, deliver: Callable[[Sequence[Output]], None], state: dict[str, Any]
    ) -> None:
        self.facts = facts
        self._state = state
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Sequence[Request] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        self._inbox.put(requests)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """All has ended already."""

    def call(self, name: str, **arguments: Any) -> Any:
        if name == "state":
            return self._state
        assert name == "flush_cache"
        return True, "there is no cache"

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (requests := self._inbox.get()) is not None:
            for start in range(0, len(requests), _ROWS_IN_A_STEP):
                self._deliver([_answer(request) for request in requests[start : start + _ROWS_IN_A_STEP]])


def _answer(request: Request) -> Output:
    return Output(request.id, (5,), Finish("length", length=1), cached_tokens=0, num_retractions=0)


def use_stand_in() -> None:
    """Give engines made from now on the facts of the true core, and the stand-in."""
    start = launch.start_core

    def start_stand_in(config: Any, *, deliver: Any, died: Any) -> Any:
        core = start(config, deliver=lambda outputs: None, died=died)
        state = core.call("state")
        core.close()
        return StandIn(core.facts, deliver, state)

    launch.start_core = start_stand_in


def prompts(count: int) -> Iterator[str]:
    return (f"Question {index}: what is the capital of country {index % 97}?" for index in range(count))


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure_memory(engine: sgl.Engine, sizes: Sequence[int], params: dict[str, Any]) -> None:
    for size in sorted(sizes):
        gc.collect()
        before = peak_mebibytes()
        seconds = seconds_of(lambda count=size: deque(engine.iter(prompts(count), params), maxlen=0))
        grown = peak_mebibytes() - before
        print(f"{size:>9,} rows  peak memory +{grown:6.1f} MiB  {size / seconds:9,.0f} rows/s", flush=True)


def measure_ratio(engine: sgl.Engine, count: int, rounds: int, params: dict[str, Any]) -> None:
    texts = list(prompts(count))
    ratios = []
    for _ in range(rounds):
        engine.flush_cache()
        batch = seconds_of(lambda: engine.generate(texts, params))
        engine.flush_cache()
        rows = seconds_of(lambda: list(engine.iter(texts, params)))
        ratios.append(batch / rows)
        print(f"generate {count / batch:9,.0f} rows/s  iter {count / rows:9,.0f} rows/s", flush=True)
    print(f"iter has {statistics.median(ratios):.1%} of the throughput of generate (median of {rounds})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 10_000])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=1)
    parser.add_argument("--stand-in", action="store_true")
    asked = parser.parse_args()
    if asked.stand_in:
        use_stand_in()
    params = {"max_new_tokens": asked.max_new_tokens, "temperature": 0}
    with sgl.Engine(model_path=asked.model, random_seed=1, max_total_tokens=_CACHE_TOKENS) as engine:
        deque(engine.iter(prompts(2 * _CACHE_TOKENS // _TOKENS_IN_A_ROW), params), maxlen=0)
        measure_memory(engine, asked.sizes, params)
        if asked.rounds:
            measure_ratio(engine, asked.rows, asked.rounds, params)


if __name__ == "__main__":
    main()
