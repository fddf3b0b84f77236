"""Products of the deterministic mode: the Triton kernel against float64, and blocks on a CPU."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.launching import invariant
from tokenmill.kernels.linear import linear, linear_torch

pytestmark = pytest.mark.cpu

LIMITS = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 1, 1), (3, 100, 33), (64, 128, 128), (65, 130, 257), (600, 64, 200)]
)
def test_products_of_any_rows(
    triton_device: str, dtype: torch.dtype, bias: bool, rows: int, inputs: int, outputs: int
) -> None:
    from tokenmill.kernels import triton_invariant

    x = numbers(rows, inputs + 16, dtype=dtype, seed=0)[:, :inputs].to(triton_device)
    weight = numbers(outputs, inputs, dtype=dtype, seed=1).to(triton_device)
    added = numbers(outputs, dtype=dtype, seed=2).to(triton_device) if bias else None
    y = triton_invariant.product(x, weight, added)
    assert (y.shape, y.dtype) == ((rows, outputs), dtype)
    expected = linear_torch(x.double(), weight.double(), None if added is None else added.double())
    assert (y.double() - expected).norm() < LIMITS[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_beside_any_others_on_a_cpu(dtype: torch.dtype) -> None:
    x, weight = numbers(150, 1536, dtype=dtype, seed=0), numbers(900, 1536, dtype=dtype, seed=1)
    with invariant():
        together = linear(x, weight, None)
        for begin, end in ((0, 1), (3, 4), (10, 70), (149, 150)):
            assert torch.equal(linear(x[begin:end], weight, None), together[begin:end])
    assert not together.double().sub(linear_torch(x.double(), weight.double(), None)).abs().max() > 2
