"""Where the host's time goes in W5: milliseconds of each part of a step, with and without a schema.

    python benchmarks/grammar_steps.py [--model Qwen3-0.6B] [--reps 5]

A step under grammars is as long as the longer of two: what the device does, and what the host does between a
token and the next mask.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import made_tokenizer
from run_workloads import TOKENIZER_SIZE, Adapter

import models
import tokenmill
import workloads
from tokenmill.core.grammars import Grammars
from tokenmill.core.scheduler import Scheduler
from tokenmill.grammar.llguidance_backend import LlguidanceBatch
from tokenmill.runner.runner import LocalRunner

# The last one is a part of the one before it.
PARTS: list[tuple[type, str]] = [
    (Scheduler, "schedule"),
    (LocalRunner, "launch"),
    (LocalRunner, "collect"),
    (Scheduler, "take_in"),
    (LocalRunner, "sample"),
    (Grammars, "masks"),
    (LlguidanceBatch, "fill_masks"),
]


def watch(seconds: Counter[str], calls: Counter[str]) -> None:
    """Let every part add its time to `seconds`."""
    for owner, name in PARTS:
        setattr(owner, name, timed(getattr(owner, name), name, seconds, calls))


def timed(method: Any, name: str, seconds: Counter[str], calls: Counter[str]) -> Any:
    """The method with a clock."""

    @functools.wraps(method)
    def run(*arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments, **keywords)
        finally:
            seconds[name] += time.perf_counter() - began  # type: ignore[assignment]
            calls[name] += 1

    return run


def run(options: argparse.Namespace) -> None:
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    watch(seconds, calls)
    names = [name for _, name in PARTS]
    print(f"{'schema':>6} {'seconds':>8} {'tokens/s':>9}", *(f"{name:>10}" for name in names))
    with tempfile.TemporaryDirectory() as folder:
        models.write(folder)
        path = Path(folder) / options.model
        made_tokenizer.write(path, TOKENIZER_SIZE)
        override = {"num_hidden_layers": options.layers} if options.layers else {}
        with tokenmill.Engine(
            model_path=str(path), load_format="dummy", json_model_override_args=override
        ) as engine:
            adapter = Adapter(engine)
            workloads.warm_up(adapter)
            for constrained in (False, True):
                requests = workloads.grammar(constrained, n=options.requests)
                for _ in range(options.reps):
                    adapter.flush()
                    seconds.clear()
                    calls.clear()
                    began = time.perf_counter()
                    tokens = sum(len(result.output_ids) for result in adapter.generate(requests))
                    taken = time.perf_counter() - began
                    parts = (seconds[name] / max(1, calls["launch"]) * 1e3 for name in names)
                    shown = (f"{part:>10.2f}" for part in parts)
                    print(f"{constrained!s:>6} {taken:>8.3f} {tokens / taken:>9.0f}", *shown, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(models.CONFIGS), default="Qwen3-0.6B")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--layers", type=int, help="make the model this short, for a machine without a GPU")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
