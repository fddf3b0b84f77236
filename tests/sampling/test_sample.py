"""Draws against a plain float64 implementation in NumPy, which sorts everything and makes its own numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tokenmill import sampling
from tokenmill.sampling import SamplingColumns, SamplingNeeds, torch_draw
from tokenmill.sampling.columns import NOT_A_NUMBER, NOTHING_ALLOWED

pytestmark = pytest.mark.cpu

Columns = Callable[..., SamplingColumns]
RANDOM = SamplingNeeds(random=True, filters=False)
FILTERED = SamplingNeeds(random=True, filters=True)
LARGEST_R = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
GREEDY = SamplingNeeds(random=False, filters=False)


def sample(logits_RV: torch.Tensor, columns: SamplingColumns, needs: SamplingNeeds) -> torch.Tensor:
    """What the host is told of a draw."""
    return sampling.sample(logits_RV, columns, needs).told_R


# ── reference ─────────────────────────────────────────────────────────────────────────────────


def reference_uniform(seed: int, position: int) -> float:
    """Philox4x32-10 in Python integers."""
    word = 0xFFFFFFFF
    counter = [position & word, (position >> 32) & word, 0, 0]
    key = [seed & word, (seed >> 32) & word]
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & word,
            (first >> 32) ^ counter[3] ^ key[1],
            first & word,
        ]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return ((counter[0] >> 5) * 2**26 + (counter[1] >> 6)) / 2**53


def reference_probabilities(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[NDArray[np.float64], float]:
    """Probabilities of the survivors by id, and how near a decision of top_p or min_p was to its limit."""
    shares = np.exp((logits - logits.max()) / temperature)
    shares /= shares.sum()
    order = np.lexsort((np.arange(len(logits)), -logits))
    before = np.cumsum(shares[order]) - shares[order]
    relative = shares[order] / shares[order[0]]
    keeps = (np.arange(len(logits)) < (top_k if top_k > 0 else len(logits))) & (relative >= min_p)
    margin = np.inf
    if top_p < 1:
        keeps &= before < top_p
        margin = np.abs(before[1:] - top_p).min(initial=np.inf)
    if min_p > 0:
        margin = min(margin, np.abs(relative - min_p).min())
    survivors = np.zeros_like(shares)
    survivors[order[keeps]] = shares[order[keeps]]
    return survivors / survivors.sum(), margin


def check(logits_RV: torch.Tensor, columns: SamplingColumns, needs: SamplingNeeds = FILTERED) -> None:
    """Every row equals the reference, except where the latter stands on the edge of a decision."""
    tokens = sample(logits_RV, columns, needs).tolist()
    edges = 0
    parameters = zip(*(getattr(columns, field.name).tolist() for field in fields(columns)), strict=True)
    for token, logits, row in zip(tokens, logits_RV.double().numpy(), parameters, strict=True):
        *filters, seed, position = row
        probabilities, margin = reference_probabilities(logits, *filters)
        cumulative = np.cumsum(probabilities)
        target = reference_uniform(seed, position) * cumulative[-1]
        expected = int(np.searchsorted(cumulative, target, side="right"))
        if token != expected:
            edges += 1
            # Beside the expected token only when float32 cannot tell the difference.
            start = cumulative[token - 1] if token else 0.0
            near = start - 2e-6 <= target <= cumulative[token] + 2e-6 and probabilities[token] > 0
            assert near or margin < 2e-6, (token, expected, row)
    assert edges <= max(1, len(tokens) // 50)


def random_columns(make_columns: Columns, num_rows: int, generator: torch.Generator) -> SamplingColumns:
    """Rows with every combination of filters."""

    def numbers() -> torch.Tensor:
        return torch.rand(num_rows, generator=generator)

    ranks = torch.randint(2, 60, (num_rows,), generator=generator)
    return make_columns(
        num_rows,
        temperature=0.3 + 1.5 * numbers(),
        top_k=torch.where(numbers() < 0.5, ranks, -1),
        top_p=torch.where(numbers() < 0.5, 0.05 + 0.94 * numbers(), 1.0),
        min_p=torch.where(numbers() < 0.5, 0.3 * numbers(), 0.0),
        seed=torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator),
        position=torch.randint(0, 2**40, (num_rows,), generator=generator),
    )


# ── agreement ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 300, 4096, 4097, 9001])
def test_random_logits(make_columns: Columns, vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    num_rows = 60 if vocab_size < 4000 else 24
    spread = torch.tensor([0.1, 1.0, 4.0])[torch.arange(num_rows) % 3][:, None]
    logits_RV = (torch.randn((num_rows, vocab_size), generator=generator) * spread).to(dtype)
    columns = random_columns(make_columns, num_rows, generator)
    check(logits_RV, columns)
    check(logits_RV, make_columns(num_rows, seed=columns.seeds_R, temperature=0.7), RANDOM)


@pytest.mark.parametrize("vocab_size", [50, 5000, 20_000])
def test_many_equal_logits(make_columns: Columns, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits_RV = torch.randint(-2, 3, (40, vocab_size), generator=generator) * 1.5
    logits_RV[0] = 0.25  # all equal
    logits_RV[1] = -3.0
    logits_RV[1, vocab_size // 2] = 9.0  # one hot
    check(logits_RV, random_columns(make_columns, 40, generator))


def test_survivors_beyond_the_first_guess(make_columns: Columns) -> None:
    """Rows in which thousands survive, and rows cut in the middle of a value that thousands share."""
    generator = torch.Generator().manual_seed(3)
    logits_RV = torch.randn((12, 20_000), generator=generator)
    logits_RV[6:] = logits_RV[6:].round()
    columns = make_columns(
        12, top_k=[5000, -1, -1, 12_000, 300, 19_999] * 2, top_p=[1, 0.9, 1, 0.99, 0.5, 1] * 2,
        min_p=[0, 0, 0.01, 0.001, 0, 0] * 2, seed=torch.arange(12),
    )  # fmt: skip
    for position in range(3):
        columns.positions_R.fill_(position)
        check(logits_RV, columns)


@pytest.mark.parametrize("temperature", [1e-6, 0.01, 1.0, 50.0])
def test_extreme_values_and_masks(make_columns: Columns, temperature: float) -> None:
    generator = torch.Generator().manual_seed(5)
    logits_RV = torch.randn((36, 700), generator=generator) * 3
    logits_RV[:12] *= 1e4
    logits_RV[12:24] += 3e4
    logits_RV[24:].masked_fill_(torch.rand((12, 700), generator=generator) < 0.99, -torch.inf)
    top_p = torch.tensor([1.0, 0.7])[torch.arange(36) % 2]
    top_k = torch.tensor([-1, 3, 600])[torch.arange(36) % 3]
    check(
        logits_RV,
        make_columns(36, temperature=temperature, top_p=top_p, top_k=top_k, seed=torch.arange(36)),
    )


def test_top_k_keeps_the_lowest_ids_of_equal_logits(make_columns: Columns) -> None:
    logits_RV = torch.zeros((400, 9000))
    logits_RV[:, 8000] = 1.0
    tokens = sample(logits_RV, make_columns(400, top_k=4, seed=torch.arange(400)), FILTERED)
    assert set(tokens.tolist()) == {0, 1, 2, 8000}


def test_top_p_keeps_a_token_if_the_mass_before_it_is_below(make_columns: Columns) -> None:
    logits_RV = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(400, 4)
    for top_p, survivors in (
        (0.4, {0}),
        (0.6, {0, 1}),
        (0.74, {0, 1}),
        (0.8, {0, 1, 2}),
        (0.9, {0, 1, 2, 3}),
    ):
        tokens = sample(logits_RV, make_columns(400, top_p=top_p, seed=torch.arange(400)), FILTERED)
        assert set(tokens.tolist()) == survivors


@pytest.mark.parametrize("vocab_size", [4, 1000, 20_000])
def test_top_p_drops_a_token_if_the_mass_before_it_is_just_the_limit(
    make_columns: Columns, monkeypatch: pytest.MonkeyPatch, vocab_size: int
) -> None:
    monkeypatch.setattr(torch_draw, "uniforms", lambda *_: LARGEST_R)  # draws the last survivor
    for top_p in (0.25, 0.5, 0.75):
        tokens = sample(torch.zeros((1, vocab_size)), make_columns(1, top_p=top_p), FILTERED)
        assert tokens.tolist() == [vocab_size * top_p - 1]


@pytest.mark.parametrize("vocab_size", [6, 20_000])
def test_min_p_parts_tokens_of_nearly_the_same_probability(
    make_columns: Columns, monkeypatch: pytest.MonkeyPatch, vocab_size: int
) -> None:
    monkeypatch.setattr(torch_draw, "uniforms", lambda *_: LARGEST_R)
    logits_RV = torch.tensor([0.0, 0.995, 0.988]).repeat_interleave(vocab_size // 3 + 1)[None, :vocab_size]
    logits_RV = torch.where(logits_RV == 0, logits_RV, logits_RV.log())
    for min_p, last in (
        (0.98, vocab_size - 1),
        (0.99, 2 * (vocab_size // 3 + 1) - 1),
        (0.999, vocab_size // 3),
    ):
        assert sample(logits_RV, make_columns(1, min_p=min_p), FILTERED).tolist() == [last]


def test_min_p_is_relative_to_the_most_likely_token(make_columns: Columns) -> None:
    logits_RV = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(400, 4)
    for min_p, survivors in ((0.2, {0, 1, 2, 3}), (0.3, {0, 1}), (0.6, {0}), (1.0, {0})):
        tokens = sample(logits_RV, make_columns(400, min_p=min_p, seed=torch.arange(400)), FILTERED)
        assert set(tokens.tolist()) == survivors


def test_filters_look_at_the_unfiltered_distribution(make_columns: Columns) -> None:
    """At 0.75 of the whole the third token stays; among the best three alone the second would be last."""
    logits_RV = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(400, 4)
    columns = make_columns(400, top_k=3, top_p=0.75, seed=torch.arange(400))
    assert set(sample(logits_RV, columns, FILTERED).tolist()) == {0, 1, 2}


# ── edges ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vocab_size", [6, 5000, 20_000])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.999999}, {"min_p": 1e-5}])
def test_smallest_and_largest_number_pick_first_and_last_survivor(
    make_columns: Columns, monkeypatch: pytest.MonkeyPatch, vocab_size: int, filters: dict[str, float]
) -> None:
    logits_RV = torch.full((1, vocab_size), -torch.inf)
    logits_RV[0, [1, 2, vocab_size - 2]] = torch.tensor([0.0, 3.0, -1.0])
    for number, expected in ((0.0, 1), (1 - 2.0**-53, vocab_size - 2)):
        number_R = torch.tensor([number], dtype=torch.float64)
        monkeypatch.setattr(torch_draw, "uniforms", lambda *_, number_R=number_R: number_R)
        assert sample(logits_RV, make_columns(1, **filters), FILTERED).tolist() == [expected]


def test_greedy_is_the_lowest_id_of_the_largest_logit(make_columns: Columns) -> None:
    logits_RV = torch.randn((20, 9001)).round()
    expected = [int(np.flatnonzero(row == row.max())[0]) for row in logits_RV.numpy()]
    assert sample(logits_RV, make_columns(20, temperature=0), GREEDY).tolist() == expected
    assert sample(logits_RV, make_columns(20, temperature=0, top_p=0.5), FILTERED).tolist() == expected
    assert sample(logits_RV, make_columns(20, temperature=2, top_k=1), FILTERED).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", [GREEDY, FILTERED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("vocab_size", [5, 20_000])
def test_rows_with_nan_and_infinity(
    make_columns: Columns,
    vocab_size: int,
    filters: dict[str, float],
    temperature: float,
    needs: SamplingNeeds,
    dtype: torch.dtype,
) -> None:
    """A row with a NaN, or with nothing but -inf, draws nothing, and the device goes on with some id."""
    logits_RV = torch.zeros((6, vocab_size), dtype=dtype)
    logits_RV[0] = torch.nan
    logits_RV[1] = -torch.inf
    logits_RV[2, vocab_size - 2] = torch.nan
    logits_RV[3, 3] = torch.inf
    logits_RV[4, 1:] = -torch.inf
    logits_RV[5, [1, 2]] = torch.inf
    before = logits_RV.clone()
    columns = make_columns(6, temperature=temperature, seed=torch.arange(6), **filters)
    draw = sampling.sample(logits_RV, columns, needs)
    told = draw.told_R.tolist()
    assert told[:5] == [NOT_A_NUMBER, NOTHING_ALLOWED, NOT_A_NUMBER, 3, 0]
    assert told[5] in (1, 2)
    assert draw.tokens_R[3:].tolist() == told[3:]
    assert all(0 <= token < vocab_size for token in draw.tokens_R.tolist())
    torch.testing.assert_close(logits_RV, before, rtol=0, atol=0, equal_nan=True)  # only read


def test_temperatures_beyond_all_sense(make_columns: Columns) -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 2.0, -torch.inf]]).expand(200, 4)
    seeds = torch.arange(200)
    cold = sample(logits_RV, make_columns(200, temperature=1e-45, seed=seeds), RANDOM)
    assert set(cold.tolist()) == {1}
    hot = sample(logits_RV, make_columns(200, temperature=torch.inf, seed=seeds), RANDOM)
    assert set(hot.tolist()) == {0, 1, 2}


def test_no_rows(make_columns: Columns) -> None:
    for needs in (GREEDY, RANDOM, FILTERED):
        assert sample(torch.empty((0, 10)), make_columns(0), needs).shape == (0,)


def test_logits_may_be_a_view(make_columns: Columns) -> None:
    wide = torch.randn((6, 1000))
    columns = make_columns(6, seed=torch.arange(6), top_p=0.9)
    for needs in (GREEDY, RANDOM, FILTERED):
        assert torch.equal(
            sample(wide[::2, 10:600], make_columns(3), needs),
            sample(wide[::2, 10:600].contiguous(), make_columns(3), needs),
        )
    assert torch.equal(sample(wide.T.contiguous().T, columns, FILTERED), sample(wide, columns, FILTERED))


# ── independence ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vocab_size", [517, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_see_its_neighbours(
    make_columns: Columns, vocab_size: int, dtype: torch.dtype
) -> None:
    """Alone, in any batch, in any order, with or without filters next to it."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits_RV = (torch.randn((40, vocab_size), generator=generator) * 2).to(dtype)
    columns = random_columns(make_columns, 40, generator)
    columns.temperatures_R[::5] = 0
    plain = (columns.top_ks_R < 0) & (columns.top_ps_R == 1) & (columns.min_ps_R == 0)
    together = sample(logits_RV, columns, FILTERED)
    for row in range(40):
        one = slice(row, row + 1)
        needs = RANDOM if bool(plain[row]) else FILTERED
        assert torch.equal(sample(logits_RV[one], take(columns, one), needs), together[one])
    order = torch.randperm(40, generator=generator)
    assert torch.equal(sample(logits_RV[order], take(columns, order), FILTERED), together[order])


def test_sums_of_a_row_are_the_same_bits_anywhere_in_a_batch() -> None:
    logits_V = torch.randn(9001)
    scale = torch.tensor([1.3])
    alone = torch_draw._sum_rows(logits_V[None], torch.tensor([0]), scale)
    among = torch.randn((50, 9001))
    for place in (1, 12, 13, 49):
        among[place] = logits_V
        together = torch_draw._sum_rows(among, torch.arange(50), scale.expand(50))
        for numbers, expected in zip(together, alone, strict=True):
            assert torch.equal(numbers[place], expected[0])


def take(columns: SamplingColumns, rows: slice | torch.Tensor) -> SamplingColumns:
    return SamplingColumns(*(getattr(columns, field.name)[rows] for field in fields(columns)))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_weight_has_the_same_bits_wherever_it_stands(threads: int) -> None:
    """So that a draw is the same alone and beside any other rows."""
    values = torch.rand(3 * 50_257, generator=torch.Generator().manual_seed(2)) * -40
    zeros, ones = torch.zeros(1, 1), torch.ones(1, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat(
            [torch_draw._exponentials(each.clone().view(1, 1), zeros, ones)[0] for each in values[:500]]
        )
        for num_rows, size in ((1, 500), (20, 25), (3, 50_257), (9, 17), (4, 37), (500, 1)):
            rows = values[: num_rows * size].clone().view(num_rows, size)
            together = torch_draw._exponentials(rows, zeros, ones).flatten()[:500]
            assert torch.equal(together, alone[: len(together)]), (num_rows, size)
    finally:
        torch.set_num_threads(before)


def test_a_draw_between_two_tokens_is_the_same_in_any_batch() -> None:
    """Where the last bit of a weight decides between them."""
    logits = torch.full((9, 17), -0.1629791259765625)
    logits[:, 16] = 0

    def tokens(count: int, seed: int) -> list[int]:
        columns = SamplingColumns(
            temperatures_R=torch.ones(count),
            top_ks_R=torch.full((count,), -1, dtype=torch.int32),
            top_ps_R=torch.ones(count),
            min_ps_R=torch.zeros(count),
            seeds_R=torch.full((count,), seed),
            positions_R=torch.full((count,), 3),
        )
        needs = SamplingNeeds(random=True, filters=False)
        drawn: list[int] = torch_draw.sample(logits[:count], columns, needs).tokens_R.tolist()
        return drawn

    for seed in (1506145, 1763674):
        assert tokens(9, seed) == tokens(1, seed) * 9
