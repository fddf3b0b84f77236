"""Hiding stop ids while a minimum of tokens is not out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tokenmill.sampling import SamplingColumns, SamplingNeeds, mask_stops, sample

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_the_stop_ids_of_masked_rows_become_minus_infinity(dtype: torch.dtype) -> None:
    logits_RV = torch.randn((4, 10)).to(dtype)
    expected = logits_RV.clone()
    # Token 0 as a stop id beside paddings, a repeated id, ids outside of the vocabulary.
    stop_ids = torch.tensor([[0, 3, -1], [9, 9, -1], [-1, -1, -1], [10, 2**31 - 1, 5]], dtype=torch.int32)
    expected[0, [0, 3]] = -torch.inf
    expected[3, 5] = -torch.inf
    returned = mask_stops(logits_RV, stop_ids, torch.tensor([True, False, True, True]))
    assert returned is logits_RV  # in place
    assert torch.equal(logits_RV, expected)


def test_a_logit_of_token_0_survives_paddings_whatever_it_is() -> None:
    logits_RV = torch.tensor([[torch.inf, 1.0], [-torch.inf, 1.0], [torch.nan, 1.0]])
    expected = logits_RV.clone()
    mask_stops(logits_RV, torch.full((3, 4), -1, dtype=torch.int32), torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(logits_RV, expected, rtol=0, atol=0, equal_nan=True)


def test_no_rows_and_no_ids() -> None:
    logits_RV = torch.randn((2, 3))
    expected = logits_RV.clone()
    mask_stops(logits_RV, torch.empty((2, 0), dtype=torch.int32), torch.ones(2, dtype=torch.bool))
    assert torch.equal(logits_RV, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_masked_stop_is_never_drawn(
    make_columns: Callable[..., SamplingColumns], temperature: float
) -> None:
    logits_RV = torch.zeros((200, 6))
    logits_RV[:, 4] = 8.0
    logits_RV = mask_stops(
        logits_RV, torch.full((200, 1), 4, dtype=torch.int32), torch.ones(200, dtype=torch.bool)
    )
    columns = make_columns(200, temperature=temperature, seed=torch.arange(200))
    draw = sample(logits_RV, columns, SamplingNeeds(random=temperature > 0, filters=False))
    assert 4 not in draw.told_R.tolist()
