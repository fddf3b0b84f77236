"""What a decoding step reads of its rows, on the GPU in one launch; the reference is `rows.py`."""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.operands import RowState, StepRows
from tokenmill.kernels.sizes import ceil_div, next_power_of_2
from tokenmill.kernels.triton_overlap import let_next_begin, overlap_options, wait_for_inputs

COLUMNS_PER_PROGRAM = 1024


def read_rows(state: RowState, inputs_FB: torch.Tensor, *, page_size: int) -> StepRows:
    """See `rows.read_rows`; nothing waits for the device."""
    num_groups, _, num_columns = state.page_table_GSC.shape
    num_rows = inputs_FB.shape[1]

    def empty(*shape: int, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype, device=inputs_FB.device)

    numbers = (state.last_token_S, state.temperature_S, state.top_k_S, state.top_p_S, state.min_p_S)
    token_id_B, temperature_B, top_k_B, top_p_B, min_p_B = (empty(num_rows, like=each) for each in numbers)
    rows = StepRows(
        slot_B=empty(num_rows, like=state.last_token_S),
        token_id_B=token_id_B,
        position_B=empty(num_rows, like=state.last_token_S),
        length_B=empty(num_rows, like=inputs_FB),
        page_table_GBC=empty(num_groups, num_rows, num_columns, like=state.page_table_GSC),
        cache_slot_GB=empty(num_groups, num_rows, like=state.last_token_S),
        temperature_B=temperature_B,
        top_k_B=top_k_B,
        top_p_B=top_p_B,
        min_p_B=min_p_B,
        seed_B=empty(num_rows, like=state.seed_S),
        drawn_position_B=empty(num_rows, like=state.last_token_S),
    )
    block = min(COLUMNS_PER_PROGRAM, next_power_of_2(num_columns))
    _read_rows_kernel[(num_rows, num_groups, ceil_div(num_columns, block))](
        inputs_FB,
        *(getattr(state, name) for name in RowState.__dataclass_fields__),
        *(getattr(rows, name) for name in StepRows.__dataclass_fields__),
        num_rows,
        *state.page_table_GSC.stride()[:2],
        num_columns,
        PAGE_SIZE=page_size,
        BLOCK_COLUMNS=block,
        num_warps=4 if block > 128 else 1,
        **overlap_options(inputs_FB.device),
    )
    return rows


@triton.jit(do_not_specialize=["num_rows", "stride_group", "num_columns"])
def _read_rows_kernel(
    inputs,
    last_token,
    page_table,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    slot_out,
    token_id_out,
    position_out,
    length_out,
    page_table_out,
    cache_slot_out,
    temperature_out,
    top_k_out,
    top_p_out,
    min_p_out,
    seed_out,
    drawn_position_out,
    num_rows,
    stride_group,
    stride_slot,
    num_columns,
    PAGE_SIZE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    let_next_begin(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    group = tl.program_id(1)
    block = tl.program_id(2)
    slot = tl.load(inputs + row).to(tl.int64)
    position = tl.load(inputs + num_rows + row)
    new_column = tl.load(inputs + (2 + 2 * group) * num_rows + row)
    new_page = tl.load(inputs + (3 + 2 * group) * num_rows + row)

    # The new entry is put in while the table is copied; whoever copies its block also remembers it.
    table = page_table + group.to(tl.int64) * stride_group + slot * stride_slot
    columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    keep = columns < num_columns
    pages = tl.load(table + columns, mask=keep, other=0)
    pages = tl.where(columns == new_column, new_page, pages)
    copy = page_table_out + (group * num_rows + row).to(tl.int64) * num_columns
    tl.store(copy + columns, pages, mask=keep)
    tl.store(table + columns, pages, mask=columns == new_column)

    column = position // PAGE_SIZE
    if column // BLOCK_COLUMNS == block:
        page = tl.sum(tl.where(columns == column, pages, 0), axis=0).to(tl.int64)
        tl.store(cache_slot_out + group * num_rows + row, page * PAGE_SIZE + position % PAGE_SIZE)
    if (group == 0) & (block == 0):
        tl.store(slot_out + row, slot)
        tl.store(token_id_out + row, tl.load(last_token + slot))
        tl.store(position_out + row, position.to(tl.int64))
        tl.store(length_out + row, position + 1)
        tl.store(temperature_out + row, tl.load(temperature + slot))
        tl.store(top_k_out + row, tl.load(top_k + slot))
        tl.store(top_p_out + row, tl.load(top_p + slot))
        tl.store(min_p_out + row, tl.load(min_p + slot))
        tl.store(seed_out + row, tl.load(seed + slot))
        tl.store(drawn_position_out + row, position.to(tl.int64) + 1)
