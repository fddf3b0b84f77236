"""Tokens per second on a CPU that other work wants, too: with threads that give way, and without.

Run `python benchmarks/cpu_beside_others.py [--busy 0 1 2] [--requests 1 16] [--new-tokens 200] [--rounds 4]`.
`--busy` processes count in a loop meanwhile. An engine of each kind takes turns with the other, in one
process. Prints the median of the rounds for each.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest import mock

import torch
from cpu_versus_transformers import cpu_name

import tokenmill as sgl


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in processes:
            process.kill()


def rate(engine: sgl.Engine, num_requests: int, num_new: int) -> float:
    prompts = [f"Tell me story {index}" for index in range(num_requests)]
    begin = time.perf_counter()
    engine.generate(prompts, {"max_new_tokens": num_new, "ignore_eos": True})
    return num_requests * num_new / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    print(f"device: {cpu_name()}, {torch.get_num_threads()} threads; torch {torch.__version__}")
    print("tokens/s of the bundled model, medians     fixed  give way")
    with mock.patch("tokenmill.runner.runner.cpu_threads", return_value=None):
        fixed = sgl.Engine(model_path="tiny")
    with fixed, sgl.Engine(model_path="tiny") as following:
        engines = (fixed, following)
        for engine in engines:
            rate(engine, 2, 8)
        for count in options.busy:
            for num_requests in options.requests:
                rates: tuple[list[float], list[float]] = ([], [])
                with busy_processes(count):
                    for _ in range(options.rounds):
                        for engine, found in zip(engines, rates, strict=True):
                            found.append(rate(engine, num_requests, options.new_tokens))
                medians = "".join(f"{statistics.median(found):10.1f}" for found in rates)
                print(f"{count} busy processes, {num_requests:2} requests      {medians}")


if __name__ == "__main__":
    main()
