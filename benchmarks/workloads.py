"""Fixed offline workloads for comparing LLM inference engines, and the timing loop.

Self-contained (standard library only) so that every engine is fed byte-identical
token ids.  An engine is wrapped in an adapter object with

    name: str
    def generate(self, requests) -> list[Result]   # blocks until all are done
    def flush(self) -> None                        # forget cached prefixes

Timings are host wall clock around one blocking ``generate`` call.  Random-weight
("dummy") models are fine: ``ignore_eos`` fixes the output lengths.

    python benchmarks/workloads.py        # prints each workload's size and digest
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

VOCAB = 10_000  # ids are drawn from 0..10000, below every model's vocabulary


@dataclasses.dataclass
class Request:
    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.6
    ignore_eos: bool = True
    json_schema: dict | None = None


@dataclasses.dataclass
class Result:
    output_ids: list[int]
    cached_tokens: int | None = None


def batch(n: int = 256, seed: int = 0) -> list[Request]:
    """W1: n requests, 100..1024 tokens in, 100..1024 out, temperature 0.6.

    The draw order is that of the widely used nano-vllm benchmark, so n=256,
    seed=0 gives exactly its requests (133,966 output tokens).
    """
    r = random.Random(seed)
    prompts = [[r.randint(0, VOCAB) for _ in range(r.randint(100, 1024))] for _ in range(n)]
    return [Request(p, r.randint(100, 1024)) for p in prompts]


def latency(reps: int = 5, n_in: int = 128, n_out: int = 256, seed: int = 1) -> list[Request]:
    """W2: `reps` distinct single greedy requests, to be sent one at a time."""
    r = random.Random(seed)
    return [
        Request([r.randint(0, VOCAB) for _ in range(n_in)], n_out, temperature=0.0)
        for _ in range(reps)
    ]


def shared_prefix(n: int = 512, prefix: int = 2048, unique: int = 64, n_out: int = 64,
                  seed: int = 2) -> list[Request]:
    """W3: n requests that share one prefix."""
    r = random.Random(seed)
    head = [r.randint(0, VOCAB) for _ in range(prefix)]
    return [Request(head + [r.randint(0, VOCAB) for _ in range(unique)], n_out) for _ in range(n)]


def long_prefill(n: int = 32, n_in: int = 8192, seed: int = 3) -> list[Request]:
    """W4: long prompts, one output token each."""
    r = random.Random(seed)
    return [Request([r.randint(0, VOCAB) for _ in range(n_in)], 1, temperature=0.0) for _ in range(n)]


# No length bounds: with random weights a document then rarely ends before the limit.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"type": "string"},
                "zip": {"type": "string"},
            },
            "required": ["street", "city", "zip"],
            "additionalProperties": False,
        },
        "scores": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["name", "age", "email", "tags", "address", "scores"],
    "additionalProperties": False,
}


def grammar(constrained: bool, n: int = 128, n_in: int = 128, n_out: int = 128,
            seed: int = 4) -> list[Request]:
    """W5: JSON-schema constrained generation, or the same requests unconstrained."""
    r = random.Random(seed)
    return [
        Request(
            [r.randint(0, VOCAB) for _ in range(n_in)], n_out,
            ignore_eos=not constrained,
            json_schema=SCHEMA if constrained else None,
        )
        for _ in range(n)
    ]


def digest(requests: list[Request]) -> str:
    h = hashlib.sha256()
    for q in requests:
        h.update(json.dumps([q.prompt, q.max_new_tokens, q.temperature]).encode())
    return h.hexdigest()[:16]


# --------------------------------------------------------------------- timing

def _timed(engine: Any, requests: list[Request], expect_full: bool = True) -> dict:
    t0 = time.perf_counter()
    results = engine.generate(requests)
    dt = time.perf_counter() - t0
    n_in = sum(len(q.prompt) for q in requests)
    n_out = sum(len(x.output_ids) for x in results)
    full = sum(q.max_new_tokens for q in requests)
    if expect_full and n_out != full:
        raise AssertionError(f"asked for {full} output tokens, got {n_out}")
    cached = [x.cached_tokens for x in results if x.cached_tokens is not None]
    return {
        "requests": len(requests), "in_tokens": n_in, "out_tokens": n_out,
        "seconds": round(dt, 4),
        "out_tok_s": round(n_out / dt, 1), "in_tok_s": round(n_in / dt, 1),
        "total_tok_s": round((n_in + n_out) / dt, 1),
        "cached_tokens": sum(cached) if cached else None,
    }


def _repeat(engine: Any, requests: list[Request], reps: int, **kw) -> list[dict]:
    out = []
    for i in range(reps):
        engine.flush()
        out.append({"run": i + 1, **_timed(engine, requests, **kw)})
    return out


def run_batch(engine: Any, n: int = 256, reps: int = 2) -> list[dict]:
    reqs = batch(n)
    return [{"digest": digest(reqs), **r} for r in _repeat(engine, reqs, reps)]


def run_latency(engine: Any, reps: int = 5) -> list[dict]:
    """ms to the first token (a 1-token request) and ms for each later token."""
    reqs = latency(reps + 1)
    ttft, tpot = [], []
    for i, q in enumerate(reqs):
        engine.flush()
        one = _timed(engine, [dataclasses.replace(q, max_new_tokens=1)])["seconds"]
        engine.flush()
        full = _timed(engine, [q])["seconds"]
        if i:  # the first is warm-up
            ttft.append(one * 1e3)
            tpot.append((full - one) * 1e3 / (q.max_new_tokens - 1))
    return [{
        "digest": digest(reqs), "reps": reps,
        "ttft_ms": round(statistics.median(ttft), 3),
        "ttft_ms_all": [round(x, 3) for x in ttft],
        "tpot_ms": round(statistics.median(tpot), 4),
        "tpot_ms_all": [round(x, 4) for x in tpot],
    }]


def run_shared_prefix(engine: Any, reps: int = 2) -> list[dict]:
    """Each run starts with an empty prefix cache."""
    reqs = shared_prefix()
    return [{"digest": digest(reqs), **r} for r in _repeat(engine, reqs, reps)]


def run_long_prefill(engine: Any, reps: int = 2) -> list[dict]:
    reqs = long_prefill()
    return [{"digest": digest(reqs), **r} for r in _repeat(engine, reqs, reps)]


def run_grammar(engine: Any, reps: int = 2) -> list[dict]:
    """The first constrained run also compiles the schema (cold); later ones do not."""
    out = []
    for constrained in (False, True):
        reqs = grammar(constrained)
        for r in _repeat(engine, reqs, reps + constrained, expect_full=not constrained):
            out.append({"digest": digest(reqs), "constrained": constrained, **r})
    return out


def run_batch_greedy(engine: Any, reps: int = 2) -> list[dict]:
    """W1 with greedy sampling: the difference to W1 is the cost of random sampling."""
    reqs = [dataclasses.replace(q, temperature=0.0) for q in batch()]
    return [{"digest": digest(reqs), **r} for r in _repeat(engine, reqs, reps)]


def run_sweep(engine: Any) -> list[dict]:
    """W7: 128 tokens in, 128 out (greedy) at growing numbers of requests at once."""
    out = []
    r = random.Random(5)
    for n in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        reqs = [Request([r.randint(0, VOCAB) for _ in range(128)], 128, temperature=0.0)
                for _ in range(n)]
        out.append({"digest": digest(reqs), **_repeat(engine, reqs, 2)[1]})
    return out


RUNNERS: dict[str, Callable[[Any], list[dict]]] = {
    "w1_batch256": lambda e: run_batch(e, 256),
    "w1_batch256_once": lambda e: run_batch(e, 256, reps=1),
    "w1_batch1024": lambda e: run_batch(e, 1024),
    "w1_batch256_greedy": run_batch_greedy,
    "w2_latency": run_latency,
    "w3_shared_prefix": run_shared_prefix,
    "w4_long_prefill": run_long_prefill,
    "w5_grammar": run_grammar,
    "w7_sweep": run_sweep,
}


def warm_up(engine: Any) -> None:
    """Small mixed load so that lazy compilation stays out of the timings."""
    r = random.Random(99)
    engine.generate([Request([r.randint(0, VOCAB) for _ in range(r.randint(10, 600))], 16)
                     for _ in range(64)])
    engine.generate([Request([r.randint(0, VOCAB) for _ in range(64)], 16, temperature=0.0)])
    engine.generate([Request([r.randint(0, VOCAB) for _ in range(256)], 32) for _ in range(256)])
    engine.flush()


if __name__ == "__main__":
    for name, reqs in {
        "w1_batch256": batch(), "w1_batch1024": batch(1024), "w2_latency": latency(6),
        "w3_shared_prefix": shared_prefix(), "w4_long_prefill": long_prefill(),
        "w5_grammar": grammar(True),
    }.items():
        print(name, len(reqs), "requests", sum(len(q.prompt) for q in reqs), "in",
              sum(q.max_new_tokens for q in reqs), "out", digest(reqs))
