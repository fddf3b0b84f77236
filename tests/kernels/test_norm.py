"""RMS norms: against transformers' module, and the Triton kernels against the torch reference."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.norm import add_rms_norm, rms_norm, rms_norm_torch

pytestmark = pytest.mark.cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    module.weight.data = numbers(96, dtype=dtype, seed=1)
    x, residual = numbers(7, 96, dtype=dtype), numbers(7, 96, dtype=dtype, seed=2)
    with torch.no_grad():
        limits = {"rtol": 2e-6, "atol": 0} if dtype == torch.float32 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(rms_norm(x, module.weight, 1e-5), module(x), **limits)
        normed, total = add_rms_norm(x, residual, module.weight, 1e-5)
        assert torch.equal(total, x + residual)
        torch.testing.assert_close(normed, module(x + residual), **limits)


def test_epsilon_keeps_zeros_finite() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 80, 896, 3000])
def test_triton_agrees(triton_device: str, dtype: torch.dtype, size: int) -> None:
    from tokenmill.kernels import triton_norm

    x = numbers(5, size, dtype=dtype).to(triton_device)
    residual = numbers(5, size, dtype=dtype, seed=1).to(triton_device)
    weight = numbers(size, dtype=dtype, seed=2).to(triton_device)
    torch.testing.assert_close(triton_norm.rms_norm(x, weight, 1e-6), rms_norm_torch(x, weight, 1e-6))
    normed, total = triton_norm.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, rms_norm_torch(total, weight, 1e-6))
    one_row = residual[0].expand_as(residual)  # for all
    normed, total = triton_norm.add_rms_norm(x, one_row, weight, 1e-6)
    torch.testing.assert_close(total, x + one_row)
    torch.testing.assert_close(normed, rms_norm_torch(total, weight, 1e-6))
    assert total.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_pieces", [1, 2, 4])
def test_triton_adds_pieces_to_a_residual(triton_device: str, dtype: torch.dtype, num_pieces: int) -> None:
    """Their sum is rounded to the dtype before it is added, as the product itself would have been."""
    from tokenmill.kernels import triton_norm

    pieces = numbers(num_pieces, 5, 896, dtype=torch.float32).to(triton_device)
    residual = numbers(5, 896, dtype=dtype, seed=1).to(triton_device)
    weight = numbers(896, dtype=dtype, seed=2).to(triton_device)
    normed, total = triton_norm.add_rms_norm(pieces, residual, weight, 1e-6)
    whole, expected = triton_norm.add_rms_norm(pieces.sum(dim=0).to(dtype), residual, weight, 1e-6)
    # The interpreter cuts numbers off where it should round to bfloat16.
    limits = {"atol": 0.07, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-3, "rtol": 2e-3}
    torch.testing.assert_close(total, expected, **limits)
    torch.testing.assert_close(normed, whole, **limits)
    assert total.dtype == normed.dtype == dtype


def test_triton_reads_heads_of_a_fused_tensor(triton_device: str) -> None:
    from tokenmill.kernels import triton_norm

    fused = numbers(6, 10 * 32, dtype=torch.float32).to(triton_device)
    heads = fused[:, 64 : 64 + 5 * 32].view(6, 5, 32)
    weight = numbers(32, dtype=torch.float32, seed=1).to(triton_device)
    out = triton_norm.rms_norm(heads, weight, 1e-6)
    assert out.is_contiguous()
    torch.testing.assert_close(out, rms_norm_torch(heads, weight, 1e-6))
    _, total = triton_norm.add_rms_norm(heads, heads.contiguous(), weight, 1e-6)
    torch.testing.assert_close(total, 2 * heads)


def test_triton_takes_one_and_four_dimensions(triton_device: str) -> None:
    from tokenmill.kernels import triton_norm

    x = numbers(2, 3, 4, 16, dtype=torch.float32).to(triton_device)
    weight = numbers(16, dtype=torch.float32, seed=1).to(triton_device)
    for part in (x, x[0, 0, 0]):
        torch.testing.assert_close(
            triton_norm.rms_norm(part, weight, 1e-6), rms_norm_torch(part, weight, 1e-6)
        )
