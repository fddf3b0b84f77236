"""Throughput of a batch job beside plain `generate` on the same rows, in turns, and the memory of large jobs.

Run `python benchmarks/batch_jobs.py [--model tiny] [--arguments '{}'] [--rows 2000] [--rounds 5]
[--max-new-tokens 32 [256]] [--ignore-eos] [--sizes 10000 100000] [--stand-in]`. With two numbers of new
tokens each row has its own, between them. Prints rows per second of both and the median ratios of time and of
work (of all threads); then, for each size, by how much memory grew at most and rows per second, of a new job
and of one that only replays its journal. With `--stand-in` the core answers every row at once, without a
model: what is left is work on rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

from iteration import mebibytes, seconds_of, use_stand_in

import tokenmill as sgl
from tokenmill import batch


def write_rows(path: Path, count: int, lengths: list[int] | None = None) -> list[str]:
    """Write a file of rows, with their numbers of new tokens if there are any; gives the prompts."""
    prompts = [f"Question {index}: what is the capital of country {index % 97}?" for index in range(count)]
    with path.open("w") as file:
        for index, prompt in enumerate(prompts):
            own = {} if lengths is None else {"sampling_params": {"max_new_tokens": lengths[index]}}
            file.write(json.dumps({"id": index, "prompt": prompt, **own}) + "\n")
    return prompts


def measure_ratio(
    engine: sgl.Engine, folder: Path, options: argparse.Namespace, params: dict[str, Any]
) -> None:
    source = folder / "rows.jsonl"
    least, *most = options.max_new_tokens
    draw = random.Random(5)
    lengths = [draw.randint(least, *most) for _ in range(options.rows)] if most else None
    prompts = write_rows(source, options.rows, lengths)
    own = params if lengths is None else [{**params, "max_new_tokens": length} for length in lengths]
    walls, works = [], []
    for turn in range(options.rounds + 1):
        output = folder / f"answers{turn}.jsonl"
        engine.flush_cache()
        plain = seconds_of(lambda: engine.generate(prompts, own))
        engine.flush_cache()
        job = seconds_of(lambda path=output: run(source, path, engine, params))
        if turn:  # the first one warms up
            walls.append(plain[0] / job[0])
            works.append(plain[1] / job[1])
            rates = (
                f"generate {options.rows / plain[0]:9,.0f} rows/s  job {options.rows / job[0]:9,.0f} rows/s"
            )
            print(rates, flush=True)
    wall, work = statistics.median(walls), statistics.median(works)
    print(f"a job has {wall:.1%} of the throughput of generate, and {work:.1%} by its process's work")


def run(source: Path, output: Path, engine: sgl.Engine, params: dict[str, Any]) -> None:
    batch.run(source, output, engine=engine, sampling_params=params)


class Peak:
    """The most memory that the process has during a `with` block, above what it had before, in MiB."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.grown, self._before = 0.0, mebibytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.grown = max(self.grown, mebibytes() - self._before)


def measure_size(engine: sgl.Engine, folder: Path, count: int, params: dict[str, Any]) -> None:
    source, output = folder / f"{count}.jsonl", folder / f"{count}.out.jsonl"
    write_rows(source, count)
    for kind in ("new", "replayed"):
        with Peak() as peak:
            seconds, _ = seconds_of(lambda: run(source, output, engine, params))
        rate = f"{count / seconds:9,.0f} rows/s"
        print(f"{count:>9,} rows {kind:>8}  memory +{peak.grown:6.1f} MiB  {rate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arguments", default="{}", help="more arguments of Engine, as a JSON object")
    parser.add_argument("--max-new-tokens", type=int, nargs="+", default=[32])
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="*", default=[])
    parser.add_argument("--stand-in", action="store_true")
    options = parser.parse_args()
    if options.stand_in:
        use_stand_in()
    params: dict[str, Any] = {"sampling_seed": 1, "ignore_eos": options.ignore_eos}
    params["max_new_tokens"] = options.max_new_tokens[0]
    arguments = json.loads(options.arguments)
    with tempfile.TemporaryDirectory() as folder, sgl.Engine(model_path=options.model, **arguments) as engine:
        if options.rounds:
            measure_ratio(engine, Path(folder), options, params)
        for size in sorted(options.sizes):
            measure_size(engine, Path(folder), size, params)


if __name__ == "__main__":
    main()
