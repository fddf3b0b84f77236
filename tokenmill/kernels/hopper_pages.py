"""Pages of the cache as tiles in the shared memory of Hopper GPUs: copies of sixteen tokens at a time.

The kernels that read them are in `hopper_prefill.py`, `hopper_decode.py` and `hopper_shared.py`. This is
Gluon, the layer under Triton's own language: who waits for what is written out, and there is no interpreter
for it.

A program has a ring of S stages for keys and one for values, and 4 S barriers: keys are there, values are
there, keys are done with, values are done with. Others may follow.
"""

# Gluon rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.kernels.triton_attention import COPY_ALIGNMENT

PAGE_TOKENS = gl.constexpr(16)  # tokens of a page copied at once
PANEL = gl.constexpr(64)  # numbers of 128 bytes: a tile in shared memory is made of columns of this width
# Tiles lie in shared memory in columns of 128 bytes, as products read them.
PAGE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def are_tiles(keys_NBKD: torch.Tensor, values_NBKD: torch.Tensor) -> bool:
    """Whether the pages of these caches can be copied so."""
    return (
        keys_NBKD.element_size() == 2
        and keys_NBKD.shape[1] % PAGE_TOKENS.value == 0
        and keys_NBKD.shape[3] % PANEL.value == 0
        and can_be_copied(keys_NBKD, values_NBKD)
    )


def can_be_copied(*sources: torch.Tensor) -> bool:
    """Whether tiles of these tensors, of two bytes a number, can be copied by descriptor."""
    return all(
        (x.data_ptr() | 2 * stride) % COPY_ALIGNMENT == 0 for x in sources for stride in x.stride()[:-1]
    )


def page_tiles(cache_NBKD: torch.Tensor) -> TensorDescriptor:
    """Tiles [16 tokens, 64 numbers] of the pages of one head."""
    x_NKBD = cache_NBKD.transpose(1, 2)
    block = [1, 1, PAGE_TOKENS.value, PANEL.value]
    return TensorDescriptor(x_NKBD, list(x_NKBD.shape), list(x_NKBD.stride()), block, PAGE_LAYOUT)


# ── kernels ───────────────────────────────────────────────────────────────────────────────────


@gluon.jit
def _copy_pieces(
    cache, tiles, slot, full, pages, places, kv_head, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Copy sixteen tokens each from these pages into the tile in `slot`, where products expect them."""
    PIECES: gl.constexpr = BLOCK_N // PAGE_TOKENS
    PANELS: gl.constexpr = HEAD_DIM // PANEL
    stages: gl.constexpr = tiles.shape[0]
    pieces = tiles._reinterpret(
        tiles.dtype, [stages * PANELS * PIECES, 1, 1, PAGE_TOKENS, PANEL], cache.layout
    )
    mbarrier.expect(full, BLOCK_N * HEAD_DIM * 2)
    for piece in gl.static_range(PIECES):
        for panel in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                cache,
                [pages[piece], kv_head, places[piece], panel * PANEL],
                full,
                pieces.index((slot * PANELS + panel) * PIECES + piece),
            )


@gluon.jit
def copy_tokens(
    step, k_cache, v_cache, k_tiles, v_tiles, barriers, table, start, length, kv_head,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As this warp's tile number `step`, keys and values of positions [start, start + BLOCK_N) of the row
    whose pages `table` names. From its `length` on, they are those of its last sixteen tokens."""
    slot = step % STAGES
    phase = step // STAGES % 2 ^ 1
    last = (length - 1) // PAGE_TOKENS * PAGE_TOKENS
    pages = ()
    places = ()
    for piece in gl.static_range(BLOCK_N // PAGE_TOKENS):
        position = gl.minimum(start + piece * PAGE_TOKENS, last)
        pages += (gl.load(table + position // PAGE_SIZE),)
        places += (position % PAGE_SIZE,)
    mbarrier.wait(barriers.index(2 * STAGES + slot), phase)
    _copy_pieces(k_cache, k_tiles, slot, barriers.index(slot), pages, places, kv_head, HEAD_DIM, BLOCK_N)
    mbarrier.wait(barriers.index(3 * STAGES + slot), phase)
    _copy_pieces(
        v_cache, v_tiles, slot, barriers.index(STAGES + slot), pages, places, kv_head, HEAD_DIM, BLOCK_N
    )


@gluon.jit
def clear_past(
    step, v_tiles, barriers, count, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
):
    """Zero the values of tile `step` from its token `count` on: they are another row's or nobody's, and
    weights of zero do not cancel NaN. Every group of four warps does so, and writes the same.
    """
    PIECES: gl.constexpr = BLOCK_N // PAGE_TOKENS
    PANELS: gl.constexpr = HEAD_DIM // PANEL
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if count < BLOCK_N:
        slot = step % STAGES
        mbarrier.wait(barriers.index(STAGES + slot), step // STAGES % 2)
        pieces = v_tiles._reinterpret(
            v_tiles.dtype, [STAGES * PANELS * PIECES, PAGE_TOKENS, PANEL], v_tiles.layout
        )
        tokens = gl.arange(0, PAGE_TOKENS, gl.SliceLayout(1, layout))[:, None]
        for piece in range(count // PAGE_TOKENS, PIECES):
            for panel in gl.static_range(PANELS):
                place = pieces.index((slot * PANELS + panel) * PIECES + piece)
                values = place.load(layout)
                place.store(gl.where(piece * PAGE_TOKENS + tokens < count, values, 0.0).to(values.dtype))
        fence_async_shared()
        gl.thread_barrier()
