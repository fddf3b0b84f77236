"""Penalties, masks and log-probabilities: kernels against their torch references, tiny in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tokenmill.kernels.penalty import IN_PROMPT, penalize_torch
from tokenmill.sampling.logprobs import TokenLogprobs, token_logprobs
from tokenmill.sampling.masks import apply_masks_torch

pytestmark = pytest.mark.cpu

VOCABULARY = 5000  # more than one block, the last one not full
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def infinities_allowed() -> Iterator[None]:
    """The interpreter computes with NumPy, which would warn of infinities that are meant."""
    with np.errstate(all="ignore"):
        yield


def make_logits(device: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn((rows, VOCABULARY), generator=generator) * 6
    logits[0, 7], logits[1, 4999] = -torch.inf, torch.nan
    return logits.to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties(triton_device: str, dtype: torch.dtype) -> None:
    from tokenmill.kernels import triton_penalty

    logits = make_logits(triton_device, 3, dtype)
    slots = torch.tensor([4, 0, 2], device=triton_device)
    penalties = torch.tensor([[0.0, 0.0, 1.0]], device=triton_device).repeat(5, 1)
    penalties[4] = torch.tensor([0.5, -1.0, 1.3])
    penalties[2] = torch.tensor([0.0, 0.0, 0.7])
    counts = torch.randint(0, 4, (5, VOCABULARY), dtype=torch.int32).to(triton_device)
    counts[2, ::3] += IN_PROMPT
    expected = penalize_torch(logits, slots, penalties, counts)
    found = triton_penalty.penalize(logits, slots, penalties, counts)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    # A row without penalties keeps its logits to the last bit.
    assert torch.equal(found[1].nan_to_num(), logits[1].float().nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_words", [157, 120])
def test_masks(triton_device: str, dtype: torch.dtype, num_words: int) -> None:
    from tokenmill.kernels import triton_masks

    logits = make_logits(triton_device, 4, dtype)
    rows = torch.tensor([3, 1], device=triton_device)
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(2**31), 2**31, (2, num_words), generator=generator).to(torch.int32)
    expected = apply_masks_torch(logits.clone(), rows, bits.to(triton_device))
    found = triton_masks.apply_masks(logits.clone(), rows, bits.to(triton_device))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    for row, words in zip(rows.tolist(), bits.tolist(), strict=True):
        allowed = {
            32 * word + bit for word, value in enumerate(words) for bit in range(32) if value >> bit & 1
        }
        forbidden = set(torch.nonzero(found[row] == -torch.inf).flatten().tolist())
        assert forbidden | {4999} == (set(range(VOCABULARY)) - allowed) | {4999}  # one logit is NaN


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_top", [0, 1, 4, 64])
def test_logprobs(triton_device: str, dtype: torch.dtype, num_top: int) -> None:
    from tokenmill.kernels import triton_logprobs

    logits = make_logits(triton_device, 3, dtype)
    temperatures = torch.tensor([1.0, 0.3, 2.0], device=triton_device)
    tokens = torch.tensor([7, 4998, 12], device=triton_device)
    given = torch.tensor([[1, 2], [3, 3], [4999, 0]], device=triton_device)
    expected = logprobs_of(logits, temperatures, tokens, given, num_top)
    maxima, sums, values, ids = triton_logprobs.summarize(logits, temperatures, num_top=num_top)
    assert maxima.shape == sums.shape == (3, 2)
    clean = logits.float().nan_to_num(nan=-torch.inf, posinf=2.0**127, neginf=-torch.inf)
    best = values.topk(num_top, dim=1)
    found_ids = ids.gather(1, best.indices)
    torch.testing.assert_close(clean.gather(1, found_ids), best.values, rtol=0, atol=0)
    torch.testing.assert_close(best.values, clean.topk(num_top, dim=1).values, rtol=0, atol=0)
    total = (sums * ((maxima - maxima.amax(1, keepdim=True)) / temperatures[:, None]).exp()).sum(1)
    normalizer = maxima.amax(1) / temperatures + total.log()
    reference = (clean / temperatures[:, None]).logsumexp(1)
    torch.testing.assert_close(normalizer, reference, rtol=1e-5, atol=1e-4)
    assert expected.top_RK.shape == (3, num_top)


def logprobs_of(
    logits: torch.Tensor, temperatures: torch.Tensor, tokens: torch.Tensor, given: torch.Tensor, num_top: int
) -> TokenLogprobs:
    """What the engine makes of them, checked against a plain log-softmax."""
    found = token_logprobs(logits, temperatures, tokens, given, num_top=num_top)
    clean = logits.double().nan_to_num(nan=-torch.inf, posinf=2.0**127, neginf=-torch.inf)
    plain = (clean / temperatures[:, None]).log_softmax(1).clamp(min=torch.finfo(torch.float32).min)
    torch.testing.assert_close(
        found.token_R.double(), plain.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-4
    )
    torch.testing.assert_close(found.given_RI.double(), plain.gather(1, given), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.top_RK.double(), plain.topk(num_top, dim=1).values, rtol=1e-5, atol=1e-4)
    return found


def test_logprobs_of_a_row_in_which_nothing_is_possible() -> None:
    logits = torch.full((1, 40), -torch.inf)
    found = token_logprobs(logits, torch.ones(1), torch.tensor([3]), torch.tensor([[4]]), num_top=2)
    assert torch.isfinite(found.token_R).all()
    assert torch.isfinite(found.top_RK).all()
