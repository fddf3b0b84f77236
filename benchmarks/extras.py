"""What penalties, biases and log-probabilities cost: each on all rows of W1, prompt log-probabilities on W4
and on 3,000 short prompts, as evaluations have them.

    python benchmarks/extras.py --models Qwen3-0.6B Llama-3.1-8B --out results.jsonl

The same requests with and without, one engine, best of `--reps` runs each, in turns.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from run_workloads import record, sampling_of

import models
import tokenmill
import workloads

VOCABULARY = 128_000  # no model here has fewer ids


def biases(count: int = 20) -> dict[int, float]:
    """As many as users give: some words that they want, some that they do not."""
    rng = random.Random(2)
    return {rng.randrange(VOCABULARY): rng.uniform(-5, 5) for _ in range(count)}


# Name -> (sampling parameters, arguments of `generate`)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "penalties": ({"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1}, {}),
    "logit bias": ({"logit_bias": biases()}, {}),
    "top 5 logprobs": ({}, {"return_logprob": True, "top_logprobs_num": 5}),
}
PROMPT_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "prompt logprobs": ({}, {"return_logprob": True, "logprob_start_len": 0}),
}


def short_prompts() -> list[workloads.Request]:
    """Prompts of 60 to 140 tokens, one output token each."""
    rng = random.Random(1)
    lengths = [rng.randint(60, 140) for _ in range(3000)]
    return [
        workloads.Request([rng.randrange(VOCABULARY) for _ in range(length)], 1, temperature=0.0)
        for length in lengths
    ]


def seconds(engine: tokenmill.Engine, requests: list[workloads.Request], variant: tuple[Any, Any]) -> float:
    """Of one run from an empty prefix cache."""
    params, arguments = variant
    engine.flush_cache()
    began = time.perf_counter()
    engine.generate(
        input_ids=[request.prompt for request in requests],
        sampling_params=[{**sampling_of(request), **params} for request in requests],
        **arguments,
    )
    return time.perf_counter() - began


def compare(
    engine: tokenmill.Engine, requests: list[workloads.Request], variants: dict[str, Any], *, reps: int
) -> dict[str, float]:
    """Best seconds of each variant; the first round warms up."""
    best = dict.fromkeys(variants, float("inf"))
    for round_number in range(reps + 1):
        for name, variant in variants.items():
            taken = seconds(engine, requests, variant)
            if round_number:
                best[name] = min(best[name], taken)
    return best


def run(options: argparse.Namespace) -> None:
    override = {"num_hidden_layers": options.layers} if options.layers else {}
    jobs = {"w1_batch256": (workloads.batch(options.requests), VARIANTS)}
    if not options.layers:
        jobs["w4_long_prefill"] = (workloads.long_prefill(), PROMPT_VARIANTS)
        jobs["short_prompts"] = (short_prompts(), PROMPT_VARIANTS)
    print(f"{'model':<22} {'workload':<16} {'variant':<16} {'seconds':>9} {'more time':>10}")
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            models.write(folder)
            with tokenmill.Engine(
                model_path=str(Path(folder) / model),
                skip_tokenizer_init=True,
                load_format="dummy",
                json_model_override_args=override,
            ) as engine:
                facts = engine.get_server_info()
                for workload, (requests, variants) in jobs.items():
                    best = compare(engine, requests, variants, reps=options.reps)
                    for name, taken in best.items():
                        share = taken / best["plain"] - 1
                        print(
                            f"{model:<22} {workload:<16} {name:<16} {taken:>9.3f} {share:>9.1%}", flush=True
                        )
                        figures = {"variant": name, "seconds": round(taken, 4), "more": round(share, 4)}
                        if options.out is not None:
                            with options.out.open("a", encoding="utf-8") as out:
                                print(json.dumps(record(model, workload, facts, figures)), file=out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(models.CONFIGS), default=["Qwen3-0.6B"])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--layers", type=int, help="make the models this short, for a machine without a GPU")
    parser.add_argument("--out", type=Path, help="append one JSON object per result to this file")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
