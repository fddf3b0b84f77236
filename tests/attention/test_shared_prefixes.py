"""Decode attention that reads shared prefixes once, against softmax attention in float64."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenmill.attention import create_backend
from tokenmill.attention.base import AttentionSpec, Backend

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns one-element arrays into loop bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.fixture(scope="module")
def forests() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("forests.py"))))


@pytest.fixture(autouse=True)
def few_programs(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs than there are items, so that each gets several."""
    from tokenmill.kernels import triton_decode

    monkeypatch.setattr(triton_decode, "SHARED_PROGRAMS", 3)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is NaN before it is written."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def backend_for(spec: AttentionSpec, step: Any, page_size: int) -> Backend:
    return create_backend("triton", [spec], [step.key_cache], [step.value_cache], page_size)


def answer(spec: AttentionSpec, step: Any, page_size: int) -> torch.Tensor:
    backend = backend_for(spec, step, page_size)
    backend.plan(step.layout)
    return backend.run(step.q, step.k, step.v, 0)


@pytest.mark.parametrize("seed", range(8))
def test_random_forests(
    forests: SimpleNamespace, ragged: SimpleNamespace, triton_device: str, seed: int
) -> None:
    draw = random.Random(seed)
    heads, kv_heads, head_dim = [(2, 1, 64), (4, 2, 64), (2, 2, 80), (7, 1, 32), (2, 1, 128), (4, 4, 16)][
        seed % 6
    ]
    dtype = list(LIMITS)[seed % 3]
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5)
    page_size = draw.choice((1, 4, 16))
    rows = forests.random_forest(draw, draw.choice((2, 7, 20)), draw.choice((100, 200)) // page_size)
    rows += [max(rows, key=len) or [0]] * 2  # some have something in common
    step = forests.forest_step(
        spec,
        rows,
        costs=forests.eager_costs(spec, dtype, shortest_split=64, programs=draw.choice((8, 64))),
        page_size=page_size,
        dtype=dtype,
        seed=seed,
        device=triton_device,
        padding=draw.choice((0, 2)),
    )
    assert step.layout.shared is not None
    out = answer(spec, step, page_size)
    assert ragged.relative_error(out, step.expected) < LIMITS[dtype]
    step.layout.shared = None
    assert ragged.relative_error(answer(spec, step, page_size), step.expected) < LIMITS[dtype]


def test_more_rows_than_an_item_holds(
    forests: SimpleNamespace, ragged: SimpleNamespace, triton_device: str
) -> None:
    """Three tiles of rows of 7 heads each, and a prefix that ends within a tile of keys."""
    spec = AttentionSpec(7, 1, 64, scale=0.125)
    rows = [[*range(9), *([100 + row] * (row % 2))] for row in range(20)]
    step = forests.forest_step(
        spec,
        rows,
        costs=forests.eager_costs(spec, torch.float16, programs=9, shortest_split=128),
        page_size=16,
        dtype=torch.float16,
        seed=1,
        device=triton_device,
    )
    assert int(step.layout.shared.num_items) == 6
    assert ragged.relative_error(answer(spec, step, 16), step.expected) < LIMITS[torch.float16]


def test_splits_of_a_rows_own_keys_follow_the_shared_pieces(
    forests: SimpleNamespace, ragged: SimpleNamespace, triton_device: str
) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    rows = [[0, 1, *range(10, 25)], [0, 1, 30], [0, 2]]
    step = forests.forest_step(
        spec,
        rows,
        costs=forests.eager_costs(spec, torch.float32, shortest_split=32),
        page_size=16,
        dtype=torch.float32,
        seed=2,
        device=triton_device,
    )
    assert step.layout.shared.longest_own > 128
    assert ragged.relative_error(answer(spec, step, 16), step.expected) < LIMITS[torch.float32]


@pytest.mark.parametrize("heads", [2, 7])
def test_many_rows_are_put_together_some_heads_at_a_time(
    forests: SimpleNamespace,
    ragged: SimpleNamespace,
    triton_device: str,
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
) -> None:
    """More pieces than are read at once, rows of one piece, and heads that fill no program."""
    from tokenmill.kernels import triton_decode

    for name in ("MANY_HEADS", "MOST_HEADS"):
        monkeypatch.setattr(triton_decode, name, 1)
    spec = AttentionSpec(heads, 1, 64, scale=0.125)
    rows = [[*range(24), *range(100 + 20 * row, 100 + 11 * row)] for row in range(40)] + [[90]]
    step = forests.forest_step(
        spec,
        rows,
        costs=forests.eager_costs(spec, torch.float32, shortest_split=64, programs=999),
        page_size=16,
        dtype=torch.float32,
        seed=5,
        device=triton_device,
    )
    assert int(step.layout.shared.num_pieces_R.max()) > 4
    assert ragged.relative_error(answer(spec, step, 16), step.expected) < LIMITS[torch.float32]


def test_layers_with_a_window_do_not_share(
    forests: SimpleNamespace, ragged: SimpleNamespace, triton_device: str
) -> None:
    full, windowed = (AttentionSpec(2, 1, 64, scale=0.125, window=window) for window in (None, 20))
    step = forests.forest_step(
        windowed,
        [[0, 1, 2, 3], [0, 1, 2, 4]],
        costs=forests.eager_costs(full, torch.float32),
        page_size=16,
        dtype=torch.float32,
        seed=3,
        device=triton_device,
    )
    assert step.layout.shared is not None
    assert backend_for(windowed, step, 16).sharing is None
    assert ragged.relative_error(answer(windowed, step, 16), step.expected) < LIMITS[torch.float32]


def test_the_torch_backend_reads_every_row_by_itself(
    forests: SimpleNamespace, ragged: SimpleNamespace
) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    step = forests.forest_step(
        spec,
        [[0, 1, 2], [0, 1, 3]],
        costs=forests.eager_costs(spec, torch.float32),
        page_size=16,
        dtype=torch.float32,
        seed=4,
    )
    backend = create_backend("torch", [spec], [step.key_cache], [step.value_cache], 16)
    assert backend.sharing is None
    backend.plan(step.layout)
    assert (
        ragged.relative_error(backend.run(step.q, step.k, step.v, 0), step.expected) < LIMITS[torch.float32]
    )


def test_a_spare_row_shorter_than_what_the_row_in_its_place_shares(
    forests: SimpleNamespace, ragged: SimpleNamespace, triton_device: str
) -> None:
    """A step is captured with spare rows while the forest of true rows is on the device."""
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    step = forests.forest_step(
        spec,
        [[0, 1, 2], [0, 1, 3]],
        costs=forests.eager_costs(spec, torch.float32),
        page_size=16,
        dtype=torch.float32,
        seed=6,
        device=triton_device,
        padding=1,
    )
    step.layout.shared.own_starts_R[-1] = 640
    assert ragged.relative_error(answer(spec, step, 16), step.expected) < LIMITS[torch.float32]
