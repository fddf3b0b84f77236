"""Penalties, biases, log-probabilities and hidden states on a GPU: captured steps against plain ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenmill as sgl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CHANGES: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"repetition_penalty": 1.7, "penalize_prompt": True},
    {"logit_bias": {str(token): float(token % 7) - 3 for token in range(100)}},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 3, "frequency_penalty": 1.0},
    {"min_new_tokens": 5, "ignore_eos": False, "stop_token_ids": list(range(0, 256, 2))},
]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "chunked": {"chunked_prefill_size": 16, "max_running_requests": 4},
    "preempted": {"max_total_tokens": 400, "steps_in_flight": 3},
}


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(12)]


def run(folder: Path, **arguments: Any) -> Any:
    greedy = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    with sgl.Engine(model_path=str(folder), dtype="float32", mem_fraction_static=0.2, **arguments) as engine:
        return [
            engine.generate(
                input_ids=prompts(),
                sampling_params=[{**greedy, **CHANGES[index % len(CHANGES)]} for index in range(12)],
                return_logprob=[index % 4 == 1 for index in range(12)],
                logprob_start_len=[min(index, 1) for index in range(12)],
                top_logprobs_num=[index % 4 for index in range(12)],
                token_ids_logprob=[5, 6],
                return_hidden_states=hidden,
            )
            for hidden in ([False] * 12, [index % 5 == 0 for index in range(12)])
        ]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_captured_steps_give_what_plain_ones_give_on_a_cpu(
    make_model: Callable[..., Path], name: str
) -> None:
    folder = make_model("qwen3", head_dim=64)
    expected = run(folder, device="cpu")
    for given, results in zip(expected, run(folder, device="cuda", **ARGUMENTS[name]), strict=True):
        for one, other in zip(given, results, strict=True):
            assert other["output_ids"] == one["output_ids"]
            for key, value in one["meta_info"].items():
                found = other["meta_info"][key]
                if key.endswith("_logprobs"):
                    compare_logprobs(found, value)
                if key == "hidden_states":
                    for ours, theirs in zip(found, value, strict=True):
                        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def compare_logprobs(found: Any, expected: Any) -> None:
    """Nested lists of (value, id, text), None for what is unknown."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            compare_logprobs(one, other)
    elif expected is None or expected[0] is None:
        assert found == expected
    else:
        assert found[1] == expected[1]
        assert found[0] == pytest.approx(expected[0], abs=1e-3)


def test_masks_and_processors_join_captured_steps(make_model: Callable[..., Path]) -> None:
    """The engine's inner door: a callable that forbids everything but one token of its parameters."""
    from tokenmill.kernels import triton_masks
    from tokenmill.sampling.masks import apply_masks_torch

    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((200, 151_936), generator=generator).to(torch.bfloat16)
    rows = torch.randperm(200, generator=generator)[:128]
    bits = torch.randint(-(2**31), 2**31, (128, 151_936 // 32), generator=generator).to(torch.int32)
    expected = apply_masks_torch(logits.clone(), rows, bits)
    found = triton_masks.apply_masks(logits.cuda(), rows.cuda(), bits.cuda())
    assert torch.equal(found.cpu(), expected)
    bits = bits.pin_memory()
    place = torch.tensor([bits.data_ptr(), bits.stride(0), len(bits)]).cuda()
    expected = apply_masks_torch(logits.clone(), torch.arange(128), bits)
    assert torch.equal(triton_masks.apply_host_masks(logits.cuda(), place).cpu(), expected)


@pytest.mark.parametrize("num_top", [0, 1, 5, 32, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logprobs_of_large_vocabularies(num_top: int, dtype: torch.dtype) -> None:
    from tokenmill.sampling.logprobs import token_logprobs

    logits = (torch.randn((300, 151_936)) * 5).to(dtype)
    temperatures = torch.rand(300) + 0.3
    tokens, given = torch.randint(0, 151_936, (300,)), torch.randint(0, 151_936, (300, 3))
    expected = token_logprobs(logits, temperatures, tokens, given, num_top=num_top)
    found = token_logprobs(logits.cuda(), temperatures.cuda(), tokens.cuda(), given.cuda(), num_top=num_top)
    for name in ("token_R", "top_RK", "given_RI"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), rtol=1e-4, atol=1e-4)
    # Of equals, too, which 16 bits have many of.
    assert torch.equal(found.top_ids_RK.cpu(), expected.top_ids_RK)
