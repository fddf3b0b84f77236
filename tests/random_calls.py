"""Random calls that use features beside each other, and what each row of them gets, to the last bit.

In the deterministic mode that depends on the row alone. So an engine under pressure (small steps, few rows
and pages, any order) must give what one gives that computes the rows one after the other, without cache or
graphs.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import tokenmill as sgl

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
PLAIN = {"disable_radix_cache": True, "disable_cuda_graph": True, "steps_in_flight": 1}
# Features of a request, and how often one has them.
_PARAMS: list[tuple[float, str, list[Any]]] = [
    (0.3, "top_p", [0.1, 0.8]),
    (0.2, "top_k", [1, 3, 40]),
    (0.15, "min_p", [0.1]),
    (0.15, "frequency_penalty", [-0.5, 0.7]),
    (0.15, "repetition_penalty", [1.3]),
    (0.15, "logit_bias", [{"65": -50.0, "200": 5.0}]),
    (0.2, "ignore_eos", [True]),
    (0.2, "stop", [["a", "x"], ["e"]]),
    (0.1, "stop_token_ids", [[70], [180]]),
    (0.1, "stop_regex", ["[a-f][0-9]"]),
    (0.1, "no_stop_trim", [True]),
    (0.1, "n", [2, 3]),
]
_GRAMMARS = [{"json_schema": SCHEMA}, {"regex": "[a-c]{3}[0-9]{1,6}(foo|bar)?"}]
_OPTIONS: list[tuple[float, str, list[Any]]] = [
    (0.4, "return_logprob", [True]),
    (0.15, "return_hidden_states", ["last", True]),
]
Call = dict[str, Any]


def draw_calls(rng: random.Random, count: int) -> list[Call]:
    """Calls of one prompt each; many prompts begin alike."""
    roots = [[rng.randrange(256) for _ in range(length)] for length in (30, 100, 250)]
    return [_draw(rng, rng.choice(roots)) for _ in range(count)]


def _draw(rng: random.Random, root: list[int]) -> Call:
    prompt = root[: rng.choice([0, rng.randint(1, len(root)), len(root)])]
    prompt = [*prompt, *(rng.randrange(256) for _ in range(rng.choice([1, 5, 40])))]
    params: dict[str, Any] = {
        "temperature": rng.choice([0, 0.7, 1.0, 1.5]),
        "max_new_tokens": rng.choice([0, 1, 5, 20, 40]),
        "sampling_seed": rng.randrange(1000),
    }
    if params["max_new_tokens"] >= 5 and rng.random() < 0.15:
        params |= rng.choice(_GRAMMARS)
    else:
        params |= _some(rng, _PARAMS)
    options = _some(rng, _OPTIONS)
    if "return_logprob" in options:
        options |= {
            "top_logprobs_num": rng.choice([0, 1, 2, 9, 40]),
            "logprob_start_len": rng.choice([-1, 0, 1]),
        }
    return {"input_ids": prompt, "sampling_params": params, **options}


def _some(rng: random.Random, features: list[tuple[float, str, list[Any]]]) -> dict[str, Any]:
    return {name: rng.choice(values) for share, name, values in features if rng.random() < share}


def draw_pressure(rng: random.Random) -> dict[str, Any]:
    """Arguments of an engine that has to cut, push back and reorder."""
    return {
        "page_size": rng.choice([1, 16, 32]),
        "chunked_prefill_size": rng.choice([16, 64, 1000]),
        "max_running_requests": rng.choice([2, 5, 64]),
        "steps_in_flight": rng.choice([1, 2, 3]),
        "schedule_policy": rng.choice([None, "fcfs", "lpm", "lof", "random"]),
        "disable_radix_cache": rng.random() < 0.2,
        "max_total_tokens": rng.choice([1100, 30_000]),  # three samples of the longest row fit
    }


def one_by_one(engine: sgl.Engine, calls: list[Call]) -> list[Any]:
    """What each row gets alone."""
    return [_essence(engine.generate(**call)) for call in calls]


def at_once(engine: sgl.Engine, calls: list[Call], rng: random.Random) -> list[Any]:
    """The same of all rows beside each other, coming and going, some of them given up on the way."""

    async def one(call: Call) -> Any:
        await asyncio.sleep(rng.random() * 0.02)
        return _essence(await engine.async_generate(**call))

    async def given_up(call: Call) -> None:
        task = asyncio.ensure_future(one(call))
        await asyncio.sleep(rng.random() * 0.03)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def run() -> list[Any]:
        doomed = [given_up(rng.choice(calls)) for _ in range(3)]
        found = await asyncio.gather(*map(one, calls), *doomed)
        return found[: len(calls)]

    return asyncio.run(run())


def _essence(results: Any) -> list[dict[str, Any]]:
    """All that depends on the row alone."""
    found = []
    for result in results if isinstance(results, list) else [results]:
        about = result["meta_info"]
        told = {name: about[name] for name in about if "logprob" in name or name == "hidden_states"}
        counts = {name: about[name] for name in ("finish_reason", "prompt_tokens", "completion_tokens")}
        found.append({"ids": result["output_ids"], "text": result["text"], **counts, **told})
    return found
