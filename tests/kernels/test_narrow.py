"""Products with weights kept in bfloat16 where the processor computes in float32, against sums in float64."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels import narrow, native, native_calls, packed
from tokenmill.kernels.narrow import NarrowWeight, narrowed

DTYPES = [torch.float32, torch.bfloat16]
KERNELS = native.library(torch.float32)
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not narrow.has_kernel(torch.float32), reason="this machine has no such kernel"),
]


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """All of them bfloat16."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16().to(dtype)


def kept(weight_OI: torch.Tensor) -> NarrowWeight:
    assert KERNELS is not None
    return NarrowWeight(weight_OI, native_calls.width_for_floats(KERNELS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (33, 17), (96, 64), (1100, 1537), (64, 513)])
def test_any_number_of_rows(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    weight = numbers(num_outputs, num_inputs, dtype=dtype)
    for num_rows in (0, 1, 2, 3, 5, 6, 7, 12, 13, 36, 37, 73, 200):
        x = torch.randn(num_rows, num_inputs).to(dtype)
        for bias in (None, torch.randn(num_outputs).to(dtype)):
            ours = kept(weight).product(x, bias)
            assert ours.dtype == dtype
            assert ours.shape == (num_rows, num_outputs)
            added = 0 if bias is None else bias.double()
            exact = x.double() @ weight.double().T + added
            # Errors grow with what is added up; bfloat16 is rounded once, at the end.
            size = x.double().abs() @ weight.double().abs().T + abs(added)
            assert ((ours.double() - exact).abs() <= 1e-6 * size + torch.finfo(dtype).eps * exact.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_among_any_others(dtype: torch.dtype) -> None:
    """The numbers differ so much in size that any other order of the sums would show."""
    random = torch.Generator().manual_seed(5)

    def wild(*shape: int) -> torch.Tensor:
        sizes = torch.randint(-9, 10, shape, generator=random)
        return torch.randn(shape, generator=random) * torch.exp2(sizes.float())

    weight = kept(wild(200, 1300).bfloat16().to(dtype))
    rows = wild(150, 1300).to(dtype)
    together = weight.product(rows, None)
    for start, stop in ((0, 1), (3, 5), (7, 20), (64, 128), (30, 130)):
        assert torch.equal(weight.product(rows[start:stop], None), together[start:stop]), (start, stop)


@pytest.mark.parametrize("num_rows", [1, 3, 6, 40])
def test_long_sums_are_as_exact_as_those_of_torch(num_rows: int) -> None:
    weight, x = numbers(64, 14_336, dtype=torch.float32), torch.randn(num_rows, 14_336)
    exact = x.double() @ weight.double().T

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    assert error(kept(weight).product(x, None)) < 2 * error(x @ weight.T)


def test_rows_of_a_wider_tensor() -> None:
    weight = numbers(40, 24, dtype=torch.float32)
    wide = torch.randn(9, 60)
    torch.testing.assert_close(kept(weight).product(wide[:, 7:31], None), wide[:, 7:31] @ weight.T)


def test_infinities_and_nan_stay_what_they_are() -> None:
    weight = numbers(40, 63, dtype=torch.float32).abs()
    weight[3, 5], weight[20, 9], weight[39, 62] = torch.inf, torch.nan, -torch.inf
    for num_rows in (1, 50):
        ours = kept(weight).product(torch.ones(num_rows, 63), None)
        assert (ours[:, 3] == torch.inf).all()
        assert (ours[:, 39] == -torch.inf).all()
        assert ours.isnan().nonzero().tolist() == [[row, 20] for row in range(num_rows)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_comes_back(dtype: torch.dtype) -> None:
    for num_outputs, num_inputs in ((1, 1), (2100, 6), (33, 17)):
        weight = numbers(num_outputs, num_inputs, dtype=dtype)
        weight[0, 0] = -0.0
        dense = kept(weight).dense()
        assert dense.dtype == dtype
        assert torch.equal(dense, weight)
        assert dense[0, 0].signbit()


def test_a_weight_that_would_change_is_left_as_it_is() -> None:
    weight = numbers(1500, 24, dtype=torch.float32)
    assert narrowed(weight) is not None
    weight[1499, 23] = 1 + 2**-9
    assert narrowed(weight) is None


def test_bfloat16_is_left_to_onednn_where_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = numbers(64, 24, dtype=torch.bfloat16)
    monkeypatch.setattr(packed, "has_bfloat16", lambda: True)
    assert narrowed(weight) is None
    monkeypatch.setattr(packed, "has_bfloat16", lambda: False)
    assert narrowed(weight) is not None


def test_without_a_kernel_nothing_is_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = numbers(64, 24, dtype=torch.float32)
    monkeypatch.setattr(native_calls, "width_for_floats", lambda _: 0)
    assert narrowed(weight) is None
    assert not narrow.has_kernel(torch.float32)
    monkeypatch.setattr(native, "library", lambda _: None)
    assert narrowed(weight) is None
    assert not narrow.has_kernel(torch.float32)
