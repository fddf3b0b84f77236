"""Runs the fixed workloads of `workloads.py` on tokenmill, with random weights in a public model's shape.

    python benchmarks/run_workloads.py --models Qwen3-0.6B --workloads w1_batch256 --out results.jsonl

Token ids in, token ids out. Prints a short table; `--out` appends one JSON object per result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import more_models

import tokenmill
import workloads

# Only this one needs a tokenizer, of as many tokens as the peers had; it is asked for by name.
TOKENIZER_SIZE = 151_669
DEFAULT_WORKLOADS = [name for name in workloads.RUNNERS if name != "w5_grammar"]
# What the table shows, where a workload has it.
SHOWN = [
    "constrained",
    "requests",
    "seconds",
    "out_tok_s",
    "total_tok_s",
    "cached_tokens",
    "ttft_ms",
    "tpot_ms",
]


class Adapter:
    """tokenmill as `workloads.py` wants an engine."""

    name = "tokenmill"

    def __init__(self, engine: tokenmill.Engine) -> None:
        self._engine = engine

    def generate(self, requests: list[workloads.Request]) -> list[workloads.Result]:
        """Run all requests at once and wait for them."""
        results = self._engine.generate(
            input_ids=[request.prompt for request in requests],
            sampling_params=[sampling_of(request) for request in requests],
        )
        return [workloads.Result(r["output_ids"], r["meta_info"]["cached_tokens"]) for r in results]

    def flush(self) -> None:
        """Forget cached prefixes."""
        self._engine.flush_cache()


def sampling_of(request: workloads.Request) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": request.temperature,
        "max_new_tokens": request.max_new_tokens,
        "ignore_eos": request.ignore_eos,
    }
    return params if request.json_schema is None else {**params, "json_schema": request.json_schema}


def results_of(
    model: str, options: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(workload, facts of the engine, figures) for each result on one model."""
    with tempfile.TemporaryDirectory() as folder:
        path = more_models.write(Path(folder), model, layers=options.layers)
        has_grammar = "w5_grammar" in options.workloads
        if has_grammar:
            import made_tokenizer

            made_tokenizer.write(path, TOKENIZER_SIZE)
        start = time.perf_counter()
        engine = tokenmill.Engine(
            model_path=str(path),
            skip_tokenizer_init=not has_grammar,
            load_format="dummy",
            **json.loads(options.arguments),
        )
        with engine:
            adapter = Adapter(engine)
            adapter.generate([workloads.Request([1, 2, 3], 1)])
            facts = engine.get_server_info()
            yield "w6_start", facts, {"seconds": round(time.perf_counter() - start, 2)}
            if not options.skip_warm_up:
                workloads.warm_up(adapter)
            for name in options.workloads:
                for figures in workloads.RUNNERS[name](adapter):
                    yield name, facts, figures


def record(model: str, name: str, facts: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """One line of the results file."""
    return {
        "date": datetime.date.today().isoformat(),
        "engine": f"tokenmill {tokenmill.__version__}",
        "device": facts["device_name"],
        "versions": {
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in ("torch", "transformers", "numpy")},
        },
        "command": shlex.join(["python", *sys.argv]),
        "model": model,
        "dtype": facts["dtype"],
        "workload": name,
        **figures,
    }


def run(options: argparse.Namespace, out: TextIO | None) -> None:
    print(f"{'model':<22} {'workload':<20}", *(f"{name:>13}" for name in SHOWN))
    for model in options.models:
        for name, facts, figures in results_of(model, options):
            cells = ["" if figures.get(column) is None else figures[column] for column in SHOWN]
            print(f"{model:<22} {name:<20}", *(f"{cell:>13}" for cell in cells), flush=True)
            if out is not None:
                print(json.dumps(record(model, name, facts, figures)), file=out, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(more_models.CONFIGS), default=["Qwen3-0.6B"])
    parser.add_argument("--workloads", nargs="+", choices=list(workloads.RUNNERS), default=DEFAULT_WORKLOADS)
    parser.add_argument("--layers", type=int, help="make the models this short, for a machine without a GPU")
    parser.add_argument("--arguments", default="{}", help="more arguments of Engine, as a JSON object")
    parser.add_argument("--skip-warm-up", action="store_true", help="do not run the warm-up load first")
    parser.add_argument("--out", type=Path, help="append one JSON object per result to this file")
    options = parser.parse_args()
    if options.out is None:
        run(options, None)
    else:
        with options.out.open("a", encoding="utf-8") as out:
            run(options, out)


if __name__ == "__main__":
    main()
