"""Prompt attention for Hopper against attention written out in float64; `gluon_on_cpu.py` runs the kernel."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tokenmill.attention.base import AttentionSpec

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def hopper(load_on_cpu: Callable[[str], ModuleType]) -> Any:
    return load_on_cpu("hopper_prefill")


def attend(hopper: Any, step: Any, tiling: tuple[Any, ...], processors: int) -> torch.Tensor:
    from tokenmill.kernels.triton_attention import PagedRows

    hopper.hopper_tiling = lambda _: hopper.HopperTiling(*tiling)
    hopper.num_processors = lambda _: processors
    taken = torch.zeros(2, dtype=torch.int32)
    out = torch.full_like(step.q, torch.nan)
    layout = step.layout
    hopper.prefill(
        step.q,
        step.k,
        step.v,
        PagedRows(step.key_cache, step.value_cache, layout.page_table_RP[0], layout.lengths_R),
        query_starts=layout.query_starts,
        scale=step.q.shape[-1] ** -0.5,
        out_THD=out,
        taken_2=taken,
    )
    assert not taken.any(), "the next launch begins anew"
    return out


def with_stored(step: Any, page_size: int) -> Any:
    """The step after its own keys and values have been stored, in caches that are NaN elsewhere."""
    slots = step.layout.slot_mapping_T[0]
    step.key_cache[slots // page_size, slots % page_size] = step.k
    step.value_cache[slots // page_size, slots % page_size] = step.v
    return step


@pytest.mark.parametrize("seed", range(16))
def test_random_rows(ragged: SimpleNamespace, hopper: Any, seed: int) -> None:
    draw = random.Random(seed)
    heads, kv_heads = draw.choice(((4, 1), (7, 1), (2, 2), (8, 2)))
    head_dim, page_size = draw.choice((64, 128)), draw.choice((16, 32, 64))
    queries = [draw.choice((1, 5, 64, 128, draw.randint(1, 400))) for _ in range(draw.randint(1, 5))]
    rows = [(count, count + draw.choice((0, 0, 16, 128, draw.randint(1, 500)))) for count in queries]
    tiling = (draw.choice((64, 128)), draw.choice((2, 3, 4)))
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5)
    step = ragged.ragged_step(
        spec,
        rows,
        page_size=page_size,
        dtype=torch.float32,
        seed=seed,
        heads_first=draw.random() < 0.3,
        device="cpu",
    )
    out = attend(hopper, with_stored(step, page_size), tiling, draw.randint(1, 6))
    assert ragged.relative_error(out, step.expected) < 1e-6


def test_a_tile_that_ends_with_its_only_query(ragged: SimpleNamespace, hopper: Any) -> None:
    """The last tile of pairs begins at query 127, which sees all of the only tile of keys."""
    spec = AttentionSpec(128, 1, 64, scale=0.125)
    step = ragged.ragged_step(spec, [(128, 128)], page_size=16, dtype=torch.float32, seed=0, device="cpu")
    out = attend(hopper, with_stored(step, 16), (128, 2), 50)
    assert ragged.relative_error(out, step.expected) < 1e-6


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_of_nan_leaves_its_neighbours_alone(ragged: SimpleNamespace, hopper: Any) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    step = ragged.ragged_step(
        spec, [(70, 70), (70, 90), (70, 70)], page_size=16, dtype=torch.float32, seed=3, device="cpu"
    )
    for x in (step.q, step.k, step.v):
        x[70:140] = torch.nan
    out = attend(hopper, with_stored(step, 16), (128, 2), 2)
    assert out[70:140].isnan().all()
    for tokens in (slice(0, 70), slice(140, 210)):
        assert ragged.relative_error(out[tokens], step.expected[tokens]) < 1e-6
