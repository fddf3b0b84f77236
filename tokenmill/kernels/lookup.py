"""Rows of tables by number: the torch reference and the choice of the kernel.

V rows, D columns, T ids; another table has P rows and W columns.
"""

from __future__ import annotations

import torch

from tokenmill.kernels import native, native_calls


def look_up(table_VD: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """Row `ids_T[t]` (int32 or int64) of the table for every t: [T, D].

    What an id outside of the table gives is not defined, on a CPU NaN or an error.
    """
    kernels = native.for_tensor(table_VD)
    if kernels is not None and ids_T.dtype == torch.int64 and table_VD.is_contiguous():
        return native_calls.look_up(kernels, table_VD, ids_T.contiguous())
    return look_up_torch(table_VD, ids_T)


def look_up_both(
    table_VD: torch.Tensor, ids_T: torch.Tensor, other_PW: torch.Tensor, places_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`look_up` of ids in one table and of as many places in another: [T, D], [T, W]. On a GPU one launch."""
    if table_VD.is_cuda:
        from tokenmill.kernels import triton_lookup

        return triton_lookup.look_up_both(table_VD, ids_T, other_PW, places_T)
    return look_up(table_VD, ids_T), look_up(other_PW, places_T)


def look_up_torch(table_VD: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """The reference of `look_up`, on any device."""
    return table_VD.index_select(0, ids_T)
