"""The calls of the C kernels of `cpu.c`: a function or method for each, over tensors.

Letters: T tokens, H query heads, K key heads, D head size, R half of the rotated dimensions; N pages of a
cache, B tokens of a page; V rows of a table.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Protocol

import torch

from tokenmill.kernels.tape import recorded, run

# The structs of cpu.c by the names of the functions: P addresses, l whole numbers, f floats, in their order.
_ARGUMENTS = {
    "look_up": Struct("3P3l"),
    "product_of_rows": Struct("4P5l"),
    "product_in_tiles": Struct("4P5l"),
    "product_of_floats": Struct("4P5l"),
    "widen_rows": Struct("2P2l"),
    "rms_norm": Struct("5P5lf"),
    "gated_silu": Struct("2P2l"),
    "rotate": Struct("4P7l"),
    "store": Struct("4P5l"),
    "decode": Struct("5P6lf"),
}
_CACHES = Struct("2P6l")


class Memory(Protocol):
    """What lies somewhere."""

    def data_ptr(self) -> int:
        """Where."""


@dataclass(frozen=True, slots=True)
class ColumnWeight:
    """A weight [O, I] in memory as oneDNN keeps bfloat16: columns of `width` outputs, in each the inputs in
    pairs; padded to whole columns and to `padded_inputs`."""

    address: int
    owner: object  # of the memory
    num_outputs: int
    num_inputs: int
    padded_inputs: int
    width: int

    def data_ptr(self) -> int:
        """See `Memory`."""
        return self.address


def _call(kernels: ctypes.CDLL, name: str, memories: tuple[Memory | None, ...], *numbers: float) -> None:
    """Call a kernel with the fields of its struct: addresses, then numbers."""
    addresses = [0 if memory is None else memory.data_ptr() for memory in memories]
    arguments = _ARGUMENTS[name].pack(*addresses, *numbers)
    run(kernels, name, arguments)
    tape = recorded()
    if tape is not None:
        tape.add(kernels, name, arguments, memories)


def look_up(kernels: ctypes.CDLL, table_VD: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """Rows of a table by ids (int64), both contiguous; NaN where there is no such row."""
    num_rows, size = table_VD.shape
    out_TD = torch.empty((len(ids_T), size), dtype=table_VD.dtype)
    _call(kernels, "look_up", (table_VD, ids_T, out_TD), len(ids_T), num_rows, size)
    return out_TD


@cache
def most_tiled_rows(kernels: ctypes.CDLL) -> int:
    """The most rows for `product_in_tiles` on this machine; 0: it has no tiles (AMX)."""
    return int(kernels.most_tiled_rows())


@cache
def most_streamed_rows(kernels: ctypes.CDLL) -> int:
    """The most rows for which `product_of_rows` is quicker than oneDNN; with instructions for bfloat16 many,
    and then any number is about as quick."""
    return int(kernels.most_streamed_rows())


@cache
def width_for_floats(kernels: ctypes.CDLL) -> int:
    """The width of columns for `product_of_floats`; 0: this machine has none (AVX2 alone does)."""
    return int(kernels.width_for_floats())


def product(
    kernels: ctypes.CDLL, name: str, x_NI: torch.Tensor, weight: ColumnWeight, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """`x W^T + b` of contiguous rows in bfloat16, summed in float32, by one of two kernels.

    Inputs are whole tiles of 32, columns 16, 32, 48 or 64 wide. Each kernel sums in the same order however
    many rows there are.
    """
    return _product(kernels, name, x_NI, weight, bias_O, dtype=x_NI.dtype)


def product_of_floats(
    kernels: ctypes.CDLL, x_NI: torch.Tensor, weight: ColumnWeight, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """`x W^T + b` of contiguous rows in the kernels' dtype, multiplied and summed in float32.

    Columns are `width_for_floats` wide. Sums have the same order however many rows there are.
    """
    wide_NI = x_NI
    if x_NI.dtype != torch.float32:
        wide_NI = torch.empty(x_NI.shape, dtype=torch.float32)
        _call(kernels, "widen_rows", (x_NI, wide_NI), *x_NI.shape)
    return _product(kernels, "product_of_floats", wide_NI, weight, bias_O, dtype=x_NI.dtype)


def _product(
    kernels: ctypes.CDLL,
    name: str,
    x_NI: torch.Tensor,
    weight: ColumnWeight,
    bias_O: torch.Tensor | None,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    out_NO = torch.empty((len(x_NI), weight.num_outputs), dtype=dtype)
    _call(
        kernels, name, (x_NI, weight, bias_O, out_NO),
        len(x_NI), weight.num_inputs, weight.num_outputs, weight.padded_inputs, weight.width,
    )  # fmt: skip
    return out_NO


def rms_norm(kernels: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As `norm.rms_norm_torch`, of `x` with two or three dimensions, the last one contiguous."""
    inner = x.shape[-2] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype)
    _call(
        kernels, "rms_norm", (x, None, weight, out, None),
        x.shape[0], inner, x.stride(0), x.stride(-2), x.shape[-1], epsilon,
    )  # fmt: skip
    return out


def add_rms_norm(
    kernels: ctypes.CDLL, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(norm of the sum, sum)`; both inputs contiguous."""
    out_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    num_rows, size = x_TD.shape
    _call(
        kernels, "rms_norm", (x_TD, residual_TD, weight, out_TD, total_TD),
        num_rows, 1, size, size, size, epsilon,
    )  # fmt: skip
    return out_TD, total_TD


def gated_silu(kernels: ctypes.CDLL, gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """As `activation.gated_silu_torch`, of a contiguous tensor."""
    num_rows, width = gate_up_T2F.shape
    out_TF = torch.empty((num_rows, width // 2), dtype=gate_up_T2F.dtype)
    _call(kernels, "gated_silu", (gate_up_T2F, out_TF), num_rows, width // 2)
    return out_TF


def rotate(
    kernels: ctypes.CDLL, x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
) -> torch.Tensor:
    """The rotation of `rotary.rotate_torch` for queries or for keys; cosines and sines are laid out alike."""
    num_tokens, num_heads, head_dim = x_THD.shape
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype)
    _call(
        kernels, "rotate", (x_THD, cos_TR, sin_TR, out_THD),
        num_tokens, num_heads, x_THD.stride(0), x_THD.stride(1), head_dim, cos_TR.shape[1],
        cos_TR.stride(0),
    )  # fmt: skip
    return out_THD


class PagedCaches:
    """Keys and values [N, B, K, D] of one layer as the kernels see them. Keeps the tensors alive."""

    def __init__(self, kernels: ctypes.CDLL, keys_NBKD: torch.Tensor, values_NBKD: torch.Tensor) -> None:
        assert keys_NBKD.stride() == values_NBKD.stride(), "keys and values must be laid out alike"
        assert keys_NBKD.stride(3) == 1
        self._kernels = kernels
        self._tensors = (keys_NBKD, values_NBKD)
        self._num_heads = keys_NBKD.shape[2]
        self._layout = ctypes.create_string_buffer(
            _CACHES.pack(
                keys_NBKD.data_ptr(), values_NBKD.data_ptr(), *keys_NBKD.stride()[:3], *keys_NBKD.shape[1:]
            )
        )

    def data_ptr(self) -> int:
        """Address of `struct caches`; see `Memory`."""
        return ctypes.addressof(self._layout)

    def store(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Write token t to slot `slots_T[t]` (int64, page * B + offset)."""
        _call(
            self._kernels, "store", (self, k_TKD, v_TKD, slots_T), len(slots_T),
            k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0), v_TKD.stride(1),
        )  # fmt: skip

    def decode(
        self,
        q_RHD: torch.Tensor,
        page_table_RP: torch.Tensor,
        lengths_R: torch.Tensor,
        *,
        window: int | None,
        scale: float,
        out_RHD: torch.Tensor,
    ) -> None:
        """Attention of each row's last token, into the contiguous `out_RHD`; tables and lengths int32."""
        num_rows, num_heads, _ = q_RHD.shape
        _call(
            self._kernels, "decode", (self, q_RHD, page_table_RP, lengths_R, out_RHD),
            num_rows, q_RHD.stride(0), q_RHD.stride(1), page_table_RP.stride(0),
            num_heads // self._num_heads, window or 0, scale,
        )  # fmt: skip
