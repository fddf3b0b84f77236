"""Jobs of many requests with short outputs or common beginnings: the host's work for each request counts.

    python benchmarks/many_requests.py [--model Qwen2.5-0.5B-Instruct] [--jobs short tree] [--runs 5]

Prints the seconds of each run, the first of which captures graphs, and of one more that is traced how long
the host took before the first kernel and after the last, and for how much of the time between them no kernel
ran for more than 10 microseconds. Random weights; token ids in, token ids out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import more_models
import torch
from run_workloads import Adapter
from torch.profiler import ProfilerActivity, profile
from where_time_goes import LONG_PAUSE, read_trace

import tokenmill
import workloads
from workloads import Request


def plain(count: int, inputs: tuple[int, int], outputs: tuple[int, int]) -> list[Request]:
    """Requests that share nothing, of so many tokens in and out, from the least to the most."""
    draw = random.Random(9)
    return [Request(ids(draw, draw.randint(*inputs)), draw.randint(*outputs)) for _ in range(count)]


def groups(count: int, members: int, *, common: int, own: int, outputs: int) -> list[Request]:
    """Shuffled groups of requests that begin alike."""
    draw = random.Random(11)
    heads = [ids(draw, common) for _ in range(count)]
    requests = [Request(head + ids(draw, own), outputs) for head in heads for _ in range(members)]
    draw.shuffle(requests)
    return requests


def tree() -> list[Request]:
    """512 requests: one beginning of 1,024 tokens, 8 branches of 512, of each 8 of 256, of each 8 of 64."""
    draw = random.Random(10)
    paths = [ids(draw, 1024)]
    for fork, length in ((8, 512), (8, 256), (8, 64)):
        paths = [path + ids(draw, length) for path in paths for _ in range(fork)]
    draw.shuffle(paths)
    return [Request(path, 128) for path in paths]


def samples() -> list[Request]:
    """Eight answers to each of 64 prompts."""
    draw = random.Random(12)
    return [Request(prompt, 256) for prompt in [ids(draw, 512) for _ in range(64)] for _ in range(8)]


def ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(0, workloads.VOCAB) for _ in range(count)]


JOBS: dict[str, Callable[[], list[Request]]] = {
    "one_token": lambda: plain(8192, (32, 96), (1, 1)),
    "short": lambda: plain(8192, (32, 96), (4, 12)),
    "many_rows": lambda: plain(2000, (10, 30), (10, 30)),
    "few_shot": lambda: groups(1, 4096, common=1500, own=100, outputs=8),
    "groups": lambda: groups(64, 16, common=1024, own=64, outputs=64),
    "tree": tree,
    "samples": samples,
    "w1": lambda: workloads.batch(256),
    "w3": workloads.shared_prefix,
}


def seconds_of(adapter: Adapter, requests: list[Request]) -> float:
    """One run with an empty prefix cache."""
    adapter.flush()
    torch.cuda.synchronize()
    began = time.perf_counter()
    adapter.generate(requests)
    return time.perf_counter() - began


def traced(adapter: Adapter, requests: list[Request], path: Path) -> str:
    """What a traced run tells of the host, in words."""
    adapter.flush()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        began = time.time()
        adapter.generate(requests)
        ended = time.time()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    before = trace.began - began
    after = ended - trace.began - trace.span / 1e6
    return (
        f"before {1e3 * before:.0f} ms, device {trace.span / 1e3:.0f} ms, of which it waits "
        f"{trace.percent(LONG_PAUSE)} %, after {1e3 * after:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="Qwen2.5-0.5B-Instruct")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = more_models.write(Path(folder), options.model)
        with tokenmill.Engine(model_path=str(path), skip_tokenizer_init=True, load_format="dummy") as engine:
            adapter = Adapter(engine)
            for job in options.jobs:
                requests = JOBS[job]()
                first, *later = [seconds_of(adapter, requests) for _ in range(options.runs)]
                print(
                    f"{options.model} {job}: {first:.3f} s at first, then",
                    *(f"{seconds:.3f}" for seconds in later),
                    f"(median {statistics.median(later or [first]):.3f});",
                    traced(adapter, requests, Path(folder) / "trace.json"),
                    flush=True,
                )


if __name__ == "__main__":
    main()
