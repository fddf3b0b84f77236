"""Rows of a table by number: the torch reference and the choice of the kernel. V rows, D columns, T ids."""

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


def look_up_torch(table_VD: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """The reference of `look_up`, on any device."""
    return table_VD.index_select(0, ids_T)
