"""What a decoding step reads of its rows, gathered at once: the torch reference and the choice of the kernel.

Shapes: S slots (persistent rows), B rows of a step, G page groups, C columns of a page table.
"""

from __future__ import annotations

import torch

from tokenmill.kernels.operands import RowState, StepRows


def num_inputs(num_groups: int) -> int:
    """Lines of the table that `read_rows` is given."""
    return 2 + 2 * num_groups


def read_rows(state: RowState, inputs_FB: torch.Tensor, *, page_size: int) -> StepRows:
    """Write new page-table entries, then read what the step needs.

    `inputs_FB` (int32) has a slot and a position for each row, then for each group the column of a new
    page-table entry of the row and its page; a column of -1 for none.
    """
    if inputs_FB.is_cuda:
        from tokenmill.kernels import triton_rows

        return triton_rows.read_rows(state, inputs_FB, page_size=page_size)
    return read_rows_torch(state, inputs_FB, page_size=page_size)


def read_rows_torch(state: RowState, inputs_FB: torch.Tensor, *, page_size: int) -> StepRows:
    """The reference of `read_rows`, on any device; it looks at the inputs, so it may wait for the device."""
    slot_B, position_B = inputs_FB[:2].to(torch.int64)
    for group, (column_B, page_B) in enumerate(inputs_FB[2:].view(-1, 2, inputs_FB.shape[1])):
        new = torch.nonzero(column_B >= 0).squeeze(1)
        state.page_table_GSC[group, slot_B[new], column_B[new].to(torch.int64)] = page_B[new]
    page_table_GBC = state.page_table_GSC[:, slot_B]
    column_GB1 = (position_B // page_size).expand(len(page_table_GBC), -1).unsqueeze(2)
    page_GB = page_table_GBC.gather(2, column_GB1).squeeze(2).to(torch.int64)
    return StepRows(
        slot_B=slot_B,
        token_id_B=state.last_token_S[slot_B],
        position_B=position_B,
        length_B=(position_B + 1).to(torch.int32),
        page_table_GBC=page_table_GBC,
        cache_slot_GB=page_GB * page_size + position_B % page_size,
        temperature_B=state.temperature_S[slot_B],
        top_k_B=state.top_k_S[slot_B],
        top_p_B=state.top_p_S[slot_B],
        min_p_B=state.min_p_S[slot_B],
        seed_B=state.seed_S[slot_B],
        drawn_position_B=position_B + 1,
    )
