"""Paged attention of rows with one query each: decoding.

A program streams the keys of a row, or of one split of it. Keys that several rows share may be left out of
that and read once for all of them, by programs that hold the queries of many rows (`sharing.py`). Whoever
sees only some keys of a row leaves a piece: the answer for those keys, and the logarithm of the sum of their
weights. A last kernel puts the pieces of a row together, in the order of its keys.

Letters as in `attention/base.py`. The reference is `attention/torch_backend.py`. Nothing here waits for the
device, and a launch depends on host numbers only through upper bounds, so that it can be captured in a CUDA
graph.
"""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.sharing import ITEM_FIELDS, MANY_HEADS, MOST_HEADS, SharedPrefixes, most_pieces
from tokenmill.kernels.sizes import ceil_div, next_power_of_2
from tokenmill.kernels.triton_attention import (
    LOG2_E,
    PagedRows,
    block_of,
    has_hopper_kernels,
    num_processors,
)
from tokenmill.kernels.triton_overlap import NO_OVERLAP, let_next_begin, overlap_options, wait_for_inputs

# Splits fill the device when rows are few, and even out rows of different lengths when they are many.
DECODE_TILE_BYTES = 16384  # of keys, and again of values, per step of the loop
DECODE_REGISTERS = 168  # for three programs to a processor; the assembler alone would spill to fit a fourth
SMALL_REGISTERS = 200  # for five programs of half the threads
SMALL_DIM, SMALL_QUERIES = 128, 16  # with more, they would spill
DECODE_PROGRAMS = 1024  # wanted on the device: some eight for each of its processors
MAX_SPLITS = 64
SPLIT_KEYS_FEW_ROWS = 64  # shortest split worth its combination
SPLIT_KEYS_MANY_ROWS = 512
SPLITS_MANY_ROWS = 4
# Of what rows have beside shared prefixes, which is short, a program takes several small key heads as if they
# were one of this size: see `_folded_heads`.
FOLDED_DIM = 128
FOLDED_QUERIES = 16  # the fewest that a tensor core multiplies at a time

SHARED_QUERIES = 64  # of a program that reads a shared segment
SHARED_PROGRAMS = 264  # that run at the same time and go through the items of a step: two for each processor

MAX_PIECES = MAX_SPLITS + most_pieces(1)
# More heads than programs run at the same time are put together several at once, where a row has few pieces.
FEW_PIECES, HEADS_AT_ONCE = 32, 4


# ── launching ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of all rows and heads, P of them to a row: shared segments first, then a row's own splits."""

    parts_RHPD: torch.Tensor  # float32, attention over the piece's keys
    logs_RHP: torch.Tensor  # float32, log2 of the sum of their weights


def decode(
    q_RHD: torch.Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None,
    longest: int,
    out_RHD: torch.Tensor,
    shared: SharedPrefixes | None = None,
    are_new: bool = True,
) -> None:
    """Attention of one query per row, its last token, written to `out_RHD`.

    `longest` bounds the rows' lengths (a larger bound only costs time). A row of length 0 is left unwritten.
    With a window, `shared` is of no use: everything is read row by row. Only if another launch has used these
    prefixes before, and waited for all that was launched before it, they need not be `are_new`.
    """
    num_rows, num_heads, head_dim = q_RHD.shape
    num_kv_heads = rows.key_cache_NBKD.shape[2]
    if window is not None:
        longest, shared = min(longest, window), None
    elif shared is not None:
        longest = min(longest, shared.longest_own)
    fold = 1 if shared is None else _folded_heads(num_heads // num_kv_heads, rows.key_cache_NBKD)
    splits = split_limits(num_rows * num_kv_heads // fold, longest)
    room = 0 if shared is None else shared.max_pieces
    # A single split has no use for these; made all the same, as empty ones, they keep one signature.
    room = 0 if room + splits[0] == 1 else room + splits[0]
    pieces = _Pieces(
        torch.empty((num_rows, num_heads, room, head_dim), dtype=torch.float32, device=q_RHD.device),
        torch.empty((num_rows, num_heads, room), dtype=torch.float32, device=q_RHD.device),
    )
    # Nothing is launched between these two: the second relies on what the first has waited for.
    if shared is not None:
        _attend_shared(q_RHD, rows, shared, scale=scale, are_new=are_new, pieces=pieces)
    _attend_own(
        q_RHD, rows, shared,
        scale=scale, window=window, splits=splits, fold=fold, pieces=pieces, out_RHD=out_RHD,
    )  # fmt: skip
    if room:
        _combine(pieces, rows.lengths_R, shared, window=window, splits=splits, fold=fold, out_RHD=out_RHD)


def _attend_shared(
    q_RHD: torch.Tensor,
    rows: PagedRows,
    shared: SharedPrefixes,
    *,
    scale: float,
    are_new: bool,
    pieces: _Pieces,
) -> None:
    """Leave the pieces of all shared segments."""
    _, num_heads, head_dim = q_RHD.shape
    group = num_heads // rows.key_cache_NBKD.shape[2]
    if _is_shared_for_hopper(rows.key_cache_NBKD, rows.value_cache_NBKD, group):
        from tokenmill.kernels import hopper_shared

        hopper_shared.attend(
            q_RHD,
            rows,
            shared,
            scale=scale,
            are_new=are_new,
            parts_RHPD=pieces.parts_RHPD,
            logs_RHP=pieces.logs_RHP,
        )
        return
    tiling = shared_tiling(head_dim, q_RHD.element_size())
    block_dim = block_of(head_dim)
    launch(
        _shared_kernel,
        (SHARED_PROGRAMS,),
        q_RHD,
        rows.key_cache_NBKD,
        rows.value_cache_NBKD,
        rows.page_table_RP,
        shared.num_items,
        shared.items_IF,
        shared.members_M,
        pieces.parts_RHPD,
        pieces.logs_RHP,
        scale * LOG2_E,
        pieces.logs_RHP.shape[2],
        q_RHD.stride(0),
        q_RHD.stride(1),
        *rows.key_cache_NBKD.stride()[:3],
        rows.page_table_RP.stride(0),
        KEY_HEADS=rows.key_cache_NBKD.shape[2],
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=rows.key_cache_NBKD.shape[1],
        FIELDS=ITEM_FIELDS,
        BLOCK_M=block_of(shared.rows_per_item * group),
        BLOCK_N=tiling.keys,
        BLOCK_DIM=block_dim,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _attend_own(
    q_RHD: torch.Tensor,
    rows: PagedRows,
    shared: SharedPrefixes | None,
    *,
    scale: float,
    window: int | None,
    splits: tuple[int, int],
    fold: int,
    pieces: _Pieces,
    out_RHD: torch.Tensor,
) -> None:
    """Leave the pieces of the keys that each row reads alone; a row with no other piece is complete."""
    num_rows, num_heads, head_dim = q_RHD.shape
    num_kv_heads = rows.key_cache_NBKD.shape[2]
    group = num_heads // num_kv_heads
    block_dim, block_group = block_of(head_dim * fold), block_of(group * fold)
    tiling = own_tiling(block_dim, block_group, q_RHD.element_size(), beside_shared=shared is not None)
    launch(
        _own_kernel,
        (num_kv_heads // fold, splits[0], num_rows),
        q_RHD,
        rows.key_cache_NBKD,
        rows.value_cache_NBKD,
        rows.page_table_RP,
        rows.lengths_R,
        rows.lengths_R if shared is None else shared.own_starts_R,
        rows.lengths_R if shared is None else shared.num_pieces_R,
        out_RHD,
        pieces.parts_RHPD,
        pieces.logs_RHP,
        scale * LOG2_E,
        *splits,
        pieces.logs_RHP.shape[2],
        q_RHD.stride(0),
        q_RHD.stride(1),
        *rows.key_cache_NBKD.stride()[:3],
        rows.page_table_RP.stride(0),
        out_RHD.stride(0),
        out_RHD.stride(1),
        GROUP=group,
        FOLD=fold,
        HEAD_DIM=head_dim,
        PAGE_SIZE=rows.key_cache_NBKD.shape[1],
        WINDOW=window or 0,
        SHARED=shared is not None,
        SINGLE=shared is None and splits[0] == 1,
        BLOCK_G=block_group,
        BLOCK_N=tiling.keys,
        BLOCK_DIM=block_dim,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.registers,
        **(NO_OVERLAP if shared is None else overlap_options(q_RHD.device)),
    )


def _combine(
    pieces: _Pieces,
    lengths_R: torch.Tensor,
    shared: SharedPrefixes | None,
    *,
    window: int | None,
    splits: tuple[int, int],
    fold: int,
    out_RHD: torch.Tensor,
) -> None:
    """Put the pieces of each row together; rows of a single one are complete already."""
    num_rows, num_heads, room, head_dim = pieces.parts_RHPD.shape
    many = num_rows * num_heads >= MANY_HEADS
    are_most = num_rows * num_heads >= MOST_HEADS and room <= FEW_PIECES
    heads = HEADS_AT_ONCE if are_most else 1
    launch(
        _combine_kernel,
        (ceil_div(num_heads, heads), num_rows),
        pieces.parts_RHPD,
        pieces.logs_RHP,
        lengths_R,
        lengths_R if shared is None else shared.own_starts_R,
        lengths_R if shared is None else shared.num_pieces_R,
        out_RHD,
        *splits,
        room,
        out_RHD.stride(0),
        out_RHD.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        WINDOW=window or 0,
        SHARED=shared is not None,
        BLOCK_N=decode_tiling(block_of(head_dim * fold), out_RHD.element_size()).keys,
        BLOCK_HEADS=heads,
        MAX_PIECES=FEW_PIECES if are_most else next_power_of_2(MAX_PIECES),
        BLOCK_PIECES=4 if many else 32,
        BLOCK_DIM=block_of(head_dim),
        num_warps=1 if many else 4,
        **overlap_options(out_RHD.device),
    )


def split_limits(streams: int, most_keys: int) -> tuple[int, int]:
    """(most splits of a row, fewest keys of a split) for `streams` pairs of row and key head."""
    few = min(MAX_SPLITS, next_power_of_2(ceil_div(DECODE_PROGRAMS, streams)))
    if few > SPLITS_MANY_ROWS:
        max_splits, min_split = few, SPLIT_KEYS_FEW_ROWS
    else:
        max_splits, min_split = SPLITS_MANY_ROWS, SPLIT_KEYS_MANY_ROWS
    return max(1, min(max_splits, ceil_div(most_keys, min_split))), min_split


@dataclass(frozen=True, slots=True)
class Tiling:
    """The keys a program takes at a time, its queries, and how the compiler lays it out.

    Page numbers are loaded before the keys they lead to. The compiler gives that load a share of the stages:
    keys are fetched one tile ahead with 3 or 4 stages, two ahead with 5.
    """

    keys: int
    num_warps: int
    num_stages: int
    queries: int = 1
    registers: int | None = None  # of a thread, at most


def decode_tiling(block_dim: int, element_size: int) -> Tiling:
    """Tiles of 16 KiB of keys and as much of values; three or four programs share a processor."""
    if element_size == 4:  # no tensor cores at full precision: registers set the size
        return Tiling(32 if block_dim <= 64 else 16, num_warps=4, num_stages=5, registers=DECODE_REGISTERS)
    keys = min(128, max(16, DECODE_TILE_BYTES // (block_dim * element_size)))
    return Tiling(keys, num_warps=4, num_stages=5, registers=DECODE_REGISTERS)


def own_tiling(block_dim: int, block_group: int, element_size: int, *, beside_shared: bool) -> Tiling:
    """The tile of a program that reads the keys of one row.

    Beside shared prefixes these are few, as a rule: there programs of half the warps, of which more share a
    processor, so that some begin while others end; not where they would spill registers.
    """
    tiling = decode_tiling(block_dim, element_size)
    is_large = element_size > 2 or block_dim > SMALL_DIM or block_group > SMALL_QUERIES
    if is_large or not beside_shared:
        return tiling
    return Tiling(tiling.keys, num_warps=2, num_stages=3, registers=SMALL_REGISTERS)


def tile_keys(head_dim: int, element_size: int) -> int:
    """Keys that a program takes at a time, of one head."""
    return decode_tiling(block_of(head_dim), element_size).keys


def shared_tiling(head_dim: int, element_size: int) -> Tiling:
    """The tile of a program that reads a shared segment, whose last tile may be partly empty."""
    if element_size == 4:
        return Tiling(keys=32 if head_dim <= 64 else 16, num_warps=4, num_stages=2, queries=16)
    if head_dim > 128:
        return Tiling(keys=32, num_warps=8, num_stages=3, queries=SHARED_QUERIES)
    keys = 128 if head_dim <= 64 else 64
    return Tiling(keys, num_warps=SHARED_QUERIES // 16, num_stages=3, queries=SHARED_QUERIES)


def shared_work(keys_NBKD: torch.Tensor, values_NBKD: torch.Tensor, group: int) -> tuple[int, int]:
    """(queries that a program takes through a shared segment, programs that run at the same time), of layers
    with so many queries to a key head."""
    if _is_shared_for_hopper(keys_NBKD, values_NBKD, group):
        from tokenmill.kernels import hopper_shared

        return hopper_shared.QUERIES, num_processors(keys_NBKD.device)
    return shared_tiling(keys_NBKD.shape[3], keys_NBKD.element_size()).queries, SHARED_PROGRAMS


def _is_shared_for_hopper(keys_NBKD: torch.Tensor, values_NBKD: torch.Tensor, group: int) -> bool:
    if not has_hopper_kernels(keys_NBKD.device):
        return False
    from tokenmill.kernels import hopper_shared

    return hopper_shared.can_take(keys_NBKD, values_NBKD, group)


def _folded_heads(group: int, key_cache_NBKD: torch.Tensor) -> int:
    """Key heads that a program takes as one.

    Their numbers stand side by side in a token, so they are read in longer runs. Each query is padded with
    zeros in the place of the others' keys: a tensor core pads to 16 queries anyway.
    """
    num_kv_heads, head_dim = key_cache_NBKD.shape[2:]
    fold = 1
    if key_cache_NBKD.stride(2) != head_dim:
        return fold
    while (
        num_kv_heads % (2 * fold) == 0
        and 2 * fold * head_dim <= FOLDED_DIM
        and 2 * fold * group <= FOLDED_QUERIES
    ):
        fold *= 2
    return fold


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _token_offsets(
    table, positions, keep, stride_page, stride_token, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr
):
    """Where the tokens at these positions of a row begin in a cache; masked ones read no page number."""
    if MASKED:
        pages = tl.load(table + positions // PAGE_SIZE, mask=keep, other=0)
    else:
        pages = tl.load(table + positions // PAGE_SIZE)
    return pages.to(tl.int64) * stride_page + (positions % PAGE_SIZE) * stride_token


@triton.jit
def _load_tile(
    base,
    offsets,
    keep,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[tokens, BLOCK_DIM]; zero past HEAD_DIM and for masked tokens, so that no stale number gets in."""
    columns = tl.arange(0, BLOCK_DIM)
    pointers = base + offsets[:, None] + columns[None, :]
    if MASKED:
        return tl.load(pointers, mask=keep[:, None] & (columns < HEAD_DIM)[None, :], other=0)
    elif HEAD_DIM < BLOCK_DIM:
        return tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0)
    else:
        return tl.load(pointers)


@triton.jit
def _take_in(
    acc,
    total,
    peak,
    query,
    keys,
    values,
    table,
    start,
    stop,
    scale_log2,
    stride_page,
    stride_token,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the keys [start, stop) into the running softmax; if not masked, they are whole tiles."""
    for tile in range(start, stop, BLOCK_N):
        positions = tile + tl.arange(0, BLOCK_N)
        keep = positions < stop
        offsets = _token_offsets(table, positions, keep, stride_page, stride_token, PAGE_SIZE, MASKED)
        k = _load_tile(keys, offsets, keep, WIDTH, BLOCK_DIM, MASKED)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            scores = tl.where(keep[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, axis=1)
        v = _load_tile(values, offsets, keep, WIDTH, BLOCK_DIM, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = new_peak
    return acc, total, peak


# Lengths, page tables and the forest are slices of a step's tensors, and their addresses and strides change
# from step to step: compiling one variant for each alignment would stall the engine.
@triton.jit(
    do_not_specialize=["room", "stride_table"],
    do_not_specialize_on_alignment=["page_table", "num_items", "items", "members"],
)
def _shared_kernel(
    q,
    key_cache,
    value_cache,
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
    stride_page,
    stride_token,
    stride_head,
    stride_table,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Go through the step's items, one key head at a time: how many there are is known on the device only."""
    columns = tl.arange(0, BLOCK_DIM)
    queries = tl.arange(0, BLOCK_M)
    for work in range(tl.program_id(0), tl.load(num_items) * KEY_HEADS, tl.num_programs(0)):
        kv_head = work % KEY_HEADS
        item = items + work // KEY_HEADS * FIELDS
        table = page_table + tl.load(item).to(tl.int64) * stride_table
        start = tl.load(item + 1)
        stop = tl.load(item + 2)
        member = tl.load(item + 3) + queries // GROUP
        keep = member < tl.load(item + 4)
        piece = tl.load(item + 5)
        row = tl.load(members + member, mask=keep, other=0).to(tl.int64)
        head = kv_head * GROUP + queries % GROUP
        keep_q = keep[:, None] & (columns < HEAD_DIM)[None, :]
        query = tl.load(
            q + (row * stride_qt + head * stride_qh)[:, None] + columns[None, :], mask=keep_q, other=0
        )
        keys = key_cache + tl.cast(kv_head, tl.int64) * stride_head
        values = value_cache + tl.cast(kv_head, tl.int64) * stride_head
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)
        whole = stop - (stop - start) % BLOCK_N  # up to here tiles need no mask
        acc, total, peak = _take_in(
            acc, total, peak, query, keys, values, table, start, whole,
            scale_log2, stride_page, stride_token, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_DIM, False,
        )  # fmt: skip
        if whole < stop:
            acc, total, peak = _take_in(
                acc, total, peak, query, keys, values, table, whole, stop,
                scale_log2, stride_page, stride_token, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_DIM, True,
            )  # fmt: skip
        target = (row * (KEY_HEADS * GROUP) + head) * room + piece
        tl.store(parts + target[:, None] * HEAD_DIM + columns[None, :], acc / total[:, None], mask=keep_q)
        tl.store(logs + target, peak + tl.log2(total), mask=keep)


@triton.jit
def _split_length(count, max_splits, min_split, BLOCK_N: tl.constexpr):
    """Keys of a split of a row with `count` keys: whole tiles, at least `min_split`."""
    even = tl.cdiv(tl.cdiv(count, max_splits), BLOCK_N) * BLOCK_N
    return tl.maximum(even, min_split)


@triton.jit
def _own_start(own_starts, row, length):
    """The first key that a row reads alone; there is one even in a spare row, which may be short of it."""
    return tl.minimum(tl.load(own_starts + row), length - 1)


@triton.jit(
    do_not_specialize=["max_splits", "min_split", "room", "stride_table"],
    do_not_specialize_on_alignment=["page_table", "lengths", "own_starts", "num_pieces"],
)
def _own_kernel(
    q,
    key_cache,
    value_cache,
    page_table,
    lengths,
    own_starts,
    num_pieces,
    out,
    parts,
    logs,
    scale_log2,
    max_splits,
    min_split,
    room,
    stride_qt,
    stride_qh,
    stride_page,
    stride_token,
    stride_head,
    stride_table,
    stride_ot,
    stride_oh,
    GROUP: tl.constexpr,
    FOLD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Keys [start, stop) of a row, of one key head or several folded ones.

    Behind a kernel that reads shared segments it begins as soon as that leaves room. What both read, that one
    has waited for; so this one waits for it only in the end, for the kernel that needs both.
    """
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    before = 0  # pieces that shared segments leave in the row
    if SHARED:
        first = _own_start(own_starts, row, length)
        before = tl.load(num_pieces + row)
    split_length = _split_length(length - first, max_splits, min_split, BLOCK_N)
    start = first + tl.program_id(1) * split_length
    stop = tl.minimum(start + split_length, length)
    if start >= stop:
        return

    # The query of a head stands in its own key head's place among the folded ones, with zeros in the others.
    members = tl.arange(0, BLOCK_G)
    columns = tl.arange(0, BLOCK_DIM)
    heads = tl.program_id(0) * (FOLD * GROUP) + members
    keep = members < FOLD * GROUP
    keep_q = keep[:, None] & (columns[None, :] // HEAD_DIM == members[:, None] // GROUP)
    column = columns % HEAD_DIM
    query = tl.load(q + row * stride_qt + heads[:, None] * stride_qh + column[None, :], mask=keep_q, other=0)
    first_head = tl.program_id(0).to(tl.int64) * FOLD * stride_head
    acc, total, peak = _take_in(
        tl.zeros((BLOCK_G, BLOCK_DIM), tl.float32),
        tl.zeros((BLOCK_G,), tl.float32),
        tl.full((BLOCK_G,), float("-inf"), tl.float32),
        query, key_cache + first_head, value_cache + first_head, page_table + row * stride_table, start, stop,
        scale_log2, stride_page, stride_token, FOLD * HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_DIM, True,
    )  # fmt: skip
    acc = acc / total[:, None]

    complete = out + row * stride_ot + heads[:, None] * stride_oh + column[None, :]
    alone = True if SINGLE else (length - first <= split_length) & (before == 0)
    if alone:
        tl.store(complete, acc.to(out.dtype.element_ty), mask=keep_q)
    else:
        piece = (row * (tl.num_programs(0) * (FOLD * GROUP)) + heads) * room + before + tl.program_id(1)
        tl.store(parts + piece[:, None] * HEAD_DIM + column[None, :], acc, mask=keep_q)
        tl.store(logs + piece, peak + tl.log2(total), mask=keep)
    wait_for_inputs(OVERLAP)


@triton.jit(
    do_not_specialize=["max_splits", "min_split", "room"],
    do_not_specialize_on_alignment=["lengths", "own_starts", "num_pieces"],
)
def _combine_kernel(
    parts,
    logs,
    lengths,
    own_starts,
    num_pieces,
    out,
    max_splits,
    min_split,
    room,
    stride_ot,
    stride_oh,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Weigh the pieces of some heads of one row by their share of the softmax's denominator.

    The product behind it fetches its first weights meanwhile; during the attention before, that would only
    slow down both where the weight is large.
    """
    let_next_begin(OVERLAP)
    wait_for_inputs(OVERLAP)
    heads = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    row = tl.program_id(1).to(tl.int64)
    count = tl.load(lengths + row)
    before = 0
    if WINDOW:
        count = tl.minimum(count, WINDOW)
    if SHARED:
        count -= _own_start(own_starts, row, count)
        before = tl.load(num_pieces + row)
    number = before + tl.cdiv(count, _split_length(count, max_splits, min_split, BLOCK_N))
    if number <= 1:
        return  # the row's own program wrote the output itself
    columns = tl.arange(0, BLOCK_DIM)
    keep_out = (heads < NUM_HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
    first = ((row * NUM_HEADS + tl.minimum(heads, NUM_HEADS - 1)) * room)[:, None]
    every = tl.arange(0, MAX_PIECES)[None, :]
    all_logs = tl.load(logs + first + every, mask=every < number, other=float("-inf"))
    peak = tl.max(all_logs, axis=1)[:, None]
    total = tl.sum(tl.exp2(all_logs - peak), axis=1)[:, None]
    acc = tl.zeros((BLOCK_HEADS, BLOCK_DIM), tl.float32)
    for begin in range(0, number, BLOCK_PIECES):
        pieces = begin + tl.arange(0, BLOCK_PIECES)[None, :]
        log = tl.load(logs + first + pieces, mask=pieces < number, other=float("-inf"))
        part = tl.load(
            parts + (first + pieces)[:, :, None] * HEAD_DIM + columns[None, None, :],
            mask=(pieces < number)[:, :, None] & (columns < HEAD_DIM)[None, None, :],
            other=0,
        )
        acc += tl.sum(part * tl.exp2(log - peak)[:, :, None], axis=1)
    target = out + row * stride_ot + heads[:, None] * stride_oh + columns[None, :]
    tl.store(target, (acc / total).to(out.dtype.element_ty), mask=keep_out)
