"""Where the GPU's time goes in a workload, from a trace: by kernel, and how long no kernel ran at all.

    python benchmarks/where_time_goes.py --model Qwen3-0.6B --workload w1 [--runs 3] [--top 12] [--json OUT]

The workload runs twice, so that later runs compile nothing and capture little. Then `--runs` runs have an
event before and behind each step: `between_steps_percent` is, for each of them, the share of the time from
the first step to the last in which the device had no step to run. A last run is traced: `idle_percent` is the
share of the time between the first and the last kernel in which no kernel or copy ran, `waiting_percent` that
of pauses over 10 microseconds, in which the device waits for the host; the others are its own, between two
kernels. Tracing makes the host slower, and the device wait for it. So `gpu_idle_percent` takes from the trace
only the device's own pauses, and adds the median of `between_steps_percent`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from run_workloads import Adapter
from torch.profiler import ProfilerActivity, profile

import models
import tokenmill
import workloads
from tokenmill.messages import StepPlan
from tokenmill.runner.lanes import Lanes
from tokenmill.runner.recorder import Graph
from tokenmill.runner.results import Results

WORKLOADS: dict[str, Callable[[], list[workloads.Request]]] = {
    "w1": lambda: workloads.batch(256),
    "w1_1024": lambda: workloads.batch(1024),
    "w2": lambda: workloads.latency(1),
    "w3": workloads.shared_prefix,
    "w4": workloads.long_prefill,
}


LONG_PAUSE = 10  # microseconds


@dataclass(frozen=True)
class Trace:
    """Microseconds: from the first kernel to the last, its pauses (start, length), and the time by kernel."""

    began: float  # the first kernel, in seconds since the epoch
    span: float
    pauses: list[tuple[float, float]]
    by_kernel: dict[str, tuple[float, int]]

    def percent(self, least: float) -> float:
        """Share of the span in pauses of at least so many microseconds."""
        return round(100 * sum(length for _, length in self.pauses if length > least) / self.span, 2)


class StepEvents:
    """Events around steps: one before a step's first graph, or before what it launches kernel by kernel, and
    one behind its results.
    """

    def __init__(self) -> None:
        self._first = torch.cuda.Event(enable_timing=True)
        self._start: torch.cuda.Event | None = None
        self._is_graph = False
        self._steps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the steps that are launched within."""
        order, replay, send = Lanes.order, Graph.replay, Results.__init__

        def noted_order(lanes: Lanes, plan: StepPlan) -> None:
            order(lanes, plan)
            self._start, self._is_graph = _event(), False

        def noted_replay(graph: Graph[Any]) -> None:
            if not self._is_graph:
                self._start, self._is_graph = _event(), True
            replay(graph)

        def noted_send(results: Results, *arguments: Any) -> None:
            send(results, *arguments)
            if self._start is not None:
                self._steps.append((self._start, _event()))

        self._first.record()
        with (
            mock.patch.object(Lanes, "order", noted_order),
            mock.patch.object(Graph, "replay", noted_replay),
            mock.patch.object(Results, "__init__", noted_send),
        ):
            yield
        torch.cuda.synchronize()

    def between_percent(self) -> float:
        """Share of the time from the first step to the last in which none could run."""
        at = self._first.elapsed_time
        whole, pauses = span_and_pauses((at(start), at(stop)) for start, stop in self._steps)
        return round(100 * sum(length for _, length in pauses) / whole, 2)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def span_and_pauses(times: Iterable[tuple[float, float]]) -> tuple[float, list[tuple[float, float]]]:
    """Of things that ran from one time to another: from the first start to the last stop, and the times when
    nothing ran in between (start, length), counted from the first start."""
    spans = sorted(times)
    pauses, reached = [], spans[0][0]
    for start, stop in spans:
        if start > reached:
            pauses.append((reached - spans[0][0], start - reached))
        reached = max(reached, stop)
    return reached - spans[0][0], pauses


def read_trace(path: Path) -> Trace:
    """Add up the device's events of a Chrome trace."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    events = [
        event for event in trace["traceEvents"] if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}
    ]
    by_kernel: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in events:
        name = short(event["name"])
        seconds, count = by_kernel[name]
        by_kernel[name] = (seconds + event["dur"], count + 1)
    span, pauses = span_and_pauses((event["ts"], event["ts"] + event["dur"]) for event in events)
    began = trace.get("baseTimeNanoseconds", 0) / 1e9 + min(event["ts"] for event in events) / 1e6
    return Trace(began, span, pauses, dict(by_kernel))


def short(name: str) -> str:
    """A kernel's name without its template arguments and return type."""
    plain = re.sub(r"<.*", "", name).split("(")[0].replace("void ", "").strip()
    return (plain or name)[-60:]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the workload again and again, the last time traced."""
    with tempfile.TemporaryDirectory() as folder:
        models.write(folder)
        engine = tokenmill.Engine(
            model_path=str(Path(folder) / options.model),
            skip_tokenizer_init=True,
            load_format="dummy",
            **json.loads(options.arguments),
        )
        with engine:
            adapter = Adapter(engine)
            requests = WORKLOADS[options.workload]()
            for _ in range(2):
                adapter.flush()
                adapter.generate(requests)
            seconds, between = [], []
            for _ in range(options.runs):
                adapter.flush()
                events = StepEvents()
                with events.noted():
                    start = time.perf_counter()
                    adapter.generate(requests)
                    seconds.append(time.perf_counter() - start)
                between.append(events.between_percent())
            adapter.flush()
            with profile(activities=[ProfilerActivity.CUDA]) as traced:
                adapter.generate(requests)
                torch.cuda.synchronize()
            path = Path(folder) / "trace.json"
            traced.export_chrome_trace(str(path))
            trace = read_trace(path)
    tokens = sum(request.max_new_tokens for request in requests)
    return {
        "model": options.model,
        "workload": options.workload,
        "seconds": round(statistics.median(seconds), 3),
        "output_tokens_per_second": round(tokens / statistics.median(seconds)),
        "between_steps_percent": between,
        "traced_seconds": round(trace.span / 1e6, 3),
        "idle_percent": trace.percent(0),
        "waiting_percent": trace.percent(LONG_PAUSE),
        "gpu_idle_percent": round(
            statistics.median(between) + trace.percent(0) - trace.percent(LONG_PAUSE), 2
        ),
        "longest_pauses": [
            {"at_seconds": round(start / 1e6, 4), "milliseconds": round(length / 1e3, 3)}
            for start, length in sorted(trace.pauses, key=lambda pause: -pause[1])[:40]
        ],
        "kernels": {
            name: {"milliseconds": round(time / 1e3, 2), "launches": count}
            for name, (time, count) in sorted(trace.by_kernel.items(), key=lambda item: -item[1][0])
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(models.CONFIGS), default="Qwen3-0.6B")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="w1")
    parser.add_argument("--runs", type=int, default=3, help="runs with events (default: 3)")
    parser.add_argument("--top", type=int, default=12, help="kernels to show (default: 12)")
    parser.add_argument("--arguments", default="{}", help="more arguments of Engine, as a JSON object")
    parser.add_argument("--json", type=Path, help="append the whole result to this file")
    options = parser.parse_args()
    result = run(options)
    kernels = result["kernels"]
    print({name: value for name, value in result.items() if name not in ("kernels", "longest_pauses")})
    print(
        "longest pauses:",
        ", ".join(f"{row['milliseconds']} ms" for row in result["longest_pauses"][: options.top]),
    )
    for name, row in list(kernels.items())[: options.top]:
        each = 1e3 * row["milliseconds"] / row["launches"]
        print(f"{row['milliseconds']:>10.1f} ms {row['launches']:>8} x {each:>8.1f} us  {name}")
    if options.json:
        with options.json.open("a", encoding="utf-8") as out:
            print(json.dumps(result), file=out)


if __name__ == "__main__":
    main()
