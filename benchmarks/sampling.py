"""Time to draw one token per row, against `torch.softmax` and `torch.multinomial` on the same logits.

Run `python benchmarks/sampling.py [--rows 32 256] [--vocabulary 151936] [--threads N]`. Prints milliseconds
on the CPU and, where there is one, microseconds on the GPU: the median of several runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from replays import median_milliseconds

from tokenmill.sampling import SamplingColumns, SamplingNeeds, sample

CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k=50": {"top_k": 50},
    "top_p=0.95": {"top_p": 0.95},
    "min_p=0.05": {"min_p": 0.05},
    "top_k=50 top_p=0.9 min_p=0.02": {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
}


def columns(
    num_rows: int,
    device: str,
    *,
    temperature: float = 1.0,
    top_k: float = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SamplingColumns:
    return SamplingColumns(
        temperatures_R=torch.full((num_rows,), temperature, device=device),
        top_ks_R=torch.full((num_rows,), int(top_k), dtype=torch.int32, device=device),
        top_ps_R=torch.full((num_rows,), top_p, device=device),
        min_ps_R=torch.full((num_rows,), min_p, device=device),
        seeds_R=torch.arange(num_rows, device=device),
        positions_R=torch.arange(num_rows, device=device),
    )


def logits_like_a_model(num_rows: int, vocab_size: int, device: str) -> torch.Tensor:
    """Most of the weight on some tens of tokens, the rest spread wide; bfloat16."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((num_rows, vocab_size), generator=generator)
    best = torch.randint(0, vocab_size, (num_rows, 100), generator=generator)
    logits.scatter_(1, best, torch.linspace(18, 10, 100).expand(num_rows, 100))
    return logits.to(device, torch.bfloat16)


def milliseconds_on_cpu(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def milliseconds_on_gpu(call: Callable[[], object], repeats: int = 30) -> float:
    """Time on the device alone: the call is captured in a graph, as in the engine."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median_milliseconds(graph, repeats)


def report(device: str, num_rows: int, vocab_size: int) -> None:
    """One table: a line per kind of row, and the line to compare with."""
    measure = milliseconds_on_gpu if device == "cuda" else milliseconds_on_cpu
    unit, factor = ("us", 1e3) if device == "cuda" else ("ms", 1.0)
    logits = logits_like_a_model(num_rows, vocab_size, device)
    flat = torch.randn_like(logits)
    print(f"\n{device}, {num_rows} x {vocab_size}, bfloat16")
    multinomial = measure(lambda: torch.multinomial((logits.float() / 0.8).softmax(-1), 1))
    print(f"  {'torch softmax + multinomial':42s}{multinomial * factor:10.1f} {unit}")
    for name, case in CASES.items():
        chosen = columns(num_rows, device, **case)
        needs = SamplingNeeds(random=name != "greedy", filters=bool(case.keys() - {"temperature"}))
        milliseconds = measure(partial(sample, logits, chosen, needs))
        print(f"  {name:42s}{milliseconds * factor:10.1f} {unit}{multinomial / milliseconds:9.1f} x")
    chosen = columns(num_rows, device, top_p=0.95)
    milliseconds = measure(partial(sample, flat, chosen, SamplingNeeds(random=True, filters=True)))
    print(f"  {'top_p=0.95, flat logits (worst case)':42s}{milliseconds * factor:10.1f} {unit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=None, help="threads of torch on the CPU")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        for num_rows in arguments.rows:
            report(device, num_rows, arguments.vocabulary)


if __name__ == "__main__":
    main()
