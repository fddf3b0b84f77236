"""Products of up to some hundred rows on Hopper GPUs: one warp feeds tiles, the others multiply.

A product of so few rows takes little longer than its launch, its first loads and its weights. Here the
first weights are on their way while the kernel before still runs (`triton_overlap.py`), and where the
outputs are few, several programs share the inputs of a tile: their sums are left in pieces, for the norm that
follows adds them on its way. Small tiles are fed by the warps that multiply.
`product_tilings.py` chooses the tiles, `linear.py` is the reference. This is Gluon (see `hopper_prefill.py`).
Letters: N rows, I inputs, O outputs of the weight, F outputs of a gated product (O = 2F), P pieces.
"""

# Gluon rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.operands import Norm, UnscaledRows
from tokenmill.kernels.product_tilings import ProductTiling
from tokenmill.kernels.sizes import ceil_div, next_power_of_2
from tokenmill.kernels.spare_rows import empty_rows, rows_to_copy
from tokenmill.kernels.triton_attention import COPY_ALIGNMENT
from tokenmill.kernels.triton_overlap import let_next_begin, overlap_options, wait_for_inputs

STORED_BYTES = 16  # by a thread at once
TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def can_take(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether `product` knows these numbers and layouts."""
    return (
        x_NI.dtype == weight_OI.dtype
        and x_NI.is_floating_point()
        and x_NI.element_size() == 2
        and x_NI.shape[1] == weight_OI.shape[1]
        and x_NI.stride(1) == 1
        and weight_OI.is_contiguous()
        and all((x.data_ptr() | 2 * x.stride(0)) % COPY_ALIGNMENT == 0 for x in (x_NI, weight_OI))
    )


def product(
    x_NI: torch.Tensor | UnscaledRows,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    tiling: ProductTiling,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """`linear.linear` of what `can_take` allows; with several pieces float32 [P, N, O], to be summed."""
    num_outputs = len(weight_OI) // 2 if gated else len(weight_OI)
    rows_NI, scaled_by = (x_NI.numbers_NI, x_NI) if isinstance(x_NI, UnscaledRows) else (x_NI, None)
    if tiling.pieces > 1:
        shape = (tiling.pieces, len(rows_NI), num_outputs)
        out = torch.empty(shape, dtype=torch.float32, device=rows_NI.device)
    else:
        out = empty_rows(len(rows_NI), num_outputs, dtype=rows_NI.dtype, device=rows_NI.device)
    _launch(rows_NI, weight_OI, bias_O, tiling, out, gated=gated, scaled_by=scaled_by)
    return out


def add(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    residual_NO: torch.Tensor,
    norm: Norm,
    tiling: ProductTiling,
) -> tuple[UnscaledRows, torch.Tensor]:
    """The norm of `linear + residual` up to what its rows are multiplied by, and that sum [N, O].

    The residual is contiguous, and the tiling has one piece.
    """
    out = empty_rows(*residual_NO.shape, dtype=x_NI.dtype, device=x_NI.device)
    total_NO = torch.empty_like(residual_NO)
    shape = (ceil_div(len(weight_OI), tiling.outputs), len(x_NI))
    squares_CN = torch.empty(shape, dtype=torch.float32, device=x_NI.device)
    added = _Added(residual_NO, norm.weight_I, total_NO, squares_CN)
    _launch(x_NI, weight_OI, bias_O, tiling, out, added=added)
    return UnscaledRows(out, squares_CN, norm.epsilon), total_NO


@dataclass(frozen=True, slots=True)
class _Added:
    """What a product is added to, and where the sum goes."""

    residual_NO: torch.Tensor
    norm_O: torch.Tensor
    total_NO: torch.Tensor
    squares_CN: torch.Tensor


def _launch(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    tiling: ProductTiling,
    out: torch.Tensor,
    *,
    gated: bool = False,
    added: _Added | None = None,
    scaled_by: UnscaledRows | None = None,
) -> None:
    num_rows, size = x_NI.shape
    num_outputs = out.shape[-1]
    assert tiling.pieces == 1 or not (gated or added or scaled_by)
    assert not (tiling.weights_left and tiling.more)
    # With more inputs the halves of a gated tile lie between each other, and are multiplied as one tile.
    assert tiling.weights_left or not gated or tiling.inputs == 64
    steps = ceil_div(size, tiling.inputs)
    halves = 2 if gated else 1
    grid = (
        ceil_div(num_outputs, tiling.width // halves),
        ceil_div(num_rows, tiling.rows),
        tiling.pieces,
    )
    squares_CN = added.squares_CN if added else scaled_by.squares_CN if scaled_by else None
    launch(
        _product_kernel,
        grid,
        tiles_of_rows(x_NI, [tiling.rows, tiling.inputs]),
        tiles(weight_OI, [tiling.outputs // halves, tiling.inputs]),
        tiles(weight_OI, [tiling.more // halves, tiling.inputs]) if tiling.more else None,
        bias_O,
        out,
        added.residual_NO if added else None,
        added.norm_O if added else None,
        added.total_NO if added else None,
        squares_CN,
        scaled_by.epsilon if scaled_by else 0.0,
        num_rows,
        num_outputs,
        size,
        steps,
        ceil_div(steps, tiling.pieces),
        len(scaled_by.squares_CN) if scaled_by else 0,
        GATED=gated,
        BLOCK_M=tiling.rows,
        BLOCK_N=tiling.outputs,
        MORE_N=tiling.more,
        BLOCK_K=tiling.inputs,
        STAGES=tiling.stages,
        AT_ONCE=_numbers_at_once(out.element_size(), num_outputs),
        PARTS=next_power_of_2(len(scaled_by.squares_CN)) if scaled_by else 0,
        WEIGHTS_LEFT=tiling.weights_left,
        IS_FED=tiling.is_fed or gated,
        num_warps=tiling.num_warps,
        maxnreg=tiling.registers,
        **overlap_options(x_NI.device),
    )


def _numbers_at_once(element_size: int, num_outputs: int) -> int:
    """How many numbers a thread stores at once: one, if not every row of outputs begins at a multiple.

    0: as they lie, for threads beside each other hold pieces in float32 that the memory can take as one.
    """
    if element_size == 4:
        return 0
    at_once = STORED_BYTES // element_size
    return at_once if num_outputs % at_once == 0 else 1


def tiles(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Past the ends of a tensor its tiles are zero."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, TILE_LAYOUT)


def tiles_of_rows(x_NI: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Past the last row tiles are what the memory there holds, or zero."""
    shape = [rows_to_copy(x_NI, block[0]), x_NI.shape[1]]
    return TensorDescriptor(x_NI, shape, list(x_NI.stride()), block, TILE_LAYOUT)


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


@gluon.jit
def copy_weights(
    weight, w_tiles, full, slot, output, num_outputs, column, GATED: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy a tile of weights; a gated one is half of the gate's and half of what it gates."""
    if GATED:
        halves = w_tiles._reinterpret(w_tiles.dtype, [2 * STAGES, BLOCK_N // 2, BLOCK_K], w_tiles.layout)
        tma.async_copy_global_to_shared(weight, [output, column], full, halves.index(2 * slot))
        second = num_outputs + output
        tma.async_copy_global_to_shared(weight, [second, column], full, halves.index(2 * slot + 1))
    else:
        tma.async_copy_global_to_shared(weight, [output, column], full, w_tiles.index(slot))


@gluon.jit
def _copy_all_weights(
    weight, more_weight, w_tiles, m_tiles, full, slot, output, num_outputs, column, GATED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MORE_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Both tiles, where there are two. They are waited for together with those of the rows."""
    mbarrier.expect(full, 2 * BLOCK_K * (BLOCK_M + BLOCK_N + MORE_N))
    copy_weights(weight, w_tiles, full, slot, output, num_outputs, column, GATED, BLOCK_N, BLOCK_K, STAGES)
    if MORE_N > 0:
        beside = output + (BLOCK_N // 2 if GATED else BLOCK_N)
        copy_weights(
            more_weight, m_tiles, full, slot, beside, num_outputs, column, GATED, MORE_N, BLOCK_K, STAGES
        )


@gluon.jit
def copy_first_tiles(
    x, weight, more_weight, x_tiles, w_tiles, m_tiles, full, row, output, num_outputs, begin, steps,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MORE_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The tiles of as many steps as there are stages. Nobody writes weights, so they do not wait for other
    kernels."""
    for step in range(gl.minimum(steps, STAGES)):
        column = (begin + step) * BLOCK_K
        _copy_all_weights(
            weight, more_weight, w_tiles, m_tiles, full.index(step), step, output, num_outputs, column, GATED,
            BLOCK_M, BLOCK_N, MORE_N, BLOCK_K, STAGES,
        )  # fmt: skip
    wait_for_inputs(OVERLAP)
    for step in range(gl.minimum(steps, STAGES)):
        column = (begin + step) * BLOCK_K
        tma.async_copy_global_to_shared(x, [row, column], full.index(step), x_tiles.index(step))


@gluon.jit
def copy_tiles(
    x, weight, more_weight, x_tiles, w_tiles, m_tiles, full, row, output, num_outputs, begin, step,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MORE_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Those of a later step, in place of tiles that all warps are done with."""
    slot = step % STAGES
    column = (begin + step) * BLOCK_K
    _copy_all_weights(
        weight, more_weight, w_tiles, m_tiles, full.index(slot), slot, output, num_outputs, column, GATED,
        BLOCK_M, BLOCK_N, MORE_N, BLOCK_K, STAGES,
    )  # fmt: skip
    tma.async_copy_global_to_shared(x, [row, column], full.index(slot), x_tiles.index(slot))


@gluon.jit
def _feed(
    x, weight, more_weight, x_tiles, w_tiles, m_tiles, full, empty, row, output, num_outputs, begin, steps,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MORE_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """One warp: copy the tiles."""
    copy_first_tiles(
        x, weight, more_weight, x_tiles, w_tiles, m_tiles, full, row, output, num_outputs, begin, steps,
        GATED, BLOCK_M, BLOCK_N, MORE_N, BLOCK_K, STAGES, OVERLAP,
    )  # fmt: skip
    for step in range(STAGES, steps):
        mbarrier.wait(empty.index(step % STAGES), step // STAGES % 2 ^ 1)
        copy_tiles(
            x, weight, more_weight, x_tiles, w_tiles, m_tiles, full, row, output, num_outputs, begin, step,
            GATED, BLOCK_M, BLOCK_N, MORE_N, BLOCK_K, STAGES,
        )  # fmt: skip


@gluon.jit
def with_bias(sums, bias, outputs, num_outputs):
    """Sums [rows, outputs] and the bias, where there is one."""
    if bias is not None:
        added = gl.load(bias + outputs, mask=outputs < num_outputs, other=0).to(gl.float32)
        sums += added[None, :]
    return sums


# Two gates ($1, $2) and two that they gate ($3, $4) make two numbers. Written by the compiler, this takes 19
# instructions a number instead of 8, three of them of the slow unit for roots and the like instead of two: it
# cares for the smallest and the largest of numbers, and rounds gates one by one.
ACTIVATED_BFLOAT16 = gl.constexpr("""{
    .reg .b32 gates, ups, gate, other, x, y;
    cvt.rn.bf16x2.f32 gates, $2, $1;
    cvt.rn.bf16x2.f32 ups, $4, $3;
    shl.b32 gate, gates, 16;
    and.b32 other, gates, 0xffff0000;
    mul.ftz.f32 x, gate, 0fBFB8AA3B;
    mul.ftz.f32 y, other, 0fBFB8AA3B;
    ex2.approx.ftz.f32 x, x;
    ex2.approx.ftz.f32 y, y;
    add.ftz.f32 x, x, 0f3F800000;
    add.ftz.f32 y, y, 0f3F800000;
    rcp.approx.ftz.f32 x, x;
    rcp.approx.ftz.f32 y, y;
    mul.ftz.f32 x, x, gate;
    mul.ftz.f32 y, y, other;
    cvt.rn.bf16x2.f32 gates, y, x;
    mul.rn.bf16x2 $0, gates, ups;
}""")


@gluon.jit
def activated(gate, up, dtype: gl.constexpr):
    """The gated activation of sums, with the roundings of `activation.gated_silu`."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            ACTIVATED_BFLOAT16, "=r,r,r,r,r", [gate, up], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    gate = gate.to(dtype).to(gl.float32)
    active = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
    return (active * up.to(dtype).to(gl.float32)).to(dtype)


@gluon.jit
def _store(
    result, out, row, output, piece, num_rows, num_outputs, BLOCK_M: gl.constexpr, AT_ONCE: gl.constexpr
):
    """Store a tile [rows, outputs]. Threads hold sums that lie apart: they exchange them first, so that each
    stores AT_ONCE numbers that lie side by side, and those next to it the next ones. 0: as they are."""
    result = result.to(out.dtype.element_ty)
    if AT_ONCE > 0:
        THREADS: gl.constexpr = min(32, result.shape[1] // AT_ONCE)  # of a warp, beside each other
        wide: gl.constexpr = gl.BlockedLayout(
            [1, AT_ONCE], [32 // THREADS, THREADS], [gl.num_warps(), 1], [1, 0]
        )
        result = gl.convert_layout(result, wide)
    outputs = output + gl.arange(0, result.shape[1], gl.SliceLayout(0, result.type.layout))
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, result.type.layout))
    targets = (piece * num_rows + rows).to(gl.int64)[:, None] * num_outputs + outputs[None, :]
    keep = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    gl.store(out + targets, result, mask=keep)


@gluon.jit
def _finish_plain(
    acc, bias, out, row, output, piece, num_rows, num_outputs,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Store the sums of a tile [rows, outputs], with the bias."""
    outputs = output + gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc.type.layout))
    # One of the pieces brings the bias; the others load none of it.
    acc = with_bias(acc, bias, outputs, gl.where(piece == 0, num_outputs, 0))
    _store(acc, out, row, output, piece, num_rows, num_outputs, BLOCK_M, AT_ONCE)


@gluon.jit
def _finish_added(
    acc, beside, weights, bias, out, total, squares, row, output, num_rows, num_outputs,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Store the sums of a tile [rows, outputs] with what stands beside them, the same times the weights of a
    norm, and the sums of its squares by row. Roundings as in `norm.add_rms_norm`."""
    dtype: gl.constexpr = out.dtype.element_ty
    outputs = output + gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc.type.layout))
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, acc.type.layout))
    own = with_bias(acc, bias, outputs, num_outputs).to(dtype).to(gl.float32)
    added = (own + beside.to(gl.float32)).to(dtype).to(gl.float32)
    part = output // BLOCK_N
    gl.store(squares + part * num_rows + rows, gl.sum(added * added, axis=1), mask=rows < num_rows)
    _store(added, total, row, output, 0, num_rows, num_outputs, BLOCK_M, AT_ONCE)
    scaled = added * weights.to(gl.float32)
    _store(scaled, out, row, output, 0, num_rows, num_outputs, BLOCK_M, AT_ONCE)


@gluon.jit
def load_squares(squares, row, num_rows, num_parts, BLOCK_M: gl.constexpr, PARTS: gl.constexpr):
    """Sums of squares [rows, parts], of which each thread has a row's."""
    layout: gl.constexpr = gl.BlockedLayout([1, PARTS], [32, 1], [gl.num_warps(), 1], [0, 1])
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    parts = gl.arange(0, PARTS, gl.SliceLayout(0, layout))
    keep = (rows < num_rows)[:, None] & (parts < num_parts)[None, :]
    return gl.load(squares + (parts[None, :] * num_rows + rows[:, None]), mask=keep, other=0)


@gluon.jit
def scales_of(found, size, epsilon, layout: gl.constexpr):
    """What each row of a norm of `size` numbers is multiplied by."""
    return gl.convert_layout(gl.rsqrt(gl.sum(found, axis=1) / size + epsilon), layout)


@gluon.jit
def _finish_gated(
    gate, up, bias, out, row, output, num_rows, num_outputs,
    BLOCK_M: gl.constexpr, HALF: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Store what the sums of a tile [rows, outputs] make, with bias and activation."""
    outputs = output + gl.arange(0, HALF, gl.SliceLayout(0, gate.type.layout))
    gate = with_bias(gate, bias, outputs, num_outputs)
    up = with_bias(up, None if bias is None else bias + num_outputs, outputs, num_outputs)
    result = activated(gate, up, out.dtype.element_ty)
    _store(result, out, row, output, 0, num_rows, num_outputs, BLOCK_M, AT_ONCE)


@gluon.jit
def _finish(
    acc, bias, out, row, output, piece, num_rows, num_outputs,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    if GATED:
        HALF: gl.constexpr = BLOCK_N // 2
        gate, up = acc.reshape([BLOCK_M, 2, HALF]).permute((0, 2, 1)).split()
        _finish_gated(gate, up, bias, out, row, output, num_rows, num_outputs, BLOCK_M, HALF, AT_ONCE)
    else:
        _finish_plain(acc, bias, out, row, output, piece, num_rows, num_outputs, BLOCK_M, BLOCK_N, AT_ONCE)


@gluon.jit
def _multiply(
    x, weight, more_weight, x_tiles, w_tiles, m_tiles, full, empty, bias, out, residual, norm, total, squares,
    epsilon, row, output, piece, num_rows, num_outputs, size, num_parts, begin, steps, GATED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MORE_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, AT_ONCE: gl.constexpr, PARTS: gl.constexpr, IS_FED: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """The sums of the program's tiles, which another warp copies, or these warps themselves."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    rows = (row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout)))[:, None]
    outputs = (output + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout)))[None, :]
    inside = (rows < num_rows) & (outputs < num_outputs)
    if total is not None:
        weights = gl.load(norm + (outputs + rows * 0), mask=inside, other=0)
    if IS_FED:
        wait_for_inputs(OVERLAP)  # what is written may still be read by a kernel before
    else:
        copy_first_tiles(
            x, weight, more_weight, x_tiles, w_tiles, m_tiles, full, row, output, num_outputs, begin, steps,
            GATED, BLOCK_M, BLOCK_N, MORE_N, BLOCK_K, STAGES, OVERLAP,
        )  # fmt: skip
    # On their way while tiles are multiplied.
    if total is not None:
        beside = gl.load(residual + (rows * num_outputs + outputs), mask=inside, other=0)
    elif squares is not None:
        found = load_squares(squares, row, num_rows, num_parts, BLOCK_M, PARTS)
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    if MORE_N > 0:
        more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, MORE_N, 16])
        more = gl.zeros([BLOCK_M, MORE_N], gl.float32, more_layout)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES % 2)
        acc = warpgroup_mma(x_tiles.index(slot), w_tiles.index(slot).permute((1, 0)), acc, is_async=True)
        # The products of the step before are done, and its tiles may be overwritten.
        if MORE_N > 0:
            more = warpgroup_mma(
                x_tiles.index(slot), m_tiles.index(slot).permute((1, 0)), more, is_async=True
            )
            acc, more = warpgroup_mma_wait(2, [acc, more])
        else:
            acc = warpgroup_mma_wait(1, [acc])
        if IS_FED:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
        else:
            ahead = step + STAGES - 1
            if (step > 0) & (ahead < steps):
                copy_tiles(
                    x, weight, more_weight, x_tiles, w_tiles, m_tiles, full, row, output, num_outputs, begin,
                    ahead, GATED, BLOCK_M, BLOCK_N, MORE_N, BLOCK_K, STAGES,
                )  # fmt: skip
    if MORE_N > 0:
        acc, more = warpgroup_mma_wait(0, [acc, more])
        if squares is not None:
            more *= scales_of(found, size, epsilon, gl.SliceLayout(1, more_layout))[:, None]
        beyond = output + (BLOCK_N // 2 if GATED else BLOCK_N)
        _finish(more, bias, out, row, beyond, piece, num_rows, num_outputs, GATED, BLOCK_M, MORE_N, AT_ONCE)
    else:
        acc = warpgroup_mma_wait(0, [acc])
    if total is not None:
        _finish_added(
            acc, beside, weights, bias, out, total, squares, row, output, num_rows, num_outputs, BLOCK_M,
            BLOCK_N, AT_ONCE,
        )  # fmt: skip
    else:
        if squares is not None:
            acc *= scales_of(found, size, epsilon, gl.SliceLayout(1, layout))[:, None]
        _finish(acc, bias, out, row, output, piece, num_rows, num_outputs, GATED, BLOCK_M, BLOCK_N, AT_ONCE)


@gluon.jit
def _multiply_few(
    x_tiles, w_tiles, full, empty, bias, out, residual, norm, total, squares, epsilon, row, output, piece,
    num_rows, num_outputs, size, num_parts, steps, GATED: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, AT_ONCE: gl.constexpr, PARTS: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """`_multiply` with weights as the left factor, outputs times rows."""
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    HALVES: gl.constexpr = 2 if GATED else 1
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    rows = (row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout)))[None, :]
    outputs = (output + gl.arange(0, WIDTH, gl.SliceLayout(1, layout)))[:, None]
    inside = (rows < num_rows) & (outputs < num_outputs)
    if total is not None:
        weights = gl.load(norm + (outputs + rows * 0), mask=inside, other=0)
    wait_for_inputs(OVERLAP)
    # On their way while tiles are multiplied.
    if total is not None:
        beside = gl.load(residual + (rows * num_outputs + outputs), mask=inside, other=0)
    elif squares is not None:
        found = load_squares(squares, row, num_rows, num_parts, BLOCK_M, PARTS)
    halves = w_tiles._reinterpret(w_tiles.dtype, [HALVES * STAGES, WIDTH, w_tiles.shape[2]], w_tiles.layout)
    acc = gl.zeros([WIDTH, BLOCK_M], gl.float32, layout)
    up = gl.zeros([WIDTH, BLOCK_M], gl.float32, layout)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES % 2)
        columns = x_tiles.index(slot).permute((1, 0))
        acc = warpgroup_mma(halves.index(HALVES * slot), columns, acc, is_async=True)
        if GATED:
            up = warpgroup_mma(halves.index(HALVES * slot + 1), columns, up, is_async=True)
            acc, up = warpgroup_mma_wait(2, [acc, up])
        else:
            acc = warpgroup_mma_wait(1, [acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
    if GATED:
        acc, up = warpgroup_mma_wait(0, [acc, up])
    else:
        acc = warpgroup_mma_wait(0, [acc])
    if total is not None:
        _finish_added(
            acc.permute((1, 0)), beside.permute((1, 0)), weights.permute((1, 0)), bias, out, total, squares,
            row, output, num_rows, num_outputs, BLOCK_M, BLOCK_N, AT_ONCE,
        )  # fmt: skip
    else:
        if squares is not None:
            scales = scales_of(found, size, epsilon, gl.SliceLayout(0, layout))[None, :]
            acc *= scales
            up *= scales
        if GATED:
            _finish_gated(
                acc.permute((1, 0)), up.permute((1, 0)), bias, out, row, output, num_rows, num_outputs,
                BLOCK_M, WIDTH, AT_ONCE,
            )  # fmt: skip
        else:
            _finish_plain(
                acc.permute((1, 0)), bias, out, row, output, piece, num_rows, num_outputs,
                BLOCK_M, BLOCK_N, AT_ONCE,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "size", "total_steps", "piece_steps", "num_parts"])
def _product_kernel(
    x,
    weight,
    more_weight,
    bias,
    out,
    residual,
    norm,
    total,
    squares,
    epsilon,
    num_rows,
    num_outputs,
    size,
    total_steps,
    piece_steps,
    num_parts,
    GATED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    MORE_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    AT_ONCE: gl.constexpr,
    PARTS: gl.constexpr,
    OVERLAP: gl.constexpr,
    WEIGHTS_LEFT: gl.constexpr,
    IS_FED: gl.constexpr,
):
    let_next_begin(OVERLAP)
    output = gl.program_id(0) * ((BLOCK_N + MORE_N) // (2 if GATED else 1))
    row = gl.program_id(1) * BLOCK_M
    piece = gl.program_id(2)
    begin = piece * piece_steps
    # The last of several pieces may have none, and gets zeros, from beyond the end. That there is always one
    # lets a product begin before the one before it has ended: the compiler finds no sum without any.
    steps = gl.maximum(gl.minimum(piece_steps, total_steps - begin), 1)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    w_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_N, BLOCK_K], x.layout)
    m_tiles = w_tiles
    if MORE_N > 0:
        m_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, MORE_N, BLOCK_K], x.layout)
    # Tiles are there, tiles are done with; one of each for each stage.
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = full
    if IS_FED:
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        if IS_FED:
            mbarrier.init(empty.index(stage), count=1)

    feed = (
        x, weight, more_weight, x_tiles, w_tiles, m_tiles, full, empty, row, output, num_outputs, begin,
        steps,
    )  # fmt: skip
    feeding: gl.constexpr = (GATED, BLOCK_M, BLOCK_N, MORE_N, BLOCK_K, STAGES, OVERLAP)
    if WEIGHTS_LEFT:
        few = (
            x_tiles, w_tiles, full, empty, bias, out, residual, norm, total, squares, epsilon, row, output,
            piece, num_rows, num_outputs, size, num_parts, steps,
        )  # fmt: skip
        multiplying_few: gl.constexpr = (GATED, BLOCK_M, BLOCK_N, STAGES, AT_ONCE, PARTS, OVERLAP)
        gl.warp_specialize([(_multiply_few, few + multiplying_few), (_feed, feed + feeding)], [1], [24])
    elif IS_FED:
        multiply = (
            x, weight, more_weight, x_tiles, w_tiles, m_tiles, full, empty, bias, out, residual, norm, total,
            squares, epsilon, row, output, piece, num_rows, num_outputs, size, num_parts, begin, steps,
        )  # fmt: skip
        multiplying: gl.constexpr = (
            GATED, BLOCK_M, BLOCK_N, MORE_N, BLOCK_K, STAGES, AT_ONCE, PARTS, IS_FED, OVERLAP,
        )  # fmt: skip
        gl.warp_specialize([(_multiply, multiply + multiplying), (_feed, feed + feeding)], [1], [24])
    else:
        _multiply(
            x, weight, more_weight, x_tiles, w_tiles, m_tiles, full, empty, bias, out, residual, norm, total,
            squares, epsilon, row, output, piece, num_rows, num_outputs, size, num_parts, begin, steps, GATED,
            BLOCK_M, BLOCK_N, MORE_N, BLOCK_K, STAGES, AT_ONCE, PARTS, IS_FED, OVERLAP,
        )  # fmt: skip
