"""Products of few rows with weights in oneDNN's order, against sums in float64."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels import native, native_calls, packed
from tokenmill.kernels.native_calls import ColumnWeight
from tokenmill.layers.linear import can_pack

KERNELS = native.library(torch.bfloat16)
TILED = KERNELS is not None and native_calls.most_tiled_rows(KERNELS) > 0
NAMES = ["product_of_rows", "product_in_tiles"] if TILED else ["product_of_rows"]
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(KERNELS is None, reason="there is no C compiler"),
]
PACKS = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this machine does not pack bfloat16"
)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def in_columns(weight_OI: torch.Tensor, width: int) -> ColumnWeight:
    """A weight as a processor would want it whose columns are so wide."""
    num_outputs, num_inputs = weight_OI.shape
    padded_OI = torch.zeros(-(-num_outputs // width) * width, num_inputs + 32, dtype=weight_OI.dtype)
    padded_OI[:num_outputs, :num_inputs] = weight_OI
    ordered = padded_OI.view(-1, width, padded_OI.shape[1] // 2, 2).transpose(1, 2).contiguous()
    return ColumnWeight(ordered.data_ptr(), ordered, num_outputs, num_inputs, padded_OI.shape[1], width=width)


def assert_close(
    ours: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    unit = torch.finfo(x.dtype).eps * float(exact.abs().max())
    assert torch.allclose(ours.double(), exact, rtol=0, atol=unit)


@pytest.mark.parametrize("width", [16, 32, 48, 64])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 32), (96, 64), (1000, 96), (47, 4096)])
def test_columns_of_any_width(num_outputs: int, num_inputs: int, width: int) -> None:
    assert KERNELS is not None
    weight = numbers(num_outputs, num_inputs)
    for name in NAMES:
        for num_rows in (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 49, 70):
            x = numbers(num_rows, num_inputs)
            for bias in (None, numbers(num_outputs)):
                ours = native_calls.product(KERNELS, name, x, in_columns(weight, width), bias)
                assert ours.shape == (num_rows, num_outputs)
                assert_close(ours, x, weight, bias)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_summed_alone_as_in_company(name: str) -> None:
    assert KERNELS is not None
    x, weight = numbers(70, 1024), in_columns(numbers(500, 1024), 32)
    whole = native_calls.product(KERNELS, name, x, weight, None)
    for row in range(70):
        alone = native_calls.product(KERNELS, name, x[row : row + 1], weight, None)
        assert torch.equal(alone[0], whole[row])


@pytest.mark.skipif(not packed.multiplies_any_rows(), reason="this machine has no such instructions")
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1000, 384), (77, 512), (4000, 64)])
def test_rows_by_our_kernels_have_the_bits_of_sums_that_onednn_does_not_cut(
    num_outputs: int, num_inputs: int
) -> None:
    """So that a row's numbers do not depend on how many others there are."""
    weight, bias = numbers(num_outputs, num_inputs), numbers(num_outputs)
    packed_weight = packed.pack(weight)
    columns = packed.columns(packed_weight, weight)
    assert columns is not None
    for num_rows in (1, 3, 8, 20, 32, 33, 100):
        x = numbers(num_rows, num_inputs)
        ours = packed.product(x, packed_weight, bias, columns, any_rows=True)
        assert torch.equal(ours, packed.product(x, packed_weight, bias))


@PACKS
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1000, 768), (768, 1056), (33, 64)])
def test_what_onednn_packed_is_read_where_it_lies(num_outputs: int, num_inputs: int) -> None:
    weight, bias = numbers(num_outputs, num_inputs), numbers(num_outputs)
    packed_weight = packed.pack(weight)
    columns = packed.columns(packed_weight, weight)
    if columns is None:
        pytest.skip("oneDNN's order on this machine is none that the kernel knows")
    for num_rows in (1, 2, 32, 33):
        x = numbers(num_rows, num_inputs)
        assert_close(packed.product(x, packed_weight, bias, columns), x, weight, bias)


@PACKS
def test_another_order_is_noticed() -> None:
    """A weight that does not lie as the kernel expects is left to oneDNN."""
    weight = numbers(200, 640)
    assert packed.columns(packed.pack(weight.flip(0)), weight) is None
    assert packed.columns(packed.pack(weight), weight.flip(1)) is None


def test_infinities_and_nan_stay_what_they_are() -> None:
    assert KERNELS is not None
    weight = numbers(40, 64).abs()
    weight[3, 5], weight[20, 9] = torch.inf, torch.nan
    for name in NAMES:
        ours = native_calls.product(KERNELS, name, torch.ones(1, 64).bfloat16(), in_columns(weight, 32), None)
        assert ours[0, 3] == torch.inf
        assert ours.isnan().nonzero().tolist() == [[0, 20]]


@PACKS
def test_tiles_and_onednn_take_turns() -> None:
    """Both configure the processor's tiles, each for itself."""
    weight = numbers(3000, 768)
    packed_weight = packed.pack(weight)
    columns = packed.columns(packed_weight, weight)
    rows = {num_rows: numbers(num_rows, 768) for num_rows in (1, 200, 20, 40, 7)}
    first = {n: packed.product(x, packed_weight, None, columns) for n, x in rows.items()}
    for _ in range(20):
        for num_rows, x in rows.items():
            assert torch.equal(packed.product(x, packed_weight, None, columns), first[num_rows])
    for num_rows, x in rows.items():
        assert_close(first[num_rows], x, weight, None)


@pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="this machine does not pack")
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (96, 64), (1100, 1000)])
def test_products_of_any_number_of_rows(num_outputs: int, num_inputs: int) -> None:
    """oneDNN gets few different numbers of rows, callers as many as they gave."""
    weight, bias = numbers(num_outputs, num_inputs).float(), numbers(num_outputs).float()
    for num_rows in (0, 1, 7, 8, 9, 31, 33, 100):
        x = numbers(num_rows, num_inputs).float()
        ours = packed.product(x, packed.pack(weight), bias)
        assert ours.shape == (num_rows, num_outputs)
        exact = x.double() @ weight.double().T + bias.double()
        # Sums of float32 in whatever order the machine has for them: errors grow with what is added up.
        added = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        assert ((ours.double() - exact).abs() <= 1e-6 * added).all()
    given = {packed.padded_rows(count, weight.numel()) for count in range(1025)}
    assert len(given) <= 8 + 1 + 1024 // 8
    assert all(0 <= packed.padded_rows(count, weight.numel()) - count < 16 for count in range(1025))
