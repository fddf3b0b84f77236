"""Rotary position embedding of queries and keys: the torch reference and the choice of the kernel.

Owns no frequencies; `layers/rotary.py` makes the cosines and sines.
T tokens, H query heads, K key heads, D head size, R half of the rotated dimensions.
"""

from __future__ import annotations

import torch

from tokenmill.kernels import native


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
