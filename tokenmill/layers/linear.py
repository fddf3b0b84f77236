"""Matrix products with weights, and their form for CPUs: weights reordered once.

A `Linear` may hold several checkpoint tensors, one below the other, so that one product serves them all.
Letters: N rows of input, I inputs, O outputs.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from tokenmill.kernels import narrow, packed
from tokenmill.kernels.activation import gated_silu
from tokenmill.kernels.launching import is_invariant
from tokenmill.kernels.linear import Addend as Addend
from tokenmill.kernels.linear import Hidden as Hidden
from tokenmill.kernels.linear import add_norm_linear, in_blocks, linear, queries_after_norm
from tokenmill.kernels.operands import Heads, Norm
from tokenmill.layers.norm import RMSNorm

# oneDNN cuts long sums in 16 bits into pieces, and where depends on the number of rows: an answer would
# change with its neighbours in the batch. Small products are all by our kernels, or go in blocks of always as
# many rows, which costs them next to nothing; large ones would take up to twice as long. There few rows are
# by our kernels.
_LONGEST_WHOLE_SUM = 512
_SMALL_WEIGHT_BYTES = 2**20


class Linear(nn.Module):
    """`x W^T + b` over the last dimension: [N, I] -> [N, O].

    `parts` names the checkpoint's projections stacked in the weight, with the outputs of each; an
    unfused one has none. The weight is uninitialised until it is loaded.
    """

    gives_queries = True  # whether it has `queries_after_norm`

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.parts = dict(parts or {})
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        )

    def forward(self, x_NI: torch.Tensor) -> torch.Tensor:
        """[N, I] -> [N, O]"""
        return linear(x_NI, self.weight, self.bias)

    def addend(self, x_NI: torch.Tensor) -> Hidden:
        """The product [N, O] for `after_norm` or `RMSNorm.add`, which add it to a residual."""
        return Addend(x_NI, self.weight, self.bias)

    def after_norm(
        self, norm: RMSNorm, hidden: Hidden, residual_NI: torch.Tensor, *, gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of `norm(hidden + residual)`, and that sum [N, I]. If `gated`, the first half of the
        outputs gates the second (`gated_silu`), and half as many come out."""
        return add_norm_linear(
            hidden,
            residual_NI,
            Norm(norm.weight, norm.epsilon),
            weight_OI=self.weight,
            bias_O=self.bias,
            gated=gated,
        )

    def queries_after_norm(
        self, norm: RMSNorm, hidden: Hidden, residual_NI: torch.Tensor, heads: Heads
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`after_norm` of a product that gives queries, keys and values: queries [N, H, D], rotated; keys and
        values are stored."""
        return queries_after_norm(
            hidden,
            residual_NI,
            Norm(norm.weight, norm.epsilon),
            weight_OI=self.weight,
            bias_O=self.bias,
            heads=heads,
        )

    def slots(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(part, "weight" or "bias", view of the parameter that holds it), for every stacked part."""
        for kind, parameter in self.named_parameters():
            views = parameter.split(list(self.parts.values()))
            yield from ((part, kind, view) for part, view in zip(self.parts, views, strict=True))


class TiedLinear(nn.Module):
    """A product with a weight [O, I] that another module owns: an output layer tied to the embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        # In a tuple, so that the parameter is not registered a second time.
        self._shared = (weight,)

    @property
    def weight(self) -> nn.Parameter:
        """The owner's parameter."""
        return self._shared[0]

    def forward(self, x_NI: torch.Tensor) -> torch.Tensor:
        """[N, I] -> [N, O]"""
        return linear(x_NI, self.weight, None)


class PackedLinear(nn.Module):
    """A `Linear` or `TiedLinear` whose weight lies in another order: the same product, faster.

    The order is oneDNN's, or that of `kernels/narrow`. The weight counts as a parameter where it replaced
    one, not where it is a copy of a tied one.
    """

    gives_queries = False

    def __init__(self, plain: Linear | TiedLinear) -> None:
        super().__init__()
        weight_OI = plain.weight.detach()
        self._narrow = narrow.narrowed(weight_OI)
        self._columns, self._is_small_and_cut = None, False
        if self._narrow is not None:
            weight = self._narrow.numbers[: weight_OI.numel()]  # without what fills its last column
        else:
            weight = packed.pack(weight_OI)
            has_pieces = weight_OI.element_size() == 2 and weight_OI.shape[1] > _LONGEST_WHOLE_SUM
            self._is_small_and_cut = has_pieces and weight_OI.nbytes <= _SMALL_WEIGHT_BYTES
            if packed.multiplies_any_rows() or (has_pieces and not self._is_small_and_cut):
                self._columns = packed.columns(weight, weight_OI)
        # In a tuple, so that it is no module of the model's.
        self._tied = (plain,) if isinstance(plain, TiedLinear) else None
        self._parts = {} if isinstance(plain, TiedLinear) else plain.parts
        if isinstance(plain, Linear):
            self.bias = plain.bias
            self.weight = nn.Parameter(weight, requires_grad=False)
        else:
            self.bias = None
            self.register_buffer("weight", weight, persistent=False)

    def forward(self, x_NI: torch.Tensor) -> torch.Tensor:
        """[N, I] -> [N, O]"""
        if self._narrow is not None:
            return self._narrow.product(x_NI, self.bias)
        if is_invariant() or (self._is_small_and_cut and self._columns is None):
            return in_blocks(x_NI, lambda block_NI: packed.product(block_NI, self.weight, self.bias))
        return packed.product(x_NI, self.weight, self.bias, self._columns, any_rows=self._is_small_and_cut)

    def addend(self, x_NI: torch.Tensor) -> Hidden:
        """See `Linear.addend`."""
        return self.forward(x_NI)

    def after_norm(
        self, norm: RMSNorm, hidden: Hidden, residual_NI: torch.Tensor, *, gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Linear.after_norm`."""
        normed_NI, total_NI = norm.add(hidden, residual_NI)
        y_NO = self(normed_NI)
        return (gated_silu(y_NO) if gated else y_NO), total_NI

    def unpacked(self) -> Linear | TiedLinear:
        """What was packed, with exactly its numbers."""
        if self._tied is not None:
            return self._tied[0]
        weight_OI = self.weight.to_dense() if self._narrow is None else self._narrow.dense()
        out_features, in_features = weight_OI.shape
        plain = Linear(in_features, out_features, bias=False, dtype=weight_OI.dtype, parts=self._parts)
        plain.weight = nn.Parameter(weight_OI, requires_grad=False)
        plain.bias = self.bias
        return plain


_LINEARS = (Linear, TiedLinear, PackedLinear)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine multiplies packed weights of the dtype (and gains by it)."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if dtype == torch.bfloat16:
        return packed.has_bfloat16() or narrow.has_kernel(dtype)
    return dtype == torch.float32


def pack_linears(model: nn.Module) -> None:
    """Replace every `Linear` and `TiedLinear` below `model` by its packed form, one after the other, so
    that at most one weight exists twice at a time (that of a tied one stays: it is also looked up)."""
    for parent in parents(model):
        pack_children(parent)


def parents(model: nn.Module) -> list[nn.Module]:
    """What linears hang below. The linears themselves are not in the list, which would keep them alive."""
    return [module for module in model.modules() if not isinstance(module, _LINEARS)]


def pack_children(parent: nn.Module) -> None:
    """As `pack_linears`, only for what is directly below `parent`."""
    for name, child in parent.named_children():
        if isinstance(child, Linear | TiedLinear):
            setattr(parent, name, PackedLinear(child))


def unpack_children(parent: nn.Module) -> bool:
    """The opposite of `pack_children`; whether there was anything to unpack."""
    found = False
    for name, child in parent.named_children():
        if isinstance(child, PackedLinear):
            setattr(parent, name, child.unpacked())
            found = True
    return found
