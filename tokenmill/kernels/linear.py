"""Products with weights, alone or between a norm and an activation: torch reference and choice of kernel.

One or two rows are multiplied by kernels that stream the weights. On Hopper GPUs a few rows, some hundred
with a small weight, both in graphs, and gated products of many rows go by our own tiles. All others go by
torch (cuBLAS).
Where a row must get the same bits beside all others, one kernel or blocks of one size serve any number of
rows. Owns no weights.
Letters: N rows, I inputs, O outputs of the weight, F outputs of a gated product (O = 2F), P pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tokenmill.kernels.activation import gated_silu, gated_silu_torch
from tokenmill.kernels.launching import are_replayed, is_invariant, is_measured
from tokenmill.kernels.norm import add_rms_norm, rms_norm_torch
from tokenmill.kernels.operands import Heads, Norm, UnscaledRows
from tokenmill.kernels.product_tilings import (
    ProductTiling,
    choose_heads_tiling,
    choose_sum_tiling,
    choose_tiling,
)
from tokenmill.kernels.spare_rows import rows_to_copy

# Products of up to so many rows are streamed; from the second row on, only with small weights: with large
# ones the arithmetic units fall behind the memory, and tensor cores win.
STREAMED_ROWS = 2
SMALL_WEIGHT_BYTES = 24_000_000
MOST_TILED_ROWS = 256
# To launch a gated product by tiles takes the host 0.1 ms. Outside of graphs, fewer operations than these
# take the device less, and two quicker launches are better.
LEAST_OPERATIONS = 6e10
# A sum over so many times as many inputs as there are outputs is cut into pieces: else there are too few sums
# for all processors. So is a shorter one of many rows whose pieces, in squares of so many rows and outputs,
# are just as many as processors.
INPUTS_PER_OUTPUT = 2
PIECES = 2
SQUARE = 128
NEARLY_ALL = 0.9
# cuBLAS has a kernel of its own for nearly every number of rows, and the device stands still while one is
# loaded. A weight of so many outputs, as of logits, is multiplied by a few numbers of rows only: some more
# rows are nothing beside reading it.
MANY_OUTPUTS = 65_536
ROWS_AT_A_TIME = 32
# Rows of a block where every row is to be computed alike: so few that one row alone does not take long.
BLOCK_ROWS = 64


def linear(
    x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, *, gated: bool = False
) -> torch.Tensor:
    """`x W^T + b` [N, O], summed in float32; if `gated`, `gated_silu` of it [N, F].

    Rounds as `activation.gated_silu` of a product does, whichever kernel is chosen.
    """
    return _product(x_NI, weight_OI, bias_O, gated=gated, may_split=False)


@dataclass(frozen=True, slots=True)
class Addend:
    """`x W^T + b`, to be computed by whoever adds it to a residual: what follows may become part of it."""

    x_NI: torch.Tensor
    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None

    def computed(self) -> torch.Tensor:
        """For `norm.add_rms_norm`: [N, O], or float32 [P, N, O], pieces that are still to be summed."""
        return _product(self.x_NI, self.weight_OI, self.bias_O, gated=False, may_split=True)


# What is to be added to a residual, [N, O].
Hidden = torch.Tensor | Addend


def computed(hidden: Hidden) -> torch.Tensor:
    """See `Addend.computed`."""
    return hidden.computed() if isinstance(hidden, Addend) else hidden


def _product(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    *,
    gated: bool,
    may_split: bool,
) -> torch.Tensor:
    if _is_streamed(x_NI, weight_OI):
        from tokenmill.kernels import triton_linear

        return triton_linear.linear(x_NI, weight_OI, bias_O, gated=gated)
    if is_invariant():
        y_NO = _invariant(x_NI, weight_OI, bias_O)
    else:
        tiled = _tiled(x_NI, weight_OI, bias_O, gated=gated, may_split=may_split)
        if tiled is None and gated and bias_O is None:
            tiled = _tiled_gated(x_NI, weight_OI)
        if tiled is not None:
            return tiled
        if may_split and bias_O is None and _is_quicker_in_pieces(x_NI, weight_OI):
            return _in_pieces(x_NI, weight_OI)
        y_NO = _by_library(x_NI, weight_OI, bias_O)
    return gated_silu(y_NO) if gated else y_NO


def _by_library(x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """The product by torch, for some weights with what the memory behind the rows holds, up to a number of
    rows that comes often."""
    num_rows, size = x_NI.shape
    if len(weight_OI) >= MANY_OUTPUTS and _are_some_rows_of_a_graph(x_NI):
        whole = rows_to_copy(x_NI, ROWS_AT_A_TIME)
        if whole > num_rows and whole % ROWS_AT_A_TIME == 0:
            return F.linear(x_NI.as_strided((whole, size), x_NI.stride()), weight_OI, bias_O)[:num_rows]
    return F.linear(x_NI, weight_OI, bias_O)


def _invariant(x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """The product, each row as if it were alone."""
    if x_NI.is_cuda:
        from tokenmill.kernels import triton_invariant

        return triton_invariant.product(x_NI, weight_OI, bias_O)
    return in_blocks(x_NI, lambda block_NI: F.linear(block_NI, weight_OI, bias_O))


def in_blocks(x_NI: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`multiply` [N, I] -> [N, O] by blocks of always as many rows, some of them zero: libraries choose the
    order of their sums by the number of rows."""
    num_rows = len(x_NI)
    padded_NI = F.pad(x_NI, (0, 0, 0, -num_rows % BLOCK_ROWS))
    return torch.cat([multiply(block_NI) for block_NI in padded_NI.split(BLOCK_ROWS)])[:num_rows]


def add_norm_linear(
    hidden: Hidden,
    residual_NI: torch.Tensor,
    norm: Norm,
    *,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(linear(norm(hidden + residual)), hidden + residual)`, with the roundings of `add_rms_norm` and
    `linear`; in 16 bits, but for one rounding of the norm."""
    if gated and isinstance(hidden, Addend):
        found = _gated_of_sum(hidden, residual_NI, norm, weight_OI, bias_O)
        if found is not None:
            return found
    x_NI = computed(hidden)
    if _is_streamed(x_NI, weight_OI):
        from tokenmill.kernels import triton_linear

        return triton_linear.add_norm_linear(
            x_NI, residual_NI, norm, weight_OI=weight_OI, bias_O=bias_O, gated=gated
        )
    normed_NI, total_NI = add_rms_norm(x_NI, residual_NI, norm.weight_I, norm.epsilon)
    return linear(normed_NI, weight_OI, bias_O, gated=gated), total_NI


def queries_after_norm(
    hidden: Hidden,
    residual_NI: torch.Tensor,
    norm: Norm,
    *,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    heads: Heads,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_norm_linear` on a GPU whose product gives queries, keys and values: queries [N, H, D], normalised
    and rotated; keys and values are stored."""
    tiling = _heads_tiling(residual_NI, weight_OI, heads)
    if tiling is not None:
        found = _unscaled(hidden, residual_NI, norm) if isinstance(hidden, Addend) else None
        rows_NI, total_NI = found or add_rms_norm(computed(hidden), residual_NI, norm.weight_I, norm.epsilon)
        from tokenmill.kernels import hopper_heads

        return hopper_heads.product(rows_NI, weight_OI, bias_O, heads, tiling), total_NI
    product_NO, total_NI = add_norm_linear(hidden, residual_NI, norm, weight_OI=weight_OI, bias_O=bias_O)
    from tokenmill.kernels.triton_rotary import rotate_and_store

    product_NSD = product_NO.unflatten(1, (-1, heads.head_dim))
    q_NHD, _ = rotate_and_store(product_NSD, heads.rotation, heads.norms, heads.cache)
    return q_NHD, total_NI


def compile_tilings(dtype: torch.dtype, device: torch.device) -> None:
    """Launch gated products by each tiling there is: which one a step chooses depends on its rows.

    Nothing happens where no step would choose any: on other devices, and for numbers of four bytes.
    """
    if _has_hopper_kernels(device):
        from tokenmill.kernels import hopper_gated

        hopper_gated.compile_tilings(dtype, device)


def linear_torch(
    x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, *, gated: bool = False
) -> torch.Tensor:
    """The reference of `linear`, on any device."""
    y_NO = F.linear(x_NI, weight_OI, bias_O)
    return gated_silu_torch(y_NO) if gated else y_NO


def add_norm_linear_torch(
    x_NI: torch.Tensor,
    residual_NI: torch.Tensor,
    norm: Norm,
    *,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of `add_norm_linear`, on any device."""
    total_NI = x_NI + residual_NI
    normed_NI = rms_norm_torch(total_NI, norm.weight_I, norm.epsilon)
    return linear_torch(normed_NI, weight_OI, bias_O, gated=gated), total_NI


def _is_streamed(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    if not (x_NI.is_cuda and x_NI.element_size() == 2 and 0 < len(x_NI) <= STREAMED_ROWS) or is_invariant():
        return False
    return len(x_NI) == 1 or weight_OI.nbytes <= SMALL_WEIGHT_BYTES


def _has_hopper_kernels(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    from tokenmill.kernels.triton_attention import has_hopper_kernels  # needs Triton

    return has_hopper_kernels(device)


def _are_some_rows_of_a_graph(x_NI: torch.Tensor) -> bool:
    return x_NI.is_cuda and 1 < len(x_NI) <= MOST_TILED_ROWS and are_replayed()


def _may_go_by_tiles(x_NI: torch.Tensor) -> bool:
    """Whether products of such rows may go by our own tiles, which are slow to launch."""
    return _are_some_rows_of_a_graph(x_NI) and _has_hopper_kernels(x_NI.device) and not is_invariant()


def _is_quicker_in_pieces(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether `_in_pieces` is quicker than cuBLAS, which cuts sums, too, but adds the pieces up itself."""
    if len(x_NI) <= STREAMED_ROWS or not _are_some_rows_of_a_graph(x_NI):
        return False
    from tokenmill.kernels.triton_attention import num_processors
    from tokenmill.kernels.triton_overlap import is_hopper_or_later

    num_outputs, size = weight_OI.shape
    if x_NI.element_size() != 2 or size % (8 * PIECES) or not is_hopper_or_later(x_NI.device):
        return False
    return size >= INPUTS_PER_OUTPUT * num_outputs or _fill(
        len(x_NI), num_outputs, num_processors(x_NI.device)
    )


def _fill(num_rows: int, num_outputs: int, processors: int) -> bool:
    """Whether the pieces of many rows are as many squares as can be computed at once."""
    squares = PIECES * -(-num_rows // SQUARE) * -(-num_outputs // SQUARE)
    return num_rows > SQUARE and NEARLY_ALL * processors <= squares <= processors


def _in_pieces(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """The product as float32 [P, N, O]: the norm that follows adds the pieces up as it reads them."""
    x_PNI = x_NI.unflatten(1, (PIECES, -1)).transpose(0, 1)
    weight_PIO = weight_OI.unflatten(1, (PIECES, -1)).permute(1, 2, 0)
    return torch.bmm(x_PNI, weight_PIO, out_dtype=torch.float32)


def _tiled(
    x_NI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    *,
    gated: bool,
    may_split: bool,
) -> torch.Tensor | None:
    """The product by our own tiles, where they are known to be faster."""
    tiling = _tiling(x_NI, weight_OI, gated=gated, may_split=may_split)
    if tiling is None:
        return None
    from tokenmill.kernels import hopper_linear

    return hopper_linear.product(x_NI, weight_OI, bias_O, tiling, gated=gated)


def _tiling(
    x_NI: torch.Tensor, weight_OI: torch.Tensor, *, gated: bool, may_split: bool
) -> ProductTiling | None:
    """That of a product by our own tiles, where they can take it and are known to be faster."""
    if not _may_go_by_tiles(x_NI):
        return None
    from tokenmill.kernels import hopper_linear
    from tokenmill.kernels.triton_attention import num_processors

    if not hopper_linear.can_take(x_NI, weight_OI):
        return None
    return choose_tiling(
        *x_NI.shape,
        len(weight_OI) // 2 if gated else len(weight_OI),
        gated=gated,
        may_split=may_split,
        processors=num_processors(x_NI.device),
    )


def _heads_tiling(x_NI: torch.Tensor, weight_OI: torch.Tensor, heads: Heads) -> ProductTiling | None:
    """That of a product of rows like `x` whose tiles end as heads."""
    if not _may_go_by_tiles(x_NI):
        return None
    from tokenmill.kernels import hopper_heads, hopper_linear
    from tokenmill.kernels.triton_attention import num_processors

    tiling = choose_heads_tiling(
        *x_NI.shape,
        len(weight_OI),
        head_dim=heads.head_dim,
        are_whole=heads.norms is not None,
        processors=num_processors(x_NI.device),
    )
    if tiling is None or not hopper_linear.can_take(x_NI, weight_OI):
        return None
    return tiling if hopper_heads.can_take(heads, tiling) else None


def _unscaled(
    addend: Addend, residual_NO: torch.Tensor, norm: Norm
) -> tuple[UnscaledRows, torch.Tensor] | None:
    """The norm of a sum up to factors of its rows, without a kernel of its own, and the sum.

    None: a kernel of its own is faster, or the rows cannot be known without it.
    """
    x_NI = addend.x_NI
    if not _may_go_by_tiles(x_NI) or _is_streamed(x_NI, addend.weight_OI):
        return None
    # Not in float16: what a norm is of can be larger than its numbers.
    if x_NI.dtype != torch.bfloat16 or not residual_NO.is_contiguous():
        return None
    from tokenmill.kernels import hopper_linear
    from tokenmill.kernels.triton_attention import num_processors

    num_outputs, processors = len(addend.weight_OI), num_processors(x_NI.device)
    tiling = choose_sum_tiling(*x_NI.shape, num_outputs, processors=processors)
    if tiling is None or not hopper_linear.can_take(x_NI, addend.weight_OI):
        return None
    return hopper_linear.add(x_NI, addend.weight_OI, addend.bias_O, residual_NO, norm, tiling)


def _gated_of_sum(
    addend: Addend,
    residual_NO: torch.Tensor,
    norm: Norm,
    weight_FO: torch.Tensor,
    bias_F: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`add_norm_linear` without a kernel for the norm, where that is known to be faster."""
    if _is_streamed(residual_NO, weight_FO):
        return None
    tiling = _tiling(residual_NO, weight_FO, gated=True, may_split=False)
    if tiling is None or (found := _unscaled(addend, residual_NO, norm)) is None:
        return None
    from tokenmill.kernels import hopper_linear

    rows, total_NO = found
    return hopper_linear.product(rows, weight_FO, bias_F, tiling, gated=True), total_NO


def _tiled_gated(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor | None:
    """The gated product of many rows by tiles that have the activation inside, where that is faster."""
    if is_measured() or not _has_hopper_kernels(x_NI.device):
        return None
    if not are_replayed() and 2 * x_NI.numel() * len(weight_OI) < LEAST_OPERATIONS:
        return None
    from tokenmill.kernels import hopper_gated
    from tokenmill.kernels.triton_attention import num_processors

    processors = num_processors(x_NI.device)
    tiling = hopper_gated.choose_tiling(*x_NI.shape, len(weight_OI) // 2, processors)
    if tiling is None or not hopper_gated.can_take_gated(x_NI, weight_OI):
        return None
    return hopper_gated.product(x_NI, weight_OI, tiling)
