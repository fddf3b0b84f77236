"""Memory and speed of `engine.iter` over many short rows, and its throughput beside plain `generate`.

Run `python benchmarks/iteration.py [--model tiny] [--sizes 1000 10000] [--rounds 3] [--rows 2000]
[--max-new-tokens 1] [--stand-in]`. Prints for each size by how much the memory of the process grew and the
rows per second, then rows per second of both calls on the same rows, in turns, and the median ratio, by
the wall clock and by the time of the processor, which tells more on a machine that others use, too.
With `--stand-in` the core answers every row at once, without a model: what is left is the frontend's work.
The cache is small and full, and a window was full, before anything is measured.
"""

from __future__ import annotations

import argparse
import gc
import queue
import random
import resource
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenmill as sgl
from tokenmill.core import launch
from tokenmill.messages import EngineFacts, Finish, Need, Output, Request

_ROWS_IN_A_STEP = 64
_CACHE_TOKENS = 16_384
_LONG_PROMPT = 200
_ROWS_BETWEEN_LOOKS = 500


class StandIn:
    """A core that ends every request with one token."""

    def __init__(
        self, facts: EngineFacts, deliver: Callable[[Sequence[Output]], None], state: dict[str, Any]
    ) -> None:
        self.facts = facts
        self.need: Need = "none"
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
        answers = {
            "state": self._state,
            "device_seconds": None,
            "flush_cache": (True, "there is no cache"),
        }
        return answers[name]

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


def mebibytes() -> float:
    """Memory of this process right now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def seconds_of(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the wall clock, and of the processor in all threads."""
    began, worked = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - worked


def warm_up(engine: sgl.Engine, params: dict[str, Any]) -> None:
    """Run long prompts, all different, until the cache is full twice over, then a full window."""
    draw = random.Random(0).randrange
    count = 2 * _CACHE_TOKENS // _LONG_PROMPT
    ids = ([draw(10, 2000) for _ in range(_LONG_PROMPT)] for _ in range(count))
    deque(engine.iter(ids, params), maxlen=0)
    deque(engine.iter(prompts(2000), params), maxlen=0)


def measure_memory(engine: sgl.Engine, sizes: Sequence[int], params: dict[str, Any]) -> None:
    for size in sorted(sizes):
        gc.collect()
        before = peak = mebibytes()
        began = time.perf_counter()
        for number, _ in enumerate(engine.iter(prompts(size), params)):
            if number % _ROWS_BETWEEN_LOOKS == 0:
                peak = max(peak, mebibytes())
        speed = size / (time.perf_counter() - began)
        print(f"{size:>9,} rows  memory +{peak - before:6.1f} MiB  {speed:9,.0f} rows/s", flush=True)


def measure_ratio(engine: sgl.Engine, count: int, rounds: int, params: dict[str, Any]) -> None:
    texts = list(prompts(count))
    ratios: list[tuple[float, float]] = []
    for _ in range(rounds):
        engine.flush_cache()
        batch = seconds_of(lambda: engine.generate(texts, params))
        engine.flush_cache()
        rows = seconds_of(lambda: list(engine.iter(texts, params)))
        ratios.append((batch[0] / rows[0], batch[1] / rows[1]))
        print(f"generate {count / batch[0]:9,.0f} rows/s  iter {count / rows[0]:9,.0f} rows/s", flush=True)
    wall, processor = (statistics.median(each) for each in zip(*ratios, strict=True))
    print(f"iter has {wall:.1%} of the throughput of generate, and {processor:.1%} by processor time")


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
        warm_up(engine, params)
        measure_memory(engine, asked.sizes, params)
        if asked.rounds:
            measure_ratio(engine, asked.rows, asked.rounds, params)


if __name__ == "__main__":
    main()
