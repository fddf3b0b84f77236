"""Decode attention in runs for Hopper GPUs: one warp feeds tiles of keys and values, four others compute.

It takes the runs of `triton_balanced.py`, which is the reference and puts the pieces of rows together. Keys
are the left factor, and the few queries of a key head the right one, so that tensor cores multiply little in
vain; then values, turned round, and weights. Old keys and values are on their way while the kernel before
still runs (`triton_overlap.py`). A program begins with the run of its number, and the warp that feeds it
takes short runs afterwards, as long as there are any. Letters are those of `attention/base.py`. This is Gluon
(see `hopper_pages.py`).
"""

# Gluon rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.hopper_pages import (
    PANEL,
    are_tiles,
    can_be_copied,
    clear_past,
    copy_tokens,
    page_tiles,
)
from tokenmill.kernels.hopper_work import CELL_LAYOUT, be_told, tell
from tokenmill.kernels.runs import RunPieces, Runs
from tokenmill.kernels.triton_attention import LOG2_E, PagedRows
from tokenmill.kernels.triton_overlap import let_next_begin, overlap_options, wait_for_inputs

HEAD_DIMS = (64, 128)
QUERIES = 8  # columns of a product, in steps of so many
# Tiles of a program that are under way. With more than 48 KiB of shared memory programs find room later, as
# do those of the product behind them; where rows are few, that takes as long as attention.
STAGES, STAGES_OF_FEW = 3, 1
QUERY_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """Keys of a tile, programs that share a processor, registers of a thread."""

    keys: int
    programs: int
    registers: int


def decode_tiling(head_dim: int) -> DecodeTiling:
    """Measured on an H200."""
    return DecodeTiling(64, 2, 96) if head_dim == 128 else DecodeTiling(64, 3, 80)


def can_take(q_RHD: torch.Tensor, rows: PagedRows) -> bool:
    """Whether `attend` knows these numbers and layouts."""
    is_known = q_RHD.shape[2] in HEAD_DIMS and can_be_copied(q_RHD)
    return is_known and are_tiles(rows.key_cache_NBKD, rows.value_cache_NBKD)


def attend(
    q_RHD: torch.Tensor,
    rows: PagedRows,
    runs: Runs,
    *,
    scale: float,
    are_new: bool,
    pieces: RunPieces,
    out_RHD: torch.Tensor,
) -> None:
    """Write the answers of rows that lie in one run, and leave the pieces of the others.

    `are_new`: no launch before this one has used the runs.
    """
    _, num_heads, head_dim = q_RHD.shape
    num_kv_heads = rows.key_cache_NBKD.shape[2]
    group = num_heads // num_kv_heads
    tiling = decode_tiling(head_dim)
    queries = -(-group // QUERIES) * QUERIES
    launch(
        _decode_kernel,
        (num_kv_heads, runs.shape.num_programs),
        _query_tiles(q_RHD, queries),
        page_tiles(rows.key_cache_NBKD),
        page_tiles(rows.value_cache_NBKD),
        rows.page_table_RP,
        runs.tiles_3N,
        runs.cuts_P,
        runs.taken_1,
        out_RHD,
        pieces.parts_KP2GD,
        pieces.logs_KP2G,
        scale * LOG2_E,
        int(are_new),
        runs.shape.num_runs,
        runs.tiles_3N.shape[1],
        rows.page_table_RP.stride(0),
        out_RHD.stride(0),
        out_RHD.stride(1),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=rows.key_cache_NBKD.shape[1],
        BLOCK_G=pieces.logs_KP2G.shape[3],
        BLOCK_Q=queries,
        BLOCK_N=runs.shape.tile_keys,
        STAGES=STAGES if runs.shape.has_short else STAGES_OF_FEW,
        HAVE_SHORT=runs.shape.has_short,
        num_warps=4,
        maxnreg=tiling.registers,
        **overlap_options(q_RHD.device),
    )


def _query_tiles(q_RHD: torch.Tensor, queries: int) -> TensorDescriptor:
    """Tiles [queries, 64 numbers] of a row; past its last head they are zero."""
    block = [1, queries, PANEL.value]
    return TensorDescriptor(q_RHD, list(q_RHD.shape), list(q_RHD.stride()), block, QUERY_LAYOUT)


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


@gluon.jit
def _nth_tile(tiles, stride_tile, tile):
    """(row, first key, length of the row) of a tile."""
    place = tiles + tile
    return gl.load(place), gl.load(place + stride_tile), gl.load(place + 2 * stride_tile)


@gluon.jit
def _copy_queries(
    step, q, q_tiles, barriers, row, head, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr
):
    """Copy the queries that belong to tile number `step`; its keys are waited for together with them."""
    PANELS: gl.constexpr = HEAD_DIM // PANEL
    slot = step % STAGES
    panels = q_tiles._reinterpret(q_tiles.dtype, [STAGES * PANELS, 1, BLOCK_Q, PANEL], q.layout)
    mbarrier.expect(barriers.index(slot), BLOCK_Q * HEAD_DIM * 2)
    for panel in gl.static_range(PANELS):
        tma.async_copy_global_to_shared(
            q, [row, head, panel * PANEL], barriers.index(slot), panels.index(slot * PANELS + panel)
        )


@gluon.jit
def _take_run(number, claims, barriers, cuts, taken, num_runs, STAGES: gl.constexpr):
    """Tell the other warps what comes after their run number `number`: (key head, run), or -1 for none."""
    num_heads = gl.num_programs(0)
    num_programs = gl.num_programs(1)
    num_tiles = gl.load(cuts + num_runs)
    claim = num_heads * num_runs
    if gl.load(cuts + num_programs) < num_tiles:  # there are short runs
        claim = gl.atomic_add(taken, 1, sem="relaxed") + num_heads * num_programs
    run = gl.minimum(claim // num_heads, num_runs)
    is_there = gl.load(cuts + run) < num_tiles
    tell(number, (gl.where(is_there, claim, -1),), claims, barriers, 4 * STAGES, STAGES, 1)
    return claim % num_heads, gl.where(is_there, run, -1)


@gluon.jit
def _next_run(number, claims, barriers, STAGES: gl.constexpr):
    """What `_take_run` has told."""
    (claim,) = be_told(number, claims, barriers, 4 * STAGES, STAGES, 1)
    num_heads = gl.num_programs(0)
    return claim % num_heads, gl.where(claim < 0, -1, claim // num_heads)


@gluon.jit
def _feed(
    q, k_cache, v_cache, q_tiles, k_tiles, v_tiles, claims, barriers, page_table, tiles, cuts, taken,
    are_new, num_runs, stride_tile, stride_table,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAVE_SHORT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """One warp: copy the tiles that the others compute with, as soon as there is room.

    A step writes the last key of a row only: what stands before the row's last tile waits for no kernel, once
    a first layer has seen to it that the tiles are listed.
    """
    if are_new:
        wait_for_inputs(OVERLAP)
    kv_head = gl.program_id(0)
    run = gl.program_id(1)
    begin = gl.load(cuts + run)
    early = gl.minimum(gl.load(cuts + run + 1) - begin, STAGES)
    for step in range(early):
        row, start, length = _nth_tile(tiles, stride_tile, begin + step)
        if start + BLOCK_N < length:
            copy_tokens(
                step, k_cache, v_cache, k_tiles, v_tiles, barriers,
                page_table + row.to(gl.int64) * stride_table, start, length, kv_head,
                PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES,
            )  # fmt: skip
    wait_for_inputs(OVERLAP)
    step = 0  # of all runs
    number = 0  # of the run
    while run >= 0:
        begin = gl.load(cuts + run)
        end = gl.load(cuts + run + 1)
        for tile in range(begin, end):
            row, start, length = _nth_tile(tiles, stride_tile, tile)
            if (step >= early) | (start + BLOCK_N >= length):
                copy_tokens(
                    step, k_cache, v_cache, k_tiles, v_tiles, barriers,
                    page_table + row.to(gl.int64) * stride_table, start, length, kv_head,
                    PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES,
                )  # fmt: skip
            _copy_queries(step, q, q_tiles, barriers, row, kv_head * GROUP, HEAD_DIM, BLOCK_Q, STAGES)
            step += 1
        if HAVE_SHORT:
            kv_head, run = _take_run(number, claims, barriers, cuts, taken, num_runs, STAGES)
            number += 1
        else:
            run -= gl.num_programs(1)  # below zero: there is no other


@gluon.jit
def _attend(
    q_tiles, k_tiles, v_tiles, weight_tile, claims, barriers, tiles, cuts, out, parts, logs, scale_log2,
    num_runs, stride_tile, stride_ot, stride_oh,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_G: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAVE_SHORT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Four warps: the running softmax of the rows of a run, one after the other, and of the next run."""
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)  # not before: the next kernel reads the joins at once
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    members = gl.arange(0, BLOCK_Q, gl.SliceLayout(0, layout))
    numbers = gl.arange(0, HEAD_DIM, gl.SliceLayout(1, layout))
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    weights_KQ = weight_tile.permute((1, 0))
    nothing = gl.zeros([BLOCK_N, BLOCK_Q], gl.float32, layout)
    kv_head = gl.program_id(0)
    run = gl.program_id(1)
    step = 0  # of all runs
    number = 0  # of the run
    while run >= 0:
        begin = gl.load(cuts + run)
        end = gl.load(cuts + run + 1)
        acc = gl.zeros([HEAD_DIM, BLOCK_Q], gl.float32, layout)
        totals = gl.zeros([BLOCK_N, BLOCK_Q], gl.float32, layout)  # of the weights at a place of all tiles
        peak = gl.full([BLOCK_Q], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
        for tile in range(begin, end):
            row, start, length = _nth_tile(tiles, stride_tile, tile)
            slot = step % STAGES
            phase = step // STAGES % 2
            mbarrier.wait(barriers.index(slot), phase)
            queries_DQ = q_tiles.index(slot).permute((1, 0))
            scores = warpgroup_mma(k_tiles.index(slot), queries_DQ, nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(barriers.index(2 * STAGES + slot))
            visible = start + keys < length
            scores = gl.where(visible[:, None], scores * scale_log2, float("-inf"))
            # A row that begins forgets the one before, whose numbers need not be finite.
            fresh = (start == 0) | (tile == begin)
            peak = gl.where(fresh, float("-inf"), peak)
            new_peak = gl.maximum(peak, gl.max(scores, axis=0))
            weights = gl.exp2(scores - new_peak[None, :])
            fade = gl.exp2(peak - new_peak)[None, :]
            peak = new_peak
            totals = gl.where(fresh, 0.0, totals * fade) + weights
            acc = gl.where(fresh, 0.0, acc * fade)
            weights_KQ.store(weights.to(weight_tile.dtype))
            clear_past(step, v_tiles, barriers, length - start, HEAD_DIM, BLOCK_N, STAGES)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.wait(barriers.index(STAGES + slot), phase)
            acc = warpgroup_mma(v_tiles.index(slot).permute((1, 0)), weights_KQ, acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(barriers.index(3 * STAGES + slot))
            step += 1
            ends = start + BLOCK_N >= length
            if ends | (tile + 1 == end):
                begins = tile - start // BLOCK_N >= begin
                total = gl.sum(totals, axis=0)
                answer = acc / total[None, :]
                keep = (members < GROUP)[None, :] & (numbers < HEAD_DIM)[:, None]
                if begins & ends:
                    head = kv_head * GROUP + members
                    target = row.to(gl.int64) * stride_ot + head[None, :] * stride_oh + numbers[:, None]
                    gl.store(out + target, answer.to(out.dtype.element_ty), mask=keep)
                else:
                    place = ((kv_head * num_runs + run) * 2 + begins.to(gl.int32)) * BLOCK_G + members
                    gl.store(parts + place[None, :] * HEAD_DIM + numbers[:, None], answer, mask=keep)
                    gl.store(logs + place, peak + gl.log2(total), mask=members < BLOCK_G)
        if HAVE_SHORT:
            kv_head, run = _next_run(number, claims, barriers, STAGES)
            number += 1
        else:
            run -= gl.num_programs(1)


@gluon.jit(
    do_not_specialize=["are_new", "num_runs", "stride_tile", "stride_table"],
    do_not_specialize_on_alignment=["page_table", "cuts", "taken"],
)
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    tiles,
    cuts,
    taken,
    out,
    parts,
    logs,
    scale_log2,
    are_new,
    num_runs,
    stride_tile,
    stride_table,
    stride_ot,
    stride_oh,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_G: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HAVE_SHORT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_Q, HEAD_DIM], TILE_LAYOUT)
    k_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, HEAD_DIM], TILE_LAYOUT)
    v_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, HEAD_DIM], TILE_LAYOUT)
    weight_tile = gl.allocate_shared_memory(q.dtype, [BLOCK_Q, BLOCK_N], TILE_LAYOUT)
    # The runs that come next, as the feeding warp has told.
    claims = gl.allocate_shared_memory(gl.int32, [STAGES, 1], CELL_LAYOUT)
    barriers = gl.allocate_shared_memory(gl.int64, [6 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=2)  # keys, and the queries that meet them
        # Values are there; keys, values are done with; the next run has been told, and taken in.
        for kind in gl.static_range(1, 6):
            mbarrier.init(barriers.index(kind * STAGES + stage), count=1)

    feed = (
        q, k_cache, v_cache, q_tiles, k_tiles, v_tiles, claims, barriers, page_table, tiles, cuts, taken,
        are_new, num_runs, stride_tile, stride_table,
    )  # fmt: skip
    attend = (
        q_tiles, k_tiles, v_tiles, weight_tile, claims, barriers, tiles, cuts, out, parts, logs, scale_log2,
        num_runs, stride_tile, stride_ot, stride_oh,
    )  # fmt: skip
    feeding: gl.constexpr = (
        GROUP, HEAD_DIM, PAGE_SIZE, BLOCK_Q, BLOCK_N, STAGES, HAVE_SHORT, OVERLAP,
    )  # fmt: skip
    attending: gl.constexpr = (GROUP, HEAD_DIM, BLOCK_G, BLOCK_Q, BLOCK_N, STAGES, HAVE_SHORT, OVERLAP)
    gl.warp_specialize([(_attend, attend + attending), (_feed, feed + feeding)], [1], [24])
