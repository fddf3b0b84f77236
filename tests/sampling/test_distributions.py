"""Chi-square tests: what is drawn over many seeds or positions has the probabilities that were asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats

from tokenmill import sampling
from tokenmill.sampling import SamplingColumns, SamplingNeeds

pytestmark = pytest.mark.cpu

Columns = Callable[..., SamplingColumns]
NUM_DRAWS = 20_000
LOGITS = torch.linspace(2.0, -2.5, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(1))]
# Seeds are fixed, so that a test either always passes or never does.
LEAST_P_VALUE = 1e-4


def sample(logits_RV: torch.Tensor, columns: SamplingColumns, needs: SamplingNeeds) -> torch.Tensor:
    """What the host is told of a draw."""
    return sampling.sample(logits_RV, columns, needs).told_R


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "top_k and top_p": {"temperature": 1.5, "top_k": 10, "top_p": 0.7},
    "all": {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "min_p": 0.05},
}


def expected_shares(
    temperature: float = 1.0, top_k: int = 24, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    shares, ids = (LOGITS.double() / temperature).softmax(0).sort(descending=True)
    keeps = (shares.cumsum(0) - shares < top_p) & (shares >= min_p * shares[0]) & (torch.arange(24) < top_k)
    kept = torch.zeros(24, dtype=torch.float64)
    kept[ids[keeps]] = shares[keeps]
    return kept / kept.sum()


def p_value(tokens: torch.Tensor, shares: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(shares))
    assert not counts[shares == 0].any()
    possible = shares > 0
    expected = shares[possible] * len(tokens)
    return float(stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue)


@pytest.mark.parametrize("axis", ["seed", "position"])
@pytest.mark.parametrize("case", CASES)
def test_shares(make_columns: Columns, case: str, axis: str) -> None:
    """Different seeds at one position, and one seed over positions."""
    draws = torch.arange(NUM_DRAWS)
    columns = make_columns(
        NUM_DRAWS, **({"seed": draws, "position": 11} if axis == "seed" else {"seed": -3, "position": draws}),
        **CASES[case],
    )  # fmt: skip
    needs = SamplingNeeds(random=True, filters=bool(CASES[case].keys() - {"temperature"}))
    tokens = sample(LOGITS.expand(NUM_DRAWS, 24), columns, needs)
    assert p_value(tokens, expected_shares(**CASES[case])) > LEAST_P_VALUE


def test_draws_of_one_seed_do_not_follow_each_other(make_columns: Columns) -> None:
    logits = torch.zeros((NUM_DRAWS, 8))
    tokens = sample(
        logits, make_columns(NUM_DRAWS, seed=99, position=torch.arange(NUM_DRAWS)), SamplingNeeds(True, False)
    )
    pairs = tokens[:-1] * 8 + tokens[1:]
    assert p_value(pairs, torch.full((64,), 1 / 64, dtype=torch.float64)) > LEAST_P_VALUE


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.999999}])
def test_a_wide_vocabulary_is_drawn_from_to_its_end(make_columns: Columns, filters: dict[str, float]) -> None:
    """9,001 tokens in three blocks; every tenth of the cumulative distribution holds a tenth of the draws."""
    generator = torch.Generator().manual_seed(2)
    logits_V = torch.randn(9001, generator=generator) + torch.linspace(-3, 3, 9001)
    num_draws = 1000 if not filters else 300
    tokens = sample(
        logits_V.expand(num_draws, 9001),
        make_columns(num_draws, seed=torch.arange(num_draws), **filters),
        SamplingNeeds(True, bool(filters)),
    )
    cumulative = logits_V.double().softmax(0).cumsum(0)
    tenth = (cumulative * 10).long().clamp(max=9)
    shares = torch.zeros(10, dtype=torch.float64).scatter_add_(0, tenth, logits_V.double().softmax(0))
    assert p_value(tenth[tokens], shares) > LEAST_P_VALUE


def test_rare_tokens_keep_their_share(make_columns: Columns) -> None:
    """One likely token, and 19,999 of about 1e-5 each, which make a sixth in all."""
    logits_V = torch.full((20_000,), -11.5)
    logits_V[17_000] = 0.0
    num_draws = 600
    tokens = sample(
        logits_V.expand(num_draws, -1),
        make_columns(num_draws, seed=torch.arange(num_draws)),
        SamplingNeeds(True, False),
    )
    rest = 19_999 * 2.718281828459045**-11.5
    shares = torch.tensor([rest / (1 + rest), 1 / (1 + rest)], dtype=torch.float64)
    assert p_value((tokens == 17_000).long(), shares) > LEAST_P_VALUE
