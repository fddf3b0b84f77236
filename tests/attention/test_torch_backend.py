"""The torch backend against softmax attention written out in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tokenmill.attention import create_backend
from tokenmill.attention.base import AttentionSpec
from tokenmill.attention.torch_backend import TorchBackend

pytestmark = pytest.mark.cpu

MIXED = [(1, 1), (1, 17), (1, 33), (1, 16), (5, 5), (3, 40), (16, 16), (2, 18)]


def answer(step: SimpleNamespace, spec: AttentionSpec, page_size: int) -> torch.Tensor:
    backend = TorchBackend([spec], [step.key_cache], [step.value_cache], page_size)
    backend.plan(step.layout)
    return backend.run(step.q, step.k, step.v, 0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(14, 2, 64), (4, 4, 80), (8, 2, 96), (6, 1, 128), (4, 2, 256)]
)
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_rows_match_float64(
    ragged: SimpleNamespace, heads: int, kv_heads: int, head_dim: int, window: int | None, page_size: int
) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5, window=window)
    step = ragged.ragged_step(spec, MIXED, page_size=page_size, dtype=torch.float32, seed=heads)
    out = answer(step, spec, page_size)
    torch.testing.assert_close(out.double(), step.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(ragged: SimpleNamespace, dtype: torch.dtype) -> None:
    spec = AttentionSpec(8, 2, 64, scale=0.125)
    step = ragged.ragged_step(spec, MIXED, page_size=16, dtype=dtype, seed=1)
    limit = 6e-3 if dtype == torch.bfloat16 else 1e-3
    assert ragged.relative_error(answer(step, spec, 16), step.expected) < limit


def test_caches_with_heads_before_tokens(ragged: SimpleNamespace) -> None:
    spec = AttentionSpec(8, 2, 64, scale=0.1, window=9)
    step = ragged.ragged_step(spec, MIXED, page_size=4, dtype=torch.float32, seed=2, heads_first=True)
    torch.testing.assert_close(answer(step, spec, 4).double(), step.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 300])
def test_a_prompt_of_several_query_blocks(ragged: SimpleNamespace, window: int | None) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125, window=window)
    rows = [(600, 600), (530, 700)]
    step = ragged.ragged_step(spec, rows, page_size=16, dtype=torch.float32, seed=3)
    torch.testing.assert_close(answer(step, spec, 16).double(), step.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 250])
def test_decoding_rows_of_very_different_lengths(ragged: SimpleNamespace, window: int | None) -> None:
    spec = AttentionSpec(4, 2, 64, scale=0.125, window=window)
    rows = [(1, length) for length in (900, 1, 130, 64, 65, 2, 400, 899, 31)]
    step = ragged.ragged_step(spec, rows, page_size=16, dtype=torch.float32, seed=4)
    torch.testing.assert_close(answer(step, spec, 16).double(), step.expected, atol=1e-5, rtol=1e-5)


def test_short_rows_do_not_pay_for_long_ones(ragged: SimpleNamespace) -> None:
    spec = AttentionSpec(4, 2, 64, scale=0.125)
    rows = [(1, length) for length in (1000, 20, 30, 25, 40, 50, 60, 10)]
    step = ragged.ragged_step(spec, rows, page_size=16, dtype=torch.float32, seed=5)
    backend = TorchBackend([spec], [step.key_cache], [step.value_cache], 16)
    backend.plan(step.layout)
    gathered = sum(bucket.slots_NL.numel() for bucket in backend._works[0, None].decodes)
    assert gathered <= 1000 + 7 * 64


def test_keys_and_values_land_in_their_slots(ragged: SimpleNamespace) -> None:
    spec = AttentionSpec(4, 2, 64, scale=0.125)
    step = ragged.ragged_step(spec, MIXED, page_size=16, dtype=torch.float32, seed=6)
    before = step.key_cache.isnan().sum()
    answer(step, spec, 16)
    slots = step.layout.slot_mapping_T[0]
    assert torch.equal(step.key_cache.view(-1, 2, 64)[slots], step.k)
    assert torch.equal(step.value_cache.view(-1, 2, 64)[slots], step.v)
    assert before - step.key_cache.isnan().sum() == step.k.numel()  # and nowhere else


def test_layers_of_different_windows_share_one_plan(ragged: SimpleNamespace) -> None:
    specs = [AttentionSpec(4, 2, 64, scale=0.125, window=window) for window in (None, 8, None)]
    steps = [ragged.ragged_step(spec, MIXED, page_size=16, dtype=torch.float32, seed=7) for spec in specs]
    backend = TorchBackend(
        specs, [step.key_cache for step in steps], [step.value_cache for step in steps], 16
    )
    backend.plan(steps[0].layout)
    for layer, step in enumerate(steps):
        out = backend.run(step.q, step.k, step.v, layer)
        torch.testing.assert_close(out.double(), step.expected, atol=1e-5, rtol=1e-5)


def test_page_groups_have_their_own_tables(ragged: SimpleNamespace) -> None:
    specs = [AttentionSpec(4, 2, 64, scale=0.125, group=group) for group in (0, 1)]
    steps = [
        ragged.ragged_step(specs[0], MIXED, page_size=16, dtype=torch.float32, seed=seed) for seed in (8, 9)
    ]
    layout = steps[0].layout
    layout.slot_mapping_T += steps[1].layout.slot_mapping_T
    layout.page_table_RP += steps[1].layout.page_table_RP
    backend = create_backend(
        "torch", specs, [step.key_cache for step in steps], [step.value_cache for step in steps], 16
    )
    backend.plan(layout)
    for layer, step in enumerate(steps):
        out = backend.run(step.q, step.k, step.v, layer)
        torch.testing.assert_close(out.double(), step.expected, atol=1e-5, rtol=1e-5)
