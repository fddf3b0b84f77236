"""Sampling at real sizes on a GPU: kernels against the torch path there and on the CPU, graphs, shares."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from tokenmill import sampling
from tokenmill.sampling import SamplingColumns, SamplingNeeds, mask_stops, torch_draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VOCABULARIES = [151_936, 128_256, 32_000, 50_257]
# The paths differ in the last bits of `exp2`. A draw within 1e-7 of the edge between two tokens may go either
# way, which in a nearly flat distribution of 150,000 tokens is one draw in a hundred.
MOST_DIFFERENT = 0.02


def sample(logits_RV: torch.Tensor, columns: SamplingColumns, needs: SamplingNeeds) -> torch.Tensor:
    """What the host is told of a draw."""
    return sampling.sample(logits_RV, columns, needs).told_R


def random_columns(num_rows: int, *, filters: bool, seed: int = 0, device: str = "cuda") -> SamplingColumns:
    generator = torch.Generator().manual_seed(seed)

    def numbers() -> torch.Tensor:
        return torch.rand(num_rows, generator=generator)

    def some(column: torch.Tensor, off: float) -> torch.Tensor:
        return torch.where((numbers() < 0.5) & filters, column, off)

    columns = SamplingColumns(
        temperatures_R=torch.where(numbers() < 0.1, 0.0, 0.3 + 1.2 * numbers()),
        top_ks_R=some(torch.randint(1, 1500, (num_rows,), generator=generator), -1).to(torch.int32),
        top_ps_R=some(0.1 + 0.89 * numbers(), 1.0),
        min_ps_R=some(0.2 * numbers(), 0.0),
        seeds_R=torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator),
        positions_R=torch.randint(0, 2**20, (num_rows,), generator=generator),
    )
    return moved(columns, device)


def moved(columns: SamplingColumns, device: str) -> SamplingColumns:
    return SamplingColumns(*(getattr(columns, field.name).to(device) for field in fields(columns)))


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Peaked, medium and nearly flat rows."""
    generator = torch.Generator("cuda").manual_seed(seed)
    spread = torch.tensor([4.0, 2.0, 0.5], device="cuda")[torch.arange(num_rows, device="cuda") % 3]
    logits = torch.randn((num_rows, vocab_size), generator=generator, device="cuda") * spread[:, None]
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("filters", [False, True])
def test_kernels_draw_what_torch_draws(vocab_size: int, dtype: torch.dtype, filters: bool) -> None:
    needs = SamplingNeeds(random=True, filters=filters)
    different = 0
    for seed in range(4):
        logits = random_logits(64, vocab_size, dtype, seed)
        columns = random_columns(64, filters=filters, seed=seed)
        expected = torch_draw.sample(logits, columns, needs).told_R
        different += int((sample(logits, columns, needs) != expected).sum())
    assert different <= MOST_DIFFERENT * 4 * 64


@pytest.mark.parametrize("filters", [False, True])
def test_gpu_draws_what_the_cpu_draws(filters: bool) -> None:
    needs = SamplingNeeds(random=True, filters=filters)
    logits = random_logits(48, 32_000, torch.bfloat16)
    columns = random_columns(48, filters=filters)
    on_cpu = sample(logits.cpu(), moved(columns, "cpu"), needs)
    assert int((sample(logits, columns, needs).cpu() != on_cpu).sum()) <= 1


def test_many_draws_differ_from_the_torch_path_hardly_ever() -> None:
    logits = random_logits(1, 32_000, torch.bfloat16).expand(4000, -1)
    columns = random_columns(4000, filters=False)
    needs = SamplingNeeds(random=True, filters=False)
    expected = torch_draw.sample(logits, columns, needs).told_R
    different = (sample(logits, columns, needs) != expected).double().mean()
    assert float(different) <= 1e-3  # a peaked distribution


@pytest.mark.parametrize("dtype", DTYPES)
def test_hard_rows(dtype: torch.dtype) -> None:
    """All equal, one hot, masked, NaN, infinite, very many ties: the same tokens as torch."""
    vocab_size = 100_003
    logits = torch.zeros((10, vocab_size), device="cuda")
    logits[1, 77_777] = 20.0
    logits[2] = -torch.inf
    logits[3] = torch.nan
    logits[4, ::2] = -torch.inf
    logits[5, [5, 99_999]] = torch.inf
    logits[6] = torch.randint(-2, 3, (vocab_size,), device="cuda")
    logits[7, 1:] = -torch.inf
    logits[8, 50_000] = torch.nan
    logits[9] = torch.randn(vocab_size, device="cuda").round()
    logits = logits.to(dtype)
    for temperature in (0.0, 1.0):
        for top_k, top_p, min_p in ((-1, 1, 0), (40, 1, 0), (-1, 0.6, 0), (-1, 1, 0.3), (70_000, 0.9, 0)):
            columns = SamplingColumns(
                temperatures_R=torch.full((10,), temperature, device="cuda"),
                top_ks_R=torch.full((10,), top_k, dtype=torch.int32, device="cuda"),
                top_ps_R=torch.full((10,), float(top_p), device="cuda"),
                min_ps_R=torch.full((10,), float(min_p), device="cuda"),
                seeds_R=torch.arange(10, device="cuda"),
                positions_R=torch.arange(10, device="cuda"),
            )
            needs = SamplingNeeds(random=True, filters=True)
            expected = torch_draw.sample(logits, columns, needs).told_R
            tokens = sample(logits, columns, needs)
            # Rows of many equal logits may land on the next survivor: see MOST_DIFFERENT.
            near = (tokens - expected).abs() <= torch.tensor([0] * 6 + [50, 0, 0, 50], device="cuda")
            assert bool(near.all()), (temperature, top_k, top_p, tokens, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_see_its_neighbours(dtype: torch.dtype) -> None:
    logits = random_logits(96, 151_936, dtype)
    columns = random_columns(96, filters=True)
    needs = SamplingNeeds(random=True, filters=True)
    together = sample(logits, columns, needs)
    for rows in (torch.arange(0, 1), torch.arange(17, 20), torch.randperm(96)):
        chosen = SamplingColumns(*(getattr(columns, field.name)[rows.cuda()] for field in fields(columns)))
        assert torch.equal(sample(logits[rows.cuda()], chosen, needs), together[rows.cuda()])
    plain = (columns.top_ks_R < 0) & (columns.top_ps_R == 1) & (columns.min_ps_R == 0)
    without = sample(logits, columns, SamplingNeeds(random=True, filters=False))
    assert torch.equal(without[plain], together[plain])


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_synchronises_and_a_graph_replays_it(filters: bool) -> None:
    logits = random_logits(32, 151_936, torch.bfloat16)
    columns = random_columns(32, filters=filters)
    stop_ids = torch.randint(-1, 151_936, (32, 3), dtype=torch.int32, device="cuda")
    masked = torch.ones(32, dtype=torch.bool, device="cuda")
    needs = SamplingNeeds(random=True, filters=filters)

    def step() -> torch.Tensor:
        return sample(mask_stops(logits.float(), stop_ids, masked), columns, needs)

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    logits.copy_(random_logits(32, 151_936, torch.bfloat16, seed=5))
    columns.positions_R.add_(1)
    graph.replay()
    assert torch.equal(captured, step())


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(-1, 1.0, 0.0), (200, 1.0, 0.0), (-1, 0.7, 0.0), (500, 0.8, 0.01)]
)
def test_shares(top_k: int, top_p: float, min_p: float) -> None:
    """Chi-square over tenths of the cumulative distribution of the survivors."""
    from scipy import stats

    num_draws = 4000
    logits = random_logits(2, 32_000, torch.bfloat16)[1]
    draws = torch.arange(num_draws, device="cuda")
    columns = SamplingColumns(
        temperatures_R=torch.ones(num_draws, device="cuda"),
        top_ks_R=torch.full((num_draws,), top_k, dtype=torch.int32, device="cuda"),
        top_ps_R=torch.full((num_draws,), top_p, device="cuda"),
        min_ps_R=torch.full((num_draws,), min_p, device="cuda"),
        seeds_R=draws * 31,
        positions_R=draws,
    )
    tokens = sample(logits.expand(num_draws, -1), columns, SamplingNeeds(random=True, filters=True)).cpu()

    shares, ids = logits.cpu().double().softmax(0).sort(descending=True, stable=True)
    keeps = (shares.cumsum(0) - shares < top_p) & (shares >= min_p * shares[0])
    keeps &= torch.arange(32_000) < (top_k if top_k > 0 else 32_000)
    kept = torch.zeros(32_000, dtype=torch.float64)
    kept[ids[keeps]] = shares[keeps] / shares[keeps].sum()
    assert bool((kept[tokens] > 0).all())
    tenth = (kept.cumsum(0) * 10).long().clamp(max=9)
    expected = torch.zeros(10, dtype=torch.float64).scatter_add_(0, tenth, kept) * num_draws
    counts = torch.bincount(tenth[tokens], minlength=10)
    assert (
        stats.chisquare(counts.numpy(), expected.numpy() * counts.sum().item() / expected.sum().item()).pvalue
        > 1e-4
    )
