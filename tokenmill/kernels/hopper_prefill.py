"""Prompt attention for Hopper GPUs: one warp feeds tiles of keys and values, groups of four warps compute.

`triton_prefill.py` is the reference, and takes what is missing here: windows, short prompts, other head sizes
and types, pages of fewer than 16 tokens. Letters are those of `attention/base.py`. This is Gluon, the layer
under Triton's own language: who waits for what is written out, and there is no interpreter for it.
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
from tokenmill.kernels.hopper_pages import are_tiles, can_be_copied, clear_past, copy_tokens, page_tiles
from tokenmill.kernels.hopper_work import CELL_LAYOUT, be_told, tell
from tokenmill.kernels.triton_attention import LOG2_E, ROWS_PER_SEARCH, PagedRows, num_processors

HEAD_DIMS = (64, 128)
# Measured on an H200: below both, starting a program of this size costs more than it gains.
LONG_QUERY = 1024
LONG_PREFIX = 4  # times the prompt's own tokens
WORK_SLOTS = gl.constexpr(2)  # tiles that are told of and not yet begun
WORK_FIELDS = gl.constexpr(5)  # of such a tile: see `_take_tile`
NOWHERE = gl.constexpr(2**30)  # the first pair where there is no tile: no prompt has so many
GROUPS = gl.constexpr(2)  # of four warps, that share tiles of keys and values; each is launched by name
GROUP_QUERIES = gl.constexpr(64)  # pairs of query and head of a group: what its products take
BLOCK_M = gl.constexpr(GROUPS.value * GROUP_QUERIES.value)  # of a tile, the work of a program
NEVER = gl.constexpr(-1e30)  # the peak of a query before its first key: finite, to be subtracted from itself
# Tiles lie in shared memory in columns of 128 bytes, as products read them.
STEP_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """Tiles of so many keys, of which `stages` are in shared memory at once."""

    keys: int
    stages: int


def hopper_tiling(head_dim: int) -> HopperTiling:
    """Measured on an H200."""
    return HopperTiling(keys=128, stages=2 if head_dim == 128 else 4)


def pays(longest_query: int, longest_row: int) -> bool:
    """Whether prompts are so long, or follow so long a prefix, that this kernel beats the plain one."""
    return longest_query >= LONG_QUERY or longest_row >= LONG_PREFIX * longest_query


def can_take(k_TKD: torch.Tensor, v_TKD: torch.Tensor, rows: PagedRows, most_pairs: int) -> bool:
    """Whether `prefill` knows these numbers and layouts, and rows fill more than one group."""
    return (
        are_tiles(rows.key_cache_NBKD, rows.value_cache_NBKD)
        and k_TKD.shape[2] in HEAD_DIMS
        and most_pairs > GROUP_QUERIES.value
        and k_TKD.stride() == v_TKD.stride()
        and can_be_copied(k_TKD, v_TKD)
    )


def prefill(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    rows: PagedRows,
    *,
    query_starts: torch.Tensor,
    scale: float,
    out_THD: torch.Tensor,
    taken_2: torch.Tensor,
) -> None:
    """As `triton_prefill.prefill`, for what `can_take` allows."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_rows, num_kv_heads = rows.lengths_R.shape[0], k_TKD.shape[1]
    group = num_heads // num_kv_heads
    tiling = hopper_tiling(head_dim)
    num_tiles = num_kv_heads * (num_tokens * group // BLOCK_M.value + num_rows)
    launch(
        _prefill_kernel,
        (min(num_tiles, num_processors(q_THD.device)),),
        q_THD,
        _step_tiles(k_TKD, tiling.keys),
        _step_tiles(v_TKD, tiling.keys),
        page_tiles(rows.key_cache_NBKD),
        page_tiles(rows.value_cache_NBKD),
        rows.page_table_RP,
        query_starts,
        rows.lengths_R,
        taken_2,
        out_THD,
        scale * LOG2_E,
        num_rows,
        num_tiles,
        num_kv_heads,
        k_TKD.stride(1),
        *q_THD.stride()[:2],
        rows.page_table_RP.stride(0),
        *out_THD.stride()[:2],
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=rows.key_cache_NBKD.shape[1],
        ROWS_PER_SEARCH=ROWS_PER_SEARCH,
        BLOCK_N=tiling.keys,
        STAGES=tiling.stages,
        num_warps=4,
    )


def _step_tiles(x_TKD: torch.Tensor, keys: int) -> TensorDescriptor:
    """Tiles [keys, D] of the step's keys or values; the heads of a token are one long row."""
    num_tokens, num_heads, head_dim = x_TKD.shape
    stride_t, stride_h, _ = x_TKD.stride()
    width = (num_heads - 1) * stride_h + head_dim
    return TensorDescriptor(x_TKD, [num_tokens, width], [stride_t, 1], [keys, head_dim], STEP_LAYOUT)


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


@gluon.jit
def _find_row(tile, query_starts, num_rows, GROUP: gl.constexpr, SEARCH: gl.constexpr):
    """(row that owns `tile`, its first token, its queries, the tile's first pair of query and head).

    Row r begins at tile pairs_before_r // BLOCK_M + r: no two rows share a tile, and some tiles stay empty.
    Of a tile before all rows the first pair is negative.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = -1
    for begin in range(0, num_rows, SEARCH):
        candidates = begin + gl.arange(0, SEARCH, layout)
        starts = gl.load(query_starts + candidates, mask=candidates < num_rows, other=0)
        begun = (starts * GROUP // BLOCK_M + candidates <= tile) & (candidates < num_rows)
        row += gl.sum(begun.to(gl.int32), axis=0)
    row = gl.maximum(row, 0)
    token = gl.load(query_starts + row)
    num_queries = gl.load(query_starts + row + 1) - token
    return row, token, num_queries, (tile - (token * GROUP // BLOCK_M + row)) * BLOCK_M


@gluon.jit
def _count_tiles(first, num_queries, prefix, GROUP: gl.constexpr, BLOCK_N: gl.constexpr):
    """How a program goes over the keys: (own tiles, whole ones of them, partial tiles of the prefix).

    First the own keys past some query, from the last, at least one tile; then what fills no tile of the
    prefix; these are masked. Then the other own keys, and the other keys of the prefix, both from the last.
    """
    last_query = gl.minimum((first + BLOCK_M - 1) // GROUP, num_queries - 1)
    own = last_query // BLOCK_N + 1
    whole = gl.minimum((first // GROUP + 1) // BLOCK_N, own - 1)
    return own, whole, (prefix % BLOCK_N + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _draw_tile(
    taken, query_starts, num_rows, num_tiles, num_kv_heads,
    GROUP: gl.constexpr, SEARCH: gl.constexpr,
):  # fmt: skip
    """(key head, row, its first token, its queries, first pair) of a tile that no program has taken.

    The last tiles of a prompt see the most keys: they go first. The heads of one tile run side by side.
    """
    place = gl.atomic_add(taken, 1, sem="relaxed")
    tile = num_tiles // num_kv_heads - 1 - place // num_kv_heads
    row, token, num_queries, first = _find_row(tile, query_starts, num_rows, GROUP, SEARCH)
    return gl.where(place < num_tiles, place % num_kv_heads, -1), row, token, num_queries, first


@gluon.jit
def _take_tile(
    number, work, told, taken, query_starts, lengths, num_rows, num_tiles, num_kv_heads,
    GROUP: gl.constexpr, SEARCH: gl.constexpr,
):  # fmt: skip
    """Tell the groups what the program's tile number `number` is: (key head, row, first token, queries, first
    pair of query and head, tokens of the row before its queries); key head -1 if no tile is left."""
    kv_head, row, token, num_queries, first = _draw_tile(
        taken, query_starts, num_rows, num_tiles, num_kv_heads, GROUP, SEARCH
    )
    while (kv_head >= 0) & ((first < 0) | (first >= num_queries * GROUP)):  # an empty one
        kv_head, row, token, num_queries, first = _draw_tile(
            taken, query_starts, num_rows, num_tiles, num_kv_heads, GROUP, SEARCH
        )
    prefix = gl.load(lengths + row) - num_queries
    fields = (kv_head, token, num_queries, gl.where(kv_head < 0, NOWHERE, first), prefix)
    tell(number, fields, work, told, 0, WORK_SLOTS, WORK_FIELDS)
    return kv_head, row, token, num_queries, first, prefix


@gluon.jit
def _next_tile(number, work, told):
    """What `_take_tile` has told: (key head, first token, queries, first pair, tokens before)."""
    return be_told(number, work, told, 0, WORK_SLOTS, WORK_FIELDS)


@gluon.jit
def _leave(taken):
    """The last program to come here leaves zeros for the next launch: nobody takes a tile any more."""
    ended = gl.atomic_add(taken + 1, 1, sem="acq_rel")
    if ended == gl.num_programs(0) - 1:
        gl.store(taken, 0)
        gl.store(taken + 1, 0)


@gluon.jit
def _copy_own(
    step, k_step, v_step, k_tiles, v_tiles, barriers, token, column, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the step's keys and values from `token` on as this warp's tile number `step`."""
    slot = step % STAGES
    phase = step // STAGES % 2 ^ 1
    mbarrier.wait(barriers.index(2 * STAGES + slot), phase)
    mbarrier.expect(barriers.index(slot), k_step.block_type.nbytes)
    tma.async_copy_global_to_shared(k_step, [token, column], barriers.index(slot), k_tiles.index(slot))
    mbarrier.wait(barriers.index(3 * STAGES + slot), phase)
    mbarrier.expect(barriers.index(STAGES + slot), v_step.block_type.nbytes)
    tma.async_copy_global_to_shared(
        v_step, [token, column], barriers.index(STAGES + slot), v_tiles.index(slot)
    )


@gluon.jit
def _feed(
    k_step, v_step, k_cache, v_cache, k_tiles, v_tiles, work, barriers, told, page_table, query_starts,
    lengths, taken, num_rows, num_tiles, num_kv_heads, stride_h, stride_table,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, ROWS_PER_SEARCH: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: copy the tiles that the others compute with, as soon as there is room."""
    step = 0
    number = 0
    kv_head, row, token, num_queries, first, prefix = _take_tile(
        number, work, told, taken, query_starts, lengths, num_rows, num_tiles, num_kv_heads, GROUP,
        ROWS_PER_SEARCH,
    )  # fmt: skip
    while kv_head >= 0:
        own, whole, partial = _count_tiles(first, num_queries, prefix, GROUP, BLOCK_N)
        table = page_table + row.to(gl.int64) * stride_table
        column = kv_head * stride_h
        for index in range(own - whole):
            start = token + (own - 1 - index) * BLOCK_N
            _copy_own(
                step + index, k_step, v_step, k_tiles, v_tiles, barriers, start, column, BLOCK_N, STAGES
            )
        step += own - whole
        if partial > 0:
            start = prefix // BLOCK_N * BLOCK_N
            copy_tokens(
                step, k_cache, v_cache, k_tiles, v_tiles, barriers, table, start, prefix, kv_head,
                PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES,
            )  # fmt: skip
        step += partial
        for index in range(whole):
            start = token + (whole - 1 - index) * BLOCK_N
            _copy_own(
                step + index, k_step, v_step, k_tiles, v_tiles, barriers, start, column, BLOCK_N, STAGES
            )
        step += whole
        for index in range(prefix // BLOCK_N):
            start = (prefix // BLOCK_N - 1 - index) * BLOCK_N
            copy_tokens(
                step + index, k_cache, v_cache, k_tiles, v_tiles, barriers, table, start, prefix, kv_head,
                PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES,
            )  # fmt: skip
        step += prefix // BLOCK_N
        number += 1
        kv_head, row, token, num_queries, first, prefix = _take_tile(
            number, work, told, taken, query_starts, lengths, num_rows, num_tiles, num_kv_heads, GROUP,
            ROWS_PER_SEARCH,
        )  # fmt: skip
    _leave(taken)


@gluon.jit
def _thread_sums(x):
    """[rows, 4] of [rows, columns]: what each of the four threads that hold a row can add up by itself.

    Products leave two neighbours of every eight columns to a thread.
    """
    pairs: gl.constexpr = x.shape[1] // 8
    return gl.sum(gl.sum(gl.reshape(x, [x.shape[0], pairs, 4, 2]), axis=3), axis=1)


@gluon.jit
def _softmax_step(scores, totals, peak, scale_log2):
    """(weights of these scores, factor of all weights so far, their new totals by threads, new peak)."""
    new_peak = gl.maximum(peak, gl.max(scores, axis=1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_peak[:, None])
    fade = gl.exp2(peak - new_peak)
    sums = _thread_sums(weights)
    totals = totals * gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return weights, fade, totals, new_peak


@gluon.jit
def _start_scores(step, query, k_tiles, barriers, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Begin the products of the queries with the keys of tile number `step`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    slot = step % STAGES
    mbarrier.wait(barriers.index(slot), step // STAGES % 2)
    nothing = gl.zeros([GROUP_QUERIES, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(query, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _start_values(step, acc, handed, v_tiles, barriers, STAGES: gl.constexpr):
    """Begin to add the values of tile number `step`, times their weights as handed on, to `acc`."""
    layout: gl.constexpr = acc.type.layout
    slot = step % STAGES
    mbarrier.wait(barriers.index(STAGES + slot), step // STAGES % 2)
    if handed.dtype == gl.int16:
        factor = handed.to(v_tiles.dtype, bitcast=True)
    else:
        factor = _as_factor(handed, layout, v_tiles.dtype)
    return warpgroup_mma(factor, v_tiles.index(slot), acc, is_async=True)


@gluon.jit
def _as_factor(weights, layout: gl.constexpr, dtype: gl.constexpr):
    return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _hand_on(weights, layout: gl.constexpr, dtype: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The weights as a loop hands them on: where there are registers enough as they are, to be rounded while
    the next scores are multiplied.

    Else as integers of two bytes: what a loop hands on in bfloat16 is taken apart and put together again each
    time.
    """
    if HEAD_DIM == 64:
        return weights
    else:
        return _as_factor(weights, layout, dtype).to(gl.int16, bitcast=True)


@gluon.jit
def _masked(scores, queries, start, limit, BLOCK_N: gl.constexpr):
    """Scores, without those of keys at `limit` and on, and of keys past a query."""
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
    last = gl.minimum(queries, limit - 1) - start
    return gl.where(keys[None, :] <= last[:, None], scores, float("-inf"))


@gluon.jit
def _next_scores(
    step, turn, acc, handed, query, k_tiles, v_tiles, barriers, turns, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, MINE: gl.constexpr,
):  # fmt: skip
    """(scores of tile `step`, `acc` while the values of the tile before are being added)."""
    mbarrier.wait(turns.index(MINE), turn % 2 ^ (1 if MINE == 0 else 0))
    scores = _start_scores(step, query, k_tiles, barriers, BLOCK_N, STAGES)
    acc = _start_values(step - 1, acc, handed, v_tiles, barriers, STAGES)
    mbarrier.arrive(turns.index((MINE + 1) % GROUPS))
    scores = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(barriers.index(2 * STAGES + step % STAGES))
    return scores, acc


@gluon.jit
def _finish_values(step, acc, fade, barriers, STAGES: gl.constexpr):
    """`acc` with the values of tile `step`, relative to the new peak.

    The assembler moves a wait for products as far up as it can, here before the softmax that is meant to run
    beside them, but not past a branch: hence the wait for a barrier that opened long ago.
    """
    mbarrier.wait(barriers.index(STAGES + step % STAGES), step // STAGES % 2)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(barriers.index(3 * STAGES + step % STAGES))
    return acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """(those of the tiles, those by which the groups take turns) of a program.

    Keys are there, values are there, keys are done with, values are done with; one of each for each stage.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(2 * STAGES):
        mbarrier.init(barriers.index(index), count=1)
        mbarrier.init(barriers.index(2 * STAGES + index), count=GROUPS)
    for index in gl.static_range(GROUPS):
        mbarrier.init(turns.index(index), count=1)
    return barriers, turns


@gluon.jit
def attend_tiles(
    step, turn, queries, query, k_tiles, v_tiles, barriers, turns, num_queries, prefix, own, whole, partial,
    scale_log2, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    MINE: gl.constexpr,
):  # fmt: skip
    """(weighted sum of the values, sum of the weights, peak of the scores, number of tiles) over all keys.

    The values of a tile are multiplied while the softmax of the next one is computed.
    """
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    row_layout: gl.constexpr = queries.type.layout
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([GROUP_QUERIES, HEAD_DIM], gl.float32, out_layout)
    peak = gl.full([GROUP_QUERIES], NEVER, gl.float32, row_layout)
    totals = _thread_sums(gl.zeros([GROUP_QUERIES, BLOCK_N], gl.float32, score_layout))

    start = (own - 1) * BLOCK_N
    scores = _start_scores(step, query, k_tiles, barriers, BLOCK_N, STAGES)
    scores = warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(barriers.index(2 * STAGES + step % STAGES))
    clear_past(step, v_tiles, barriers, num_queries - start, HEAD_DIM, BLOCK_N, STAGES)
    scores = _masked(scores, queries, start, num_queries, BLOCK_N)
    weights, fade, totals, peak = _softmax_step(scores, totals, peak, scale_log2)
    handed = _hand_on(weights, out_layout, query.dtype, HEAD_DIM)
    masked = own - whole + partial
    count = masked + whole + prefix // BLOCK_N
    for index in range(1, masked):
        scores, acc = _next_scores(
            step + index, turn + index - 1, acc, handed, query, k_tiles, v_tiles, barriers, turns, BLOCK_N,
            STAGES, MINE,
        )  # fmt: skip
        of_prefix = index == own - whole
        start = gl.where(of_prefix, prefix // BLOCK_N, own - 1 - index) * BLOCK_N
        limit = gl.where(of_prefix, prefix, num_queries)
        clear_past(step + index, v_tiles, barriers, limit - start, HEAD_DIM, BLOCK_N, STAGES)
        scores = _masked(scores, gl.where(of_prefix, limit, queries), start, limit, BLOCK_N)
        weights, fade, totals, peak = _softmax_step(scores, totals, peak, scale_log2)
        acc = _finish_values(step + index - 1, acc, fade, barriers, STAGES)
        handed = _hand_on(weights, out_layout, query.dtype, HEAD_DIM)
    for index in range(masked, count):
        scores, acc = _next_scores(
            step + index, turn + index - 1, acc, handed, query, k_tiles, v_tiles, barriers, turns, BLOCK_N,
            STAGES, MINE,
        )  # fmt: skip
        weights, fade, totals, peak = _softmax_step(scores, totals, peak, scale_log2)
        acc = _finish_values(step + index - 1, acc, fade, barriers, STAGES)
        handed = _hand_on(weights, out_layout, query.dtype, HEAD_DIM)
    acc = _start_values(step + count - 1, acc, handed, v_tiles, barriers, STAGES)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(barriers.index(3 * STAGES + (step + count - 1) % STAGES))
    total = gl.convert_layout(gl.sum(totals, axis=1), row_layout)
    return acc, total, peak, count


@gluon.jit
def _places(pairs, first, stride_t, stride_h, GROUP: gl.constexpr):
    """Where these pairs of a tile lie, from the tile's first token and key head on, which fits 32 bits."""
    return ((first + pairs) // GROUP - first // GROUP) * stride_t + (first + pairs) % GROUP * stride_h


@gluon.jit
def _load_queries(
    q, pairs, columns, kv_head, token, num_queries, first, stride_t, stride_h, GROUP: gl.constexpr
):
    """The queries of these pairs of a tile; zero past the last one."""
    source = q + (token + first // GROUP).to(gl.int64) * stride_t + kv_head * GROUP * stride_h
    sources = _places(pairs, first, stride_t, stride_h, GROUP)[:, None] + columns[None, :]
    return gl.load(source + sources, mask=(first + pairs < num_queries * GROUP)[:, None], other=0)


@gluon.jit
def _compute(
    q, query_tiles, k_tiles, v_tiles, work, barriers, told, turns, out, scale_log2, stride_qt, stride_qh,
    stride_ot, stride_oh,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, MINE: gl.constexpr,
):  # fmt: skip
    """Four warps: the attention of 64 pairs of query and head of each of the program's tiles."""
    query = query_tiles.index(MINE)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    pairs = MINE * GROUP_QUERIES + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, wide))
    columns = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, wide))
    score_pairs = MINE * GROUP_QUERIES + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, score_layout))
    step = 0
    turn = 0
    number = 0
    kv_head, token, num_queries, first, prefix = _next_tile(number, work, told)
    asked = _load_queries(q, pairs, columns, kv_head, token, num_queries, first, stride_qt, stride_qh, GROUP)
    while kv_head >= 0:
        query.store(asked)
        fence_async_shared()
        gl.thread_barrier()
        own, whole, partial = _count_tiles(first, num_queries, prefix, GROUP, BLOCK_N)
        queries = gl.minimum((first + score_pairs) // GROUP, num_queries - 1)
        acc, total, _, count = attend_tiles(
            step, turn, queries, query, k_tiles, v_tiles, barriers, turns, num_queries, prefix, own, whole,
            partial, scale_log2, HEAD_DIM, BLOCK_N, STAGES, MINE,
        )  # fmt: skip
        step += count
        turn += count - 1
        target = out + (token + first // GROUP).to(gl.int64) * stride_ot + kv_head * GROUP * stride_oh
        targets = _places(pairs, first, stride_ot, stride_oh, GROUP)[:, None] + columns[None, :]
        keep = first + pairs < num_queries * GROUP
        # The next queries are on their way while this tile's answers are written.
        number += 1
        kv_head, token, num_queries, first, prefix = _next_tile(number, work, told)
        asked = _load_queries(
            q, pairs, columns, kv_head, token, num_queries, first, stride_qt, stride_qh, GROUP
        )
        acc = acc * gl.convert_layout(1 / total, gl.SliceLayout(1, acc.type.layout))[:, None]
        # The queries are done with: their place turns the result round for wide stores.
        query.store(acc.to(out.dtype.element_ty))
        gl.thread_barrier()
        gl.store(target + targets, query.load(wide), mask=keep[:, None])
        gl.thread_barrier()


@gluon.jit(
    do_not_specialize=["num_rows", "num_tiles", "num_kv_heads", "stride_table"],
    do_not_specialize_on_alignment=["page_table", "query_starts", "lengths", "taken"],
)
def _prefill_kernel(
    q,
    k_step,
    v_step,
    k_cache,
    v_cache,
    page_table,
    query_starts,
    lengths,
    taken,
    out,
    scale_log2,
    num_rows,
    num_tiles,
    num_kv_heads,
    stride_h,
    stride_qt,
    stride_qh,
    stride_table,
    stride_ot,
    stride_oh,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS_PER_SEARCH: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    k_tiles = gl.allocate_shared_memory(k_step.dtype, [STAGES, BLOCK_N, HEAD_DIM], k_step.layout)
    v_tiles = gl.allocate_shared_memory(k_step.dtype, [STAGES, BLOCK_N, HEAD_DIM], k_step.layout)
    query_tiles = gl.allocate_shared_memory(k_step.dtype, [GROUPS, GROUP_QUERIES, HEAD_DIM], k_step.layout)
    barriers, turns = make_barriers(STAGES)
    # The tiles that come next, as the feeding warp has told; it was told, and was taken in by all groups.
    work = gl.allocate_shared_memory(gl.int32, [WORK_SLOTS * WORK_FIELDS, 1], CELL_LAYOUT)
    told = gl.allocate_shared_memory(gl.int64, [2 * WORK_SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(WORK_SLOTS):
        mbarrier.init(told.index(slot), count=1)
        mbarrier.init(told.index(WORK_SLOTS + slot), count=GROUPS)

    feed = (
        k_step, v_step, k_cache, v_cache, k_tiles, v_tiles, work, barriers, told, page_table, query_starts,
        lengths, taken, num_rows, num_tiles, num_kv_heads, stride_h, stride_table,
    )  # fmt: skip
    compute = (
        q, query_tiles, k_tiles, v_tiles, work, barriers, told, turns, out, scale_log2, stride_qt, stride_qh,
        stride_ot, stride_oh,
    )  # fmt: skip
    feeding: gl.constexpr = (GROUP, HEAD_DIM, PAGE_SIZE, ROWS_PER_SEARCH, BLOCK_N, STAGES)
    first: gl.constexpr = (GROUP, HEAD_DIM, BLOCK_N, STAGES, 0)
    second: gl.constexpr = (GROUP, HEAD_DIM, BLOCK_N, STAGES, 1)
    # Registers of a thread: of 504 for three times four warps.
    gl.warp_specialize(
        [(_compute, compute + first), (_compute, compute + second), (_feed, feed + feeding)],
        [4, 1],
        [240, 24],
    )
