"""Throughput of a batch job beside plain `generate` on the same rows, in turns, and the memory of large jobs.

Run `python benchmarks/batch_jobs.py [--model tiny] [--rows 2000] [--rounds 5] [--max-new-tokens 32] [--sizes
10000 100000] [--stand-in]`. Prints rows per second of both and the median ratio; then, for each size, by how
much the peak of the process' memory grew, rows per second of a new job, and of one that only replays its
journal. With `--stand-in` the core answers every row at once, without a model: what is left is work on rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from iteration import peak_mebibytes, seconds_of, use_stand_in

import tokenmill as sgl
from tokenmill import batch


def write_rows(path: Path, count: int) -> list[str]:
    prompts = [f"Question {index}: what is the capital of country {index % 97}?" for index in range(count)]
    with path.open("w") as file:
        for index, prompt in enumerate(prompts):
            file.write(json.dumps({"id": index, "prompt": prompt}) + "\n")
    return prompts


def measure_ratio(
    engine: sgl.Engine, folder: Path, options: argparse.Namespace, params: dict[str, Any]
) -> None:
    source = folder / "rows.jsonl"
    prompts = write_rows(source, options.rows)
    ratios = []
    for turn in range(options.rounds + 1):
        engine.flush_cache()
        plain = seconds_of(lambda: engine.generate(prompts, params))
        engine.flush_cache()
        output = folder / f"answers{turn}.jsonl"
        job = seconds_of(lambda path=output: batch.run(source, path, engine=engine, sampling_params=params))
        if turn:  # the first one warms up
            ratios.append(plain / job)
            rates = f"generate {options.rows / plain:9,.0f} rows/s  job {options.rows / job:9,.0f} rows/s"
            print(rates, flush=True)
    print(f"a job reaches {statistics.median(ratios):.1%} of generate (median of {len(ratios)})")


def measure_size(engine: sgl.Engine, folder: Path, count: int, params: dict[str, Any]) -> None:
    source, output = folder / f"{count}.jsonl", folder / f"{count}.out.jsonl"
    write_rows(source, count)
    gc.collect()
    before = peak_mebibytes()
    new = seconds_of(lambda: batch.run(source, output, engine=engine, sampling_params=params))
    again = seconds_of(lambda: batch.run(source, output, engine=engine, sampling_params=params))
    rates = f"new {count / new:9,.0f} rows/s  replayed {count / again:9,.0f} rows/s"
    print(f"{count:>9,} rows  peak memory +{peak_mebibytes() - before:6.1f} MiB  {rates}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--sizes", type=int, nargs="*", default=[])
    parser.add_argument("--stand-in", action="store_true")
    options = parser.parse_args()
    if options.stand_in:
        use_stand_in()
    params = {"max_new_tokens": options.max_new_tokens, "sampling_seed": 1}
    with tempfile.TemporaryDirectory() as folder, sgl.Engine(model_path=options.model) as engine:
        if options.rounds:
            measure_ratio(engine, Path(folder), options, params)
        for size in sorted(options.sizes):
            measure_size(engine, Path(folder), size, params)


if __name__ == "__main__":
    main()
