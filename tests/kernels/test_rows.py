"""Reading a decoding step's rows in one kernel, against the torch reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tokenmill.kernels.operands import RowState, StepRows
from tokenmill.kernels.rows import num_inputs, read_rows_torch

pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")

pytestmark = pytest.mark.cpu


def random_state(num_slots: int, num_groups: int, num_columns: int, device: str) -> RowState:
    torch.manual_seed(num_slots)
    return RowState(
        last_token_S=torch.randint(0, 10**6, (num_slots,)).to(device),
        page_table_GSC=torch.randint(0, 10**9, (num_groups, num_slots, num_columns), dtype=torch.int32).to(
            device
        ),
        temperature_S=torch.rand(num_slots).to(device),
        top_k_S=torch.randint(-1, 50, (num_slots,), dtype=torch.int32).to(device),
        top_p_S=torch.rand(num_slots).to(device),
        min_p_S=torch.rand(num_slots).to(device),
        seed_S=torch.randint(-(2**62), 2**62, (num_slots,)).to(device),
    )


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (5, 7), (8, 1024), (3, 2500)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_equals_the_reference(
    triton_device: str, num_rows: int, num_groups: int, num_columns: int, page_size: int
) -> None:
    from tokenmill.kernels import triton_rows

    ours = random_state(11, num_groups, num_columns, triton_device)
    theirs = RowState(*(getattr(ours, field.name).clone() for field in dataclasses.fields(RowState)))
    inputs_FB = torch.full((num_inputs(num_groups), num_rows), -1, dtype=torch.int32)
    inputs_FB[0] = torch.randperm(11)[:num_rows]
    inputs_FB[1] = torch.randint(0, num_columns * page_size, (num_rows,))
    for group in range(num_groups):
        for row in range(0, num_rows, 2):  # every other row gets a page, where its token goes
            inputs_FB[2 + 2 * group, row] = inputs_FB[1, row] // page_size
            inputs_FB[3 + 2 * group, row] = 5000 + row
    inputs_FB = inputs_FB.to(triton_device)
    got = triton_rows.read_rows(ours, inputs_FB, page_size=page_size)
    expected = read_rows_torch(theirs, inputs_FB, page_size=page_size)
    for field in dataclasses.fields(StepRows):
        mine, reference = getattr(got, field.name), getattr(expected, field.name)
        assert mine.dtype == reference.dtype, field.name
        assert torch.equal(mine, reference), field.name
    assert torch.equal(ours.page_table_GSC, theirs.page_table_GSC)
