"""The least time that each workload can take on one H200, from its own requests, beside what was measured.

    python benchmarks/floors.py --results benchmarks/results/*.jsonl

A floor counts only what has to be read, written and multiplied, at the speeds below, as if all else were
free:

    products of a decode step    max(weight bytes / READ, 2 * parameters * rows / FLOPS)
    attention of a decode step   max(key and value bytes / READ, pair operations / FLOPS)
    prefill                      max(weight bytes / READ + new key and value bytes / COPY,
                                     (2 * parameters * tokens + pair operations) / FLOPS)
    pair operations              4 * layers * query heads * head size * pairs

A pair is a query and a key that it sees. Keys and values of a prefix that all requests share are computed
once, and read once in a step. Of the last layer, only keys and values are needed for tokens that are not
sampled. All requests decode together; the first output token belongs to the prefill. Not counted are norms,
biases, activations, logits, and what decode steps write. A start writes the weights once and reads them once.
Results are JSON lines as `run_workloads.py` or `tokenmill bench`
writes them; they are matched by the digest of their requests.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import workloads

# Of one NVIDIA H200, as measured (see docs/performance.md).
COPY = 4.27e12  # bytes per second, read and written together
READ = 4.42e12  # bytes per second
FLOPS = 700e12  # bfloat16, large products
BYTES_PER_NUMBER = 2

SWEEP_SHOWN = (1, 8, 64, 256)
ORDER = ("Qwen2.5-0.5B-Instruct", "Qwen3-0.6B", "Llama-3.1-8B", "Qwen3-14B")


# ── a model in numbers ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Shape:
    """What a floor needs to know of a model; sizes in numbers, not bytes."""

    num_layers: int
    layer_parameters: int
    key_value_parameters: int  # of the products that make keys and values, in one layer
    head_parameters: int  # of the product that makes logits
    key_value_numbers: int  # that one token leaves in one layer
    query_numbers: int  # query heads * head size

    @property
    def weight_bytes(self) -> int:
        """Read by every step: layers and head; of the embedding only single rows are."""
        return BYTES_PER_NUMBER * (self.num_layers * self.layer_parameters + self.head_parameters)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return BYTES_PER_NUMBER * self.num_layers * self.key_value_numbers


def shape_of(config: dict[str, Any]) -> Shape:
    """The numbers of a config.json."""
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    queries = config["num_attention_heads"] * head_dim
    keys_and_values = 2 * config["num_key_value_heads"] * head_dim
    mlp = 3 * hidden * config["intermediate_size"]
    return Shape(
        num_layers=config["num_hidden_layers"],
        layer_parameters=hidden * (2 * queries + keys_and_values) + mlp,
        key_value_parameters=hidden * keys_and_values,
        head_parameters=hidden * config["vocab_size"],
        key_value_numbers=keys_and_values,
        query_numbers=queries,
    )


# ── floors ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Floor:
    """Seconds of each phase."""

    prefill: float
    products: float  # of all decode steps
    attention: float  # of all decode steps

    @property
    def total(self) -> float:
        """Seconds of the whole workload."""
        return self.prefill + self.products + self.attention


def floor_of(shape: Shape, requests: Sequence[workloads.Request]) -> Floor:
    """The floor of requests that run together."""
    shared = shared_tokens(requests)
    products, attention = decode_seconds(shape, requests, shared)
    return Floor(prefill_seconds(shape, requests, shared), products, attention)


def shared_tokens(requests: Sequence[workloads.Request]) -> int:
    """Tokens with which all prompts begin; 0 for a single one. Each prompt computes its last token."""
    if len(requests) < 2:
        return 0
    prompts = [request.prompt for request in requests]
    most = min(map(len, prompts)) - 1
    ids_by_position = enumerate(zip(*prompts, strict=False))
    return next(at for at, ids in ids_by_position if at == most or len(set(ids)) > 1)


def prefill_seconds(shape: Shape, requests: Sequence[workloads.Request], shared: int) -> float:
    """All prompts, and the first output token of each."""
    lengths = [len(request.prompt) for request in requests]
    tokens = shared + sum(length - shared for length in lengths)
    pairs = pairs_until(shared) + sum(pairs_until(length) - pairs_until(shared) for length in lengths)
    inner = shape.num_layers - 1
    last = shape.layer_parameters - shape.key_value_parameters
    flops = (
        2 * tokens * (inner * shape.layer_parameters + shape.key_value_parameters)
        + 2 * len(requests) * (last + shape.head_parameters)
        + 4 * shape.query_numbers * (inner * pairs + sum(lengths))
    )
    return max(shape.weight_bytes / READ + tokens * shape.token_bytes / COPY, flops / FLOPS)


def pairs_until(length: int) -> int:
    """Pairs of a query and a key that it sees, among the first `length` tokens of a sequence."""
    return length * (length + 1) // 2


def decode_seconds(shape: Shape, requests: Sequence[workloads.Request], shared: int) -> tuple[float, float]:
    """Products and attention of all steps after the prefill."""
    parameters = shape.weight_bytes // BYTES_PER_NUMBER
    products = attention = 0.0
    for step in range(1, max(request.max_new_tokens for request in requests)):
        # A row sees its prompt, the output that was computed before, and the token of this step.
        keys = [len(r.prompt) + step for r in requests if r.max_new_tokens > step]
        products += max(shape.weight_bytes / READ, 2 * parameters * len(keys) / FLOPS)
        tokens_read = shared + sum(count - shared for count in keys)
        pair_flops = 4 * shape.query_numbers * shape.num_layers
        attention += max(tokens_read * shape.token_bytes / READ, pair_flops * sum(keys) / FLOPS)
    return products, attention


# ── rows of the table ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Row:
    """One workload: its requests, and which figure of a record is compared with which part of the floor."""

    title: str
    requests: list[workloads.Request]
    digest: str
    kind: str = "seconds"  # or "ttft_ms", "tpot_ms"


def rows() -> Iterator[Row]:
    """W1 to W4 and W7, without W5, which has no fixed amount of work."""
    batch = workloads.batch()
    yield Row("W1, 256 requests", batch, workloads.digest(batch))
    singles = workloads.latency(6)
    for title, kind in (("W2, first token", "ttft_ms"), ("W2, each later token", "tpot_ms")):
        yield Row(title, singles[:1], workloads.digest(singles), kind)
    shared = workloads.shared_prefix()
    yield Row("W3, shared prefix", shared, workloads.digest(shared))
    long = workloads.long_prefill()
    yield Row("W4, long prompts", long, workloads.digest(long))
    for sweep in sweep_requests():
        if len(sweep) in SWEEP_SHOWN:
            yield Row(f"W7, {len(sweep)} at once", sweep, workloads.digest(sweep))


def sweep_requests() -> Iterator[list[workloads.Request]]:
    """The requests of `workloads.run_sweep`, which makes them on the way."""
    draw = random.Random(5)
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        prompts = [[draw.randint(0, workloads.VOCAB) for _ in range(128)] for _ in range(count)]
        yield [workloads.Request(prompt, 128, temperature=0.0) for prompt in prompts]


def phases_of(row: Row, floor: Floor) -> Floor:
    """The part of the floor that the row is about, in seconds."""
    if row.kind == "ttft_ms":
        return Floor(floor.prefill, 0.0, 0.0)
    if row.kind == "tpot_ms":
        steps = row.requests[0].max_new_tokens - 1
        return Floor(0.0, floor.products / steps, floor.attention / steps)
    return floor


# ── results ───────────────────────────────────────────────────────────────────────────────────


def read_results(paths: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """The records of each file, the newest file first; of the same date, the one named last."""
    files = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        if records := [json.loads(line) for line in lines if line.strip()]:
            files.append(records)
    return sorted(reversed(files), key=lambda records: max(r["date"] for r in records), reverse=True)


def best(files: Sequence[list[dict[str, Any]]], model: str, *, kind: str, **wanted: str) -> float | None:
    """Least seconds of the records that are as wanted, in the newest file that has any."""
    for records in files:
        found = [
            record[kind] * (1.0 if kind == "seconds" else 1e-3)
            for record in records
            if Path(record["model"]).name == model
            and kind in record
            and all(record.get(name, "").startswith(value) for name, value in wanted.items())
        ]
        if found:
            return min(found)
    return None


# ── printing ──────────────────────────────────────────────────────────────────────────────────


def line(title: str, model: str, *, phases: Sequence[float], floor: float, measured: float | None) -> str:
    """One line of the table; a phase that takes no time stays empty."""
    cells = [title, model, *(shown(part) if part else "" for part in phases), shown(floor)]
    cells += ["", ""] if measured is None else [shown(measured), share(floor / measured)]
    return f"| {' | '.join(cells)} |"


def shown(seconds: float) -> str:
    """In milliseconds below a second, with three digits."""
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{decimals}f} {unit}"


def share(part: float) -> str:
    """As a percentage."""
    return f"{100 * part:.0f} %" if part >= 0.01 else "< 1 %"


def table(files: Sequence[list[dict[str, Any]]]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| workload | model | prefill | products | attention | floor | measured | share |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    shapes = {name: shape_of(models.CONFIGS[name]) for name in ORDER}
    for row in rows():
        for name, shape in shapes.items():
            floor = phases_of(row, floor_of(shape, row.requests))
            yield line(
                row.title,
                name,
                phases=(floor.prefill, floor.products, floor.attention),
                floor=floor.total,
                measured=best(files, name, kind=row.kind, digest=row.digest),
            )
    for name, shape in shapes.items():
        # Random weights are written once, and the first token reads them.
        floor_seconds = shape.weight_bytes / COPY + shape.weight_bytes / READ
        measured = best(files, name, kind="seconds", workload="w6")
        yield line("W6, start", name, phases=(0.0, 0.0, 0.0), floor=floor_seconds, measured=measured)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", nargs="+", type=Path, default=[], help="records to compare with")
    print(*table(read_results(parser.parse_args().results)), sep="\n")


if __name__ == "__main__":
    main()
