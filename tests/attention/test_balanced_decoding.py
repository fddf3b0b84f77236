"""Decoding rows in runs of equal length, against softmax attention written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.attention import create_backend
from tokenmill.attention.base import AttentionSpec

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns one-element arrays into loop bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
Rows = list[tuple[int, int]]


@pytest.fixture
def balanced(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """`balanced(runs)` has every step decoded in so many runs; gives the tiles of each layer."""
    from tokenmill.kernels import triton_balanced

    counts: list[int] = []
    decode = triton_balanced.decode

    def counted(q: torch.Tensor, rows: object, runs: triton_balanced.Runs, **more: object) -> None:
        counts.append(int(runs.cuts_P[-1]))
        sizes = runs.cuts_P.diff()
        filled = sizes[sizes > 0]
        assert filled.max() - filled.min() <= 1, "a run is longer than others"
        assert filled.max() == -(-counts[-1] // len(sizes)), "a run is longer than need be"
        decode(q, rows, runs, **more)

    def choose(runs: int) -> list[int]:
        monkeypatch.setattr(triton_balanced, "FEWEST_STREAMS", 1)
        monkeypatch.setattr(triton_balanced, "PROGRAMS_PER_PROCESSOR", 1)
        monkeypatch.setattr(triton_balanced, "num_processors", lambda device: runs)
        monkeypatch.setattr(triton_balanced, "decode", counted)
        return counts

    return choose


def error(
    ragged: SimpleNamespace,
    device: str,
    spec: AttentionSpec,
    rows: Rows,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> float:
    step = ragged.ragged_step(spec, rows, page_size=page_size, dtype=dtype, seed=len(rows), device=device)
    backend = create_backend("triton", [spec] * 2, [step.key_cache] * 2, [step.value_cache] * 2, page_size)
    backend.plan(step.layout)
    first = backend.run(step.q, step.k, step.v, 0)
    out = backend.run(step.q, step.k, step.v, 1)
    assert torch.equal(first, out)  # layers share the runs
    return float(ragged.relative_error(out, step.expected))


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(7, 1, 64), (2, 2, 80), (4, 2, 96), (2, 1, 128), (1, 1, 256)]
)
def test_heads_and_dtypes(
    ragged: SimpleNamespace,
    triton_device: str,
    balanced: Callable[[int], list[int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    counts = balanced(3 * kv_heads)
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5)
    rows = [(1, 1), (1, 100), (1, 33), (5, 5)]
    assert error(ragged, triton_device, spec, rows, dtype=dtype) < LIMITS[dtype]
    assert len(counts) == 2


@pytest.mark.parametrize("head_dim", [64, 80])  # 32 numbers at a time where pieces are many
@pytest.mark.parametrize("runs", [1, 2, 5, 40, 300])  # 40: a long row has more pieces than are read at once
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([500], id="one row in all runs"),
        pytest.param([64, 128, 32], id="whole tiles"),
        pytest.param([1, 1, 1], id="fewer tiles than runs"),
        pytest.param([1, 300, 1, 90, 33, 32, 31], id="long beside short"),
    ],
)
def test_runs_that_cut_rows(
    ragged: SimpleNamespace,
    triton_device: str,
    balanced: Callable[[int], list[int]],
    lengths: list[int],
    runs: int,
    head_dim: int,
) -> None:
    counts = balanced(runs)
    spec = AttentionSpec(2, 1, head_dim, scale=0.125)
    assert error(ragged, triton_device, spec, [(1, length) for length in lengths]) < LIMITS[torch.float32]
    tile = 32 if head_dim == 64 else 16
    assert counts == [sum(-(-length // tile) for length in lengths)] * 2


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("runs", [1, 3])
def test_a_row_of_nan_stays_alone(
    ragged: SimpleNamespace, triton_device: str, balanced: Callable[[int], list[int]], runs: int
) -> None:
    balanced(runs)
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    rows = [(1, 70), (1, 90), (1, 40), (1, 5)]
    step = ragged.ragged_step(spec, rows, page_size=16, dtype=torch.float32, seed=3, device=triton_device)
    step.q[1] = torch.nan
    backend = create_backend("triton", [spec], [step.key_cache], [step.value_cache], 16)
    backend.plan(step.layout)
    out = backend.run(step.q, step.k, step.v, 0)
    assert out[1].isnan().all()
    others = torch.tensor([0, 2, 3])
    assert ragged.relative_error(out[others], step.expected[others]) < LIMITS[torch.float32]


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    runs=st.integers(1, 12),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_any_rows_in_any_runs(
    ragged: SimpleNamespace,
    triton_device: str,
    balanced: Callable[[int], list[int]],
    lengths: list[int],
    runs: int,
    page_size: int,
) -> None:
    balanced(runs)
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    rows = [(1, length) for length in lengths]
    assert error(ragged, triton_device, spec, rows, page_size=page_size) < LIMITS[torch.float32]


def test_more_rows_and_tiles_than_are_listed_at_once(
    ragged: SimpleNamespace,
    triton_device: str,
    balanced: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tokenmill.kernels import triton_balanced

    monkeypatch.setattr(triton_balanced, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(triton_balanced, "LISTED_AT_ONCE", 2)
    balanced(3)
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    rows = [(1, 10 + 40 * index) for index in range(7)]
    assert error(ragged, triton_device, spec, rows) < LIMITS[torch.float32]


def test_few_rows_and_windows_are_not_for_it(
    ragged: SimpleNamespace, triton_device: str, balanced: Callable[[int], list[int]]
) -> None:
    counts = balanced(3)
    windowed = AttentionSpec(2, 1, 64, scale=0.125, window=20)
    assert error(ragged, triton_device, windowed, [(1, 70), (1, 10)]) < LIMITS[torch.float32]
    many_queries = AttentionSpec(17, 1, 64, scale=0.125)
    assert error(ragged, triton_device, many_queries, [(1, 70)]) < LIMITS[torch.float32]
    assert counts == []
