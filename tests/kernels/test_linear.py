"""Products of a few rows: the Triton kernels against float64, and against the operations they fuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenmill.kernels import linear as plain
from tokenmill.kernels.launching import invariant, measured, replayed
from tokenmill.kernels.operands import Norm

pytestmark = pytest.mark.cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of a product's norm: a few roundings of its result, and in bfloat16 the interpreter's way to round.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-2, torch.float16: 2e-3}
# (inputs, outputs): one weight, odd sizes, whole tiles and parts of them.
SHAPES = [(1, 1), (100, 33), (896, 24), (1100, 7)]


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(
    rows: int, inputs: int, outputs: int, *, bias: bool, gated: bool, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Arguments of `add_norm_linear`, the rows of input and residual each with a stride of their own."""
    weights = 2 * outputs if gated else outputs
    tensors = {
        "x_NI": numbers(rows, inputs + 16, dtype=dtype, seed=0)[:, :inputs],
        "residual_NI": numbers(rows, inputs + 8, dtype=dtype, seed=1)[:, :inputs],
        "weight_OI": numbers(weights, inputs, dtype=dtype, seed=2) / inputs**0.5,
        "bias_O": numbers(weights, dtype=dtype, seed=3) if bias else None,
    }
    moved = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    return {**moved, "norm": Norm(numbers(inputs, dtype=dtype, seed=4).to(device), 1e-6), "gated": gated}


def widened(value: Any) -> Any:
    if isinstance(value, Norm):
        return Norm(value.weight_I.double(), value.epsilon)
    return value.double() if isinstance(value, torch.Tensor) else value


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_products_of_any_few_rows(
    triton_device: str, dtype: torch.dtype, gated: bool, inputs: int, outputs: int
) -> None:
    from tokenmill.kernels import triton_linear

    for rows in (1, 2, 5):
        inputs_of = case(
            rows, inputs, outputs, bias=rows != 2, gated=gated, dtype=dtype, device=triton_device
        )
        given = {name: inputs_of[name] for name in ("x_NI", "weight_OI", "bias_O", "gated")}
        y = triton_linear.linear(**given)
        assert (y.shape, y.dtype) == ((rows, outputs), dtype)
        expected = plain.linear_torch(**{name: widened(value) for name, value in given.items()})
        assert relative_error(y, expected) < TOLERANCE[dtype], rows


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_addition_and_norm_in_front(
    triton_device: str, dtype: torch.dtype, gated: bool, inputs: int, outputs: int
) -> None:
    from tokenmill.kernels import triton_linear

    for rows in (1, 2):
        given = case(rows, inputs, outputs, bias=rows != 2, gated=gated, dtype=dtype, device=triton_device)
        y, total = triton_linear.add_norm_linear(**given)
        expected_total = given["x_NI"] + given["residual_NI"]
        # The interpreter cuts bits off where a GPU rounds to bfloat16.
        limit = 0.0 if dtype != torch.bfloat16 else torch.finfo(dtype).eps
        torch.testing.assert_close(total, expected_total, rtol=limit, atol=0)
        given["residual_NI"] = total.double() - given["x_NI"].double()
        expected, _ = plain.add_norm_linear_torch(**{name: widened(value) for name, value in given.items()})
        assert relative_error(y, expected) < TOLERANCE[dtype], rows


def test_fused_equals_separate_kernels_bit_for_bit(triton_device: str) -> None:
    """One input, so that no sum has two orders: every rounding on the way is where the plain path has it."""
    from tokenmill.kernels import triton_activation, triton_linear, triton_norm

    for dtype in (torch.float16, torch.float32):
        given = case(1, 1, 64, bias=True, gated=True, dtype=dtype, device=triton_device)
        normed, total = triton_norm.add_rms_norm(
            given["x_NI"], given["residual_NI"], given["norm"].weight_I, given["norm"].epsilon
        )
        product = normed.float() * given["weight_OI"].float().T + given["bias_O"].float()
        expected = triton_activation.gated_silu(product.to(dtype))
        fused, fused_total = triton_linear.add_norm_linear(**given)
        assert torch.equal(fused_total, total)
        torch.testing.assert_close(fused, expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_the_same_every_time_and_in_any_company(triton_device: str, gated: bool) -> None:
    """A row's result depends neither on the run nor, within a kernel, on the rows beside it."""
    from tokenmill.kernels import triton_linear

    given = case(2, 896, 18, bias=True, gated=gated, dtype=torch.bfloat16, device=triton_device)
    x, rest = given["x_NI"], (given["weight_OI"], given["bias_O"])
    whole = triton_linear.linear(x, *rest, gated=gated)
    assert torch.equal(whole, triton_linear.linear(x, *rest, gated=gated))
    assert torch.equal(whole[1:], triton_linear.linear(x[1:], *rest, gated=gated))


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_the_choice_on_a_cpu_is_torch(rows: int) -> None:
    given = case(rows, 32, 5, bias=True, gated=True, dtype=torch.bfloat16, device="cpu")
    x = given.pop("x_NI")
    expected = plain.add_norm_linear_torch(x, **given)
    for ours, theirs in zip(plain.add_norm_linear(x, **given), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_an_addend_is_computed_when_it_is_added(rows: int) -> None:
    given = case(rows, 32, 5, bias=True, gated=True, dtype=torch.bfloat16, device="cpu")
    addend = plain.Addend(given.pop("x_NI"), torch.randn(32, 32).bfloat16(), torch.randn(32).bfloat16())
    expected = plain.add_norm_linear_torch(addend.computed(), **given)
    for ours, theirs in zip(plain.add_norm_linear(addend, **given), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_programs_are_many_and_never_hold_more_than_registers_can() -> None:
    from tokenmill.kernels.triton_linear import FEWEST_PROGRAMS, choose_tiling

    for size, num_outputs, gated in [
        (896, 1152, False),
        (896, 896, False),
        (4864, 896, False),
        (896, 4864, True),
        (4096, 14336, True),
        (5120, 17408, True),
        (14336, 4096, False),
        (17408, 5120, False),
        (1, 1, False),
    ]:
        tiling = choose_tiling(size, num_outputs, gated)
        assert tiling.outputs * FEWEST_PROGRAMS <= num_outputs or tiling.outputs == 1
        held = tiling.outputs * (2 if gated else 1) * size / (32 * tiling.num_warps)
        assert held <= (80 if gated else 64)


@pytest.mark.parametrize(
    ("size", "num_outputs", "gated", "outputs", "num_warps"),
    [
        (896, 896, False, 2, 4),
        (2048, 1024, False, 2, 4),
        (896, 4864, True, 2, 4),
        (1024, 3072, True, 2, 4),
        (3072, 1024, False, 2, 8),
        (4096, 14336, True, 2, 8),
        (5120, 17408, True, 2, 8),
        (2560, 9728, True, 2, 4),
        (14336, 4096, False, 2, 16),
        (17408, 5120, False, 1, 16),
        (1024, 151936, False, 8, 4),
    ],
)
def test_tilings_that_were_measured_to_be_best(
    size: int, num_outputs: int, gated: bool, outputs: int, num_warps: int
) -> None:
    from tokenmill.kernels.triton_linear import LinearTiling, choose_tiling

    assert choose_tiling(size, num_outputs, gated) == LinearTiling(outputs, num_warps)


def test_which_products_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row always, two where the weight is small, more never; nothing in float32."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    small, large = (torch.empty(rows, 896, dtype=torch.bfloat16, device="meta") for rows in (9728, 14336))
    for rows, of_small, of_large in ((0, False, False), (1, True, True), (2, True, False), (3, False, False)):
        x = torch.empty(rows, 896, dtype=torch.bfloat16, device="meta")
        assert plain._is_streamed(x, small) == of_small
        assert plain._is_streamed(x, large) == of_large
        assert not plain._is_streamed(x.float(), small.float())


def test_rows_that_have_tiles_of_their_own_are_some_and_go_into_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for rows, expected in ((1, False), (2, True), (256, True), (257, False)):
        x = torch.empty(rows, 8, device="meta")
        assert not plain._are_some_rows_of_a_graph(x)
        with replayed():
            assert plain._are_some_rows_of_a_graph(x) == expected


def test_logits_are_multiplied_by_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With whatever is in the memory behind the rows, which no row's logits depend on."""
    monkeypatch.setattr(plain, "MANY_OUTPUTS", 100)
    monkeypatch.setattr(plain, "_are_some_rows_of_a_graph", lambda _: True)
    library, sizes = torch.nn.functional.linear, []

    def product(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(x))
        return library(x, *rest)

    weight, bias = numbers(100, 8, dtype=torch.float32, seed=0), numbers(100, dtype=torch.float32, seed=1)
    for num_rows, room, expected in ((70, 128, 96), (97, 128, 128), (70, 70, 70), (70, 90, 70)):
        memory = numbers(room, 8, dtype=torch.float32, seed=2)
        memory[num_rows:] = torch.nan
        x = memory[:num_rows]
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", product)
            found = plain.linear(x, weight, bias)
            plain.linear(x, weight[:99], None)
        torch.testing.assert_close(found, library(x, weight, bias))
        assert sizes[-2:] == [expected, num_rows]


# ── kernels for Hopper: where they are, and what else many rows go by ──


@pytest.mark.parametrize(
    ("version", "cuda", "capability", "expected"),
    [
        ("3.6.0", "13.0", (9, 0), True),
        ("3.7.0", "13.0", (9, 0), False),
        ("3.6.0", "13.0", (8, 0), False),
        ("3.6.0", None, (9, 0), False),
    ],
)
def test_kernels_for_hopper_need_their_device_and_their_triton(
    version: str,
    cuda: str | None,
    capability: tuple[int, int],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip("triton")
    from tokenmill.kernels.triton_attention import has_hopper_kernels

    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_hopper_kernels.__wrapped__(torch.device("cuda:0")) is expected
    assert not has_hopper_kernels(torch.device("cpu"))


def test_pieces_of_many_rows_fill_the_device() -> None:
    def fills(rows: int, outputs: int) -> bool:
        return plain._fill(rows, outputs, 132)

    assert [fills(rows, 4096) for rows in (128, 129, 200, 256)] == [False, True, True, True]
    assert not any(fills(256, outputs) for outputs in (2560, 3584, 5120, 8192))


@pytest.mark.parametrize("rows", [3, 100])
def test_halves_of_a_long_sum(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sum is the product, also for rows that lie apart."""
    x = torch.randn(rows, 104, dtype=torch.float64)[:, :96]
    weight = torch.randn(24, 96, dtype=torch.float64)
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b, *, out_dtype: bmm(a, b).to(out_dtype))
    pieces = plain._in_pieces(x, weight)
    assert pieces.shape == (2, rows, 24)
    assert pieces.dtype == torch.float32
    torch.testing.assert_close(pieces.sum(dim=0), (x @ weight.T).float())


def test_gated_products_of_many_rows_go_by_tiles_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper_gated = pytest.importorskip("tokenmill.kernels.hopper_gated")
    rows: list[int] = []

    def product(x_NI: torch.Tensor, weight_OI: torch.Tensor, tiling: Any) -> torch.Tensor:
        rows.append(len(x_NI))
        return plain.linear_torch(x_NI, weight_OI, None, gated=True)

    monkeypatch.setattr(plain, "_has_hopper_kernels", lambda _: True)
    monkeypatch.setattr(plain, "_are_some_rows_of_a_graph", lambda _: False)
    monkeypatch.setattr(hopper_gated, "product", product)
    x, weight = (numbers(size, 64, dtype=torch.bfloat16, seed=size) for size in (300, 256))
    expected = plain.linear_torch(x, weight, None, gated=True)

    def is_tiled(x: torch.Tensor = x, bias_O: torch.Tensor | None = None, *, gated: bool = True) -> bool:
        rows.clear()
        result = plain.linear(x, weight, bias_O, gated=gated)
        if bias_O is None and gated:
            torch.testing.assert_close(result, expected[: len(x)], atol=2e-2, rtol=2e-2)
        return bool(rows)

    assert not is_tiled()  # launched alone, it would cost the host more than it saves
    with replayed():
        assert is_tiled()
        assert not is_tiled(x[:191])
        assert not is_tiled(gated=False)
        assert not is_tiled(bias_O=weight[:, 0].contiguous())
        with invariant():
            assert not is_tiled()
        with measured():  # another number of rows might go the way that takes more memory
            assert not is_tiled()
    monkeypatch.setattr(plain, "LEAST_OPERATIONS", 2 * 300 * 256 * 64)
    assert is_tiled()
    assert not is_tiled(x[:299])
