"""The Triton backend against softmax attention written out in float64, on tiny steps.

Real sizes are in `tests/gpu/test_attention_gpu.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tokenmill.attention import create_backend
from tokenmill.attention.base import AttentionSpec
from tokenmill.kernels.operands import HeadNorms
from tokenmill.kernels.rotary import heads_of_product

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns one-element arrays into loop bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

# The relative error of a whole step. Rounding the weights and the output to bfloat16 alone makes 3e-3.
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def error(
    ragged: SimpleNamespace,
    device: str,
    spec: AttentionSpec,
    rows: list[tuple[int, int]],
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    heads_first: bool = False,
) -> float:
    step = ragged.ragged_step(
        spec, rows, page_size=page_size, dtype=dtype, seed=len(rows), heads_first=heads_first, device=device
    )
    backend = create_backend("triton", [spec], [step.key_cache], [step.value_cache], page_size)
    backend.plan(step.layout)
    out = backend.run(step.q, step.k, step.v, 0)
    slots = step.layout.slot_mapping_T[0]
    assert torch.equal(step.key_cache[slots // page_size, slots % page_size], step.k)
    assert torch.equal(step.value_cache[slots // page_size, slots % page_size], step.v)
    return float(ragged.relative_error(out, step.expected))


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(7, 1, 64), (2, 2, 80), (4, 2, 96), (2, 1, 128), (1, 1, 256)]
)
def test_heads_and_dtypes(
    ragged: SimpleNamespace, triton_device: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5)
    rows = [(1, 1), (1, 37), (5, 5), (3, 20)]
    assert error(ragged, triton_device, spec, rows, dtype=dtype) < LIMITS[dtype]


@pytest.mark.parametrize("page_size", [1, 2, 64])
def test_page_sizes(ragged: SimpleNamespace, triton_device: str, page_size: int) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    rows = [(1, 70), (20, 90)]
    assert error(ragged, triton_device, spec, rows, page_size=page_size) < LIMITS[torch.float32]


@pytest.mark.parametrize("window", [1, 3, 33, 64, 1000])
def test_windows(ragged: SimpleNamespace, triton_device: str, window: int) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125, window=window)
    rows = [(1, 90), (1, 2), (40, 130), (30, 30)]
    assert error(ragged, triton_device, spec, rows) < LIMITS[torch.float32]


def test_splits_of_rows_of_different_lengths(ragged: SimpleNamespace, triton_device: str) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    # 64 tokens are the shortest split: one row of one split, one of two, one of many.
    rows = [(1, 64), (1, 65), (1, 700)]
    assert error(ragged, triton_device, spec, rows) < LIMITS[torch.float32]


def test_splits_of_a_window(ragged: SimpleNamespace, triton_device: str) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125, window=150)
    assert error(ragged, triton_device, spec, [(1, 400), (1, 20)]) < LIMITS[torch.float32]


def test_more_keys_than_the_most_splits_hold_at_their_shortest(
    ragged: SimpleNamespace, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.kernels import triton_decode

    monkeypatch.setattr(triton_decode, "MAX_SPLITS", 8)
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    assert error(ragged, triton_device, spec, [(1, 1500), (1, 90)]) < LIMITS[torch.float32]


def test_more_rows_than_one_search_looks_at(
    ragged: SimpleNamespace, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.kernels import triton_prefill

    monkeypatch.setattr(triton_prefill, "ROWS_PER_SEARCH", 4)
    spec = AttentionSpec(1, 1, 64, scale=0.125)
    rows = [(2 + index % 3, 5 + 4 * index) for index in range(11)]
    assert error(ragged, triton_device, spec, rows) < LIMITS[torch.float32]


def test_long_prompts_take_the_large_tiles(ragged: SimpleNamespace, triton_device: str) -> None:
    spec = AttentionSpec(1, 1, 64, scale=0.125)
    rows = [(1, 5), (130, 300), (129, 129)]
    assert error(ragged, triton_device, spec, rows, dtype=torch.float16) < LIMITS[torch.float16]


def test_long_prompts_with_a_window(ragged: SimpleNamespace, triton_device: str) -> None:
    spec = AttentionSpec(1, 1, 64, scale=0.125, window=140)
    rows = [(150, 420), (140, 140)]
    assert error(ragged, triton_device, spec, rows, dtype=torch.float16) < LIMITS[torch.float16]


def test_caches_with_heads_before_tokens(ragged: SimpleNamespace, triton_device: str) -> None:
    spec = AttentionSpec(4, 2, 64, scale=0.125)
    assert error(ragged, triton_device, spec, [(1, 40), (6, 30)], heads_first=True) < LIMITS[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [(7, 1, 64, None), (4, 2, 128, 90), (3, 1, 80, 90), (2, 1, 256, None), (2, 1, 64, 90)],
)
def test_prompts_of_several_tiles(
    ragged: SimpleNamespace,
    triton_device: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5, window=window)
    rows = [(1, 4), (170, 170), (41, 211), (2, 2)]
    assert error(ragged, triton_device, spec, rows, dtype=dtype) < LIMITS[dtype]


def test_keys_that_no_tile_copy_can_take(ragged: SimpleNamespace, triton_device: str) -> None:
    """Heads of 20 numbers begin at addresses that the device cannot copy tiles from."""
    spec = AttentionSpec(2, 1, 20, scale=0.2)
    rows = [(150, 150), (80, 190)]
    assert error(ragged, triton_device, spec, rows, dtype=torch.float16) < LIMITS[torch.float16]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, which computes for the interpreter, minds NaN
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_of_nan_leaves_its_neighbours_alone(
    ragged: SimpleNamespace, triton_device: str, dtype: torch.dtype
) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    rows = [(70, 70), (70, 90), (70, 70)]
    step = ragged.ragged_step(spec, rows, page_size=16, dtype=dtype, seed=3, device=triton_device)
    for tensor in (step.q, step.k, step.v):
        tensor[70:140] = torch.nan
    backend = create_backend("triton", [spec], [step.key_cache], [step.value_cache], 16)
    backend.plan(step.layout)
    out = backend.run(step.q, step.k, step.v, 0)
    assert out[70:140].isnan().all()
    for tokens in (slice(0, 70), slice(140, 210)):
        assert ragged.relative_error(out[tokens], step.expected[tokens]) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prefix_that_another_row_of_the_step_writes(
    ragged: SimpleNamespace, triton_device: str, dtype: torch.dtype
) -> None:
    """The second row continues the first 64 tokens of the first: it finds them in that row's pages."""
    spec = AttentionSpec(4, 2, 64, scale=0.125)
    step = ragged.ragged_step(
        spec, [(100, 100), (40, 104)], page_size=16, dtype=dtype, seed=5, device=triton_device
    )
    table = step.layout.page_table_RP[0]
    table[1, :4] = table[0, :4]
    backend = create_backend("triton", [spec], [step.key_cache], [step.value_cache], 16)
    backend.plan(step.layout)
    out = backend.run(step.q, step.k, step.v, 0)
    k, v = (torch.cat((own[:64], own[100:])) for own in (step.k, step.v))
    expected = torch.cat((step.expected[:100], ragged.naive_attention(step.q[100:], k, v, spec)))
    assert ragged.relative_error(out, expected) < LIMITS[dtype]


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_a_product_goes_the_same_way_as_its_heads(
    ragged: SimpleNamespace, triton_device: str, normed: bool
) -> None:
    spec = AttentionSpec(4, 2, 32, scale=0.2)
    rows = [(1, 1), (1, 20), (5, 5), (3, 30)]
    step, twin = (
        ragged.ragged_step(spec, rows, page_size=4, dtype=torch.float32, seed=7, device=triton_device)
        for _ in range(2)
    )
    with torch.device(triton_device):
        rotation = torch.rand(len(step.q), 16).cos(), torch.rand(len(step.q), 16).sin()
        norms = HeadNorms(torch.rand(32), torch.rand(32), 1e-6) if normed else None
    product = torch.cat((step.q, step.k, step.v), dim=1)
    outs = []
    for case, arguments in (
        (step, (product, rotation, norms)),
        (twin, heads_of_product(product, rotation, norms, 2)),
    ):
        backend = create_backend("triton", [spec], [case.key_cache], [case.value_cache], 4)
        backend.plan(case.layout)
        outs.append((backend.run_product if case is step else backend.run)(*arguments, 0))
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(step.key_cache, twin.key_cache, equal_nan=True)
    assert torch.equal(step.value_cache.nan_to_num(), twin.value_cache.nan_to_num())


def test_heads_that_a_product_stores_are_attended_to(ragged: SimpleNamespace, triton_device: str) -> None:
    spec = AttentionSpec(4, 2, 32, scale=0.2)
    step = ragged.ragged_step(
        spec, [(1, 1), (1, 20), (1, 9)], page_size=4, dtype=torch.float32, seed=7, device=triton_device
    )
    with torch.device(triton_device):
        no_rotation = torch.ones(len(step.q), 16), torch.zeros(len(step.q), 16)
    backend = create_backend("triton", [spec], [step.key_cache], [step.value_cache], 4)
    backend.plan(step.layout)
    decoding = backend.decoding(no_rotation, None, 0)
    cache = decoding.heads.cache
    for stored, own in ((cache.key_cache_NBKD, step.k), (cache.value_cache_NBKD, step.v)):
        stored[cache.slots_T // 4, cache.slots_T % 4] = own
    assert ragged.relative_error(decoding.attend(step.q), step.expected) < LIMITS[torch.float32]


def test_a_product_stores_no_heads_of_prompts(ragged: SimpleNamespace, triton_device: str) -> None:
    spec = AttentionSpec(4, 2, 32, scale=0.2)
    step = ragged.ragged_step(
        spec, [(1, 20), (2, 9)], page_size=4, dtype=torch.float32, seed=7, device=triton_device
    )
    backend = create_backend("triton", [spec], [step.key_cache], [step.value_cache], 4)
    backend.plan(step.layout)
    assert backend.decoding((step.q, step.q), None, 0) is None


@pytest.mark.parametrize("window", [None, 7])
def test_needed_tokens_only(
    ragged: SimpleNamespace, triton_device: str, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Of each prompt at most one: the last one, one in the middle, or none."""
    monkeypatch.setattr("tokenmill.attention.triton_backend.MANY_TOKENS", 1)
    spec = AttentionSpec(4, 2, 32, scale=0.2, window=window)
    step = ragged.ragged_step(
        spec,
        [(1, 1), (1, 20), (5, 5), (9, 30), (3, 3)],
        page_size=4,
        dtype=torch.float32,
        seed=7,
        device=triton_device,
    )
    with torch.device(triton_device):
        no_rotation = torch.ones(len(step.q), 16), torch.zeros(len(step.q), 16)
    backend = create_backend("triton", [spec], [step.key_cache], [step.value_cache], 4)
    backend.plan(step.layout)
    product = torch.cat((step.q, step.k, step.v), dim=1)
    needed = torch.tensor([0, 1, 6, 10], device=triton_device)
    out = backend.run_product(product, no_rotation, None, 0, needed)
    assert ragged.relative_error(out, step.expected[needed]) < LIMITS[torch.float32]
    slots = step.layout.slot_mapping_T[0]
    assert torch.equal(step.key_cache[slots // 4, slots % 4], step.k)
