"""The likeliest tokens: which they are, and in which order, also where many are equal."""

from __future__ import annotations

import pytest
import torch

from tokenmill.sampling.logprobs import LOWEST, token_logprobs

pytestmark = pytest.mark.cpu


def likeliest(logits_RV: torch.Tensor, num_top: int) -> list[list[int]]:
    rows = len(logits_RV)
    tokens_R, given_ids_RI = torch.zeros(rows, dtype=torch.int64), torch.empty((rows, 0), dtype=torch.int64)
    found = token_logprobs(logits_RV, torch.ones(rows), tokens_R, given_ids_RI, num_top=num_top)
    assert torch.equal(found.top_RK, found.top_RK.sort(dim=1, descending=True).values)
    expected_RV = logits_RV.float().log_softmax(1).clamp(min=LOWEST)
    expected_RK = expected_RV.gather(1, found.top_ids_RK.long())
    torch.testing.assert_close(found.top_RK, expected_RK, rtol=1e-5, atol=1e-5)
    ids: list[list[int]] = found.top_ids_RK.tolist()
    return ids


@pytest.mark.parametrize("num_values", [1, 2, 7, 60, 5000])
@pytest.mark.parametrize("vocab_size", [1, 2, 40, 1000])
def test_of_equals_the_lowest_ids_in_order(num_values: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(num_values)
    logits_RV = torch.randint(0, num_values, (20, vocab_size), generator=generator).float()
    logits_RV[logits_RV == 3] = -torch.inf
    logits_RV[logits_RV == 0] = -0.0
    logits_RV[:, :1] = 0.0
    order = [
        sorted(range(vocab_size), key=lambda token, row=row: (-row[token], token))
        for row in logits_RV.tolist()
    ]
    for num_top in (0, 1, 2, 3, 8, 39, 40, vocab_size, vocab_size + 3):
        assert likeliest(logits_RV, num_top) == [row[:num_top] for row in order]
