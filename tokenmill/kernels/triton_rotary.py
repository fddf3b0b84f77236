"""Rotary position embedding on the GPU, queries and keys in one launch; the reference is `rotary.py`."""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rotate(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rotary.rotate`."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads, half = k_TKD.shape[1], cos_TR.shape[1]
    q_out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    k_out = torch.empty(k_TKD.shape, dtype=k_TKD.dtype, device=k_TKD.device)
    _rotate_kernel[(num_tokens,)](
        q_THD,
        k_TKD,
        cos_TR,
        sin_TR,
        q_out,
        k_out,
        q_THD.stride(0),
        q_THD.stride(1),
        k_TKD.stride(0),
        k_TKD.stride(1),
        cos_TR.stride(0),
        sin_TR.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
    )
    return q_out, k_out


@triton.jit
def _rotate_heads(
    x,
    out,
    stride,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """All heads of one token; `cos` and `sin` are float32 [1, BLOCK_HALF]."""
    dtype = out.dtype.element_ty
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    keep = (heads < NUM_HEADS) & (pairs < HALF)
    first = tl.load(x + heads * stride + pairs, mask=keep, other=0).to(tl.float32)
    second = tl.load(x + heads * stride + pairs + HALF, mask=keep, other=0).to(tl.float32)
    # Every product and sum rounds to the dtype on its own, as the reference does.
    left = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    right = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    tl.store(out + heads * HEAD_DIM + pairs, left.to(dtype), mask=keep)
    tl.store(out + heads * HEAD_DIM + pairs + HALF, right.to(dtype), mask=keep)
    if 2 * HALF < HEAD_DIM:
        columns = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        keep_rest = (heads < NUM_HEADS) & (columns < HEAD_DIM)
        rest = tl.load(x + heads * stride + columns, mask=keep_rest, other=0)
        tl.store(out + heads * HEAD_DIM + columns, rest, mask=keep_rest)


@triton.jit
def _rotate_kernel(
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_cos,
    stride_sin,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    cosines = tl.load(cos + token * stride_cos + pairs, mask=pairs < HALF, other=0).to(tl.float32)
    sines = tl.load(sin + token * stride_sin + pairs, mask=pairs < HALF, other=0).to(tl.float32)
    _rotate_heads(
        q + token * stride_qt,
        q_out + token * (NUM_HEADS * HEAD_DIM),
        stride_qh,
        cosines,
        sines,
        NUM_HEADS,
        HEAD_DIM,
        HALF,
        BLOCK_HEADS,
        BLOCK_HALF,
        BLOCK_REST,
    )
    _rotate_heads(
        k + token * stride_kt,
        k_out + token * (NUM_KV_HEADS * HEAD_DIM),
        stride_kh,
        cosines,
        sines,
        NUM_KV_HEADS,
        HEAD_DIM,
        HALF,
        BLOCK_KV_HEADS,
        BLOCK_HALF,
        BLOCK_REST,
    )
