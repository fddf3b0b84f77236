"""From the constructor to the first token: where the time goes, with empty and with filled kernel caches.

    python benchmarks/startup.py --models Qwen3-0.6B Llama-3.1-8B

Every start is a process of its own: the first one compiles, the others find its kernels on the disk. The
second engine of a process ("again") finds everything but its weights. Random weights, token ids in and out.
With `--profile`, prints what the imports of a start cost instead.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import models

REPOSITORY = Path(__file__).resolve().parents[1]
# Batch sizes for which a graph is captured after the first token.
CAPTURED = (256, 64, 8)


class Laps(logging.Handler):
    """Keeps what the runner logs about its start and about captures."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.laps: dict[str, float] = {}
        self.captures: list[float] = []
        self.num_kernels = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Take note of one line."""
        if record.msg.startswith("ready after") and isinstance(record.args, tuple):
            self.laps = record.args[1]  # type: ignore[assignment]
        elif record.msg.startswith("captured") and isinstance(record.args, tuple):
            self.captures.append(record.args[-1])  # type: ignore[arg-type]
        elif record.msg.startswith("compiling") and isinstance(record.args, tuple):
            self.num_kernels = record.args[0]  # type: ignore[assignment]


def start(folder: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Phases of one start in this process, in seconds."""
    import tokenmill

    laps = Laps()
    logging.getLogger("tokenmill").addHandler(laps)
    began = time.perf_counter()
    with tokenmill.Engine(
        model_path=folder, skip_tokenizer_init=True, load_format="dummy", log_level="debug", **arguments
    ) as engine:
        built = time.perf_counter()
        engine.generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 1})
        first = time.perf_counter()
        engine.generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 2, "ignore_eos": True})
        for size in CAPTURED:
            params = {"max_new_tokens": 3, "ignore_eos": True}
            engine.generate(input_ids=[[7, 8, 9 + row] for row in range(size)], sampling_params=params)
    imports = built - began - sum(laps.laps.values())
    return {
        "total": first - began,
        "imports": imports,
        **laps.laps,
        "first token": first - built,
        "captures": laps.captures,
        "kernels": laps.num_kernels,
    }


def child(folder: str, arguments: dict[str, Any]) -> None:
    """Start twice in this process and print both as JSON."""
    print(json.dumps([start(folder, arguments), start(folder, arguments)]))


def run(model: str, options: argparse.Namespace) -> None:
    """Print a table of one model: a column for each start."""
    columns: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        models.write(folder)
        environment = os.environ | {"TRITON_CACHE_DIR": str(Path(folder) / "triton")}
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        for name in ("empty cache", *(f"filled cache {number}" for number in range(1, options.repeat + 1))):
            command = [sys.executable, __file__, "--child", str(Path(folder) / model), options.arguments]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            columns[name], again = json.loads(done.stdout.splitlines()[-1])
        columns["again"] = again
    print(f"\n{model:<18}", *(f"{name:>16}" for name in columns))
    for phase in columns["empty cache"]:
        if phase == "captures":
            continue
        print(f"{phase:<18}", *(f"{column.get(phase, 0.0):>16.2f}" for column in columns.values()))
    for name, column in columns.items():
        print(f"seconds of each capture, {name}:", *(f"{seconds:.3f}" for seconds in column["captures"]))


def profile_imports() -> None:
    """The dearest imports of a start, inclusive milliseconds."""
    code = "import torch, triton, transformers.models.auto.configuration_auto"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], stderr=subprocess.PIPE, text=True, check=True
    )
    lines = [line.split("|") for line in done.stderr.splitlines() if "|" in line][1:]
    dearest = sorted(((int(total), name.strip()) for _, total, name in lines), reverse=True)
    for microseconds, name in dearest[:25]:
        print(f"{microseconds / 1000:8.0f} ms  {name}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(models.CONFIGS), default=["Qwen3-0.6B"])
    parser.add_argument("--repeat", type=int, default=2, help="starts with a filled cache")
    parser.add_argument("--arguments", default="{}", help="more arguments of Engine, as a JSON object")
    parser.add_argument("--profile", action="store_true", help="print what the imports cost")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], json.loads(options.child[1]))
    elif options.profile:
        profile_imports()
    else:
        for model in options.models:
            run(model, options)


if __name__ == "__main__":
    main()
