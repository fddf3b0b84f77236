"""Rotary position embedding of queries and keys: the torch reference and the choice of the kernel.

Owns no frequencies; `layers/rotary.py` makes the cosines and sines.
T tokens, H query heads, K key heads, D head size, R half of the rotated dimensions; S = H + 2K heads of a
product that gives queries, keys and values.
"""

from __future__ import annotations

import torch

from tokenmill.kernels import native, native_calls
from tokenmill.kernels.norm import rms_norm
from tokenmill.kernels.operands import HeadNorms, Rotation


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
    if kernels is not None and cos_TR.stride(1) == 1 and cos_TR.stride() == sin_TR.stride():
        return native_calls.rotate(kernels, q_THD, cos_TR, sin_TR), native_calls.rotate(
            kernels, k_TKD, cos_TR, sin_TR
        )
    return rotate_torch(q_THD, k_TKD, cos_TR, sin_TR)


def heads_of_product(
    product_TSD: torch.Tensor, rotation: Rotation, norms: HeadNorms | None, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, H, D], keys and values [T, K, D] of a product: queries and keys normalised, if there are
    norms, and rotated.

    One operation after the other; `triton_rotary.rotate_and_store` does the same and writes the cache.
    """
    num_heads = product_TSD.shape[1] - 2 * num_kv_heads
    q_THD, k_TKD, v_TKD = product_TSD.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        q_THD = rms_norm(q_THD, norms.query_D, norms.epsilon)
        k_TKD = rms_norm(k_TKD, norms.key_D, norms.epsilon)
    return *rotate(q_THD, k_TKD, *rotation), v_TKD


def rotate_torch(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of `rotate`, on any device."""
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    return _rotate_one(q_THD, cos_T1R, sin_T1R), _rotate_one(k_TKD, cos_T1R, sin_T1R)


def _rotate_one(x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    half = cos_T1R.shape[-1]
    first, second = x_THD[..., :half], x_THD[..., half : 2 * half]
    parts = [first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R]
    if 2 * half < x_THD.shape[-1]:
        parts.append(x_THD[..., 2 * half :])
    return torch.cat(parts, dim=-1)
