"""Gated products of many rows on Hopper GPUs, with the activation: prompts, and decode steps of many rows.

Alone, cuBLAS multiplies as fast. But it writes both halves of the product, and a kernel reads them again,
which is four times what the layer gets: that takes 6 % of the product's time with 5,120 inputs, a third with
896. Here a tile has as many outputs of the gate as of what it gates, and one is stored for each pair.
`linear.py` is the reference. This is Gluon (see `hopper_prefill.py`).
Letters: N rows, I inputs, F outputs (the weight has O = 2F).
"""

# Gluon rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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

from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.hopper_linear import activated, can_take, copy_weights, tiles, tiles_of_rows
from tokenmill.kernels.sizes import ceil_div
from tokenmill.kernels.spare_rows import empty_rows
from tokenmill.kernels.triton_attention import num_processors
from tokenmill.kernels.triton_overlap import let_next_begin, overlap_options, wait_for_inputs

BLOCK_ROWS = 128
BLOCK_INPUTS = 64
# Tiles of so many blocks of rows lie side by side before the next outputs, so that processors share what
# they read.
GROUP_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class GatedTiling:
    """A tile has so many outputs; of its factors `stages` tiles are under way or in use."""

    outputs: int
    stages: int


WIDE, NARROW = GatedTiling(128, 4), GatedTiling(64, 6)
TILINGS = (WIDE, NARROW)
# Fitted to what was measured on an H200 with the shapes of eight public models, 192 to 4,096 rows: what a
# narrow tile takes of the time of a wide one, and the inputs whose products take as long as what is gained.
NARROW_SECONDS = 0.52
ACTIVATION_INPUTS = 450
# The share of the time in which processors have work, times that gain, from which tiles are taken: cuBLAS is
# up to a third slower with some numbers of rows than with their neighbours, so no rule fits all.
ENOUGH_BUSY = 0.94
# Fewer rows take as long as the weights, or have tiles in `hopper_linear.py`. From here to two blocks cuBLAS
# takes nearly as long as for two blocks, and tiles are quicker if all are computed at once.
LEAST_ROWS = 192


@cache
def choose_tiling(num_rows: int, size: int, num_outputs: int, processors: int) -> GatedTiling | None:
    """The tiling for [num_rows, size] times a weight of twice so many outputs. None: cuBLAS is as fast."""
    if num_rows < LEAST_ROWS:
        return None
    blocks = ceil_div(num_rows, BLOCK_ROWS)
    wide, narrow = (ceil_div(blocks * ceil_div(num_outputs, each.outputs), processors) for each in TILINGS)
    tiling, turns = (WIDE, wide) if wide <= NARROW_SECONDS * narrow else (NARROW, narrow)
    if num_rows < 2 * BLOCK_ROWS and turns > 1:
        return None
    counted = max(num_rows, 2 * BLOCK_ROWS)
    busy = counted * num_outputs / (turns * processors * BLOCK_ROWS * tiling.outputs)
    return tiling if busy * (1 + ACTIVATION_INPUTS / size) >= ENOUGH_BUSY else None


def product(x_NI: torch.Tensor, weight_OI: torch.Tensor, tiling: GatedTiling) -> torch.Tensor:
    """`linear.linear`, gated and without bias, of what `can_take_gated` allows."""
    num_rows, size = x_NI.shape
    num_outputs = len(weight_OI) // 2
    out_NF = empty_rows(num_rows, num_outputs, dtype=x_NI.dtype, device=x_NI.device)
    blocks, columns = ceil_div(num_rows, BLOCK_ROWS), ceil_div(num_outputs, tiling.outputs)
    launch(
        _gated_kernel,
        (min(blocks * columns, num_processors(x_NI.device)),),
        tiles_of_rows(x_NI, [BLOCK_ROWS, BLOCK_INPUTS]),
        tiles(weight_OI, [tiling.outputs, BLOCK_INPUTS]),
        tiles(out_NF, [BLOCK_ROWS, tiling.outputs]),
        blocks,
        columns,
        num_outputs,
        ceil_div(size, BLOCK_INPUTS),
        BLOCK_M=BLOCK_ROWS,
        BLOCK_F=tiling.outputs,
        BLOCK_K=BLOCK_INPUTS,
        STAGES=tiling.stages,
        GROUP=GROUP_BLOCKS,
        num_warps=BLOCK_ROWS // 16,
        **overlap_options(x_NI.device),
    )
    return out_NF


def can_take_gated(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether `product` knows these numbers and layouts, and those of what it would put out."""
    return can_take(x_NI, weight_OI) and len(weight_OI) % 16 == 0


def compile_tilings(dtype: torch.dtype, device: torch.device) -> None:
    """Launch the kernel by each tiling, on zeros: which one a step chooses depends on its rows."""
    for tiling in TILINGS:
        x_NI = torch.zeros((1, BLOCK_INPUTS), dtype=dtype, device=device)
        weight_OI = torch.zeros((2 * tiling.outputs, BLOCK_INPUTS), dtype=dtype, device=device)
        if can_take_gated(x_NI, weight_OI):
            product(x_NI, weight_OI, tiling)


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


@gluon.jit
def _place(tile, blocks, columns, GROUP: gl.constexpr):
    """(block of rows, column of outputs) of a tile."""
    first = tile // (GROUP * columns) * GROUP
    within = tile % (GROUP * columns)
    height = gl.minimum(GROUP, blocks - first)
    return first + within % height, within // height


@gluon.jit
def _feed(
    x, weight, x_tiles, w_tiles, full, empty, blocks, columns, num_outputs, steps, BLOCK_M: gl.constexpr,
    BLOCK_F: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """One warp: copy the factors of all tiles of the program."""
    wait_for_inputs(OVERLAP)
    count = 0
    for tile in range(gl.program_id(0), blocks * columns, gl.num_programs(0)):
        block, column = _place(tile, blocks, columns, GROUP)
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), count // STAGES % 2 ^ 1)
            mbarrier.expect(full.index(slot), 2 * BLOCK_K * (BLOCK_M + 2 * BLOCK_F))
            start = step * BLOCK_K
            tma.async_copy_global_to_shared(
                x, [block * BLOCK_M, start], full.index(slot), x_tiles.index(slot)
            )
            copy_weights(
                weight, w_tiles, full.index(slot), slot, column * BLOCK_F, num_outputs, start, True,
                2 * BLOCK_F, BLOCK_K, STAGES,
            )  # fmt: skip
            count += 1


@gluon.jit
def _multiply(
    x_tiles, w_tiles, out_tile, full, empty, out, blocks, columns, steps, BLOCK_M: gl.constexpr,
    BLOCK_F: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The other warps: the outputs of all tiles of the program, stored while the next ones are computed."""
    wait_for_inputs(OVERLAP)  # what is written may still be read by a kernel before
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * BLOCK_F, 16])
    count = 0
    for tile in range(gl.program_id(0), blocks * columns, gl.num_programs(0)):
        block, column = _place(tile, blocks, columns, GROUP)
        acc = gl.zeros([BLOCK_M, 2 * BLOCK_F], gl.float32, layout)
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), count // STAGES % 2)
            acc = warpgroup_mma(x_tiles.index(slot), w_tiles.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])
            # The products of the step before are done, and its tiles may be overwritten.
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
            count += 1
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
        gate, up = acc.reshape([BLOCK_M, 2, BLOCK_F]).permute((0, 2, 1)).split()
        result = activated(gate, up, out.dtype)
        tma.store_wait(0)
        gl.thread_barrier()
        out_tile.store(result)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, [block * BLOCK_M, column * BLOCK_F], out_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["blocks", "columns", "num_outputs", "steps"])
def _gated_kernel(
    x,
    weight,
    out,
    blocks,
    columns,
    num_outputs,
    steps,
    BLOCK_M: gl.constexpr,
    BLOCK_F: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    let_next_begin(OVERLAP)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    w_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * BLOCK_F, BLOCK_K], x.layout)
    out_tile = gl.allocate_shared_memory(x.dtype, [BLOCK_M, BLOCK_F], out.layout)
    # Tiles are there, tiles are done with; one of each for each stage.
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    feed = (x, weight, x_tiles, w_tiles, full, empty, blocks, columns, num_outputs, steps)
    multiply = (x_tiles, w_tiles, out_tile, full, empty, out, blocks, columns, steps)
    feeding: gl.constexpr = (BLOCK_M, BLOCK_F, BLOCK_K, STAGES, GROUP, OVERLAP)
    multiplying: gl.constexpr = (BLOCK_M, BLOCK_F, STAGES, GROUP, OVERLAP)
    gl.warp_specialize([(_multiply, multiply + multiplying), (_feed, feed + feeding)], [1], [24])
