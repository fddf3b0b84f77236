"""`tokenmill bench`: fixed loads for any model, and how they are timed.

Owns the requests and the figures; flags and files are `cli.py`'s. With a large vocabulary and full
lengths the requests are, token by token, those of `benchmarks/workloads.py`, which every engine was measured
with; the digest shows it. Time is that of the wall clock around one blocking `generate`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.errors import InvalidArgument
from tokenmill.sampling_params import check_real, check_whole

if TYPE_CHECKING:
    from tokenmill.engine import Engine

HIGHEST_ID = 10_000  # every token id up to this one may be drawn
CPU_SCALE = 1 / 8
START = "w6"  # constructor to first token: measured in any case, because an engine has to start anyway
_MOST_REQUESTS = 100_000  # all are made before the first one runs
GRAMMAR = "w5"  # the only one that needs a tokenizer
DEFAULT_WORKLOADS = ("w1", "w2", "w3", "w4", "w7")

# A figure -> its column in the table.
COLUMNS = {
    "requests": "requests",
    "seconds": "seconds",
    "out_tok_s": "output tok/s",
    "in_tok_s": "input tok/s",
    "cached_tokens": "cached tokens",
    "tpot_ms": "ms per token",
    "ttft_ms": "ms to first token",
}

# A person as many data sets have one: texts, numbers, lists, and an object within.
_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}
_ADDRESS = {"street": _TEXT, "city": _TEXT, "zip": _TEXT}
_PERSON = {
    "name": _TEXT,
    "age": {"type": "integer"},
    "email": _TEXT,
    "tags": {"type": "array", "items": _TEXT},
    "address": {
        "type": "object",
        "properties": _ADDRESS,
        "required": list(_ADDRESS),
        "additionalProperties": False,
    },
    "scores": {"type": "array", "items": _NUMBER},
}
_SCHEMA = {
    "type": "object",
    "properties": _PERSON,
    "required": list(_PERSON),
    "additionalProperties": False,
}

Figures = dict[str, Any]
Report = Callable[[str], None]


# ── requests ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt and how it is continued.

    The end of sequence is ignored, so every length is exact, unless the output follows a schema, which ends.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    json_schema: str | None = None


class _Draw:
    """Lengths and token ids by seed. A scale shortens lengths; ids stay within a vocabulary."""

    def __init__(self, seed: int, *, scale: float, highest_id: int) -> None:
        self._random = random.Random(seed)
        self._scale = scale
        self._highest_id = highest_id

    def scaled(self, length: int, *, least: int = 1) -> int:
        return max(least, int(length * self._scale))

    def length(self) -> int:
        return self.scaled(self._random.randint(100, 1024))

    def ids(self, count: int) -> list[int]:
        return [self._random.randint(0, self._highest_id) for _ in range(count)]


def _mixed_lengths(draw: _Draw, count: int) -> list[list[BenchRequest]]:
    prompts = [draw.ids(draw.length()) for _ in range(count)]
    return [[BenchRequest(prompt, draw.length(), 0.6) for prompt in prompts]]


def _one_by_one(draw: _Draw, count: int) -> list[list[BenchRequest]]:
    # One more than are counted: the first is for the run that is not. Two tokens have a time between them.
    num_in, num_out = draw.scaled(128), draw.scaled(256, least=2)
    return [[BenchRequest(draw.ids(num_in), num_out, 0.0) for _ in range(count + 1)]]


def _shared_prefix(draw: _Draw, count: int) -> list[list[BenchRequest]]:
    prefix = draw.ids(draw.scaled(2048))
    num_own = draw.scaled(64)
    return [[BenchRequest(prefix + draw.ids(num_own), num_own, 0.6) for _ in range(count)]]


def _long_prompts(draw: _Draw, count: int) -> list[list[BenchRequest]]:
    length = draw.scaled(8192)
    return [[BenchRequest(draw.ids(length), 1, 0.0) for _ in range(count)]]


def _structured(draw: _Draw, count: int) -> list[list[BenchRequest]]:
    num_in, num_out = draw.scaled(128), draw.scaled(128)
    free = [BenchRequest(draw.ids(num_in), num_out, 0.6) for _ in range(count)]
    schema = json.dumps(_SCHEMA)
    return [free, [dataclasses.replace(request, json_schema=schema) for request in free]]


def _growing_batches(draw: _Draw, count: int) -> list[list[BenchRequest]]:
    sizes = [2**power for power in range(count.bit_length()) if 2**power < count] + [count]
    length = draw.scaled(128)
    return [[BenchRequest(draw.ids(length), length, 0.0) for _ in range(size)] for size in sizes]


@dataclass(frozen=True, slots=True)
class Workload:
    """How one workload is made: `batches` takes a source of ids and the number of requests."""

    title: str
    batches: Callable[[_Draw, int], list[list[BenchRequest]]]
    seed: int
    count: int  # requests, where the user does not say
    longest: int  # sequence at full length, prompt and output together
    one_by_one: bool = False


WORKLOADS = {
    "w1": Workload("a batch of mixed lengths", _mixed_lengths, 0, 256, 2048),
    "w2": Workload("one request at a time", _one_by_one, 1, 5, 384, one_by_one=True),
    "w3": Workload("one prefix shared by all", _shared_prefix, 2, 512, 2176),
    "w4": Workload("long prompts, one token each", _long_prompts, 3, 32, 8193),
    "w5": Workload("outputs without and with a JSON schema", _structured, 4, 128, 256),
    "w7": Workload("ever more requests at once", _growing_batches, 5, 256, 256),
}


def digest(requests: Sequence[BenchRequest]) -> str:
    """16 hexadecimal digits that are the same for the same requests."""
    sha = hashlib.sha256()
    for request in requests:
        row = [request.prompt_ids, request.max_new_tokens, request.temperature]
        sha.update(json.dumps(row).encode())
    return sha.hexdigest()[:16]


# ── what to run ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the user wants measured. Raises `InvalidArgument` for what cannot be."""

    workloads: Sequence[str] = DEFAULT_WORKLOADS
    requests: int | None = None  # of each workload; None: its own number
    repeats: int = 2  # counted runs
    scale: float | None = None  # of all lengths; None: by device

    def __post_init__(self) -> None:
        for name in self.workloads:
            _check_name(name)
        check_whole("repeats", self.repeats, minimum=1)
        if self.requests is not None:
            remedy = "; leave it out for each workload's own"
            check_whole("requests", self.requests, minimum=1, maximum=_MOST_REQUESTS, remedy=remedy)
        if self.scale is not None:
            check_real("scale", self.scale, minimum=0, maximum=1, above=True, remedy="; 1 is full length")


def _check_name(name: str) -> None:
    known = sorted([*WORKLOADS, START])
    if name not in known:
        raise InvalidArgument(f"workloads must be of {', '.join(known)}, got {name!r}")


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are timed together: one row of the table."""

    workload: str
    requests: list[BenchRequest]
    one_by_one: bool
    scale: float
    highest_id: int


def loads_of(choice: Choice, facts: Mapping[str, Any]) -> list[Load]:
    """What to run on the engine of these facts (`Engine.get_server_info`), in the order of the table."""
    wanted = _scale(choice, facts)
    highest_id = min(HIGHEST_ID, facts["vocab_size"] - 1)
    loads = []
    for name in dict.fromkeys(choice.workloads):
        if name == START:
            continue
        workload, most = WORKLOADS[name], facts["max_sequence_tokens"]
        scale = min(wanted, most / workload.longest)
        draw = _Draw(workload.seed, scale=scale, highest_id=highest_id)
        for requests in workload.batches(draw, choice.requests or workload.count):
            longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
            if longest > most:
                raise InvalidArgument(
                    f"{name} has sequences of at least {longest} tokens, but here one has at most {most}; "
                    f"raise context_length or max_total_tokens, or leave {name} out of workloads"
                )
            label = f"{name}-json" if requests[0].json_schema else name
            loads.append(Load(label, requests, workload.one_by_one, scale, highest_id))
    return loads


def _scale(choice: Choice, facts: Mapping[str, Any]) -> float:
    return choice.scale or (CPU_SCALE if facts["device"] == "cpu" else 1.0)


def notes_on(choice: Choice, loads: Sequence[Load], facts: Mapping[str, Any]) -> list[str]:
    """Sentences on all that makes these loads other than the full workloads."""
    notes = []
    if choice.scale is None and facts["device"] == "cpu":
        notes.append(f"all lengths times {CPU_SCALE:g}, as always on a CPU; --scale 1 gives full lengths")
    elif choice.scale not in (None, 1):
        notes.append(f"all lengths times {choice.scale:g}, as --scale says")
    wanted = _scale(choice, facts)
    for name, scale in {load.workload.removesuffix("-json"): load.scale for load in loads}.items():
        if scale < wanted:
            notes.append(
                f"{name}: all lengths times {scale:.3g}, because a sequence has at most "
                f"{facts['max_sequence_tokens']:,} tokens here"
            )
    if facts["vocab_size"] <= HIGHEST_ID:
        notes.append(
            f"token ids 0 to {facts['vocab_size'] - 1:,}, all that the model has; the workloads' own go "
            f"to {HIGHEST_ID:,}"
        )
    return notes


# ── timing ────────────────────────────────────────────────────────────────────────────────────


def reporter(show_progress: bool | None) -> Report:
    """Tells on standard error what is on its way, if somebody watches (None: on a terminal)."""
    watched = sys.stderr.isatty() if show_progress is None else show_progress

    def report(text: str) -> None:
        if watched:
            print(text, file=sys.stderr, flush=True)

    return report


def first_token(engine: Engine) -> None:
    """Generate one token, the end of a start."""
    _generate(engine, [BenchRequest([1, 2, 3], 1, 0.0)])


def runs_of(engine: Engine, load: Load, *, repeats: int, report: Report) -> Iterator[Figures]:
    """Run a load once without counting, then `repeats` times; yields the figures of each counted run.

    Every run starts with an empty prefix cache. `report` is told of each one.
    """
    warm_up, counted = load.requests, load.requests
    if load.one_by_one:
        warm_up, counted = load.requests[:1], load.requests[1:]
    run = _time_one_by_one if load.one_by_one else _time_batch
    where = f"{load.workload}, requests: {len(counted)}"
    report(f"{where}, a run that is not counted")
    run(engine, warm_up)
    for number in range(1, repeats + 1):
        report(f"{where}, run {number} of {repeats}")
        yield {
            "digest": digest(load.requests),
            "scale": load.scale,
            "highest_id": load.highest_id,
            "run": number,
            **run(engine, counted),
        }


def _time_batch(engine: Engine, requests: Sequence[BenchRequest]) -> Figures:
    """All requests at once."""
    engine.flush_cache()
    start = time.perf_counter()
    results = _generate(engine, requests)
    return _figures(requests, results, time.perf_counter() - start)


def _time_one_by_one(engine: Engine, requests: Sequence[BenchRequest]) -> Figures:
    """Each request twice: for its first token alone, then whole. The difference is that of the others."""
    results: list[dict[str, Any]] = []
    whole_seconds, first_ms, later_ms = 0.0, [], []
    for request in requests:
        engine.flush_cache()
        start = time.perf_counter()
        _generate(engine, [dataclasses.replace(request, max_new_tokens=1)])
        first = time.perf_counter() - start
        engine.flush_cache()
        start = time.perf_counter()
        results += _generate(engine, [request])
        whole = time.perf_counter() - start
        whole_seconds += whole
        first_ms.append(1e3 * first)
        later_ms.append(1e3 * (whole - first) / (request.max_new_tokens - 1))
    return {
        **_figures(requests, results, whole_seconds),
        "ttft_ms": round(statistics.median(first_ms), 3),
        "ttft_ms_all": [round(ms, 3) for ms in first_ms],
        "tpot_ms": round(statistics.median(later_ms), 4),
        "tpot_ms_all": [round(ms, 4) for ms in later_ms],
    }


def _generate(engine: Engine, requests: Sequence[BenchRequest]) -> list[dict[str, Any]]:
    params = [
        {
            "temperature": request.temperature,
            "max_new_tokens": request.max_new_tokens,
            "ignore_eos": request.json_schema is None,
            "json_schema": request.json_schema,
        }
        for request in requests
    ]
    results: list[dict[str, Any]] = engine.generate(
        input_ids=[r.prompt_ids for r in requests], sampling_params=params
    )
    for request, result in zip(requests, results, strict=True):
        is_exact = len(result["output_ids"]) == request.max_new_tokens
        assert is_exact or request.json_schema is not None, "else the figures would not compare"
    return results


def _figures(
    requests: Sequence[BenchRequest], results: Sequence[Mapping[str, Any]], seconds: float
) -> Figures:
    num_in = sum(len(request.prompt_ids) for request in requests)
    num_out = sum(len(result["output_ids"]) for result in results)
    return {
        "requests": len(requests),
        "in_tokens": num_in,
        "out_tokens": num_out,
        "seconds": round(seconds, 4),
        "out_tok_s": round(num_out / seconds, 1),
        "in_tok_s": round(num_in / seconds, 1),
        "total_tok_s": round((num_in + num_out) / seconds, 1),
        "cached_tokens": sum(result["meta_info"]["cached_tokens"] for result in results),
    }


# ── table ─────────────────────────────────────────────────────────────────────────────────────


def header() -> str:
    """The first line of the table."""
    return "workload  " + "  ".join(f"{title:>{_width(title)}}" for title in COLUMNS.values())


def row(workload: str, runs: Sequence[Figures]) -> str:
    """One line of the table: of each figure that the runs have, the median."""
    cells = []
    for name, title in COLUMNS.items():
        values = [run[name] for run in runs if name in run]
        cells.append(f"{_shown(name, statistics.median(values)) if values else '-':>{_width(title)}}")
    return f"{workload:<8}  " + "  ".join(cells)


def _width(title: str) -> int:
    return max(9, len(title))


def _shown(name: str, value: float) -> str:
    decimals = {"seconds": 2, "ttft_ms": 2, "tpot_ms": 3}.get(name, 0)
    return f"{value:,.{decimals}f}"
