"""Rows of memory behind a tensor's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.kernels.spare_rows import empty_rows, rows_to_copy

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


@given(num_rows=st.integers(0, 1000), shape=st.sampled_from([(8,), (4, 2), ()]))
def test_there_is_memory_for_whole_tiles(num_rows: int, shape: tuple[int, ...]) -> None:
    x = empty_rows(num_rows, *shape, dtype=torch.bfloat16, device=CPU)
    assert x.shape == (num_rows, *shape)
    assert x.dtype == torch.bfloat16
    assert x.is_contiguous()
    if num_rows > 64 and shape:
        for tile_rows in (64, 128):
            rows = x.flatten(1)
            assert rows_to_copy(rows, tile_rows) == -(-num_rows // tile_rows) * tile_rows


@given(
    num_rows=st.integers(1, 300),
    behind=st.integers(0, 300),
    before=st.integers(0, 3),
    beside=st.integers(0, 9),
    tile_rows=st.sampled_from([16, 64, 128]),
)
def test_only_rows_that_exist_are_copied(
    num_rows: int, behind: int, before: int, beside: int, tile_rows: int
) -> None:
    """Of a view into a larger tensor, whose last row may end with its memory."""
    whole = torch.empty(before + num_rows + behind, 8 + beside)
    x = whole[before : before + num_rows, beside:]
    count = rows_to_copy(x, tile_rows)
    assert num_rows <= count <= num_rows + behind
    assert count == num_rows + behind or count % tile_rows == 0
    whole.as_strided((count, 8), x.stride(), x.storage_offset())  # would fail past the end


@pytest.mark.parametrize("num_rows", [70, 127])
def test_what_products_read_has_memory_for_whole_tiles(triton_device: str, num_rows: int) -> None:
    from tokenmill.kernels import triton_activation, triton_norm

    x, residual = torch.ones(2, num_rows, 64, device=triton_device)
    weight = torch.ones(64, device=triton_device)
    for out in (
        triton_norm.rms_norm(x, weight, 1e-6),
        triton_norm.add_rms_norm(x, residual, weight, 1e-6)[0],
        triton_activation.gated_silu(x),
    ):
        assert rows_to_copy(out, 128) == 128
