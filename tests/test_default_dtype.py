"""torch's default dtype belongs to the user: whatever it is, the engine computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tokenmill as sgl

pytestmark = pytest.mark.cpu

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0, "logit_bias": {"300": 5.0}},
    {"temperature": 3.0, "top_p": 0.95, "sampling_seed": 1},
    {"temperature": 30.0, "top_k": 3000, "sampling_seed": 2},
    {"temperature": 30.0, "min_p": 0.01, "sampling_seed": 3},
]


def told() -> list[Any]:
    """What each row gives, twice, for slots are used again; a prompt's logprobs."""
    prompts = [f"The number {index} is" for index in range(len(PARAMS))]
    params = [{"max_new_tokens": 8, "ignore_eos": True, **each} for each in PARAMS]
    with sgl.Engine("tiny", dtype="float32", max_running_requests=2, disable_radix_cache=True) as engine:
        outputs = [engine.generate(prompts, params) for _ in range(2)]
        shown = engine.generate(
            "Once upon a time", {"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
        )
    ids = [row["output_ids"] for rows in outputs for row in rows]
    return [ids, shown["meta_info"]["input_token_logprobs"]]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return told()


@pytest.fixture
def restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing(expected: list[Any], restored: None, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    assert told() == expected
