"""Attention of many queries a row: prompts, and the parts of prompts that follow a cached prefix.

A row's own tokens lie side by side in the step's keys and values; only its prefix is read through the page
table. The query heads of one key head share a program: they need the same keys. The reference is
`attention/torch_backend.py`, letters are those of `attention/base.py`; nothing here waits for the device.
"""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.triton_attention import (
    COPY_ALIGNMENT,
    LOG2_E,
    ROWS_PER_SEARCH,
    PagedRows,
    block_of,
    has_hopper_kernels,
)


@dataclass(frozen=True, slots=True)
class KeyTile:
    """Keys that are taken at once, and how many such tiles are under way."""

    keys: int
    stages: int


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """The work of a program and how the compiler lays it out.

    `queries` counts pairs of query and head. A row's own keys that all of them see are copied `whole`; None
    where one tile holds all queries of a row, because no own key is seen by all of these. The others are
    `gathered` one by one, which takes registers, and so is what all queries see of the `prefix`. With
    `overlap` the tensor cores multiply the weights of one tile with its values while the softmax of the next
    tile is computed.
    """

    queries: int
    num_warps: int
    whole: KeyTile | None
    gathered: KeyTile
    prefix: KeyTile
    overlap: bool = False
    max_registers: int | None = None  # of a thread: fewer than it would take, so that two programs fit


def prefill_tiling(head_dim: int, element_size: int, most_pairs: int) -> PrefillTiling:
    """The tiling for rows of at most `most_pairs` pairs of query and head that share a key head."""
    if element_size == 4:  # no tensor cores at full precision: registers set the size
        tile = KeyTile(32 if head_dim <= 64 else 16, 2)
        return PrefillTiling(16, 4, whole=None if most_pairs <= 16 else tile, gathered=tile, prefix=tile)
    few = KeyTile(32, 2)
    if most_pairs <= 64:  # little code, too: it is the kernel that a first start waits for longest
        prefix = KeyTile(32 if head_dim > 128 else 64, 3)
        return PrefillTiling(64, 4, whole=None, gathered=few, prefix=prefix)
    if head_dim > 128:
        return PrefillTiling(128, 8, whole=KeyTile(64, 2), gathered=few, prefix=few, overlap=True)
    if head_dim > 64:  # two programs to a processor: one multiplies while the other computes its softmax
        return PrefillTiling(128, 4, whole=KeyTile(64, 2), gathered=few, prefix=few)
    tile = KeyTile(64, 3)
    return PrefillTiling(128, 8, whole=tile, gathered=tile, prefix=tile, max_registers=128)


def prefill(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    rows: PagedRows,
    *,
    query_starts: torch.Tensor,
    longest_query: int,
    longest_row: int,
    scale: float,
    window: int | None,
    out_THD: torch.Tensor,
    taken_2: torch.Tensor,
) -> None:
    """Causal attention of the last tokens of each row, written to `out_THD`.

    Row r's queries are tokens [query_starts[r], query_starts[r + 1]) of the tensors; a row may have none, and
    tokens of no row are left alone. The tokens of a row before its queries are read from its pages, its
    others from `k_TKD` and `v_TKD`. `longest_query`, and `longest_row` with the tokens before it, only choose
    kernel and tile. In `taken_2` (int32, zeros) programs count while they run; they leave zeros, and no two
    launches may use it at the same time.
    """
    pairs = longest_query * (q_THD.shape[1] // k_TKD.shape[1])
    if window is None and has_hopper_kernels(k_TKD.device):
        from tokenmill.kernels import hopper_prefill

        if hopper_prefill.pays(longest_query, longest_row) and hopper_prefill.can_take(
            k_TKD, v_TKD, rows, pairs
        ):
            hopper_prefill.prefill(
                q_THD, k_TKD, v_TKD, rows,
                query_starts=query_starts, scale=scale, out_THD=out_THD, taken_2=taken_2,
            )  # fmt: skip
            return
    tiling = prefill_tiling(q_THD.shape[2], q_THD.element_size(), pairs)
    _prefill(
        q_THD, k_TKD, v_TKD, rows, tiling,
        query_starts=query_starts, scale=scale, window=window, out_THD=out_THD,
    )  # fmt: skip


def _prefill(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    rows: PagedRows,
    tiling: PrefillTiling,
    *,
    query_starts: torch.Tensor,
    scale: float,
    window: int | None,
    out_THD: torch.Tensor,
) -> None:
    """`prefill` by the kernel below."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_rows, num_kv_heads = rows.lengths_R.shape[0], k_TKD.shape[1]
    group = num_heads // num_kv_heads
    block_dim = block_of(head_dim)
    whole = tiling.whole or KeyTile(0, 0)
    launch(
        _prefill_kernel,
        (num_kv_heads, num_tokens * group // tiling.queries + num_rows),
        q_THD,
        k_TKD,
        v_TKD,
        *(_tiles(x_TKD, whole.keys, block_dim) if whole.keys else None for x_TKD in (k_TKD, v_TKD)),
        rows.key_cache_NBKD,
        rows.value_cache_NBKD,
        rows.page_table_RP,
        query_starts,
        rows.lengths_R,
        out_THD,
        scale * LOG2_E,
        num_rows,
        *(stride for x in (q_THD, k_TKD, v_TKD) for stride in x.stride()[:2]),
        *rows.key_cache_NBKD.stride()[:3],
        rows.page_table_RP.stride(0),
        *out_THD.stride()[:2],
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=rows.key_cache_NBKD.shape[1],
        WINDOW=window or 0,
        ROWS_PER_SEARCH=ROWS_PER_SEARCH,
        BLOCK_M=tiling.queries,
        BLOCK_N=whole.keys,
        BLOCK_GATHER=tiling.gathered.keys,
        BLOCK_PREFIX=tiling.prefix.keys,
        BLOCK_DIM=block_dim,
        STAGES=whole.stages,
        GATHER_STAGES=tiling.gathered.stages,
        PREFIX_STAGES=tiling.prefix.stages,
        OVERLAP=tiling.overlap,
        num_warps=tiling.num_warps,
        maxnreg=tiling.max_registers,
    )


def _tiles(x_TKD: torch.Tensor, keys: int, block_dim: int) -> TensorDescriptor | None:
    """What the device needs to copy tiles [keys, D] of one head by itself; None where it cannot."""
    size = x_TKD.element_size()
    stride_t, stride_h, _ = x_TKD.stride()
    if size != 2 or (x_TKD.data_ptr() | stride_t * size | stride_h * size) % COPY_ALIGNMENT:
        return None
    num_tokens, num_heads, head_dim = x_TKD.shape
    shape, strides = [num_heads, num_tokens, head_dim], [stride_h, stride_t, 1]
    return TensorDescriptor(x_TKD, shape, strides, [1, keys, block_dim])


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _token_offsets(table, positions, keep, stride_page, stride_token, PAGE_SIZE: tl.constexpr):
    """Where the tokens at these positions of a row begin; PAGE_SIZE 0: side by side, without a table."""
    if PAGE_SIZE == 0:
        offsets = positions.to(tl.int64) * stride_token
    else:
        pages = tl.load(table + positions // PAGE_SIZE, mask=keep)
        offsets = pages.to(tl.int64) * stride_page + (positions % PAGE_SIZE) * stride_token
    return offsets


@triton.jit
def load_tile(base, offsets, keep, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """[tokens, BLOCK_DIM]; zero past HEAD_DIM and for tokens not kept, so that no stale number gets in."""
    columns = tl.arange(0, BLOCK_DIM)
    pointers = base + offsets[:, None] + columns[None, :]
    if keep is not None:
        return tl.load(pointers, mask=keep[:, None] & (columns < HEAD_DIM)[None, :], other=0)
    elif HEAD_DIM < BLOCK_DIM:
        return tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0)
    else:
        return tl.load(pointers)


@triton.jit
def _load_whole_tile(
    tiles, kv_head, base, table, tile, row_token, stride_page, stride_token,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_DIM]: tokens [tile, tile + BLOCK_N) of a row, all of which exist."""
    if tiles is not None:
        return tiles.load([kv_head, row_token + tile, 0]).reshape(BLOCK_N, BLOCK_DIM)
    else:
        positions = tile + tl.arange(0, BLOCK_N)
        offsets = _token_offsets(table, positions, None, stride_page, stride_token, PAGE_SIZE)
        return load_tile(base, offsets, None, HEAD_DIM, BLOCK_DIM)


@triton.jit
def _softmax_step(scores, total, peak, scale_log2, GUARDED: tl.constexpr):
    """(weights of these scores, factor of all weights so far, their new total, new peak).

    GUARDED: there may be queries that have seen no key yet.
    """
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale_log2)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if GUARDED else new_peak
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    fade = tl.exp2(peak - shift)
    return weights, fade, total * fade + tl.sum(weights, axis=1), new_peak


@triton.jit
def attend_masked(
    acc, total, peak, query, query_positions, keys, values, table, start, stop, scale_log2,
    stride_page, stride_k, stride_v,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take the keys [start, stop) into the running softmax, each for the queries that see it."""
    for tile in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        positions = tile + tl.arange(0, BLOCK_N)
        keep = positions < stop
        k_offsets = _token_offsets(table, positions, keep, stride_page, stride_k, PAGE_SIZE)
        k = load_tile(keys, k_offsets, keep, HEAD_DIM, BLOCK_DIM)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        visible = keep[None, :] & (positions[None, :] <= query_positions[:, None])
        if WINDOW:
            visible = visible & (positions[None, :] > query_positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        weights, fade, total, peak = _softmax_step(scores, total, peak, scale_log2, WINDOW > 0)
        v_offsets = _token_offsets(table, positions, keep, stride_page, stride_v, PAGE_SIZE)
        v = load_tile(values, v_offsets, keep, HEAD_DIM, BLOCK_DIM)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, total, peak


@triton.jit
def _attend_whole(
    acc, total, peak, query, keys, values, k_tiles, v_tiles, kv_head, table, row_token, start, stop,
    scale_log2, stride_page, stride_k, stride_v,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Take the keys [start, stop), whole tiles that every query sees, into the running softmax.

    OVERLAP: the weights of a tile meet its values only when the scores of the next tile are there, so that
    the tensor cores work on that product while the next softmax is computed.
    """
    # At first there are no weights, and they meet the values of the first tile. They wait at full precision:
    # as narrow numbers the compiler would carry them through shared memory, with a barrier each time.
    waiting = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    fade = tl.full((BLOCK_M,), 1.0, tl.float32)
    for tile in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        k = _load_whole_tile(
            k_tiles, kv_head, keys, table, tile, row_token, stride_page, stride_k,
            PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_DIM,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        v_tile = tl.maximum(tile - BLOCK_N, start) if OVERLAP else tile
        v = _load_whole_tile(
            v_tiles, kv_head, values, table, v_tile, row_token, stride_page, stride_v,
            PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_DIM,
        )  # fmt: skip
        if OVERLAP:
            acc = tl.dot(waiting.to(query.dtype), v, acc * fade[:, None], input_precision="ieee")
            weights, fade, total, peak = _softmax_step(scores, total, peak, scale_log2, False)
            waiting = weights
        else:
            weights, fade, total, peak = _softmax_step(scores, total, peak, scale_log2, False)
            acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    if OVERLAP and start < stop:
        v = _load_whole_tile(
            v_tiles, kv_head, values, table, stop - BLOCK_N, row_token, stride_page, stride_v,
            PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_DIM,
        )  # fmt: skip
        acc = tl.dot(waiting.to(query.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, total, peak


@triton.jit
def _attend(
    acc, total, peak, query, query_positions, keys, values, k_tiles, v_tiles, kv_head, table, row_token,
    first_position, last_position, stop, scale_log2, stride_page, stride_k, stride_v,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_EDGE: tl.constexpr, BLOCK_DIM: tl.constexpr, STAGES: tl.constexpr,
    EDGE_STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend to the tokens [0, stop) of one part of a row, by queries at [first_position, last_position].

    In order: behind some query's window | seen by all queries | past some query, or less than a tile. With
    BLOCK_N 0 all are taken as the last are.
    """
    begin = 0
    if BLOCK_N > 0:
        whole_stop = tl.minimum(first_position + 1, stop) // BLOCK_N * BLOCK_N
        if WINDOW:
            begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            edge_stop = tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
            edge_stop = tl.minimum(edge_stop, whole_stop)
            acc, total, peak = attend_masked(
                acc, total, peak, query, query_positions, keys, values, table, begin, edge_stop, scale_log2,
                stride_page, stride_k, stride_v,
                PAGE_SIZE, WINDOW, HEAD_DIM, BLOCK_EDGE, BLOCK_DIM, EDGE_STAGES,
            )  # fmt: skip
            begin = tl.maximum(begin, edge_stop)
        acc, total, peak = _attend_whole(
            acc, total, peak, query, keys, values, k_tiles, v_tiles, kv_head, table, row_token, begin,
            whole_stop, scale_log2, stride_page, stride_k, stride_v,
            PAGE_SIZE, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_DIM, STAGES, OVERLAP,
        )  # fmt: skip
        begin = tl.maximum(begin, whole_stop)
    return attend_masked(
        acc, total, peak, query, query_positions, keys, values, table, begin,
        tl.minimum(last_position + 1, stop), scale_log2,
        stride_page, stride_k, stride_v, PAGE_SIZE, WINDOW, HEAD_DIM, BLOCK_EDGE, BLOCK_DIM, EDGE_STAGES,
    )  # fmt: skip


@triton.jit
def find_row(tile, query_starts, num_rows, GROUP: tl.constexpr, SEARCH: tl.constexpr, BLOCK_M: tl.constexpr):
    """(row that owns `tile`, its first token, its queries, the tile's first pair of query and head).

    Row r begins at tile pairs_before_r // BLOCK_M + r: no two rows share a tile, and some tiles stay empty.
    Of a tile before all rows the first pair is negative.
    """
    row = -1
    for begin in range(0, num_rows, SEARCH):
        candidates = begin + tl.arange(0, SEARCH)
        starts = tl.load(query_starts + candidates, mask=candidates < num_rows, other=0)
        begun = (starts * GROUP // BLOCK_M + candidates <= tile) & (candidates < num_rows)
        row += tl.sum(begun.to(tl.int32), axis=0)
    row = tl.maximum(row, 0)
    token = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - token
    return row, token, num_queries, (tile - (token * GROUP // BLOCK_M + row)) * BLOCK_M


# Lengths, page tables and query starts are slices of a step's tensors, and their addresses and strides change
# from step to step: compiling one variant for each alignment would stall the engine.
@triton.jit(
    do_not_specialize=["num_rows", "stride_table"],
    do_not_specialize_on_alignment=["page_table", "query_starts", "lengths"],
)
def _prefill_kernel(
    q,
    k,
    v,
    k_tiles,
    v_tiles,
    key_cache,
    value_cache,
    page_table,
    query_starts,
    lengths,
    out,
    scale_log2,
    num_rows,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
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
    ROWS_PER_SEARCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_GATHER: tl.constexpr,
    BLOCK_PREFIX: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAGES: tl.constexpr,
    GATHER_STAGES: tl.constexpr,
    PREFIX_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    # The last tiles of a prompt see the most keys: they go first, so that no long one is left at the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row, row_token, num_queries, first = find_row(
        tile, query_starts, num_rows, GROUP, ROWS_PER_SEARCH, BLOCK_M
    )
    if (first < 0) | (first >= num_queries * GROUP):
        return

    # Offsets from the tile's first token: they fit 32 bits, and cost half the registers.
    first_query = first // GROUP
    last_query = tl.minimum((first + BLOCK_M - 1) // GROUP, num_queries - 1)
    pairs = first + tl.arange(0, BLOCK_M)
    queries = tl.minimum(pairs // GROUP, last_query)  # past the last one: the last once more
    columns = tl.arange(0, BLOCK_DIM)
    first_token = (row_token + first_query).to(tl.int64)
    source = q + first_token * stride_qt + kv_head * GROUP * stride_qh
    sources = ((queries - first_query) * stride_qt + pairs % GROUP * stride_qh)[:, None] + columns[None, :]
    query = tl.load(source + sources, mask=(columns < HEAD_DIM)[None, :], other=0)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32)

    own_keys = k + tl.cast(row_token, tl.int64) * stride_kt + kv_head * stride_kh
    own_values = v + tl.cast(row_token, tl.int64) * stride_vt + kv_head * stride_vh
    acc, total, peak = _attend(
        acc, total, peak, query, queries, own_keys, own_values, k_tiles, v_tiles, kv_head, page_table,
        row_token, first_query, last_query, num_queries, scale_log2, 0, stride_kt, stride_vt,
        0, WINDOW, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_GATHER, BLOCK_DIM, STAGES, GATHER_STAGES, OVERLAP,
    )  # fmt: skip
    prefix = tl.load(lengths + row) - num_queries
    acc, total, peak = _attend(
        acc, total, peak, query, prefix + queries, key_cache + kv_head.to(tl.int64) * stride_head,
        value_cache + kv_head.to(tl.int64) * stride_head, None, None, kv_head,
        page_table + tl.cast(row, tl.int64) * stride_table,
        row_token, prefix + first_query, prefix + last_query, prefix, scale_log2,
        stride_page, stride_token, stride_token,
        PAGE_SIZE, WINDOW, HEAD_DIM, BLOCK_M, BLOCK_PREFIX, BLOCK_GATHER, BLOCK_DIM, PREFIX_STAGES,
        GATHER_STAGES, False,
    )  # fmt: skip
    keep = (pairs < num_queries * GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    target = out + first_token * stride_ot + kv_head * GROUP * stride_oh
    targets = ((queries - first_query) * stride_ot + pairs % GROUP * stride_oh)[:, None] + columns[None, :]
    tl.store(target + targets, (acc / total[:, None]).to(out.dtype.element_ty), mask=keep)
