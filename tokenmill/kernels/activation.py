"""Gated activations of feed-forward layers: the torch reference and the choice of the kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tokenmill.kernels import native, native_calls


def gated_silu(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """`silu(first half) * second half` of the last dimension: [T, 2F] -> [T, F].

    The activation is computed in float32 and rounded to the input's dtype before the product.
    """
    if gate_up_T2F.is_cuda:
        from tokenmill.kernels import triton_activation

        return triton_activation.gated_silu(gate_up_T2F)
    kernels = native.for_tensor(gate_up_T2F)
    if kernels is not None and gate_up_T2F.dim() == 2 and gate_up_T2F.is_contiguous():
        return native_calls.gated_silu(kernels, gate_up_T2F)
    return gated_silu_torch(gate_up_T2F)


def gated_silu_torch(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """The reference of `gated_silu`, on any device."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF
