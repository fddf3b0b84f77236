"""Penalties, masks and log-probabilities: kernels against their torch references, tiny in the interpreter."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.kernels.penalty import IN_PROMPT, penalize_torch
from tokenmill.sampling.logprobs import TokenLogprobs, pack_on_gpu, token_logprobs
from tokenmill.sampling.masks import apply_masks_torch

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns one-element arrays into loop bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

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
@pytest.mark.parametrize("num_masks", [4, 3, 0])
def test_masks_in_the_memory_of_the_host(triton_device: str, dtype: torch.dtype, num_masks: int) -> None:
    """A row has more words than the vocabulary needs; rows behind the masks keep their logits."""
    from tokenmill.kernels import triton_masks

    logits = make_logits(triton_device, 4, dtype)
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(-(2**31), 2**31, (4, 160), generator=generator).to(torch.int32)
    words = words.pin_memory() if triton_device == "cuda" else words
    place = torch.tensor([words.data_ptr(), words.stride(0), num_masks], device=triton_device)
    bits = words[:num_masks, : -(-VOCABULARY // 32)].contiguous().to(triton_device)
    rows = torch.arange(num_masks, device=triton_device)
    expected = apply_masks_torch(logits.clone(), rows, bits)
    found = triton_masks.apply_host_masks(logits.clone(), place)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_top", [0, 1, 5, 32, 40])
def test_logprobs(triton_device: str, dtype: torch.dtype, num_top: int) -> None:
    logits = make_logits(triton_device, 4, dtype)
    logits[2] = logits[2].round()  # ties, between stripes and within them
    temperatures = torch.tensor([1.0, 0.3, 2.0, 1.0], device=triton_device)
    tokens = torch.tensor([7, 4998, 12, 0], device=triton_device)
    given = torch.tensor([[1, 2], [3, 3], [4999, 0], [7, 4999]], device=triton_device)
    plain = logprobs_of(logits, temperatures, tokens, given, num_top)
    found = packed(logits, temperatures, tokens, given, num_top)
    assert_same(found, plain)
    if num_top <= 32:  # more are sorted, in any order of equals
        assert found.top_ids_RK.tolist() == likeliest(logits, num_top)
    clean = logits.float().nan_to_num(nan=-torch.inf)
    torch.testing.assert_close(
        clean.gather(1, found.top_ids_RK.long()), clean.topk(num_top, dim=1).values, rtol=0, atol=0
    )
    assert_same(found, packed(logits.t().contiguous().t(), temperatures, tokens, given, num_top))


@pytest.mark.parametrize("vocab_size", [1, 31, 40, 4096, 4097])
def test_logprobs_of_vocabularies_of_any_size(triton_device: str, vocab_size: int) -> None:
    """The likeliest may be all there are, and stand in the last stripe or in one that is not full."""
    logits = torch.full((3, vocab_size), 1.5, device=triton_device)
    logits[0, vocab_size - 1] = 2.0
    logits[1] = -torch.inf
    logits[2, 0] = torch.inf
    tokens, given = torch.zeros(3, dtype=torch.int64), torch.full((3, 300), vocab_size - 1)
    tokens, given, ones = tokens.to(triton_device), given.to(triton_device), torch.ones(3).to(triton_device)
    num_top = min(32, vocab_size)
    found = packed(logits, ones, tokens, given, num_top)
    assert_same(found, token_logprobs(logits.cpu(), ones.cpu(), tokens.cpu(), given.cpu(), num_top=num_top))
    assert found.top_ids_RK.tolist() == likeliest(logits, num_top)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_likeliest_among_many_equals(triton_device: str, data: st.DataObject) -> None:
    """Few values, on few places: everything is a tie or impossible."""
    places = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=12, unique=True))
    values = data.draw(
        st.lists(st.sampled_from([3.0, 2.0, math.inf, math.nan]), min_size=len(places), max_size=len(places))
    )
    logits = torch.full((1, VOCABULARY), data.draw(st.sampled_from([-math.inf, -1.0])))
    logits[0, places] = torch.tensor(values)
    num_top = data.draw(st.integers(1, 8))
    nothing = torch.zeros((1, 0), dtype=torch.int64, device=triton_device)
    token, one = torch.tensor([9], device=triton_device), torch.ones(1, device=triton_device)
    found = packed(logits.to(triton_device), one, token, nothing, num_top)
    assert found.tokens_R.tolist() == [9]
    assert found.top_ids_RK.tolist() == likeliest(logits, num_top)
    assert_same(found, token_logprobs(logits, one.cpu(), token.cpu(), nothing.cpu(), num_top=num_top))


def packed(
    logits: torch.Tensor, temperatures: torch.Tensor, tokens: torch.Tensor, given: torch.Tensor, num_top: int
) -> TokenLogprobs:
    """What the kernels make of them."""
    columns = pack_on_gpu(logits, temperatures, tokens, given, num_top=num_top)
    return TokenLogprobs(columns, num_top)


def assert_same(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    """All but the ids of the likeliest, which may differ where there are ties."""
    assert found.packed_RC.shape == expected.packed_RC.shape
    assert found.tokens_R.tolist() == expected.tokens_R.tolist()
    for name in ("token_R", "top_RK", "given_RI"):
        values = (getattr(found, name).cpu(), getattr(expected, name).cpu())
        torch.testing.assert_close(*values, rtol=1e-5, atol=1e-4)


def likeliest(logits: torch.Tensor, num_top: int) -> list[list[int]]:
    """Their ids, of equals the lowest first."""
    clean = logits.cpu().float().nan_to_num(nan=-torch.inf, posinf=2.0**127, neginf=-torch.inf)
    return [ids[:num_top] for ids in clean.argsort(dim=1, descending=True, stable=True).tolist()]


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


def test_the_kernels_compile_for_a_gpu() -> None:
    """Nothing lies in local memory, and several programs run beside each other."""
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_logprobs.py")
    finished = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False
    )
    assert finished.returncode == 0, finished.stderr
    for name, facts in json.loads(finished.stdout).items():
        assert facts["stack"] == 0, (name, facts)
        assert facts["registers"] <= (32 if name.endswith("num_top=0") else 128), (name, facts)


def test_logprobs_of_a_row_in_which_nothing_is_possible() -> None:
    logits = torch.full((1, 40), -torch.inf)
    found = token_logprobs(logits, torch.ones(1), torch.tensor([3]), torch.tensor([[4]]), num_top=2)
    assert torch.isfinite(found.token_R).all()
    assert torch.isfinite(found.top_RK).all()
