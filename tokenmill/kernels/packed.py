"""Products with weights in oneDNN's order on a CPU: by oneDNN, and of few rows by kernels that stream them.

oneDNN chooses the order, and hands out the bytes; a weight whose order is none that the kernel knows is
left to oneDNN. Letters: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from tokenmill.kernels import native, native_calls
from tokenmill.kernels.native_calls import ColumnWeight

# Rows of input for which oneDNN lays the weights out; decoding has few rows, and few rows gain most.
_EXPECTED_ROWS = 16
_TILE_INPUTS = 32
_WIDTHS = (16, 32, 48, 64)  # of columns that the kernel knows
# Rows are filled up to a multiple of this: a row more costs little, with a small weight next to nothing.
_SMALL_WEIGHT = 2**20  # numbers
_ROW_STEP, _SMALL_ROW_STEP = 8, 16


def has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this machine."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiplies_any_rows() -> bool:
    """Whether the kernels multiply rows of bfloat16 by small weights as quickly as oneDNN, however many they
    are. Sums that oneDNN does not cut have the same bits then."""
    kernels = native.library(torch.bfloat16)
    return kernels is not None and _kernel_and_most_rows(kernels)[1] > 1


def _kernel_and_most_rows(kernels: ctypes.CDLL) -> tuple[str, int]:
    """The kernel that multiplies few rows on this machine, and how many those are."""
    if most_tiled := native_calls.most_tiled_rows(kernels):
        return "product_in_tiles", most_tiled
    return "product_of_rows", native_calls.most_streamed_rows(kernels)


def pack(weight_OI: torch.Tensor) -> torch.Tensor:
    """The weight in oneDNN's order for products of few rows."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _EXPECTED_ROWS)
    return packed


def product(
    x_NI: torch.Tensor,
    packed: torch.Tensor,
    bias_O: torch.Tensor | None,
    columns: ColumnWeight | None = None,
    *,
    any_rows: bool = False,
) -> torch.Tensor:
    """`x W^T + b` [N, O] of a packed weight; with `columns`, few rows are streamed, or `any_rows`, which
    is for machines that `multiplies_any_rows`."""
    kernels = None if columns is None else native.for_tensor(x_NI)
    if columns is not None and kernels is not None and len(x_NI):
        name, most_rows = _kernel_and_most_rows(kernels)
        if len(x_NI) <= most_rows or any_rows:
            return native_calls.product(kernels, name, x_NI.contiguous(), columns, bias_O)
    num_rows, padded = len(x_NI), padded_rows(len(x_NI), packed.numel())
    if padded > num_rows:
        x_NI = F.pad(x_NI, (0, 0, 0, padded - num_rows))
    y_NO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, packed, bias_O, "none", [], "")
    return y_NO[:num_rows]


def padded_rows(num_rows: int, num_weights: int) -> int:
    """How many rows oneDNN is given.

    For every number of them it compiles another kernel, in 1 to 5 milliseconds, and keeps it in up to several
    megabytes, and steps differ by a few rows all the time.
    """
    if num_rows <= _ROW_STEP:
        return num_rows
    step = _SMALL_ROW_STEP if num_weights <= _SMALL_WEIGHT else _ROW_STEP
    return -(-num_rows // step) * step


def columns(packed: torch.Tensor, weight_OI: torch.Tensor) -> ColumnWeight | None:
    """The bytes of a packed weight for the kernel; None where it cannot read them, or there is no kernel."""
    num_outputs, num_inputs = weight_OI.shape
    if weight_OI.dtype != torch.bfloat16 or native.for_tensor(weight_OI) is None:
        return None
    if num_inputs % _TILE_INPUTS or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    numbers = _numbers(packed)
    for width in _WIDTHS:
        padded_inputs, rest = divmod(len(numbers), -(-num_outputs // width) * width)
        if not rest and padded_inputs >= num_inputs and _is_ordered(numbers, weight_OI, width):
            return ColumnWeight(
                numbers.data_ptr(), packed, num_outputs, num_inputs, padded_inputs, width=width
            )
    return None


def _numbers(packed: torch.Tensor) -> torch.Tensor:
    """What a packed weight has in memory (bfloat16, 1-D); valid as long as the weight is."""
    address, num_bytes = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.bfloat16)


def _is_ordered(numbers: torch.Tensor, weight_OI: torch.Tensor, width: int) -> bool:
    """Whether the first and the last column of outputs lie as they should."""
    num_outputs, num_inputs = weight_OI.shape
    found = numbers.view(torch.int16).view(-(-num_outputs // width), -1, width, 2)[:, : num_inputs // 2]
    bits_OI = weight_OI.view(torch.int16)  # a NaN equals itself
    for column in (0, len(found) - 1):
        outputs = bits_OI[column * width : (column + 1) * width]
        expected = outputs.unflatten(1, (-1, 2)).transpose(0, 1)
        if not torch.equal(found[column, :, : len(outputs)], expected):
            return False
    return True
