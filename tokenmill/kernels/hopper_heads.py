"""Products that give queries, keys and values on Hopper GPUs, for rows of which each writes one token.

What follows such a product is little, but it was a kernel more: heads are normalised and rotated, and keys
and values are stored. Here that is the end of a tile. A rotation turns pairs of numbers half a head apart, so
a tile is some outputs of a head's first half and the same of its second, each multiplied on its own; where
heads are normalised, whole halves. The reference is `linear.py` and `rotary.heads_of_product`; the rest is as
in `hopper_linear.py`. This is Gluon (see `hopper_prefill.py`).
Letters are those of `linear.py` and `rotary.py`.
"""

# Gluon rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.hopper_linear import (
    copy_first_tiles,
    copy_tiles,
    load_squares,
    scales_of,
    tiles,
    tiles_of_rows,
    with_bias,
)
from tokenmill.kernels.operands import Heads, UnscaledRows
from tokenmill.kernels.product_tilings import ProductTiling
from tokenmill.kernels.sizes import ceil_div, next_power_of_2
from tokenmill.kernels.triton_overlap import let_next_begin, overlap_options

AT_ONCE = 8  # numbers that a thread stores, 16 bytes
WIDTHS = (8, 16, 32, 64)  # of each part of a tile, in outputs


def can_take(heads: Heads, tiling: ProductTiling) -> bool:
    """Whether `product` can end such tiles: all of a head is rotated, and its halves come in equal parts."""
    half, width = heads.head_dim // 2, tiling.outputs // 2
    is_whole = width == half if heads.norms is not None else half % width == 0
    is_known = width in WIDTHS and not (tiling.more or tiling.weights_left or tiling.pieces > 1)
    return is_known and is_whole and heads.rotation[0].shape[1] == half


def product(
    x_NI: torch.Tensor | UnscaledRows,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    heads: Heads,
    tiling: ProductTiling,
) -> torch.Tensor:
    """Queries [N, H, D] of what `hopper_linear.can_take` allows; keys and values go to their slots."""
    x_NI, unscaled = (x_NI.numbers_NI, x_NI) if isinstance(x_NI, UnscaledRows) else (x_NI, None)
    num_rows, size = x_NI.shape
    cache, norms, (cos_NR, sin_NR) = heads.cache, heads.norms, heads.rotation
    page_size, num_kv_heads, head_dim = cache.key_cache_NBKD.shape[1:]
    num_heads = len(weight_OI) // head_dim - 2 * num_kv_heads
    q_NHD = torch.empty((num_rows, num_heads, head_dim), dtype=x_NI.dtype, device=x_NI.device)
    launch(
        _heads_kernel,
        (len(weight_OI) // tiling.outputs, ceil_div(num_rows, tiling.rows)),
        tiles_of_rows(x_NI, [tiling.rows, tiling.inputs]),
        tiles(weight_OI, [tiling.outputs // 2, tiling.inputs]),
        bias_O,
        cos_NR,
        sin_NR,
        None if norms is None else norms.query_D,
        None if norms is None else norms.key_D,
        cache.slots_T,
        q_NHD,
        cache.key_cache_NBKD,
        cache.value_cache_NBKD,
        None if unscaled is None else unscaled.squares_CN,
        0.0 if norms is None else norms.epsilon,
        0.0 if unscaled is None else unscaled.epsilon,
        num_rows,
        size,
        ceil_div(size, tiling.inputs),
        0 if unscaled is None else len(unscaled.squares_CN),
        cos_NR.stride(0),
        sin_NR.stride(0),
        *cache.key_cache_NBKD.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_M=tiling.rows,
        BLOCK_N=tiling.outputs,
        BLOCK_K=tiling.inputs,
        STAGES=tiling.stages,
        AT_ONCE=AT_ONCE,
        PARTS=0 if unscaled is None else next_power_of_2(len(unscaled.squares_CN)),
        num_warps=tiling.num_warps,
        **overlap_options(x_NI.device),
    )
    return q_NHD


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


@gluon.jit
def _scaled(x, inverse, weights, dtype: gl.constexpr):
    """Roundings as in `norm.rms_norm`; float32 in and out."""
    return ((x * inverse[:, None]).to(dtype).to(gl.float32) * weights[None, :]).to(dtype).to(gl.float32)


@gluon.jit
def _rotated(first, second, cosines, sines, dtype: gl.constexpr):
    """Every product and sum rounds to the dtype on its own, as in `rotary.rotate`; float32 in and out."""
    left = (first * cosines).to(dtype).to(gl.float32) - (second * sines).to(dtype).to(gl.float32)
    right = (second * cosines).to(dtype).to(gl.float32) + (first * sines).to(dtype).to(gl.float32)
    return left, right


@gluon.jit
def _put(
    part, column, row, slots, q_out, key_cache, value_cache, head, num_rows, stride_page, stride_slot,
    stride_head, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Store columns of a head: of a query among the answers, of a key or a value in the slots of its rows."""
    THREADS: gl.constexpr = part.shape[1] // AT_ONCE  # of a warp, beside each other
    wide: gl.constexpr = gl.BlockedLayout([1, AT_ONCE], [32 // THREADS, THREADS], [gl.num_warps(), 1], [1, 0])
    part = gl.convert_layout(part.to(q_out.dtype.element_ty), wide)
    slots = gl.convert_layout(slots, gl.SliceLayout(1, wide))
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, wide))
    columns = column + gl.arange(0, part.shape[1], gl.SliceLayout(0, wide))
    keep = (rows < num_rows)[:, None]
    if head < NUM_HEADS:
        places = (rows.to(gl.int64) * NUM_HEADS + head) * HEAD_DIM
        gl.store(q_out + (places[:, None] + columns[None, :]), part, mask=keep)
    else:
        places = (slots // PAGE_SIZE) * stride_page + (slots % PAGE_SIZE) * stride_slot
        targets = places[:, None] + columns[None, :]
        if head < NUM_HEADS + NUM_KV_HEADS:
            gl.store(key_cache + (targets + (head - NUM_HEADS) * stride_head), part, mask=keep)
        else:
            value = head - NUM_HEADS - NUM_KV_HEADS
            gl.store(value_cache + (targets + value * stride_head), part, mask=keep)


@gluon.jit(
    do_not_specialize=["num_rows", "size", "steps", "num_parts"], do_not_specialize_on_alignment=["slots"]
)
def _heads_kernel(
    x, weight, bias, cos, sin, q_weight, k_weight, slots, q_out, key_cache, value_cache, squares,
    head_epsilon, epsilon, num_rows, size, steps, num_parts, stride_cos, stride_sin, stride_page,
    stride_slot, stride_head,
    NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    AT_ONCE: gl.constexpr, PARTS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    let_next_begin(OVERLAP)
    dtype: gl.constexpr = q_out.dtype.element_ty
    HALF: gl.constexpr = HEAD_DIM // 2
    WIDTH: gl.constexpr = BLOCK_N // 2
    TILES: gl.constexpr = HEAD_DIM // BLOCK_N  # of a head
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, WIDTH, 16])
    head = gl.program_id(0) // TILES
    column = gl.program_id(0) % TILES * WIDTH
    row = gl.program_id(1) * BLOCK_M
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    if q_weight is not None:
        norm = q_weight if head < NUM_HEADS else k_weight
        first_weights = gl.load(norm + columns).to(gl.float32)
        second_weights = gl.load(norm + columns + HALF).to(gl.float32)

    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    w_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_N, BLOCK_K], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())  # tiles are there
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    # A tile's halves lie half a head apart, as those of a gated one lie half a weight apart.
    output = head * HEAD_DIM + column
    copy_first_tiles(
        x, weight, None, x_tiles, w_tiles, w_tiles, full, row, output, HALF, 0, steps, True, BLOCK_M, BLOCK_N,
        0, BLOCK_K, STAGES, OVERLAP,
    )  # fmt: skip
    # On their way while tiles are multiplied.
    is_there = (rows < num_rows)[:, None]
    own = rows.to(gl.int64)[:, None]
    cosines = gl.load(cos + (own * stride_cos + columns[None, :]), mask=is_there, other=0)
    sines = gl.load(sin + (own * stride_sin + columns[None, :]), mask=is_there, other=0)
    row_slots = gl.load(slots + rows, mask=rows < num_rows, other=0)

    if squares is not None:
        found = load_squares(squares, row, num_rows, num_parts, BLOCK_M, PARTS)
    halves = w_tiles._reinterpret(w_tiles.dtype, [2 * STAGES, WIDTH, BLOCK_K], w_tiles.layout)
    first = gl.zeros([BLOCK_M, WIDTH], gl.float32, layout)
    second = gl.zeros([BLOCK_M, WIDTH], gl.float32, layout)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES % 2)
        x_tile = x_tiles.index(slot)
        first = warpgroup_mma(x_tile, halves.index(2 * slot).permute((1, 0)), first, is_async=True)
        second = warpgroup_mma(x_tile, halves.index(2 * slot + 1).permute((1, 0)), second, is_async=True)
        # The products of the step before are done, and its tiles may be overwritten.
        first, second = warpgroup_mma_wait(2, [first, second])
        ahead = step + STAGES - 1
        if (step > 0) & (ahead < steps):
            copy_tiles(
                x, weight, None, x_tiles, w_tiles, w_tiles, full, row, output, HALF, 0, ahead, True, BLOCK_M,
                BLOCK_N, 0, BLOCK_K, STAGES,
            )  # fmt: skip
    first, second = warpgroup_mma_wait(0, [first, second])
    if squares is not None:
        scales = scales_of(found, size, epsilon, gl.SliceLayout(1, layout))[:, None]
        first *= scales
        second *= scales

    # Rounded where one kernel left the product to the next one.
    place = head * HEAD_DIM + columns
    end = (head + 1) * HEAD_DIM
    first = with_bias(first, bias, place, end).to(dtype).to(gl.float32)
    second = with_bias(second, bias, place + HALF, end).to(dtype).to(gl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        if q_weight is not None:
            total = gl.sum(first * first, axis=1) + gl.sum(second * second, axis=1)
            inverse = gl.rsqrt(total / HEAD_DIM + head_epsilon)
            first = _scaled(first, inverse, first_weights, dtype)
            second = _scaled(second, inverse, second_weights, dtype)
        first, second = _rotated(first, second, cosines.to(gl.float32), sines.to(gl.float32), dtype)
    _put(
        first, column, row, row_slots, q_out, key_cache, value_cache, head, num_rows, stride_page,
        stride_slot, stride_head, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_M, AT_ONCE,
    )  # fmt: skip
    _put(
        second, column + HALF, row, row_slots, q_out, key_cache, value_cache, head, num_rows, stride_page,
        stride_slot, stride_head, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_M, AT_ONCE,
    )  # fmt: skip
