"""Paged attention of rows with one query each: every program streams the same number of keys.

The keys of all rows stand in one list of tiles, and each program takes an equal run of it, whatever rows
that cuts: no program is left over at the end, and none starts anew at each row. A row that lies in one run is
complete; of the others each run leaves a piece, and a second kernel puts those together. On Hopper GPUs
some processors are a quarter faster than others: there the last part of the list is cut into short runs, and
whoever is done takes the next of them. Where the list is cut depends on the rows' lengths alone.

Letters as in `attention/base.py`; nothing here waits for the device, and a launch depends on host numbers
only through upper bounds. On Hopper GPUs the kernel of `hopper_decode.py` takes the runs, where it knows the
layout. The kernels for windows and shared prefixes are in `triton_decode.py`, and, for other GPUs, those for
few rows.
"""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.kernels import triton_decode
from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.runs import RunPieces, Runs, RunShape
from tokenmill.kernels.sizes import ceil_div, next_power_of_2
from tokenmill.kernels.triton_attention import (
    LOG2_E,
    PagedRows,
    block_of,
    has_hopper_kernels,
    num_processors,
)
from tokenmill.kernels.triton_overlap import let_next_begin, overlap_options, wait_for_inputs

# Measured on an H200: four programs to a processor, each with two tiles on their way.
PROGRAMS_PER_PROCESSOR = 4
STAGES = 3
REGISTERS = 128
# Pairs of row and key head; with fewer, starting to stream takes most of the time. On Hopper GPUs starts are
# hidden, and all rows go by runs.
FEWEST_STREAMS = 96
MOST_QUERIES = 16  # of a key head: their answers must stay in registers
# Of all tiles, what the long runs have; the rest are short ones, at most so many for each program. There are
# none where a program has fewer tiles than these: to take a run costs time, too.
LONG_SHARE = 0.85
SHORT_RUNS = 2
FEWEST_TILES = 6
# Nor where there are fewer rows than this for each program: the last of them would be cut into very many
# pieces.
FEWEST_ROWS = 0.6
FEWEST_PIECES, MOST_PIECES = 8, 256  # of a row, that are read at once
JOINED_NUMBERS = 32  # of a head, by a program, where a row has more pieces than the fewest
NUMBERS_PER_WARP = 2048  # of pieces: more would not fit its registers
LISTED_AT_ONCE = 256  # tiles of a row
FEWEST_LISTED = 512  # runs: steps of few rows have one kernel, however many runs there are
ROWS_AT_ONCE = 1024
GOLDEN_SECTION = 0.618  # steps of this part of a circle spread evenly, however many there are


def choose_shape(q_RHD: torch.Tensor, rows: PagedRows, longest: int) -> RunShape | None:
    """The runs for so many rows, of at most `longest` keys each; None: other kernels decode them faster."""
    num_rows, num_heads, head_dim = q_RHD.shape
    num_kv_heads = rows.key_cache_NBKD.shape[2]
    if num_heads > MOST_QUERIES * num_kv_heads:
        return None
    for_hopper = _is_for_hopper(q_RHD, rows)
    if for_hopper:
        from tokenmill.kernels import hopper_decode

        tiling = hopper_decode.decode_tiling(head_dim)
        keys, programs = tiling.keys, tiling.programs
    elif num_rows * num_kv_heads >= FEWEST_STREAMS:
        keys, programs = triton_decode.tile_keys(head_dim, q_RHD.element_size()), PROGRAMS_PER_PROCESSOR
    else:
        return None
    at_once = max(1, programs * num_processors(q_RHD.device) // num_kv_heads)
    # More than tiles would begin early, to find none, and take room from the kernels before.
    num_programs = min(at_once, num_rows * ceil_div(longest, keys))
    short_runs = SHORT_RUNS if for_hopper and num_rows >= FEWEST_ROWS * at_once else 0
    return RunShape(keys, num_programs, num_programs * (1 + short_runs), for_hopper)


def _is_for_hopper(q_RHD: torch.Tensor, rows: PagedRows) -> bool:
    if not has_hopper_kernels(q_RHD.device):
        return False
    from tokenmill.kernels import hopper_decode

    return hopper_decode.can_take(q_RHD, rows)


def plan_runs(lengths_R: torch.Tensor, shape: RunShape, *, longest: int) -> Runs:
    """What `decode` needs to know of rows of these lengths (int32, at least 1; `longest` is a bound)."""
    tile_keys, num_runs = shape.tile_keys, shape.num_runs
    num_rows, device = lengths_R.shape[0], lengths_R.device
    tiles_3N = torch.empty((3, num_rows * ceil_div(longest, tile_keys)), dtype=torch.int32, device=device)
    num_joins = min(num_rows, num_runs)
    # Most rows need no joining, and nobody has taken a run. While kernels are compiled, the one that fills
    # the cuts may be skipped: then there are no tiles.
    zeros = torch.zeros(num_runs + 1 + 3 * num_joins + 1, dtype=torch.int32, device=device)
    cuts_P, joins_J, taken_1 = zeros.split((num_runs + 1, 3 * num_joins, 1))
    _list_kernel[(num_rows,)](
        lengths_R,
        tiles_3N,
        cuts_P,
        joins_J,
        tiles_3N.shape[1],
        num_joins,
        num_rows,
        _stride(num_rows),
        shape.num_programs,
        num_runs,
        LONG_SHARE=int(1024 * LONG_SHARE) if shape.has_short else 1024,
        FEWEST_TILES=FEWEST_TILES,
        BLOCK_N=tile_keys,
        BLOCK_RUNS=max(FEWEST_LISTED, next_power_of_2(num_runs + 1)),
        ROWS_AT_ONCE=ROWS_AT_ONCE,
        LISTED_AT_ONCE=LISTED_AT_ONCE,
        num_warps=4,
        **overlap_options(device),
    )
    return Runs(shape, tiles_3N, cuts_P, joins_J.view(3, num_joins), taken_1)


def _stride(num_rows: int) -> int:
    """The distance between rows that are listed one after the other, so that all are, and neighbours are not.

    A row that ends costs a run more than its tiles do, and rows alike stand together: those that fill a graph
    up have one key each.
    """
    steps = range(max(1, round(GOLDEN_SECTION * num_rows)), num_rows)
    return next((step for step in steps if math.gcd(step, num_rows) == 1), 1)


def decode(
    q_RHD: torch.Tensor,
    rows: PagedRows,
    runs: Runs,
    *,
    scale: float,
    out_RHD: torch.Tensor,
    are_new: bool = True,
) -> None:
    """Attention of one query per row, its last token, over all its keys, written to `out_RHD`.

    `runs` are those of the rows' lengths, in the shape that was chosen. Only if another launch has used them
    before, and waited for all that was launched before it, they need not be `are_new`.
    """
    num_heads, num_kv_heads = q_RHD.shape[1], rows.key_cache_NBKD.shape[2]
    num_runs = runs.shape.num_runs
    shape = (num_kv_heads, num_runs, 2, block_of(num_heads // num_kv_heads))
    pieces = RunPieces(
        torch.empty((*shape, q_RHD.shape[2]), dtype=torch.float32, device=q_RHD.device),
        torch.empty(shape, dtype=torch.float32, device=q_RHD.device),
    )
    if runs.shape.for_hopper:
        from tokenmill.kernels import hopper_decode

        hopper_decode.attend(q_RHD, rows, runs, scale=scale, are_new=are_new, pieces=pieces, out_RHD=out_RHD)
    else:
        _attend(q_RHD, rows, runs, scale=scale, pieces=pieces, out_RHD=out_RHD)
    num_rows, _, head_dim = q_RHD.shape
    tiling = join_tiling(runs.shape, num_rows, head_dim)
    launch(
        _join_kernel,
        (num_heads, runs.joins_3J.shape[1], block_of(head_dim) // tiling.numbers),
        pieces.parts_KP2GD,
        pieces.logs_KP2G,
        runs.cuts_P,
        runs.joins_3J,
        runs.taken_1,
        out_RHD,
        num_runs,
        out_RHD.stride(0),
        out_RHD.stride(1),
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_G=shape[3],
        BLOCK_DIM=tiling.numbers,
        PIECES=tiling.pieces,
        num_warps=tiling.warps,
        **overlap_options(q_RHD.device),
    )


@dataclass(frozen=True, slots=True)
class JoinTiling:
    """How pieces of a row are put together: so many at a time, and so many numbers of a head by a program."""

    pieces: int
    numbers: int
    warps: int


def join_tiling(shape: RunShape, num_rows: int, head_dim: int) -> JoinTiling:
    """All pieces of a row at once, if rows are alike and pieces not too many: to read others after them takes
    a microsecond."""
    block_dim = block_of(head_dim)
    pieces = min(MOST_PIECES, max(FEWEST_PIECES, next_power_of_2(shape.num_programs // num_rows + 2)))
    if pieces == FEWEST_PIECES:
        return JoinTiling(pieces, block_dim, warps=1)
    numbers = min(JOINED_NUMBERS, block_dim)
    return JoinTiling(pieces, numbers, warps=max(1, pieces * numbers // NUMBERS_PER_WARP))


def _attend(
    q_RHD: torch.Tensor,
    rows: PagedRows,
    runs: Runs,
    *,
    scale: float,
    pieces: RunPieces,
    out_RHD: torch.Tensor,
) -> None:
    """Write the answers of rows that lie in one run, and leave the pieces of the others."""
    num_kv_heads = rows.key_cache_NBKD.shape[2]
    launch(
        _balanced_kernel,
        (num_kv_heads, runs.shape.num_programs),
        q_RHD,
        rows.key_cache_NBKD,
        rows.value_cache_NBKD,
        rows.page_table_RP,
        runs.tiles_3N,
        runs.cuts_P,
        out_RHD,
        pieces.parts_KP2GD,
        pieces.logs_KP2G,
        scale * LOG2_E,
        runs.tiles_3N.shape[1],
        q_RHD.stride(0),
        q_RHD.stride(1),
        *rows.key_cache_NBKD.stride()[:3],
        rows.page_table_RP.stride(0),
        out_RHD.stride(0),
        out_RHD.stride(1),
        **_constants(q_RHD, num_kv_heads),
        BLOCK_N=runs.shape.tile_keys,
        PAGE_SIZE=rows.key_cache_NBKD.shape[1],
        STAGES=STAGES,
        num_warps=4,
        maxnreg=REGISTERS,
        **overlap_options(q_RHD.device),
    )


def _constants(q_RHD: torch.Tensor, num_kv_heads: int) -> dict[str, int]:
    _, num_heads, head_dim = q_RHD.shape
    group = num_heads // num_kv_heads
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_G": block_of(group),
        "BLOCK_DIM": block_of(head_dim),
    }


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _first_tile(
    runs, num_tiles, num_programs, num_runs, LONG_SHARE: tl.constexpr, FEWEST_TILES: tl.constexpr
):
    """Of each run; those that are left over, and what comes behind all runs, begin behind the last tile.
    `num_tiles` is int64.

    Few tiles are in no more runs than it takes for none to be longer: each leaves a piece.
    """
    are_few = num_tiles < FEWEST_TILES * num_programs
    in_long = tl.where(are_few, num_tiles, num_tiles * LONG_SHARE // 1024)
    num_long = tl.where(are_few, tl.cdiv(num_tiles, tl.cdiv(num_tiles, num_programs)), num_programs)
    rest = num_tiles - in_long
    num_short = tl.maximum(1, tl.minimum(num_runs - num_programs, rest))
    short = tl.minimum(runs - num_programs, num_short)
    long = tl.minimum(runs, num_long)
    first = tl.where(runs < num_programs, in_long * long // num_long, in_long + rest * short // num_short)
    return first.to(tl.int32)


@triton.jit(
    do_not_specialize=["num_joins", "num_rows", "stride_tile", "stride_row", "num_programs", "num_runs"],
    do_not_specialize_on_alignment=["lengths", "cuts", "joins"],
)
def _list_kernel(
    lengths,
    tiles,
    cuts,
    joins,
    stride_tile,
    num_joins,
    num_rows,
    stride_row,
    num_programs,
    num_runs,
    LONG_SHARE: tl.constexpr,
    FEWEST_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    LISTED_AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row: its tiles, behind those of all rows that are listed before it, and the runs that begin in it.

    The lengths of long runs differ by one tile at most, and so do those of short ones.
    """
    let_next_begin(OVERLAP)
    wait_for_inputs(OVERLAP)
    rank = tl.program_id(0)
    first = tl.zeros([], tl.int32)
    num_tiles = tl.zeros([], tl.int64)
    for begin in range(0, num_rows, ROWS_AT_ONCE):
        ranks = begin + tl.arange(0, ROWS_AT_ONCE)
        others = lengths + ranks * stride_row % num_rows
        numbers = tl.cdiv(tl.load(others, mask=ranks < num_rows, other=0), BLOCK_N)
        first += tl.sum(tl.where(ranks < rank, numbers, 0), axis=0)
        num_tiles += tl.sum(numbers, axis=0)
    row = rank * stride_row % num_rows
    length = tl.load(lengths + row)
    number = tl.cdiv(length, BLOCK_N)
    for begin in range(0, number, LISTED_AT_ONCE):
        listed = begin + tl.arange(0, LISTED_AT_ONCE)
        keep = listed < number
        nothing = tl.zeros((LISTED_AT_ONCE,), tl.int32)
        target = tiles + first + listed
        tl.store(target, row + nothing, mask=keep)
        tl.store(target + stride_tile, listed * BLOCK_N, mask=keep)
        tl.store(target + 2 * stride_tile, length + nothing, mask=keep)

    runs = tl.arange(0, BLOCK_RUNS)
    begins = _first_tile(runs, num_tiles, num_programs, num_runs, LONG_SHARE, FEWEST_TILES)
    after = first + number
    is_last = rank == num_rows - 1
    keep = (runs <= num_runs) & (begins >= first) & ((begins < after) | is_last)
    tl.store(cuts + runs, begins, mask=keep)
    # The last of the runs that begin so early: those before it may be empty.
    opening = tl.sum((begins <= first).to(tl.int32), axis=0) - 1
    closing = tl.sum((begins < after).to(tl.int32), axis=0) - 1
    if opening < closing:
        # By row, if rows are fewer than runs. Only one row can end in a run and begin in another one.
        slot = tl.where(num_joins == num_rows, rank, closing)
        tl.store(joins + slot, row)
        tl.store(joins + num_joins + slot, opening)
        tl.store(joins + 2 * num_joins + slot, closing)


@triton.jit(do_not_specialize=["stride_tile", "stride_table"], do_not_specialize_on_alignment=["page_table"])
def _balanced_kernel(
    q,
    key_cache,
    value_cache,
    page_table,
    tiles,
    cuts,
    out,
    parts,
    logs,
    scale_log2,
    stride_tile,
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
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    let_next_begin(OVERLAP)  # not before: the next kernel reads the cuts at once
    run = tl.program_id(1)
    begin = tl.load(cuts + run)
    end = tl.load(cuts + run + 1)
    members = tl.arange(0, BLOCK_G)
    columns = tl.arange(0, BLOCK_DIM)
    heads = tl.program_id(0) * GROUP + members
    keep_q = (members < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    query_offsets = heads[:, None] * stride_qh + columns[None, :]
    head_offset = tl.program_id(0).to(tl.int64) * stride_head
    acc = tl.zeros((BLOCK_G, BLOCK_DIM), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    peak = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        row = tl.load(tiles + tile).to(tl.int64)
        start = tl.load(tiles + stride_tile + tile)
        length = tl.load(tiles + 2 * stride_tile + tile)
        positions = start + tl.arange(0, BLOCK_N)
        keep = positions < length
        pages = tl.load(page_table + row * stride_table + positions // PAGE_SIZE, mask=keep, other=0)
        offsets = pages.to(tl.int64) * stride_page + (positions % PAGE_SIZE) * stride_token + head_offset
        keep_n = keep[:, None] & (columns < HEAD_DIM)[None, :]
        k = tl.load(key_cache + offsets[:, None] + columns[None, :], mask=keep_n, other=0)
        query = tl.load(q + row * stride_qt + query_offsets, mask=keep_q, other=0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(keep[None, :], scores, float("-inf"))
        # A row that begins forgets the one before, whose numbers need not be finite.
        fresh = (start == 0) | (tile == begin)
        peak = tl.where(fresh, float("-inf"), peak)
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = tl.where(fresh, 0.0, total * fade) + tl.sum(weights, axis=1)
        v = tl.load(value_cache + offsets[:, None] + columns[None, :], mask=keep_n, other=0)
        faded = tl.where(fresh, 0.0, acc * fade[:, None])
        acc = tl.dot(weights.to(v.dtype), v, faded, input_precision="ieee")
        peak = new_peak
        ends = start + BLOCK_N >= length
        if ends | (tile + 1 == end):
            begins = tile - start // BLOCK_N >= begin
            answer = acc / total[:, None]
            if begins & ends:
                target = out + row * stride_ot + heads[:, None] * stride_oh + columns[None, :]
                tl.store(target, answer.to(out.dtype.element_ty), mask=keep_q)
            else:
                piece = (tl.program_id(0) * tl.num_programs(1) + run) * 2 + begins.to(tl.int32)
                places = piece * BLOCK_G + members
                tl.store(parts + places[:, None] * HEAD_DIM + columns[None, :], answer, mask=keep_q)
                tl.store(logs + places, peak + tl.log2(total))


@triton.jit(do_not_specialize=["num_runs"], do_not_specialize_on_alignment=["cuts", "joins", "taken"])
def _join_kernel(
    parts,
    logs,
    cuts,
    joins,
    taken,
    out,
    num_runs,
    stride_ot,
    stride_oh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some numbers of a head of a row that lies in several runs, if it is one.

    The next launch may take all runs again.
    """
    let_next_begin(OVERLAP)
    head = tl.program_id(0)
    join = joins + tl.program_id(1)
    num_joins = tl.num_programs(1)
    row = tl.load(join)
    opening = tl.load(join + num_joins)
    closing = tl.load(join + 2 * num_joins)
    wait_for_inputs(OVERLAP)
    if (head == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(taken, 0)
    if opening == closing:
        return
    columns = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    acc = tl.zeros((BLOCK_DIM,), tl.float32)
    total = 0.0
    peak = float("-inf")
    for some in range(opening, closing + 1, PIECES):
        runs = some + tl.arange(0, PIECES)
        keep = runs <= closing
        place = (head // GROUP * num_runs + runs) * 2 + (runs == opening).to(tl.int32)
        place = place * BLOCK_G + head % GROUP
        log = tl.load(logs + place, mask=keep, other=float("-inf"))
        keep_p = keep[:, None] & (columns < HEAD_DIM)[None, :]
        part = tl.load(parts + place[:, None] * HEAD_DIM + columns[None, :], mask=keep_p, other=0)
        # Where tiles are fewer than runs, some runs have none, and left nothing.
        begin = tl.load(cuts + runs, mask=keep, other=0)
        filled = begin < tl.load(cuts + runs + 1, mask=keep, other=0)
        log = tl.where(filled, log, float("-inf"))
        part = tl.where(filled[:, None], part, 0.0)
        new_peak = tl.maximum(peak, tl.max(log, axis=0))
        fade = tl.exp2(peak - new_peak)
        weights = tl.exp2(log - new_peak)
        total = total * fade + tl.sum(weights, axis=0)
        acc = acc * fade + tl.sum(part * weights[:, None], axis=0)
        peak = new_peak
    target = out + row.to(tl.int64) * stride_ot + head * stride_oh + columns
    tl.store(target, (acc / total).to(out.dtype.element_ty), mask=columns < HEAD_DIM)
