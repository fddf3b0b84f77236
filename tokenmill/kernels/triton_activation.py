"""Gated activations on the GPU; the reference is `activation.py`."""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.sizes import ceil_div
from tokenmill.kernels.spare_rows import empty_rows

BLOCK = 1024


def gated_silu(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """See `activation.gated_silu`."""
    size = gate_up_T2F.shape[-1] // 2
    flat = gate_up_T2F.reshape(-1, 2 * size)
    out = empty_rows(*gate_up_T2F.shape[:-1], size, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    grid = (flat.shape[0], ceil_div(size, BLOCK))
    launch(_gated_silu_kernel, grid, flat, out, size, flat.stride(0), BLOCK_SIZE=BLOCK)
    return out


@triton.jit
def _gated_silu_kernel(gate_up, out, size, stride, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    keep = columns < size
    gate = tl.load(gate_up + row * stride + columns, mask=keep, other=0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + columns, mask=keep, other=0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + columns, (active * up).to(out.dtype.element_ty), mask=keep)
