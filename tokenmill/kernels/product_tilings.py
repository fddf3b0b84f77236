"""How the products of `hopper_linear.py` are cut into tiles, and which are left to cuBLAS.

All numbers are measured, in decode steps of public models of 0.5 to 14 billion parameters on an H100 or H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from tokenmill.kernels.sizes import ceil_div, next_power_of_2

# So few rows wait for their weights, whatever the size of these, and weights are the left factor: tensor
# cores take 64 numbers of it at a time, but as few as eight of the right one. A few more rows do so if the
# weight is large.
VERY_FEW_ROWS, FEW_ROWS = 32, 64
LEAST_ROWS = 16  # of a tile; narrower ones are hardly faster, and more kernels to compile
# Of more rows and more weights the memory decides, and cuBLAS is as fast; with a gated product it would have
# the activation behind it.
MOST_WEIGHT_BYTES = 24_000_000
MOST_GATED_BYTES = 110_000_000
# With more weights yet, the rows are read too often to be worth it, unless a tile is wide: so wide that all
# tiles are computed at once, on nearly all processors. In between, the activation still decides.
WIDE_OUTPUTS = 256
LEAST_BUSY = 0.7
# Programs for each processor: with more, the kernel that follows finds no room to read ahead.
MOST_BUSY = 0.86
# Up to 64 rows some programs that read ahead are enough. With more rows all processors are to have work.
ENOUGH_BUSY = 0.36
MOST_PIECES = 4
# Of very few rows: up to so many inputs pieces gain nothing, beyond the latter programs leave no room for
# others, and with more programs for each processor than this two pieces are better than four.
SHORT_SUM, LONG_SUM = 1024, 4096
MOST_BUSY_IN_FOUR = 0.5
# Of more rows: pieces gain nothing up to so many inputs, and narrow tiles, by which the rows are read twice
# as often, with more programs for each processor.
SHORT_SUM_OF_MORE = 2048
MOST_BUSY_NARROW = 0.55
# Of a sum that may not come in pieces: what would be worth a tile on each processor; shorter ones, on fewer.
LONGEST_WHOLE_SUM = 8192
# And of 17 to 32 rows, programs for each processor that are too few for more than SHORT_SUM inputs.
TOO_FEW_FOR_WHOLE_SUMS = 0.15
# Gated programs for each processor, of which some run beside another: with up to 16 rows, and with more.
MOST_SIDE_BY_SIDE_OF_FEW, MOST_SIDE_BY_SIDE = 1.1, 1.2
TILE_BYTES = 196_608  # shared memory of a program for its tiles
MOST_STAGES = 8
# Of a program that leaves room for another one beside it.
HALF_TILE_BYTES = 110_592
HALF_REGISTERS = 128


@dataclass(frozen=True, slots=True)
class ProductTiling:
    """The work of a program: a tile of `rows` and `outputs` (if gated, half of them of each half of the
    weight), so many `inputs` at a time, of which `stages` are under way. `pieces` programs share a tile.

    `more` outputs are a second, narrower tile beside the first: widths are powers of two, and where one makes
    too many programs to be computed at once, the next would leave too many processors idle.
    With `weights_left` weights are the left factor; such a tile may have fewer than 64 rows, and has none
    beside it. `registers` is what each thread may have at most, for another program to run beside this one.
    """

    rows: int
    outputs: int
    inputs: int
    stages: int
    pieces: int = 1
    more: int = 0
    weights_left: bool = False
    registers: int | None = None

    @property
    def width(self) -> int:
        return self.outputs + self.more

    @property
    def is_fed(self) -> bool:
        """Whether a warp of its own copies tiles. A small tile that is not gated gains without one: it is set
        up sooner, and most of its copies are under way from the start."""
        return self.weights_left or self.rows > 64

    @property
    def num_warps(self) -> int:
        """Those that multiply."""
        return 4 if self.weights_left else self.rows // 16


@cache
def choose_tiling(
    num_rows: int, size: int, num_outputs: int, *, gated: bool, may_split: bool, processors: int
) -> ProductTiling | None:
    """The tiling for [num_rows, size] times a weight of so many outputs (of each half, if gated).

    None: cuBLAS is as fast. Only with `may_split` there may be several pieces.
    """
    num_bytes = (4 if gated else 2) * size * num_outputs
    is_large = num_bytes > (MOST_GATED_BYTES if gated else MOST_WEIGHT_BYTES)
    if num_rows <= (FEW_ROWS if is_large else VERY_FEW_ROWS):
        if gated:
            return _gated_tiling_of_few(num_rows, size, num_outputs, processors)
        return _tiling_of_few(num_rows, size, num_outputs, processors, may_split=may_split)
    if is_large:
        return _wide_gated_tiling(num_rows, num_outputs, processors) if gated else None
    if gated:
        return _gated_tiling(num_rows, num_outputs, processors)
    return _tiling(num_rows, size, num_outputs, processors, may_split=may_split)


@cache
def choose_heads_tiling(
    num_rows: int, size: int, num_outputs: int, *, head_dim: int, are_whole: bool, processors: int
) -> ProductTiling | None:
    """The tiling for a product whose tiles end as parts of heads (`are_whole`: as whole ones).

    None: another kernel rotates them, behind the product that `choose_tiling` is asked for.
    """
    if num_rows <= VERY_FEW_ROWS or 2 * size * num_outputs > MOST_WEIGHT_BYTES:
        return None
    turns = ceil_div(num_rows, 64)
    outputs, inputs = (head_dim, 64) if are_whole else (64, 128)
    if not are_whole and turns * ceil_div(num_outputs, 32) <= MOST_BUSY_NARROW * processors:
        outputs = 32
    if turns * ceil_div(num_outputs, outputs) > processors:
        return None
    return _of_tiles(64, outputs, inputs)


@cache
def choose_sum_tiling(num_rows: int, size: int, num_outputs: int, *, processors: int) -> ProductTiling | None:
    """The tiling, in one piece, for a product that is added to a residual, of which the product behind it
    takes the norm.

    None: the norm is a kernel of its own, and adds up pieces of the product.
    """
    tiling = choose_tiling(num_rows, size, num_outputs, gated=False, may_split=True, processors=processors)
    if tiling is None or tiling.pieces == 1:
        return tiling
    busy = ceil_div(num_outputs, tiling.outputs) / processors
    are_too_few = tiling.weights_left and tiling.rows > LEAST_ROWS and busy < TOO_FEW_FOR_WHOLE_SUMS
    if size <= (SHORT_SUM if are_too_few else SHORT_SUM_OF_MORE):
        return replace(tiling, pieces=1)
    narrow = ceil_div(num_rows, 64) * ceil_div(num_outputs, 32) / processors
    if num_rows > FEW_ROWS and size / LONGEST_WHOLE_SUM <= narrow <= MOST_BUSY:
        return _of_tiles(64, 32, 128)
    return None


# ── few rows: weights are the left factor ─────────────────────────────────────────────────────


def _gated_tiling_of_few(num_rows: int, size: int, num_outputs: int, processors: int) -> ProductTiling:
    """Where all programs run at once, kernels before and behind are to find room beside them. Where there are
    a few more, these are not to take a turn of their own."""
    most = MOST_SIDE_BY_SIDE if num_rows > LEAST_ROWS else MOST_SIDE_BY_SIDE_OF_FEW
    is_half = num_rows <= VERY_FEW_ROWS and ceil_div(num_outputs, 64) <= most * processors
    inputs = 64 if is_half and (size <= SHORT_SUM or num_rows > LEAST_ROWS) else 128
    return _with_weights_left(num_rows, 128, inputs, is_half=is_half)


def _tiling_of_few(
    num_rows: int, size: int, num_outputs: int, processors: int, *, may_split: bool
) -> ProductTiling:
    """Where a short sum may be left in pieces programs are few, and others are to find room there, too. Where
    programs take turns, as those of logits do, one of two side by side begins while the other one stores."""
    programs = ceil_div(num_outputs, 64)
    pieces = 1
    if may_split and size > SHORT_SUM:
        busy = programs / processors
        most_of_four = MOST_BUSY if num_rows > VERY_FEW_ROWS else MOST_BUSY_IN_FOUR
        pieces = 4 if 4 * busy <= most_of_four else 2 if 2 * busy <= 1 else 1
    is_half = size <= LONG_SUM and num_rows <= VERY_FEW_ROWS if may_split else programs > processors
    return _with_weights_left(num_rows, 64, 128, is_half=is_half, pieces=pieces)


def _with_weights_left(
    num_rows: int, outputs: int, inputs: int, *, is_half: bool, pieces: int = 1
) -> ProductTiling:
    rows = max(LEAST_ROWS, next_power_of_2(num_rows))
    return ProductTiling(
        rows,
        outputs,
        inputs,
        _stages(rows, outputs, inputs, HALF_TILE_BYTES if is_half else TILE_BYTES),
        pieces,
        weights_left=True,
        registers=HALF_REGISTERS if is_half else None,
    )


# ── more rows: they are the left factor ───────────────────────────────────────────────────────


def _tiling(
    num_rows: int, size: int, num_outputs: int, processors: int, *, may_split: bool
) -> ProductTiling | None:
    turns = ceil_div(num_rows, 64) / processors
    narrow, wide = turns * ceil_div(num_outputs, 32), turns * ceil_div(num_outputs, 64)
    may_split = may_split and size > SHORT_SUM_OF_MORE
    # Of few rows as much of the weights as possible is to be on its way before their turn comes.
    if may_split and num_rows <= FEW_ROWS and MOST_PIECES * narrow <= MOST_BUSY:
        return _of_tiles(64, 32, 128, pieces=MOST_PIECES)
    if not may_split and narrow <= MOST_BUSY_NARROW:
        return _of_tiles(64, 32, 128)
    if wide <= MOST_BUSY:
        pieces = _choose_pieces(num_rows, wide) if may_split else 1
        return _of_tiles(64, 64, 128, pieces=pieces)
    if num_rows > FEW_ROWS and ceil_div(num_rows, 128) * ceil_div(num_outputs, 64) <= processors:
        return _of_tiles(128, 64, 64)
    return None


def _choose_pieces(num_rows: int, busy: float) -> int:
    """How many programs share a tile, of which there are enough for this share of the processors."""
    enough = ENOUGH_BUSY if num_rows <= FEW_ROWS else MOST_BUSY / 2
    pieces = 1
    while pieces < MOST_PIECES and busy * pieces < enough and 2 * busy * pieces <= MOST_BUSY:
        pieces *= 2
    return pieces


def _gated_tiling(num_rows: int, num_outputs: int, processors: int) -> ProductTiling | None:
    rows = 64 if num_rows <= FEW_ROWS else 128
    for outputs, more, most in (
        (64, 0, MOST_BUSY * processors),
        (128, 0, processors),
        (128, 32, processors),
    ):
        if ceil_div(num_rows, rows) * ceil_div(num_outputs, (outputs + more) // 2) <= most:
            return _of_tiles(rows, outputs, 64, more=more)
    return _of_tiles(rows, 128, 64) if rows == 64 else None


def _wide_gated_tiling(num_rows: int, num_outputs: int, processors: int) -> ProductTiling | None:
    busy = ceil_div(num_outputs, WIDE_OUTPUTS // 2) / processors
    if num_rows <= 128 and LEAST_BUSY <= busy <= 1:
        return _of_tiles(128, WIDE_OUTPUTS, 64)
    return None


def _of_tiles(rows: int, outputs: int, inputs: int, *, pieces: int = 1, more: int = 0) -> ProductTiling:
    """With as many stages as there is room for."""
    return ProductTiling(rows, outputs, inputs, _stages(rows, outputs + more, inputs), pieces, more)


def _stages(rows: int, outputs: int, inputs: int, most_bytes: int = TILE_BYTES) -> int:
    return min(MOST_STAGES, most_bytes // (2 * inputs * (rows + outputs)))
