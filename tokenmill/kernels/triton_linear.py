"""Products of a few rows on the GPU at the speed of its memory; the reference is `linear.py`.

Weights are read once. With one or two rows a program holds whole rows of the weight in registers and
multiplies on the plain arithmetic units, perhaps after a norm; with more, tensor cores multiply tiles that
are fetched ahead. Every sum has a fixed order.
Letters: N rows, I inputs, O outputs of the weight, F outputs if gated (O = 2F).
"""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.kernels.operands import Norm
from tokenmill.kernels.triton_overlap import (
    CACHE_LINE_BYTES,
    let_next_begin,
    overlap_options,
    prefetch,
    wait_for_inputs,
)

# Up to so many rows go to the kernel that holds the weights in registers.
VECTOR_ROWS = 2
VECTOR_WEIGHTS_PER_THREAD = 64  # loads that a thread has under way: an eighth of it, of 16 bytes each
VECTOR_INPUTS_PER_WARP = 512
FEWEST_PROGRAMS = 192  # one and a half for each processor: below, programs take fewer outputs

MATRIX_OUTPUTS = 16
MATRIX_INPUTS_PER_WARP = 64
MATRIX_WARPS = 4
MATRIX_STAGES = 4
# Weights of a program brought near while it waits: inputs of each output.
PREFETCHED_INPUTS = 1024


# ── launching ─────────────────────────────────────────────────────────────────────────────────


def linear(
    x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, *, gated: bool
) -> torch.Tensor:
    """See `linear.linear`; for any number of rows from one on, though only a few are fast."""
    if len(x_NI) <= VECTOR_ROWS:
        return _vector(x_NI, None, None, weight_OI, bias_O, gated)[0]
    return _matrix(x_NI, weight_OI, bias_O, gated)


def add_norm_linear(
    x_NI: torch.Tensor,
    residual_NI: torch.Tensor,
    norm: Norm,
    *,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `linear.add_norm_linear`; every program adds and normalises all of the (few) rows."""
    y_NO, total_NI = _vector(x_NI, residual_NI, norm, weight_OI, bias_O, gated)
    assert total_NI is not None
    return y_NO, total_NI


def _vector(
    x_NI: torch.Tensor,
    residual_NI: torch.Tensor | None,
    norm: Norm | None,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The product [N, O or F] and, with a norm, the new residual [N, I]."""
    num_rows, size = x_NI.shape
    num_outputs = len(weight_OI) // 2 if gated else len(weight_OI)
    tiling = vector_tiling(size, num_outputs, gated)
    out_NO = torch.empty(num_rows, num_outputs, dtype=x_NI.dtype, device=x_NI.device)
    total_NI = None if norm is None else torch.empty((num_rows, size), dtype=x_NI.dtype, device=x_NI.device)
    assert x_NI.stride(1) == 1
    assert weight_OI.is_contiguous()
    _vector_kernel[(triton.cdiv(num_outputs, tiling.outputs),)](
        x_NI,
        residual_NI,
        None if norm is None else norm.weight_I,
        weight_OI,
        bias_O,
        out_NO,
        total_NI,
        0.0 if norm is None else norm.epsilon,
        num_rows,
        num_outputs,
        x_NI.stride(0),
        0 if residual_NI is None else residual_NI.stride(0),
        SIZE=size,
        GATED=gated,
        ROWS=triton.next_power_of_2(num_rows),
        BLOCK_OUTPUTS=tiling.outputs,
        BLOCK_SIZE=triton.next_power_of_2(size),
        num_warps=tiling.num_warps,
        **overlap_options(x_NI.device),
    )
    return out_NO, total_NI


@dataclass(frozen=True, slots=True)
class VectorTiling:
    """Outputs of a program (if gated, of each half of the weight) and its warps."""

    outputs: int
    num_warps: int


def vector_tiling(size: int, num_outputs: int, gated: bool) -> VectorTiling:
    """As many outputs as registers hold, but so few that every processor gets some."""
    block_size = triton.next_power_of_2(size)
    num_warps = min(16, max(4, block_size // VECTOR_INPUTS_PER_WARP))
    held = 32 * num_warps * VECTOR_WEIGHTS_PER_THREAD // block_size
    outputs = max(1, held // 2 if gated else held)
    while outputs > 1 and triton.cdiv(num_outputs, outputs) < FEWEST_PROGRAMS:
        outputs //= 2
    return VectorTiling(outputs, num_warps)


def _matrix(
    x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, gated: bool
) -> torch.Tensor:
    """The product [N, O or F]."""
    num_rows, size = x_NI.shape
    num_outputs = len(weight_OI) // 2 if gated else len(weight_OI)
    out_NO = torch.empty(num_rows, num_outputs, dtype=x_NI.dtype, device=x_NI.device)
    tiling = matrix_tiling(size, num_outputs, gated)
    assert x_NI.stride(1) == 1
    assert weight_OI.is_contiguous()
    _matrix_kernel[(triton.cdiv(num_outputs, tiling.outputs),)](
        x_NI,
        weight_OI,
        bias_O,
        out_NO,
        num_rows,
        num_outputs,
        x_NI.stride(0),
        SIZE=size,
        GATED=gated,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_OUTPUTS=tiling.outputs,
        BLOCK_SIZE=tiling.inputs_per_warp,
        WARPS=tiling.num_warps,
        PREFETCHED=min(max(64, triton.next_power_of_2(size)), PREFETCHED_INPUTS),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **overlap_options(x_NI.device),
    )
    return out_NO


@dataclass(frozen=True, slots=True)
class MatrixTiling:
    """Outputs of a program (if gated, of each half), inputs that a warp takes at a time, tiles in flight."""

    outputs: int
    inputs_per_warp: int
    num_warps: int
    num_stages: int


def matrix_tiling(size: int, num_outputs: int, gated: bool) -> MatrixTiling:
    """Few outputs, so that there are many programs; the warps of a program share the inputs."""
    return MatrixTiling(MATRIX_OUTPUTS, MATRIX_INPUTS_PER_WARP, MATRIX_WARPS, MATRIX_STAGES)


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _gated(gate, up):
    """`silu(gate) * up` with the roundings of `activation.gated_silu`."""
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _load_bias(bias, outputs, num_outputs):
    """float32, or 0 where there is none. Loaded early: at the end a program would wait for it alone."""
    if bias is None:
        return 0.0
    else:
        return tl.load(bias + outputs, mask=outputs < num_outputs, other=0).to(tl.float32)


@triton.jit
def _weight_rows(weight, outputs, num_outputs, columns, SIZE: tl.constexpr):
    """[1, BLOCK_OUTPUTS, BLOCK_SIZE]; read once, so the first to leave the caches. Zero past the end."""
    keep = (outputs < num_outputs) & (columns < SIZE)
    return tl.load(weight + outputs.to(tl.int64) * SIZE + columns, keep, 0, eviction_policy="evict_first")


@triton.jit
def _normalised(total, scale, epsilon, SIZE: tl.constexpr):
    """RMS norm of rows [ROWS, 1, BLOCK_SIZE] with the roundings of `norm.rms_norm`."""
    wide = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=2, keep_dims=True) / SIZE + epsilon)
    quotient = (wide * inverse).to(total.dtype).to(tl.float32)
    return (quotient * scale.to(tl.float32)).to(total.dtype)


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def _vector_kernel(
    x,
    residual,
    scale,
    weight,
    bias,
    out,
    total,
    epsilon,
    num_rows,
    num_outputs,
    stride_x,
    stride_residual,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Everything is [rows, outputs, inputs]: one layout in registers serves inputs, weights and sums.
    dtype: tl.constexpr = out.dtype.element_ty
    rows = tl.arange(0, ROWS)[:, None, None]
    outputs = (tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS))[None, :, None]
    columns = tl.arange(0, BLOCK_SIZE)[None, None, :]
    keep = (rows < num_rows) & (columns < SIZE)
    let_next_begin(OVERLAP)
    tile = _weight_rows(weight, outputs, num_outputs, columns, SIZE)
    if GATED:
        second = weight + num_outputs.to(tl.int64) * SIZE
        up_tile = _weight_rows(second, outputs, num_outputs, columns, SIZE)
    if scale is not None:
        scale_I = tl.load(scale + columns, mask=columns < SIZE, other=0)
    bias_O = _load_bias(bias, outputs, num_outputs)
    if GATED:
        up_bias_O = _load_bias(None if bias is None else bias + num_outputs, outputs, num_outputs)
    wait_for_inputs(OVERLAP)

    x_RI = tl.load(x + rows * stride_x + columns, mask=keep, other=0)
    if scale is not None:
        residual_RI = tl.load(residual + rows * stride_residual + columns, mask=keep, other=0)
        x_RI = (x_RI.to(tl.float32) + residual_RI.to(tl.float32)).to(dtype)
        if tl.program_id(0) == 0:
            tl.store(total + rows * SIZE + columns, x_RI, mask=keep)
        x_RI = _normalised(x_RI, scale_I, epsilon, SIZE)
    y = (tl.sum(x_RI.to(tl.float32) * tile.to(tl.float32), axis=2, keep_dims=True) + bias_O).to(dtype)
    if GATED:
        up = tl.sum(x_RI.to(tl.float32) * up_tile.to(tl.float32), axis=2, keep_dims=True) + up_bias_O
        y = _gated(y, up.to(dtype))
    keep_out = (rows < num_rows) & (outputs < num_outputs)
    tl.store(out + rows * num_outputs + outputs, y, mask=keep_out)


@triton.jit
def _prefetch_rows(
    weight, outputs, num_outputs, SIZE: tl.constexpr, INPUTS: tl.constexpr, OVERLAP: tl.constexpr
):
    """Bring the first INPUTS weights of the outputs near."""
    LINE: tl.constexpr = CACHE_LINE_BYTES // (weight.dtype.element_ty.primitive_bitwidth // 8)
    columns = tl.minimum(tl.arange(0, INPUTS // LINE) * LINE, SIZE - 1)
    rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    prefetch(weight + rows[:, None] * SIZE + columns[None, :], OVERLAP)


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def _matrix_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    stride_x,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WARPS: tl.constexpr,
    PREFETCHED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Batches of a batched product go to different warps: each warp takes its share of the inputs.
    dtype: tl.constexpr = out.dtype.element_ty
    let_next_begin(OVERLAP)
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    second = weight + num_outputs.to(tl.int64) * SIZE
    _prefetch_rows(weight, outputs, num_outputs, SIZE, PREFETCHED, OVERLAP)
    if GATED:
        _prefetch_rows(second, outputs, num_outputs, SIZE, PREFETCHED, OVERLAP)
    across = outputs[None, :]
    bias_O = _load_bias(bias, across, num_outputs)
    if GATED:
        up_bias_O = _load_bias(None if bias is None else bias + num_outputs, across, num_outputs)
    wait_for_inputs(OVERLAP)

    rows = tl.arange(0, ROWS)
    shares = tl.arange(0, WARPS)[:, None, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, None, :]
    inputs_x = x + rows[None, :, None] * stride_x
    keep_x = (rows < num_rows)[None, :, None]
    offsets = outputs.to(tl.int64)[None, :, None] * SIZE
    keep_weight = (outputs < num_outputs)[None, :, None]
    sums = tl.zeros((WARPS, ROWS, BLOCK_OUTPUTS), tl.float32)
    up_sums = tl.zeros((WARPS, ROWS, BLOCK_OUTPUTS), tl.float32)
    for start in range(0, SIZE, WARPS * BLOCK_SIZE):
        columns = start + shares
        keep = columns < SIZE
        x_tile = tl.load(inputs_x + columns, mask=keep & keep_x, other=0)
        tile = tl.load(
            weight + offsets + columns, mask=keep & keep_weight, other=0, eviction_policy="evict_first"
        )
        sums = tl.dot(x_tile, tl.trans(tile, (0, 2, 1)), sums, input_precision="ieee")
        if GATED:
            up_tile = tl.load(
                second + offsets + columns, mask=keep & keep_weight, other=0, eviction_policy="evict_first"
            )
            up_sums = tl.dot(x_tile, tl.trans(up_tile, (0, 2, 1)), up_sums, input_precision="ieee")

    y = (tl.sum(sums, axis=0) + bias_O).to(dtype)
    if GATED:
        y = _gated(y, (tl.sum(up_sums, axis=0) + up_bias_O).to(dtype))
    keep_out = (rows < num_rows)[:, None] & (across < num_outputs)
    tl.store(out + rows[:, None] * num_outputs + across, y, mask=keep_out)
