"""Rotary embedding: against transformers' function, and the Triton kernel against the torch reference."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.norm import rms_norm_torch
from tokenmill.kernels.operands import CacheSlots, HeadNorms
from tokenmill.kernels.rotary import (
    heads_of_product,
    rotate,
    rotate_torch,
)

pytestmark = pytest.mark.cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(
    heads: int, kv_heads: int, head_dim: int, half: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys as views of a fused tensor, and cosines and sines of true angles."""
    generator = torch.Generator().manual_seed(heads)
    fused = torch.randn(5, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    q, k, _ = fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    angles = torch.arange(5)[:, None] * torch.rand(half, generator=generator) * 100
    return (
        q.view(5, heads, head_dim),
        k.view(5, kv_heads, head_dim),
        angles.cos().to(dtype),
        angles.sin().to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, cos, sin = inputs(4, 2, 64, 32, dtype)
    theirs = apply_rotary_pos_emb(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        torch.cat((cos, cos), -1)[None],
        torch.cat((sin, sin), -1)[None],
    )
    for ours, expected in zip(rotate(q, k, cos, sin), theirs, strict=True):
        assert torch.equal(ours, expected[0].transpose(0, 1))


def test_partial_rotation_leaves_the_rest() -> None:
    q, k, cos, sin = inputs(3, 1, 80, 16, torch.float32)
    q_out, k_out = rotate(q, k, cos, sin)
    assert torch.equal(q_out[..., 32:], q[..., 32:])
    assert torch.equal(k_out[..., 32:], k[..., 32:])
    pair = torch.complex(q[..., :16], q[..., 16:32]) * torch.complex(cos, sin)[:, None]
    torch.testing.assert_close(q_out[..., :16], pair.real)
    torch.testing.assert_close(q_out[..., 16:32], pair.imag)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half"),
    [(14, 2, 64, 32), (3, 3, 80, 40), (4, 1, 96, 24), (1, 1, 256, 128)],
)
def test_triton_agrees(
    triton_device: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, half: int
) -> None:
    from tokenmill.kernels import triton_rotary

    q, k, cos, sin = (tensor.to(triton_device) for tensor in inputs(heads, kv_heads, head_dim, half, dtype))
    for ours, expected in zip(
        triton_rotary.rotate(q, k, cos, sin), rotate_torch(q, k, cos, sin), strict=True
    ):
        assert ours.is_contiguous()
        # Where products cancel, their rounding shows; the interpreter rounds to bfloat16 differently.
        limit = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, expected, rtol=limit, atol=limit * float(q.abs().max()))


def fused_case(
    heads: int, kv_heads: int, head_dim: int, half: int, *, page_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], HeadNorms, CacheSlots]:
    """Five tokens of a product with more columns, scattered over caches of NaN that lie heads first."""
    generator = torch.Generator().manual_seed(heads)
    _, _, cos, sin = inputs(heads, kv_heads, head_dim, half, dtype)
    all_heads = heads + 2 * kv_heads
    product = torch.randn(5, all_heads * head_dim + 8, generator=generator).to(dtype)
    query, key = (1 + torch.randn(2, head_dim, generator=generator) / 4).to(dtype)
    caches = torch.full((2, 7, kv_heads, page_size, head_dim), torch.nan, dtype=dtype).transpose(2, 3)
    slots = torch.randperm(7 * page_size, generator=generator)[:5]
    return (
        product[:, : all_heads * head_dim].view(5, all_heads, head_dim),
        (cos, sin),
        HeadNorms(query, key, 1e-6),
        CacheSlots(caches[0], caches[1], slots),
    )


def test_heads_of_a_product_are_normalised_and_rotated() -> None:
    qkv, rotation, norms, _ = fused_case(4, 2, 80, 16, page_size=1, dtype=torch.float32)
    q, k, v = heads_of_product(qkv, rotation, norms, 2)
    assert torch.equal(v, qkv[:, 6:])
    for ours, heads, weight in ((q, qkv[:, :4], norms.query_D), (k, qkv[:, 4:6], norms.key_D)):
        normed = rms_norm_torch(heads, weight, norms.epsilon)
        torch.testing.assert_close(ours, rotate_torch(normed, normed, *rotation)[0])
    q, k, _ = heads_of_product(qkv, rotation, None, 2)
    expected = rotate_torch(qkv[:, :4], qkv[:, 4:6], *rotation)
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half"),
    [(14, 2, 64, 32), (3, 3, 80, 40), (4, 1, 96, 24), (1, 1, 256, 128), (33, 3, 16, 8)],
)
def test_triton_agrees_from_product_to_cache(
    triton_device: str,
    dtype: torch.dtype,
    normed: bool,
    page_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    half: int,
) -> None:
    from tokenmill.kernels import triton_rotary

    product, angles, both_norms, cache = fused_case(
        heads, kv_heads, head_dim, half, page_size=page_size, dtype=dtype
    )
    qkv = product.to(triton_device)
    rotation = angles[0].to(triton_device), angles[1].to(triton_device)
    norms = HeadNorms(
        both_norms.query_D.to(triton_device), both_norms.key_D.to(triton_device), both_norms.epsilon
    )
    slots = CacheSlots(
        cache.key_cache_NBKD.to(triton_device),
        cache.value_cache_NBKD.to(triton_device),
        cache.slots_T.to(triton_device),
    )
    ours = triton_rotary.rotate_and_store(qkv, rotation, norms if normed else None, slots)
    # The interpreter cuts bits off where a GPU rounds to bfloat16, here up to four times in a row.
    limit = (4 if normed else 2) * torch.finfo(dtype).eps
    expected = heads_of_product(product, angles, both_norms if normed else None, kv_heads)
    for actual, reference in zip(ours, expected[:2], strict=True):
        assert actual.is_contiguous()
        largest = float(reference.abs().max())
        torch.testing.assert_close(actual.cpu(), reference, rtol=limit, atol=limit * largest)
    keys, values = slots.key_cache_NBKD.flatten(0, 1), slots.value_cache_NBKD.flatten(0, 1)
    assert torch.equal(keys[slots.slots_T], ours[1])
    assert torch.equal(values[slots.slots_T], qkv[:, -kv_heads:])
    for flat in (keys, values):
        assert int(flat.isnan().all(-1).all(-1).sum()) == 7 * page_size - 5


def test_storing_no_token_writes_nothing(triton_device: str) -> None:
    from tokenmill.kernels import triton_rotary

    with torch.device(triton_device):
        qkv, angles, caches = (
            torch.empty(0, 4, 16),
            torch.empty(0, 8),
            torch.full((2, 3, 4, 1, 16), torch.nan),
        )
        slots = CacheSlots(caches[0], caches[1], torch.empty(0, dtype=torch.int64))
    q, k = triton_rotary.rotate_and_store(qkv, (angles, angles), None, slots)
    assert (q.shape, k.shape) == ((0, 2, 16), (0, 1, 16))
    assert caches.isnan().all()
