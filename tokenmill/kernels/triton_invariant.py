"""Products and attention on the GPU whose bits for a row do not depend on the rows beside it.

Every sum runs over its terms in one order, tile by tile from the first on, whether a token is computed alone,
in a prompt, or in a part of one: keys are always read from the cache, and the tiles of a sum are the same for
all numbers of rows. What a tile holds for others is masked, which adds exact zeros. The quicker kernels, with
orders that depend on the step, are `triton_linear.py`, `hopper_*.py`, `triton_prefill.py`, `triton_decode.py`
and `triton_balanced.py`; the reference is torch. (Such kernels are called batch-invariant: He and others
2025, "Defeating Nondeterminism in LLM Inference".)
Letters: N rows, I inputs, O outputs of a weight; those of attention are in `attention/base.py`.
"""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.sizes import ceil_div
from tokenmill.kernels.triton_attention import LOG2_E, ROWS_PER_SEARCH, PagedRows, block_of, num_processors
from tokenmill.kernels.triton_prefill import attend_masked, find_row, load_tile

# Neighbouring programs share so many tiles of rows, so that what they read of the weight stays in the cache.
_ROW_TILES_TOGETHER = 8


def product(x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """`x W^T + b` [N, O], summed in float32."""
    (num_rows, size), num_outputs = x_NI.shape, len(weight_OI)
    assert x_NI.stride(1) == 1
    assert weight_OI.is_contiguous()
    out_NO = torch.empty(num_rows, num_outputs, dtype=x_NI.dtype, device=x_NI.device)
    is_wide = x_NI.element_size() == 4  # no tensor cores at full precision
    rows, outputs = (32, 32) if is_wide else _tile(num_rows, num_outputs, num_processors(x_NI.device))
    _product_kernel[(ceil_div(num_rows, rows) * ceil_div(num_outputs, outputs),)](
        x_NI,
        weight_OI,
        bias_O,
        out_NO,
        num_rows,
        num_outputs,
        x_NI.stride(0),
        SIZE=size,
        BLOCK_M=rows,
        BLOCK_N=outputs,
        BLOCK_K=32 if is_wide else 64,
        TOGETHER=_ROW_TILES_TOGETHER,
        num_warps=4 if is_wide else rows // 16,
        num_stages=2 if is_wide else 4,
    )
    return out_NO


def _tile(num_rows: int, num_outputs: int, processors: int) -> tuple[int, int]:
    """Rows and outputs of a tile: many, but so few that all processors have work. They have no say in the
    order of a sum, whose terms are always taken 64 inputs at a time."""
    for rows, outputs in ((128, 128), (64, 128), (64, 64)):
        programs = ceil_div(num_rows, rows) * ceil_div(num_outputs, outputs)
        if programs >= processors and (rows == 64 or num_rows > 64):
            return rows, outputs
    return 64, 32


def attend(
    q_THD: torch.Tensor,
    rows: PagedRows,
    *,
    query_starts: torch.Tensor,
    scale: float,
    window: int | None,
    out_THD: torch.Tensor,
) -> None:
    """Causal attention of the last tokens of each row, written to `out_THD`.

    Row r's queries are tokens [query_starts[r], query_starts[r + 1]); a row may have none, and tokens of no
    row are left alone. The keys and values of all tokens, these included, are in the row's pages.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_rows, num_kv_heads = len(rows.lengths_R), rows.key_cache_NBKD.shape[2]
    group = num_heads // num_kv_heads
    block_dim = block_of(head_dim)
    pairs, keys, stages = 64, 64 if block_dim <= 128 else 32, 3
    if q_THD.element_size() == 4:
        pairs, keys, stages = 16, 32 if block_dim <= 64 else 16, 2
    _attend_kernel[(num_kv_heads, num_tokens * group // pairs + num_rows)](
        q_THD,
        rows.key_cache_NBKD,
        rows.value_cache_NBKD,
        rows.page_table_RP,
        query_starts,
        rows.lengths_R,
        out_THD,
        scale * LOG2_E,
        num_rows,
        *q_THD.stride()[:2],
        *rows.key_cache_NBKD.stride()[:3],
        rows.page_table_RP.stride(0),
        *out_THD.stride()[:2],
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=rows.key_cache_NBKD.shape[1],
        WINDOW=window or 0,
        ROWS_PER_SEARCH=ROWS_PER_SEARCH,
        BLOCK_M=pairs,
        BLOCK_N=keys,
        BLOCK_DIM=block_dim,
        STAGES=stages,
        num_warps=4,
    )


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def _product_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    stride_x,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    row_tiles, output_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_outputs, BLOCK_N)
    together = TOGETHER * output_tiles
    first_row_tile = tl.program_id(0) // together * TOGETHER
    width = tl.minimum(row_tiles - first_row_tile, TOGETHER)
    place = tl.program_id(0) % together
    rows = (first_row_tile + place % width) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = place // width * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    is_row = (rows < num_rows)[:, None]
    x_tiles = x + rows.to(tl.int64)[:, None] * stride_x + inputs[None, :]
    # Outputs past the end read the last one once more. As for rows, many readers of one wait for each other.
    weight_tiles = (
        weight + tl.minimum(outputs, num_outputs - 1).to(tl.int64)[None, :] * SIZE + inputs[:, None]
    )
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, SIZE, BLOCK_K):
        if SIZE % BLOCK_K == 0:
            x_tile = tl.load(x_tiles + begin, mask=is_row, other=0)
            weight_tile = tl.load(weight_tiles + begin)
        else:
            keep = begin + inputs < SIZE
            x_tile = tl.load(x_tiles + begin, mask=is_row & keep[None, :], other=0)
            weight_tile = tl.load(weight_tiles + begin, mask=keep[:, None], other=0)
        acc = tl.dot(x_tile, weight_tile, acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + outputs, mask=outputs < num_outputs, other=0).to(tl.float32)[None, :]
    targets = rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    keep_out = is_row & (outputs < num_outputs)[None, :]
    tl.store(out + targets, acc.to(out.dtype.element_ty), mask=keep_out)


# Lengths, page tables and query starts are slices of a step's tensors; see `triton_prefill.py`.
@triton.jit(
    do_not_specialize=["num_rows", "stride_table"],
    do_not_specialize_on_alignment=["page_table", "query_starts", "lengths"],
)
def _attend_kernel(
    q,
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
    BLOCK_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    row, row_token, num_queries, first = find_row(
        tile, query_starts, num_rows, GROUP, ROWS_PER_SEARCH, BLOCK_M
    )
    if (first < 0) | (first >= num_queries * GROUP):
        return

    pairs = first + tl.arange(0, BLOCK_M)
    queries = tl.minimum(pairs // GROUP, num_queries - 1)  # past the last one: the last once more
    heads = kv_head * GROUP + pairs % GROUP
    columns = tl.arange(0, BLOCK_DIM)
    tokens = (row_token + queries).to(tl.int64)
    query = load_tile(q, tokens * stride_qt + heads * stride_qh, None, HEAD_DIM, BLOCK_DIM)

    before = tl.load(lengths + row) - num_queries
    begin = 0
    if WINDOW:  # on a multiple of the tile, as for every other query
        begin = tl.maximum(before + first // GROUP - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    last_query = tl.minimum((first + BLOCK_M - 1) // GROUP, num_queries - 1)
    head_offset = kv_head.to(tl.int64) * stride_head
    acc, total, _ = attend_masked(
        tl.zeros((BLOCK_M, BLOCK_DIM), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        query, before + queries, key_cache + head_offset, value_cache + head_offset,
        page_table + tl.cast(row, tl.int64) * stride_table, begin, before + last_query + 1, scale_log2,
        stride_page, stride_token, stride_token,
        PAGE_SIZE, WINDOW, HEAD_DIM, BLOCK_N, BLOCK_DIM, STAGES,
    )  # fmt: skip
    targets = (tokens * stride_ot + heads * stride_oh)[:, None] + columns[None, :]
    keep = (pairs < num_queries * GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(out + targets, (acc / total[:, None]).to(out.dtype.element_ty), mask=keep)
