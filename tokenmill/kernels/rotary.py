"""Rotary position embedding of queries and keys, alone or on their way from a product into the cache: the
torch reference and the choice of the kernel.

Owns no frequencies; `layers/rotary.py` makes the cosines and sines.
T tokens, H query heads, K key heads, D head size, R half of the rotated dimensions; S = H + 2K heads of a
fused product: queries, keys, values. Caches are [N, B, K, D]: pages, tokens of a page.
"""

from __future__ import annotations

import torch

from tokenmill.kernels import native
from tokenmill.kernels.norm import rms_norm_torch
from tokenmill.kernels.operands import CacheSlots, HeadNorms, Rotation


def rotate(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate dimension pairs (i, i + R) of the first 2R dimensions; the other D - 2R pass through.

    `cos_TR` and `sin_TR` have one column per pair and the dtype of `q_THD`; products and sums round to that
    dtype one by one. Queries and keys may be strided views (the last dimension contiguous); results are new.
    """
    if q_THD.is_cuda:
        from tokenmill.kernels import triton_rotary

        return triton_rotary.rotate(q_THD, k_TKD, cos_TR, sin_TR)
    kernels = native.for_tensor(q_THD)
    if kernels is not None and cos_TR.is_contiguous() and sin_TR.is_contiguous():
        return native.rotate(kernels, q_THD, cos_TR, sin_TR), native.rotate(kernels, k_TKD, cos_TR, sin_TR)
    return rotate_torch(q_THD, k_TKD, cos_TR, sin_TR)


def rotate_and_store(
    qkv_TSD: torch.Tensor, rotation: Rotation, norms: HeadNorms | None, cache: CacheSlots
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise (if there are norms) and rotate queries and keys, and write keys and values to the cache.

    Returns queries [T, H, D] and keys [T, K, D], new and contiguous; rounds as `rms_norm` and `rotate`.
    """
    if qkv_TSD.is_cuda:
        from tokenmill.kernels import triton_rotary

        return triton_rotary.rotate_and_store(qkv_TSD, rotation, norms, cache)
    return rotate_and_store_torch(qkv_TSD, rotation, norms, cache)


def rotate_torch(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of `rotate`, on any device."""
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    return _rotate_one(q_THD, cos_T1R, sin_T1R), _rotate_one(k_TKD, cos_T1R, sin_T1R)


def rotate_and_store_torch(
    qkv_TSD: torch.Tensor, rotation: Rotation, norms: HeadNorms | None, cache: CacheSlots
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of `rotate_and_store`, on any device."""
    page_size, num_kv_heads = cache.key_cache_NBKD.shape[1:3]
    num_heads = qkv_TSD.shape[1] - 2 * num_kv_heads
    q_THD, k_TKD, v_TKD = qkv_TSD.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        q_THD = rms_norm_torch(q_THD, norms.query_D, norms.epsilon)
        k_TKD = rms_norm_torch(k_TKD, norms.key_D, norms.epsilon)
    q_THD, k_TKD = rotate_torch(q_THD, k_TKD, *rotation)
    pages_T, offsets_T = cache.slots_T // page_size, cache.slots_T % page_size
    cache.key_cache_NBKD[pages_T, offsets_T] = k_TKD
    cache.value_cache_NBKD[pages_T, offsets_T] = v_TKD
    return q_THD, k_TKD


def _rotate_one(x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    half = cos_T1R.shape[-1]
    first, second = x_THD[..., :half], x_THD[..., half : 2 * half]
    parts = [first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R]
    if 2 * half < x_THD.shape[-1]:
        parts.append(x_THD[..., 2 * half :])
    return torch.cat(parts, dim=-1)
