"""Shared prefixes in decoding on Hopper GPUs: one warp feeds tiles of keys and values, eight others compute.

It takes the items of a step's forest (`sharing.py`); the kernel in `triton_decode.py` is the reference, and
takes what is missing here: other head sizes and types, small pages. The queries of an item go through its
keys as those of a prompt go through a prefix (`hopper_prefill.py`), twice as many at a time as in the plain
kernel, so that keys come half as often from the second-level cache. Letters are those of
`attention/base.py`. This is Gluon (see `hopper_pages.py`).
"""

# Gluon rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.hopper_pages import are_tiles, copy_tokens, page_tiles
from tokenmill.kernels.hopper_prefill import (
    BLOCK_M,
    GROUP_QUERIES,
    GROUPS,
    STEP_LAYOUT,
    attend_tiles,
    make_barriers,
)
from tokenmill.kernels.sharing import ITEM_FIELDS, SharedPrefixes
from tokenmill.kernels.triton_attention import LOG2_E, PagedRows, num_processors
from tokenmill.kernels.triton_overlap import let_next_begin, overlap_options, wait_for_inputs

HEAD_DIMS = (64, 128)
QUERIES = BLOCK_M.value  # pairs of row and head of an item: those of both groups
ANYWHERE = gl.constexpr(2**30)  # the position of a query that sees all keys of its item


@dataclass(frozen=True, slots=True)
class SharedTiling:
    """Keys of a tile, tiles that are under way."""

    keys: int
    stages: int


def hopper_tiling(head_dim: int) -> SharedTiling:
    """Measured on an H100."""
    return SharedTiling(keys=128, stages=2 if head_dim == 128 else 4)


def can_take(key_cache_NBKD: torch.Tensor, value_cache_NBKD: torch.Tensor, group: int) -> bool:
    """Whether `attend` knows these numbers and layouts, with so many queries to a key head."""
    is_known = key_cache_NBKD.shape[3] in HEAD_DIMS and group <= QUERIES
    return is_known and are_tiles(key_cache_NBKD, value_cache_NBKD)


def attend(
    q_RHD: torch.Tensor,
    rows: PagedRows,
    shared: SharedPrefixes,
    *,
    scale: float,
    are_new: bool,
    parts_RHPD: torch.Tensor,
    logs_RHP: torch.Tensor,
) -> None:
    """Leave the pieces of all shared segments: attention over their keys, and the logs of their weights.

    `are_new`: no launch before this one has used the segments and the page tables.
    """
    _, num_heads, head_dim = q_RHD.shape
    num_kv_heads = rows.key_cache_NBKD.shape[2]
    tiling = hopper_tiling(head_dim)
    launch(
        _shared_kernel,
        (num_processors(q_RHD.device),),
        q_RHD,
        page_tiles(rows.key_cache_NBKD),
        page_tiles(rows.value_cache_NBKD),
        rows.page_table_RP,
        shared.num_items,
        shared.items_IF,
        shared.members_M,
        parts_RHPD,
        logs_RHP,
        scale * LOG2_E,
        logs_RHP.shape[2],
        q_RHD.stride(0),
        q_RHD.stride(1),
        rows.page_table_RP.stride(0),
        KEY_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=rows.key_cache_NBKD.shape[1],
        FIELDS=ITEM_FIELDS,
        BLOCK_N=tiling.keys,
        STAGES=tiling.stages,
        ARE_NEW=are_new,
        num_warps=4,
        **overlap_options(q_RHD.device),
    )


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


@gluon.jit
def _count_tiles(item, BLOCK_N: gl.constexpr):
    """(first key, tiles, keys of the last tile) of an item."""
    start = gl.load(item + 1)
    number = gl.load(item + 2) - start
    tiles = (number + BLOCK_N - 1) // BLOCK_N
    return start, tiles, number - (tiles - 1) * BLOCK_N


@gluon.jit
def _feed(
    k_cache, v_cache, k_tiles, v_tiles, barriers, page_table, num_items, items, stride_table,
    KEY_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, FIELDS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, ARE_NEW: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """One warp: copy the tiles that the others compute with, the last of an item first.

    Shared keys are of steps before: they wait for no kernel, once a first layer has seen to it that the
    segments are there.
    """
    if ARE_NEW:
        wait_for_inputs(OVERLAP)
    step = 0
    for work in range(gl.program_id(0), gl.load(num_items) * KEY_HEADS, gl.num_programs(0)):
        item = items + work // KEY_HEADS * FIELDS
        table = page_table + gl.load(item).to(gl.int64) * stride_table
        start, tiles, _ = _count_tiles(item, BLOCK_N)
        stop = gl.load(item + 2)
        for index in range(tiles):
            copy_tokens(
                step + index, k_cache, v_cache, k_tiles, v_tiles, barriers, table,
                start + (tiles - 1 - index) * BLOCK_N, stop, work % KEY_HEADS,
                PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES,
            )  # fmt: skip
        step += tiles


@gluon.jit
def _rows_of(item, members, pairs, kv_head, GROUP: gl.constexpr):
    """(rows, heads, which of them there are) of these pairs of an item."""
    member = gl.load(item + 3) + pairs // GROUP
    keep = member < gl.load(item + 4)
    row = gl.load(members + member, mask=keep, other=0).to(gl.int64)
    return row, kv_head * GROUP + pairs % GROUP, keep


@gluon.jit
def _compute(
    q, query_tiles, k_tiles, v_tiles, barriers, turns, num_items, items, members, parts, logs, scale_log2,
    room, stride_qt, stride_qh,
    KEY_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, FIELDS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, MINE: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 pairs of row and head of each of the program's items. Both groups multiply in turn."""
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)  # not before: the next kernel does not wait for what this one has waited for
    query = query_tiles.index(MINE)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    first = MINE * GROUP_QUERIES
    pairs = first + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, wide))
    out_pairs = first + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, out_layout))
    score_pairs = first + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, score_layout))
    columns = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, wide))
    out_columns = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))
    everywhere = gl.full([GROUP_QUERIES], ANYWHERE, gl.int32, gl.SliceLayout(1, score_layout))
    step = 0
    turn = 0
    for work in range(gl.program_id(0), gl.load(num_items) * KEY_HEADS, gl.num_programs(0)):
        kv_head = work % KEY_HEADS
        item = items + work // KEY_HEADS * FIELDS
        row, head, keep = _rows_of(item, members, pairs, kv_head, GROUP)
        sources = (row * stride_qt + head * stride_qh)[:, None] + columns[None, :]
        query.store(gl.load(q + sources, mask=keep[:, None], other=0))
        fence_async_shared()
        gl.thread_barrier()

        # As for a prompt whose own keys, all seen by all queries, are the item's last tile, behind a prefix.
        _, tiles, last = _count_tiles(item, BLOCK_N)
        acc, total, peak, count = attend_tiles(
            step, turn, everywhere, query, k_tiles, v_tiles, barriers, turns, last, (tiles - 1) * BLOCK_N, 1,
            0, 0, scale_log2, HEAD_DIM, BLOCK_N, STAGES, MINE,
        )  # fmt: skip
        step += count
        turn += count - 1

        piece = gl.load(item + 5)
        row, head, keep = _rows_of(item, members, score_pairs, kv_head, GROUP)
        target = (row * (KEY_HEADS * GROUP) + head) * room + piece
        gl.store(logs + target, peak + gl.log2(total), mask=keep)
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, acc.type.layout))[:, None]
        row, head, keep = _rows_of(item, members, out_pairs, kv_head, GROUP)
        target = (row * (KEY_HEADS * GROUP) + head) * room + piece
        gl.store(parts + target[:, None] * HEAD_DIM + out_columns[None, :], acc, mask=keep[:, None])
        gl.thread_barrier()  # before the next queries are stored, all warps have multiplied these


@gluon.jit(
    do_not_specialize=["room", "stride_table"],
    do_not_specialize_on_alignment=["page_table", "num_items", "items", "members"],
)
def _shared_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    num_items,
    items,
    members,
    parts,
    logs,
    scale_log2,
    room,
    stride_qt,
    stride_qh,
    stride_table,
    KEY_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    FIELDS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ARE_NEW: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    k_tiles = gl.allocate_shared_memory(k_cache.dtype, [STAGES, BLOCK_N, HEAD_DIM], STEP_LAYOUT)
    v_tiles = gl.allocate_shared_memory(k_cache.dtype, [STAGES, BLOCK_N, HEAD_DIM], STEP_LAYOUT)
    query_tiles = gl.allocate_shared_memory(k_cache.dtype, [GROUPS, GROUP_QUERIES, HEAD_DIM], STEP_LAYOUT)
    barriers, turns = make_barriers(STAGES)

    feed = (k_cache, v_cache, k_tiles, v_tiles, barriers, page_table, num_items, items, stride_table)
    compute = (
        q, query_tiles, k_tiles, v_tiles, barriers, turns, num_items, items, members, parts, logs, scale_log2,
        room, stride_qt, stride_qh,
    )  # fmt: skip
    feeding: gl.constexpr = (KEY_HEADS, HEAD_DIM, PAGE_SIZE, FIELDS, BLOCK_N, STAGES, ARE_NEW, OVERLAP)
    first: gl.constexpr = (KEY_HEADS, GROUP, HEAD_DIM, FIELDS, BLOCK_N, STAGES, OVERLAP, 0)
    second: gl.constexpr = (KEY_HEADS, GROUP, HEAD_DIM, FIELDS, BLOCK_N, STAGES, OVERLAP, 1)
    # Registers of a thread: of 504 for three times four warps.
    gl.warp_specialize(
        [(_compute, compute + first), (_compute, compute + second), (_feed, feed + feeding)],
        [4, 1],
        [240, 24],
    )
