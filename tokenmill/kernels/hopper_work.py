"""What a program on a Hopper GPU does next: one warp finds out, and tells the groups that compute.

A piece of work is some numbers. They lie in shared memory, in a ring of slots with a cell for each number,
and there are two barriers for each slot: the numbers are there, and all groups have taken them in. Those of
the first kind come first, from barrier AT on. This is Gluon (see `hopper_pages.py`).
"""

# Gluon rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

CELL_LAYOUT = gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit
def tell(number, fields, cells, barriers, AT: gl.constexpr, SLOTS: gl.constexpr, FIELDS: gl.constexpr):
    """Of one warp: `fields` are the program's work number `number`."""
    slot = number % SLOTS
    mbarrier.wait(barriers.index(AT + SLOTS + slot), number // SLOTS % 2 ^ 1)
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for field in gl.static_range(FIELDS):
        cells.index(slot * FIELDS + field).store(gl.full([1], fields[field], gl.int32, lane))
    gl.thread_barrier()
    mbarrier.arrive(barriers.index(AT + slot))


@gluon.jit
def be_told(number, cells, barriers, AT: gl.constexpr, SLOTS: gl.constexpr, FIELDS: gl.constexpr):
    """Of a group of four warps: the fields of work number `number`."""
    slot = number % SLOTS
    mbarrier.wait(barriers.index(AT + slot), number // SLOTS % 2)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    fields = ()
    for field in gl.static_range(FIELDS):
        fields += (gl.max(cells.index(slot * FIELDS + field).load(lanes), axis=0),)
    mbarrier.arrive(barriers.index(AT + SLOTS + slot))
    return fields
