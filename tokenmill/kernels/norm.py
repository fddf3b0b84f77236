"""RMS normalisation with and without a residual addition: the torch reference and the choice of the kernel.

Owns no weights; `layers/norm.py` does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tokenmill.kernels import native, native_calls


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, times `weight`; any leading shape, result in `x.dtype`.

    The statistics and the division are float32; the quotient is rounded to `x.dtype` before the weight.
    """
    if x.is_cuda:
        from tokenmill.kernels import triton_norm

        return triton_norm.rms_norm(x, weight, epsilon)
    kernels = native.for_tensor(x)
    if kernels is not None and x.dim() in (2, 3) and x.stride(-1) == 1:
        return native_calls.rms_norm(kernels, x, weight, epsilon)
    return rms_norm_torch(x, weight, epsilon)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(x + residual), x + residual)`; the sum is rounded to its dtype once and used for both.

    On a GPU, `x` may be float32 pieces [P, …] for a residual […]: their sum, rounded to the residual's dtype.
    """
    if x.is_cuda:
        from tokenmill.kernels import triton_norm

        return triton_norm.add_rms_norm(x, residual, weight, epsilon)
    kernels = native.for_tensor(x)
    if kernels is not None and x.dim() == 2 and x.is_contiguous() and residual.is_contiguous():
        return native_calls.add_rms_norm(kernels, x, residual, weight, epsilon)
    return add_rms_norm_torch(x, residual, weight, epsilon)


def add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of `add_rms_norm`, on any device."""
    total = x + residual
    return rms_norm_torch(total, weight, epsilon), total


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The reference of `rms_norm`, on any device."""
    return weight * F.rms_norm(x, (x.shape[-1],), eps=epsilon)
