"""Rotary embedding: against transformers' function, and the Triton kernel against the torch reference."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.rotary import rotate, rotate_torch

pytestmark = pytest.mark.cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(
    heads: int, kv_heads: int, head_dim: int, half: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys as views of a fused tensor, and cosines and sines of true angles."""
    generator = torch.Generator().manual_seed(heads)
    fused = torch.randn(5, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    q, k, _ = fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    angles = torch.arange(5)[:, None] * torch.rand(half, generator=generator) * 100
    return (
        q.view(5, heads, head_dim),
        k.view(5, kv_heads, head_dim),
        angles.cos().to(dtype),
        angles.sin().to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, cos, sin = inputs(4, 2, 64, 32, dtype)
    theirs = apply_rotary_pos_emb(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        torch.cat((cos, cos), -1)[None],
        torch.cat((sin, sin), -1)[None],
    )
    for ours, expected in zip(rotate(q, k, cos, sin), theirs, strict=True):
        assert torch.equal(ours, expected[0].transpose(0, 1))


def test_partial_rotation_leaves_the_rest() -> None:
    q, k, cos, sin = inputs(3, 1, 80, 16, torch.float32)
    q_out, k_out = rotate(q, k, cos, sin)
    assert torch.equal(q_out[..., 32:], q[..., 32:])
    assert torch.equal(k_out[..., 32:], k[..., 32:])
    pair = torch.complex(q[..., :16], q[..., 16:32]) * torch.complex(cos, sin)[:, None]
    torch.testing.assert_close(q_out[..., :16], pair.real)
    torch.testing.assert_close(q_out[..., 16:32], pair.imag)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half"),
    [(14, 2, 64, 32), (3, 3, 80, 40), (4, 1, 96, 24), (1, 1, 256, 128)],
)
def test_triton_agrees(
    triton_device: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, half: int
) -> None:
    from tokenmill.kernels import triton_rotary

    q, k, cos, sin = (tensor.to(triton_device) for tensor in inputs(heads, kv_heads, head_dim, half, dtype))
    for ours, expected in zip(
        triton_rotary.rotate(q, k, cos, sin), rotate_torch(q, k, cos, sin), strict=True
    ):
        assert ours.is_contiguous()
        # Where products cancel, their rounding shows; the interpreter rounds to bfloat16 differently.
        limit = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, expected, rtol=limit, atol=limit * float(q.abs().max()))
