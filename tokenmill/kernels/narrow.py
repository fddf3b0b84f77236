"""Products on a CPU with weights whose numbers are all bfloat16, where it has no instructions for these.

Most checkpoints are stored in bfloat16. In float32 they would take twice the bytes, and decoding takes as
long as reading the weights does: here they stay as they are, and are widened only when they are multiplied,
which loses nothing. Letters: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tokenmill.kernels import native, native_calls, packed
from tokenmill.kernels.native_calls import ColumnWeight

_LOW_BITS = 0xFFFF  # of a float32, which are zero in a bfloat16
# While they are read or reordered, so many rows of a weight exist twice.
_ROWS_AT_ONCE = 1024


class NarrowWeight:
    """A weight [O, I] in columns of bfloat16; `numbers` is its memory, 1-D, with whole columns and pairs."""

    def __init__(self, weight_OI: torch.Tensor, width: int) -> None:
        num_outputs, num_inputs = weight_OI.shape
        padded_inputs = num_inputs + num_inputs % 2
        pairs = torch.empty((-(-num_outputs // width), padded_inputs // 2, width), dtype=torch.int32)
        step = max(1, _ROWS_AT_ONCE // width)
        for columns, rows in zip(pairs.split(step), weight_OI.split(step * width), strict=True):
            missing = padded_inputs - num_inputs, len(columns) * width - len(rows)
            padded = F.pad(rows.bfloat16(), (0, missing[0], 0, missing[1]))
            columns.copy_(padded.view(torch.int32).unflatten(0, (-1, width)).transpose(1, 2))
        self.numbers = pairs.view(torch.bfloat16).flatten()
        self._dtype = weight_OI.dtype
        self._columns = ColumnWeight(
            self.numbers.data_ptr(), self.numbers, num_outputs, num_inputs, padded_inputs, width=width
        )

    def product(self, x_NI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """`x W^T + b` [N, O], multiplied and summed in float32. A row gets the same bits among any others."""
        kernels = native.for_tensor(x_NI)
        assert kernels is not None, "there were kernels for the weight"
        return native_calls.product_of_floats(kernels, x_NI.contiguous(), self._columns, bias_O)

    def dense(self) -> torch.Tensor:
        """The weight [O, I] as it was."""
        columns = self._columns
        pairs = self.numbers.view(torch.int32).view(-1, columns.padded_inputs // 2, columns.width)
        rows = torch.empty_like(pairs.transpose(1, 2), memory_format=torch.contiguous_format)
        numbers = rows.copy_(pairs.transpose(1, 2)).view(torch.bfloat16).view(-1, columns.padded_inputs)
        return numbers[: columns.num_outputs, : columns.num_inputs].to(self._dtype).contiguous()


def narrowed(weight_OI: torch.Tensor) -> NarrowWeight | None:
    """A weight for these products; None where a number would change, where there is no kernel (it needs AVX2
    without AVX-512, and a C compiler), and where oneDNN multiplies bfloat16 better."""
    if weight_OI.dtype == torch.bfloat16 and packed.has_bfloat16():
        return None
    kernels = native.for_tensor(weight_OI)
    width = 0 if kernels is None else native_calls.width_for_floats(kernels)
    if not width or not _is_bfloat16(weight_OI):
        return None
    return NarrowWeight(weight_OI, width)


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether this machine has a kernel for products in the dtype."""
    kernels = native.library(dtype)
    return kernels is not None and native_calls.width_for_floats(kernels) > 0


def _is_bfloat16(weight_OI: torch.Tensor) -> bool:
    if weight_OI.dtype == torch.bfloat16:
        return True
    bits = weight_OI.view(torch.int32)
    return not any(bool((part & _LOW_BITS).any()) for part in bits.split(_ROWS_AT_ONCE))
