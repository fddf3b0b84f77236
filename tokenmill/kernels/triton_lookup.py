"""Rows of two tables by number, on the GPU in one launch; the reference is `lookup.py`."""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.sizes import next_power_of_2
from tokenmill.kernels.triton_overlap import let_next_begin, overlap_options, wait_for_inputs

MOST_AT_ONCE = 4096


def look_up_both(
    table_VD: torch.Tensor, ids_T: torch.Tensor, other_PW: torch.Tensor, places_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `lookup.look_up_both`; nothing waits for the device."""
    assert all(each.is_contiguous() for each in (table_VD, ids_T, other_PW, places_T))
    assert len(ids_T) == len(places_T)
    num_rows, (size, other_size) = len(ids_T), (table_VD.shape[1], other_PW.shape[1])
    found_TD = torch.empty((num_rows, size), dtype=table_VD.dtype, device=table_VD.device)
    found_TW = torch.empty((num_rows, other_size), dtype=other_PW.dtype, device=other_PW.device)
    _look_up_kernel[(num_rows,)](
        table_VD,
        ids_T,
        found_TD,
        other_PW,
        places_T,
        found_TW,
        SIZE=size,
        OTHER_SIZE=other_size,
        BLOCK=min(MOST_AT_ONCE, next_power_of_2(size)),
        OTHER_BLOCK=next_power_of_2(other_size),
        num_warps=4,
        **overlap_options(table_VD.device),
    )
    return found_TD, found_TW


@triton.jit(do_not_specialize_on_alignment=["ids", "places"])
def _look_up_kernel(
    table,
    ids,
    found,
    other_table,
    places,
    other_found,
    SIZE: tl.constexpr,
    OTHER_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHER_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    let_next_begin(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    source = table + tl.load(ids + row).to(tl.int64) * SIZE
    other_source = other_table + tl.load(places + row).to(tl.int64) * OTHER_SIZE
    others = tl.arange(0, OTHER_BLOCK)
    keep_others = others < OTHER_SIZE
    tl.store(
        other_found + row * OTHER_SIZE + others,
        tl.load(other_source + others, mask=keep_others),
        mask=keep_others,
    )
    for begin in range(0, SIZE, BLOCK):
        numbers = begin + tl.arange(0, BLOCK)
        keep = numbers < SIZE
        tl.store(found + row * SIZE + numbers, tl.load(source + numbers, mask=keep), mask=keep)
