"""RMS normalisation on the GPU, alone and fused with the residual addition; the reference is `norm.py`."""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.sizes import ceil_div, next_power_of_2
from tokenmill.kernels.spare_rows import empty_rows
from tokenmill.kernels.triton_overlap import let_next_begin, overlap_options, wait_for_inputs

# Elements a program works on: rows shorter than this (the heads of a query norm) share a program.
ELEMENTS_PER_PROGRAM = 2048


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `norm.rms_norm`. Strided views of two or three dimensions are read in place."""
    x_OID = _two_leading_dimensions(x)
    out = empty_rows(*x.shape, dtype=x.dtype, device=x.device)
    tiling = _tiling(x)
    launch(
        _rms_norm_kernel,
        tiling.grid,
        x_OID,
        weight,
        out,
        epsilon,
        tiling.num_rows,
        x_OID.shape[1],
        x_OID.stride(0),
        x_OID.stride(1),
        SIZE=x.shape[-1],
        BLOCK_ROWS=tiling.block_rows,
        BLOCK_SIZE=tiling.block_size,
        num_warps=tiling.num_warps,
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `norm.add_rms_norm`. One pass: the sum is written and normalised while it is in registers."""
    pieces = x.shape[0] if x.dim() > residual.dim() else 0
    x_OID = _two_leading_dimensions(x[0] if pieces else x)
    residual_OID = _two_leading_dimensions(residual)
    out = empty_rows(*residual.shape, dtype=residual.dtype, device=residual.device)
    total = torch.empty_like(out)
    tiling = _tiling(residual)
    launch(
        _add_rms_norm_kernel,
        tiling.grid,
        x_OID,
        residual_OID,
        weight,
        out,
        total,
        epsilon,
        tiling.num_rows,
        x_OID.shape[1],
        x_OID.stride(0),
        x_OID.stride(1),
        residual_OID.stride(0),
        residual_OID.stride(1),
        x.stride(0),
        PIECES=pieces,
        SIZE=x.shape[-1],
        BLOCK_ROWS=tiling.block_rows,
        BLOCK_SIZE=tiling.block_size,
        num_warps=tiling.num_warps,
        **overlap_options(x.device),
    )
    return out, total


class _tiling:
    """How many rows a program takes, and with how many warps."""

    def __init__(self, x: torch.Tensor) -> None:
        size = x.shape[-1]
        self.num_rows = x.numel() // size
        self.block_size = next_power_of_2(size)
        self.block_rows = max(1, ELEMENTS_PER_PROGRAM // self.block_size)
        self.num_warps = min(16, max(4, self.block_rows * self.block_size // 512))
        self.grid = (ceil_div(self.num_rows, self.block_rows),)


def _two_leading_dimensions(x: torch.Tensor) -> torch.Tensor:
    """A view [outer, inner, size]; only inputs of more than three dimensions may need a copy."""
    if x.dim() == 3:
        return x
    return x.unsqueeze(-2) if x.dim() == 2 else x.reshape(-1, 1, x.shape[-1])


@triton.jit
def _normalised(wide, scale, epsilon, dtype: tl.constexpr, SIZE: tl.constexpr):
    """`wide` is float32 [rows, BLOCK_SIZE], zero where there is nothing; `scale` is the weight."""
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + epsilon)
    quotient = (wide * inverse[:, None]).to(dtype).to(tl.float32)
    return (quotient * scale.to(tl.float32)[None, :]).to(dtype)


@triton.jit(do_not_specialize=["num_rows", "inner"])
def _rms_norm_kernel(
    x,
    weight,
    out,
    epsilon,
    num_rows,
    inner,
    stride_outer,
    stride_inner,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    columns = tl.arange(0, BLOCK_SIZE)
    keep = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    offsets = (rows // inner) * stride_outer + (rows % inner) * stride_inner
    scale = tl.load(weight + columns, mask=columns < SIZE, other=0)
    wide = tl.load(x + offsets[:, None] + columns[None, :], mask=keep, other=0).to(tl.float32)
    normed = _normalised(wide, scale, epsilon, out.dtype.element_ty, SIZE)
    tl.store(out + rows[:, None] * SIZE + columns[None, :], normed, mask=keep)


@triton.jit(do_not_specialize=["num_rows", "inner"])
def _add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    epsilon,
    num_rows,
    inner,
    stride_outer,
    stride_inner,
    residual_stride_outer,
    residual_stride_inner,
    stride_piece,
    PIECES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    let_next_begin(OVERLAP)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    columns = tl.arange(0, BLOCK_SIZE)
    keep = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    scale = tl.load(weight + columns, mask=columns < SIZE, other=0)
    wait_for_inputs(OVERLAP)
    x_offsets = (rows // inner) * stride_outer + (rows % inner) * stride_inner
    residual_offsets = (rows // inner) * residual_stride_outer + (rows % inner) * residual_stride_inner
    source = x + x_offsets[:, None] + columns[None, :]
    own = tl.load(source, mask=keep, other=0).to(tl.float32)
    if PIECES > 0:
        for piece in tl.static_range(1, PIECES):
            own += tl.load(source + piece * stride_piece, mask=keep, other=0)
        own = own.to(out.dtype.element_ty).to(tl.float32)
    other = tl.load(residual + residual_offsets[:, None] + columns[None, :], mask=keep, other=0).to(
        tl.float32
    )
    added = (own + other).to(out.dtype.element_ty)
    targets = rows[:, None] * SIZE + columns[None, :]
    tl.store(total + targets, added, mask=keep)
    normed = _normalised(added.to(tl.float32), scale, epsilon, out.dtype.element_ty, SIZE)
    tl.store(out + targets, normed, mask=keep)
