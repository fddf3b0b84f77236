"""Rows of two tables in one launch, against indexing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize(("size", "width"), [(8, 2), (896, 64), (5000, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_equals_indexing(
    triton_device: str, num_rows: int, size: int, width: int, dtype: torch.dtype, ids_dtype: torch.dtype
) -> None:
    from tokenmill.kernels import triton_lookup

    torch.manual_seed(size)
    table_VD = torch.randn(50, size).to(triton_device, dtype)
    other_PW = torch.randn(90, width).to(triton_device, dtype)
    ids_T = torch.randint(0, 50, (num_rows,)).to(triton_device, ids_dtype)
    places_T = torch.randint(0, 90, (num_rows,)).to(triton_device)
    found_TD, found_TW = triton_lookup.look_up_both(table_VD, ids_T, other_PW, places_T)
    assert torch.equal(found_TD, table_VD[ids_T.long()])
    assert torch.equal(found_TW, other_PW[places_T])
