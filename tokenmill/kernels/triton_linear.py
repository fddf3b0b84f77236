"""Products of one or two rows on the GPU at the speed of its memory; the reference is `linear.py`.

Weights are read once: a program holds whole rows of the weight in registers and multiplies on the plain
arithmetic units, perhaps after a norm. Every sum has a fixed order.
Letters: N rows, I inputs, O outputs of the weight, F outputs if gated (O = 2F).
"""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.operands import Norm
from tokenmill.kernels.sizes import ceil_div, next_power_of_2
from tokenmill.kernels.triton_overlap import let_next_begin, overlap_options, wait_for_inputs

INPUTS_PER_WARP = 512
# Weights that a thread has under way, 8 to a load. Of a small weight all programs are on the device at once
# and wait for their inputs: smaller ones find room earlier, beside the kernel before. Of a large weight one
# wave of programs follows another, and larger ones start less often; a gated product needs its inputs for two
# sums.
WEIGHTS_PER_THREAD = 40
WEIGHTS_PER_THREAD_LARGE = 64
WEIGHTS_PER_THREAD_LARGE_GATED = 80
LARGE_WEIGHT = 12_000_000  # numbers
FEWEST_PROGRAMS = 264  # two for each processor: below, programs take fewer outputs


# ── launching ─────────────────────────────────────────────────────────────────────────────────


def linear(
    x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, *, gated: bool
) -> torch.Tensor:
    """See `linear.linear`; for any number of rows from one on, though only one or two are fast."""
    return _multiply(x_NI, None, None, weight_OI, bias_O, gated)[0]


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
    y_NO, total_NI = _multiply(x_NI, residual_NI, norm, weight_OI, bias_O, gated)
    assert total_NI is not None
    return y_NO, total_NI


def _multiply(
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
    tiling = choose_tiling(size, num_outputs, gated)
    out_NO = torch.empty(num_rows, num_outputs, dtype=x_NI.dtype, device=x_NI.device)
    total_NI = None if norm is None else torch.empty((num_rows, size), dtype=x_NI.dtype, device=x_NI.device)
    assert x_NI.stride(1) == 1
    assert weight_OI.is_contiguous()
    launch(
        _linear_kernel,
        (ceil_div(num_outputs, tiling.outputs),),
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
        ROWS=next_power_of_2(num_rows),
        BLOCK_OUTPUTS=tiling.outputs,
        BLOCK_SIZE=next_power_of_2(size),
        num_warps=tiling.num_warps,
        **overlap_options(x_NI.device),
    )
    return out_NO, total_NI


@dataclass(frozen=True, slots=True)
class LinearTiling:
    """Outputs of a program (if gated, of each half of the weight) and its warps."""

    outputs: int
    num_warps: int


def choose_tiling(size: int, num_outputs: int, gated: bool) -> LinearTiling:
    """As many outputs as threads may hold weights of, but so few that every processor gets some."""
    num_warps = min(16, max(4, _nearest_power_of_2(size / INPUTS_PER_WARP)))
    halves = 2 if gated else 1
    is_large = size * num_outputs * halves > LARGE_WEIGHT
    large = WEIGHTS_PER_THREAD_LARGE_GATED if gated else WEIGHTS_PER_THREAD_LARGE
    held = 32 * num_warps * (large if is_large else WEIGHTS_PER_THREAD)
    outputs = 1
    while 2 * outputs * halves * size <= held and num_outputs >= 2 * outputs * FEWEST_PROGRAMS:
        outputs *= 2
    return LinearTiling(outputs, num_warps)


def _nearest_power_of_2(number: float) -> int:
    return int(2 ** round(math.log2(number)))


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
def _linear_kernel(
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
