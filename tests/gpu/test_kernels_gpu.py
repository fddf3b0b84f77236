"""Norms, activation and rotary embedding at real sizes on a GPU, against their torch references there."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.activation import gated_silu, gated_silu_torch
from tokenmill.kernels.norm import add_rms_norm, rms_norm, rms_norm_torch
from tokenmill.kernels.rotary import rotate, rotate_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * 3).to(dtype)


def assert_within_a_unit(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the last bits: sums in another order, and exponentials, may round the other way."""
    rtol = 4e-6 if expected.dtype == torch.float32 else 2 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 256, 5000])
@pytest.mark.parametrize("size", [64, 128, 896, 4096, 5120, 8192])
def test_norms(dtype: torch.dtype, tokens: int, size: int) -> None:
    x, residual = numbers(tokens, size, dtype=dtype), numbers(tokens, size, dtype=dtype, seed=1)
    weight = numbers(size, dtype=dtype, seed=2)
    assert_within_a_unit(rms_norm(x, weight, 1e-6), rms_norm_torch(x, weight, 1e-6))
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_within_a_unit(normed, rms_norm_torch(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_heads_in_a_fused_tensor(dtype: torch.dtype) -> None:
    fused = numbers(777, (32 + 8 + 8) * 128, dtype=dtype)
    weight = numbers(128, dtype=dtype, seed=1)
    for heads in (fused[:, : 32 * 128].view(777, 32, 128), fused[:, 32 * 128 : 40 * 128].view(777, 8, 128)):
        assert_within_a_unit(rms_norm(heads, weight, 1e-6), rms_norm_torch(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 4864), (256, 3072), (5000, 14336), (7, 1001)])
def test_activation(dtype: torch.dtype, tokens: int, size: int) -> None:
    gate_up = numbers(tokens, 2 * size, dtype=dtype)
    assert_within_a_unit(gated_silu(gate_up), gated_silu_torch(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 256, 5000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half"),
    [(14, 2, 64, 32), (32, 8, 128, 64), (32, 32, 80, 16), (24, 8, 96, 48), (8, 4, 256, 128)],
)
def test_rotary(dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, half: int) -> None:
    fused = numbers(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, _ = fused.split([heads, kv_heads, kv_heads], dim=1)
    angles = numbers(tokens, half, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    exact = rotate_torch(q.double(), k.double(), cos.double(), sin.double())
    plain = rotate_torch(q, k, cos, sin)
    for ours, theirs, truth in zip(rotate(q, k, cos, sin), plain, exact, strict=True):
        # The compiler may keep products in float32 that torch rounds: never worse, by chance better.
        assert (ours.double() - truth).norm() <= 1.01 * (theirs.double() - truth).norm()
