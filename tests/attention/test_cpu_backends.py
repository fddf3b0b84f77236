"""The CPU's backends, in torch and in C, against softmax attention written out in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch

from tokenmill.attention import create_backend
from tokenmill.attention.base import AttentionSpec, Backend
from tokenmill.attention.torch_backend import TorchBackend
from tokenmill.kernels import native

pytestmark = pytest.mark.cpu

MIXED = [(1, 1), (1, 17), (1, 33), (1, 16), (5, 5), (3, 40), (16, 16), (2, 18)]


needs_native = pytest.mark.skipif(
    native.library(torch.float32) is None, reason="there is no C compiler, so no C kernels"
)


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)])
def name(request: pytest.FixtureRequest) -> str:
    """The backend under test."""
    return str(request.param)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """So many threads, as long as the test runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def make(
    name: str, specs: Sequence[AttentionSpec], steps: Sequence[SimpleNamespace], page_size: int
) -> Backend:
    return create_backend(
        name, specs, [step.key_cache for step in steps], [step.value_cache for step in steps], page_size
    )


def answer(name: str, step: SimpleNamespace, spec: AttentionSpec, page_size: int) -> torch.Tensor:
    backend = make(name, [spec], [step], page_size)
    backend.plan(step.layout)
    return backend.run(step.q, step.k, step.v, 0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(14, 2, 64), (4, 4, 80), (8, 2, 96), (6, 1, 128), (4, 2, 256)]
)
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_rows_match_float64(
    name: str,
    ragged: SimpleNamespace,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    page_size: int,
) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5, window=window)
    step = ragged.ragged_step(spec, MIXED, page_size=page_size, dtype=torch.float32, seed=heads)
    out = answer(name, step, spec, page_size)
    torch.testing.assert_close(out.double(), step.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(name: str, ragged: SimpleNamespace, dtype: torch.dtype) -> None:
    if name == "native" and dtype == torch.float16:
        pytest.skip("the C kernels know float32 and bfloat16")
    spec = AttentionSpec(8, 2, 64, scale=0.125)
    step = ragged.ragged_step(spec, MIXED, page_size=16, dtype=dtype, seed=1)
    limit = 6e-3 if dtype == torch.bfloat16 else 1e-3
    assert ragged.relative_error(answer(name, step, spec, 16), step.expected) < limit


def test_caches_with_heads_before_tokens(name: str, ragged: SimpleNamespace) -> None:
    spec = AttentionSpec(8, 2, 64, scale=0.1, window=9)
    step = ragged.ragged_step(spec, MIXED, page_size=4, dtype=torch.float32, seed=2, heads_first=True)
    torch.testing.assert_close(answer(name, step, spec, 4).double(), step.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 300])
def test_a_prompt_of_several_query_blocks(name: str, ragged: SimpleNamespace, window: int | None) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125, window=window)
    rows = [(600, 600), (530, 700)]
    step = ragged.ragged_step(spec, rows, page_size=16, dtype=torch.float32, seed=3)
    torch.testing.assert_close(answer(name, step, spec, 16).double(), step.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 250])
def test_decoding_rows_of_very_different_lengths(
    name: str, ragged: SimpleNamespace, window: int | None
) -> None:
    spec = AttentionSpec(4, 2, 64, scale=0.125, window=window)
    rows = [(1, length) for length in (900, 1, 130, 64, 65, 2, 400, 899, 31)]
    step = ragged.ragged_step(spec, rows, page_size=16, dtype=torch.float32, seed=4)
    torch.testing.assert_close(answer(name, step, spec, 16).double(), step.expected, atol=1e-5, rtol=1e-5)


def test_short_rows_do_not_pay_for_long_ones(ragged: SimpleNamespace) -> None:
    spec = AttentionSpec(4, 2, 64, scale=0.125)
    rows = [(1, length) for length in (1000, 20, 30, 25, 40, 50, 60, 10)]
    step = ragged.ragged_step(spec, rows, page_size=16, dtype=torch.float32, seed=5)
    backend = TorchBackend([spec], [step.key_cache], [step.value_cache], 16)
    backend.plan(step.layout)
    gathered = sum(bucket.slots_NL.numel() for bucket in backend._works[0, None].decodes)
    assert gathered <= 1000 + 7 * 64


def test_keys_and_values_land_in_their_slots(name: str, ragged: SimpleNamespace) -> None:
    spec = AttentionSpec(4, 2, 64, scale=0.125)
    step = ragged.ragged_step(spec, MIXED, page_size=16, dtype=torch.float32, seed=6)
    before = step.key_cache.isnan().sum()
    answer(name, step, spec, 16)
    slots = step.layout.slot_mapping_T[0]
    assert torch.equal(step.key_cache.view(-1, 2, 64)[slots], step.k)
    assert torch.equal(step.value_cache.view(-1, 2, 64)[slots], step.v)
    assert before - step.key_cache.isnan().sum() == step.k.numel()  # and nowhere else


def test_layers_of_different_windows_share_one_plan(name: str, ragged: SimpleNamespace) -> None:
    specs = [AttentionSpec(4, 2, 64, scale=0.125, window=window) for window in (None, 8, None)]
    steps = [ragged.ragged_step(spec, MIXED, page_size=16, dtype=torch.float32, seed=7) for spec in specs]
    backend = make(name, specs, steps, 16)
    backend.plan(steps[0].layout)
    for layer, step in enumerate(steps):
        out = backend.run(step.q, step.k, step.v, layer)
        torch.testing.assert_close(out.double(), step.expected, atol=1e-5, rtol=1e-5)


def test_page_groups_have_their_own_tables(name: str, ragged: SimpleNamespace) -> None:
    specs = [AttentionSpec(4, 2, 64, scale=0.125, group=group) for group in (0, 1)]
    steps = [
        ragged.ragged_step(specs[0], MIXED, page_size=16, dtype=torch.float32, seed=seed) for seed in (8, 9)
    ]
    layout = steps[0].layout
    layout.slot_mapping_T += steps[1].layout.slot_mapping_T
    layout.page_table_RP += steps[1].layout.page_table_RP
    backend = make(name, specs, steps, 16)
    backend.plan(layout)
    for layer, step in enumerate(steps):
        out = backend.run(step.q, step.k, step.v, layer)
        torch.testing.assert_close(out.double(), step.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
def test_the_number_of_threads_changes_nothing(name: str, ragged: SimpleNamespace, threads: None) -> None:
    spec = AttentionSpec(8, 4, 64, scale=0.125)
    step = ragged.ragged_step(spec, MIXED * 4, page_size=16, dtype=torch.float32, seed=10)
    torch.testing.assert_close(answer(name, step, spec, 16).double(), step.expected, atol=1e-5, rtol=1e-5)


def test_a_key_that_is_not_a_number_shows(name: str, ragged: SimpleNamespace) -> None:
    spec = AttentionSpec(4, 2, 64, scale=0.125)
    step = ragged.ragged_step(spec, [(1, 40), (1, 50)], page_size=16, dtype=torch.float32, seed=11)
    step.k[0, 0, 3] = torch.nan
    out = answer(name, step, spec, 16)
    assert out[0, :2].isnan().all()  # the query heads of the poisoned key head
    torch.testing.assert_close(out[1].double(), step.expected[1], atol=1e-5, rtol=1e-5)


@needs_native
def test_a_short_prompt_is_answered_alike_in_one_piece_and_in_two(ragged: SimpleNamespace) -> None:
    """Bit for bit, in 16 bits: its answer must not depend on what was in the cache."""
    spec = AttentionSpec(6, 2, 64, scale=0.125)
    step = ragged.ragged_step(spec, [(200, 200)], page_size=16, dtype=torch.bfloat16, seed=3)
    backend = make("native", [spec], [step], 16)
    backend.plan(step.layout)
    whole = backend.run(step.q, step.k, step.v, 0)
    for start in (1, 90, 199):
        rest = dataclasses.replace(
            step.layout,
            positions_T=step.layout.positions_T[start:],
            slot_mapping_T=(step.layout.slot_mapping_T[0][start:],),
            query_starts=torch.tensor([0, 200 - start], dtype=torch.int32),
            host_query_lengths=[200 - start],
        )
        backend.plan(rest)
        assert torch.equal(backend.run(step.q[start:], step.k[start:], step.v[start:], 0), whole[start:])
