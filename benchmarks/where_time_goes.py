"""Where the GPU's time goes in a workload, from a trace: by kernel, and how long no kernel ran at all.

    python benchmarks/where_time_goes.py --model Qwen3-0.6B --workload w1 [--top 12] [--json OUT]

The workload runs twice before the one that is traced, so that nothing is compiled or captured in it.
`idle_percent` is the share of the time between the first and the last kernel in which no kernel or copy ran;
`waiting_percent` counts only pauses over 10 microseconds, those in which the device waits for the host: the
others are the device's own, between two kernels. Tracing makes the host slower: all are upper bounds.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from run_workloads import Adapter
from torch.profiler import ProfilerActivity, profile

import models
import tokenmill
import workloads

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
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events)
    pauses, reached = [], spans[0][0]
    for start, stop in spans:
        if start > reached:
            pauses.append((reached - spans[0][0], start - reached))
        reached = max(reached, stop)
    began = trace.get("baseTimeNanoseconds", 0) / 1e9 + spans[0][0] / 1e6
    return Trace(began, reached - spans[0][0], pauses, dict(by_kernel))


def short(name: str) -> str:
    """A kernel's name without its template arguments and return type."""
    plain = re.sub(r"<.*", "", name).split("(")[0].replace("void ", "").strip()
    return (plain or name)[-60:]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the workload thrice, the last time traced."""
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
            seconds = []
            for _ in range(2):
                adapter.flush()
                torch.cuda.synchronize()
                start = time.perf_counter()
                adapter.generate(requests)
                seconds.append(time.perf_counter() - start)
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
        "seconds": round(seconds[-1], 3),
        "output_tokens_per_second": round(tokens / seconds[-1]),
        "traced_seconds": round(trace.span / 1e6, 3),
        "idle_percent": trace.percent(0),
        "waiting_percent": trace.percent(LONG_PAUSE),
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
