"""Prompts that need not hurry come in small portions, beside rows that decode for longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.unit

Make = Callable[..., Any]
ROOM = {"num_pages": 400, "max_rows": 32, "max_step_tokens": 64, "max_sequence_tokens": 80}


def job(make_request: Make, limits: list[int]) -> list[Any]:
    """Prompts of eight tokens, none like another."""
    return [
        make_request(str(index), [index, *range(7)], limit, seed=index) for index, limit in enumerate(limits)
    ]


def run(harness: Make, requests: list[Any], **limits: Any) -> Any:
    loop = harness(**{**ROOM, "policy": "lof", **limits})
    loop.submit(*requests)
    loop.run()
    return loop


def prompt_tokens(loop: Any) -> list[int]:
    """Of each step."""
    return [int(plan.counts[plan.num_decodes :].sum()) for plan in loop.plans]


def test_the_longest_row_decodes_while_the_others_are_read(
    harness: Make, make_request: Make, alone: Make
) -> None:
    requests = job(make_request, [40, *[10] * 20])
    at_once, paced = run(harness, requests), run(harness, requests, paced_tokens=8)
    assert prompt_tokens(at_once)[:4] == [64, 56, 48, 0]
    # The first step has no row that decodes. From then on, whoever writes forty tokens outlasts the others.
    assert prompt_tokens(paced)[:14] == [64, *[8] * 13]
    assert sum(prompt_tokens(paced)) == 21 * 8
    assert len(paced.plans) == len(at_once.plans) == 40, "it takes no longer"
    decode_only = [sum(tokens == 0 for tokens in prompt_tokens(loop)) for loop in (at_once, paced)]
    assert decode_only == [37, 26], "and fewer steps read the weights for rows that decode alone"
    for request in requests:
        tokens, finish = alone(request)
        assert paced.tokens(request.id) == at_once.tokens(request.id) == tokens
        assert paced.last(request.id).finish == finish


def test_prompts_of_rows_that_run_as_long_hurry(harness: Make, make_request: Make) -> None:
    requests = job(make_request, [20] * 21)
    assert prompt_tokens(run(harness, requests, paced_tokens=8))[:4] == [64, 56, 48, 0]


def test_prompts_hurry_again_when_the_rows_that_decode_come_to_their_end(
    harness: Make, make_request: Make
) -> None:
    requests = job(make_request, [12, *[4] * 15])
    loop = run(harness, requests, paced_tokens=8)
    assert prompt_tokens(loop)[:9] == [64, 8, 8, 8, 8, 8, 8, 16, 0], "4 of 12 tokens are left then"


def test_prompts_hurry_while_a_long_request_waits_behind_them(harness: Make, make_request: Make) -> None:
    requests = job(make_request, [12, *[4] * 14, 30])
    loop = run(harness, requests, policy="fcfs", paced_tokens=8)
    assert prompt_tokens(loop)[:3] == [64, 56, 8]


def test_a_long_prompt_goes_on_in_small_portions(harness: Make, make_request: Make) -> None:
    requests = [make_request("0", [1], 60), make_request("1", list(range(2, 52)), 5)]
    loop = run(harness, requests, max_step_tokens=20, paced_tokens=6)
    assert prompt_tokens(loop)[:8] == [20, 6, 6, 6, 6, 6, 1, 0]
