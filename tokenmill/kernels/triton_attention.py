"""Paged attention on the GPU: write keys and values, and attend with one query a row.

The reference is `attention/torch_backend.py`. Nothing here waits for the device, and a launch depends on
host numbers only through upper bounds, so that every launch can be captured in a CUDA graph.
Letters as in `attention/base.py`; caches are [N, B, K, D] with any strides but a contiguous last dimension.
"""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)

# Decoding. A program streams the keys of one key head of one row, or of one split of it. Splits fill the
# device when rows are few, and even out rows of different lengths when they are many.
DECODE_TILE_BYTES = 16384  # of keys, and again of values, per step of the loop
DECODE_PROGRAMS = 1024  # wanted on the device: some eight for each of its processors
MAX_SPLITS = 64
SPLIT_TOKENS_FEW_ROWS = 64  # shortest split worth its combination
SPLIT_TOKENS_MANY_ROWS = 512
SPLITS_MANY_ROWS = 4

COMBINED_SPLITS = 16  # splits a combining program reads at once


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The keys and values of some rows: caches, the rows' pages (int32), their lengths (int32)."""

    key_cache_NBKD: torch.Tensor
    value_cache_NBKD: torch.Tensor  # same strides as the keys
    page_table_RP: torch.Tensor
    lengths_R: torch.Tensor


# ── launching ─────────────────────────────────────────────────────────────────────────────────


def store(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    *,
    slots_T: torch.Tensor,
    key_cache_NBKD: torch.Tensor,
    value_cache_NBKD: torch.Tensor,
) -> None:
    """Write token t's keys and values to slot `slots_T[t]` (int64, page * B + offset) of both caches."""
    num_tokens, num_heads, head_dim = k_TKD.shape
    page_size = key_cache_NBKD.shape[1]
    _store_kernel[(num_tokens,)](
        k_TKD,
        v_TKD,
        slots_T,
        key_cache_NBKD,
        value_cache_NBKD,
        k_TKD.stride(0),
        k_TKD.stride(1),
        v_TKD.stride(0),
        v_TKD.stride(1),
        *key_cache_NBKD.stride()[:3],
        PAGE_SIZE=page_size,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
    )


def decode(
    q_RHD: torch.Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None,
    longest: int,
    out_RHD: torch.Tensor,
) -> None:
    """Attention of one query per row, its last token, written to `out_RHD`.

    `longest` bounds the rows' lengths (a larger bound only costs time). A row of length 0 is left unwritten.
    """
    num_rows, num_heads, head_dim = q_RHD.shape
    num_kv_heads = rows.key_cache_NBKD.shape[2]
    most_keys = longest if window is None else min(longest, window)
    max_splits, min_split = split_limits(num_rows * num_kv_heads, most_keys)
    single = max_splits == 1
    block_dim = max(16, triton.next_power_of_2(head_dim))
    # A single split has no use for these; made all the same, as empty ones, they keep one signature.
    scratch = (num_rows, num_heads, 0 if single else max_splits)
    partial = torch.empty((*scratch, head_dim), dtype=torch.float32, device=q_RHD.device)
    statistics = torch.empty(scratch, dtype=torch.float32, device=q_RHD.device)
    tiling = decode_tiling(block_dim, q_RHD.element_size())
    _decode_kernel[(num_kv_heads, max_splits, num_rows)](
        q_RHD,
        rows.key_cache_NBKD,
        rows.value_cache_NBKD,
        rows.page_table_RP,
        rows.lengths_R,
        out_RHD,
        partial,
        statistics,
        scale * LOG2_E,
        max_splits,
        min_split,
        q_RHD.stride(0),
        q_RHD.stride(1),
        *rows.key_cache_NBKD.stride()[:3],
        rows.page_table_RP.stride(0),
        out_RHD.stride(0),
        out_RHD.stride(1),
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=rows.key_cache_NBKD.shape[1],
        WINDOW=window or 0,
        SINGLE=single,
        BLOCK_G=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_N=tiling.keys,
        BLOCK_DIM=block_dim,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if not single:
        _combine(
            partial, statistics, rows.lengths_R,
            window=window, min_split=min_split, tile_keys=tiling.keys, out_RHD=out_RHD,
        )  # fmt: skip


def _combine(
    partial_RHSD: torch.Tensor,
    statistics_RHS: torch.Tensor,
    lengths_R: torch.Tensor,
    *,
    window: int | None,
    min_split: int,
    tile_keys: int,
    out_RHD: torch.Tensor,
) -> None:
    """Put the splits of each row together; rows of a single split are complete already."""
    num_rows, num_heads, max_splits, head_dim = partial_RHSD.shape
    _combine_kernel[(num_heads, num_rows)](
        partial_RHSD,
        statistics_RHS,
        lengths_R,
        out_RHD,
        max_splits,
        min_split,
        out_RHD.stride(0),
        out_RHD.stride(1),
        HEAD_DIM=head_dim,
        WINDOW=window or 0,
        BLOCK_N=tile_keys,
        MAX_SPLITS=MAX_SPLITS,
        BLOCK_SPLITS=COMBINED_SPLITS,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
    )


def split_limits(streams: int, most_keys: int) -> tuple[int, int]:
    """(most splits of a row, fewest keys of a split) for `streams` pairs of row and key head."""
    few = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(DECODE_PROGRAMS, streams)))
    if few > SPLITS_MANY_ROWS:
        max_splits, min_split = few, SPLIT_TOKENS_FEW_ROWS
    else:
        max_splits, min_split = SPLITS_MANY_ROWS, SPLIT_TOKENS_MANY_ROWS
    return (1 if most_keys <= min_split else max_splits), min_split


@dataclass(frozen=True, slots=True)
class Tiling:
    """The keys a program takes at a time, and how the compiler lays it out.

    Page numbers are loaded before the keys they lead to. The compiler gives that load a share of the stages:
    keys are fetched one tile ahead with 3 or 4 stages, two ahead with 5.
    """

    keys: int
    num_warps: int
    num_stages: int


def decode_tiling(block_dim: int, element_size: int) -> Tiling:
    """Tiles of 16 KiB of keys and as much of values; three or four programs share a processor."""
    if element_size == 4:  # no tensor cores at full precision: registers set the size
        return Tiling(keys=32 if block_dim <= 64 else 16, num_warps=4, num_stages=5)
    return Tiling(min(128, max(16, DECODE_TILE_BYTES // (block_dim * element_size))), 4, 5)


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


# Lengths, page tables and query starts are slices of a step's tensors, and their addresses and strides change
# from step to step: compiling one variant for each alignment would stall the engine.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_kernel(
    k,
    v,
    slots,
    key_cache,
    value_cache,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_page,
    stride_token,
    stride_head,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    keep = (heads < NUM_HEADS) & (columns < HEAD_DIM)
    slot = tl.load(slots + token)
    target = (slot // PAGE_SIZE) * stride_page + (slot % PAGE_SIZE) * stride_token
    target = target + heads * stride_head + columns
    keys = tl.load(k + token * stride_kt + heads * stride_kh + columns, mask=keep)
    values = tl.load(v + token * stride_vt + heads * stride_vh + columns, mask=keep)
    tl.store(key_cache + target, keys, mask=keep)
    tl.store(value_cache + target, values, mask=keep)


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
def _split_length(count, max_splits, min_split, BLOCK_N: tl.constexpr):
    """Tokens of a split of a row with `count` keys: whole tiles, at least `min_split`."""
    even = tl.cdiv(tl.cdiv(count, max_splits), BLOCK_N) * BLOCK_N
    return tl.maximum(even, min_split)


@triton.jit(
    do_not_specialize=["max_splits", "min_split", "stride_table"],
    do_not_specialize_on_alignment=["page_table", "lengths"],
)
def _decode_kernel(
    q,
    key_cache,
    value_cache,
    page_table,
    lengths,
    out,
    partial,
    statistics,
    scale_log2,
    max_splits,
    min_split,
    stride_qt,
    stride_qh,
    stride_page,
    stride_token,
    stride_head,
    stride_table,
    stride_ot,
    stride_oh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    split_length = _split_length(length - first, max_splits, min_split, BLOCK_N)
    start = first + split * split_length
    stop = tl.minimum(start + split_length, length)
    if start >= stop:
        return

    members = tl.arange(0, BLOCK_G)
    columns = tl.arange(0, BLOCK_DIM)
    heads = kv_head * GROUP + members
    keep_q = (members < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    query = tl.load(q + row * stride_qt + heads[:, None] * stride_qh + columns[None, :], mask=keep_q, other=0)
    keys = key_cache + kv_head.to(tl.int64) * stride_head
    values = value_cache + kv_head.to(tl.int64) * stride_head
    table = page_table + row * stride_table
    peak = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_DIM), tl.float32)
    for tile in range(start, stop, BLOCK_N):
        positions = tile + tl.arange(0, BLOCK_N)
        keep = positions < stop
        offsets = _token_offsets(table, positions, keep, stride_page, stride_token, PAGE_SIZE, True)
        k = _load_tile(keys, offsets, keep, HEAD_DIM, BLOCK_DIM, True)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(keep[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, axis=1)
        v = _load_tile(values, offsets, keep, HEAD_DIM, BLOCK_DIM, True)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = new_peak
    acc = acc / total[:, None]

    whole = out + row * stride_ot + heads[:, None] * stride_oh + columns[None, :]
    alone = True if SINGLE else length - first <= split_length
    if alone:
        tl.store(whole, acc.to(out.dtype.element_ty), mask=keep_q)
    else:
        piece = (row * (tl.num_programs(0) * GROUP) + heads) * max_splits + split
        tl.store(partial + piece[:, None] * HEAD_DIM + columns[None, :], acc, mask=keep_q)
        tl.store(statistics + piece, peak + tl.log2(total), mask=members < GROUP)


@triton.jit(do_not_specialize=["max_splits", "min_split"], do_not_specialize_on_alignment=["lengths"])
def _combine_kernel(
    partial,
    statistics,
    lengths,
    out,
    max_splits,
    min_split,
    stride_ot,
    stride_oh,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Weigh the splits of one head of one row by their share of the softmax's denominator."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    count = tl.minimum(length, WINDOW) if WINDOW else length
    num_splits = tl.cdiv(count, _split_length(count, max_splits, min_split, BLOCK_N))
    if num_splits <= 1:
        return  # the decoding program wrote the output itself
    columns = tl.arange(0, BLOCK_DIM)
    first = (row * tl.num_programs(0) + head) * max_splits
    all_splits = tl.arange(0, MAX_SPLITS)
    logs = tl.load(statistics + first + all_splits, mask=all_splits < num_splits, other=float("-inf"))
    peak = tl.max(logs, axis=0)
    total = tl.sum(tl.exp2(logs - peak), axis=0)
    acc = tl.zeros((BLOCK_DIM,), tl.float32)
    for begin in range(0, num_splits, BLOCK_SPLITS):
        splits = begin + tl.arange(0, BLOCK_SPLITS)
        keep = splits < num_splits
        log = tl.load(statistics + first + splits, mask=keep, other=float("-inf"))
        pieces = tl.load(
            partial + (first + splits)[:, None] * HEAD_DIM + columns[None, :],
            mask=keep[:, None] & (columns < HEAD_DIM)[None, :],
            other=0,
        )
        acc += tl.sum(pieces * tl.exp2(log - peak)[:, None], axis=0)
    target = out + row * stride_ot + head * stride_oh + columns
    tl.store(target, (acc / total).to(out.dtype.element_ty), mask=columns < HEAD_DIM)
