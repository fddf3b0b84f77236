"""Rotary position embedding on the GPU, queries and keys in one launch, alone or with what stands around it
between the product and attention; the reference is `rotary.py`."""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.operands import CacheSlots, HeadNorms, Rotation
from tokenmill.kernels.sizes import ceil_div, next_power_of_2
from tokenmill.kernels.triton_overlap import let_next_begin, overlap_options, wait_for_inputs

# Elements of one token that a program works on.
ELEMENTS_PER_PROGRAM = 2048


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
        BLOCK_HEADS=next_power_of_2(num_heads),
        BLOCK_KV_HEADS=next_power_of_2(num_kv_heads),
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(max(1, head_dim - 2 * half)),
    )
    return q_out, k_out


def rotate_and_store(
    qkv_TSD: torch.Tensor, rotation: Rotation, norms: HeadNorms | None, cache: CacheSlots
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary.heads_of_product` in one launch, which also writes keys and values to their slots.

    Returns queries [T, H, D] and keys [T, K, D], new and contiguous; values stay in the product, whose last
    dimension is contiguous.
    """
    num_tokens, all_heads, head_dim = qkv_TSD.shape
    page_size, num_kv_heads = cache.key_cache_NBKD.shape[1:3]
    num_heads, (cos_TR, sin_TR) = all_heads - 2 * num_kv_heads, rotation
    q_THD = qkv_TSD.new_empty(num_tokens, num_heads, head_dim)
    k_TKD = qkv_TSD.new_empty(num_tokens, num_kv_heads, head_dim)
    half = cos_TR.shape[1]
    block_half = next_power_of_2(half)
    block_heads = min(next_power_of_2(all_heads), max(1, ELEMENTS_PER_PROGRAM // (2 * block_half)))
    launch(
        _rotate_and_store_kernel,
        (num_tokens, ceil_div(all_heads, block_heads)),
        qkv_TSD,
        cos_TR,
        sin_TR,
        None if norms is None else norms.query_D,
        None if norms is None else norms.key_D,
        cache.slots_T,
        q_THD,
        k_TKD,
        cache.key_cache_NBKD,
        cache.value_cache_NBKD,
        0.0 if norms is None else norms.epsilon,
        qkv_TSD.stride(0),
        qkv_TSD.stride(1),
        cos_TR.stride(0),
        sin_TR.stride(0),
        *cache.key_cache_NBKD.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        PAGE_SIZE=page_size,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        BLOCK_REST=next_power_of_2(max(1, head_dim - 2 * half)),
        **overlap_options(qkv_TSD.device),
    )
    return q_THD, k_TKD


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


@triton.jit
def _head_weights(q_weight, k_weight, heads, columns, keep, NUM_HEADS: tl.constexpr):
    """float32 [heads, columns]: the norm weights of each head's kind."""
    queries = tl.load(q_weight + columns, mask=keep & (heads < NUM_HEADS), other=0)
    keys = tl.load(k_weight + columns, mask=keep & (heads >= NUM_HEADS), other=0)
    return tl.where(heads < NUM_HEADS, queries, keys).to(tl.float32)


@triton.jit
def _scaled(x, inverse, weights, dtype: tl.constexpr):
    """Roundings as in `norm.rms_norm`; float32 in and out."""
    return ((x * inverse).to(dtype).to(tl.float32) * weights).to(dtype).to(tl.float32)


@triton.jit
def _put(
    part,
    heads,
    columns,
    keep,
    q_out,
    k_out,
    key_cache,
    value_cache,
    stride_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Store columns of a token's heads: queries and keys to the outputs, keys and values to the caches."""
    part = part.to(q_out.dtype.element_ty)
    key, value = heads - NUM_HEADS, heads - NUM_HEADS - NUM_KV_HEADS
    is_key = keep & (key >= 0) & (key < NUM_KV_HEADS)
    tl.store(q_out + heads * HEAD_DIM + columns, part, mask=keep & (heads < NUM_HEADS))
    tl.store(k_out + key * HEAD_DIM + columns, part, mask=is_key)
    tl.store(key_cache + key * stride_head + columns, part, mask=is_key)
    tl.store(value_cache + value * stride_head + columns, part, mask=keep & (value >= 0))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rotate_and_store_kernel(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    slots,
    q_out,
    k_out,
    key_cache,
    value_cache,
    epsilon,
    stride_token,
    stride_qkv_head,
    stride_cos,
    stride_sin,
    stride_page,
    stride_slot,
    stride_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    dtype: tl.constexpr = q_out.dtype.element_ty
    ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    let_next_begin(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    keep = (heads < ROTATED + NUM_KV_HEADS) & (pairs < HALF)
    keep_rest = (heads < ROTATED + NUM_KV_HEADS) & (rest < HEAD_DIM)
    if q_weight is not None:
        first_weights = _head_weights(q_weight, k_weight, heads, pairs, keep, NUM_HEADS)
        second_weights = _head_weights(q_weight, k_weight, heads, pairs + HALF, keep, NUM_HEADS)
        if 2 * HALF < HEAD_DIM:
            last_weights = _head_weights(q_weight, k_weight, heads, rest, keep_rest, NUM_HEADS)
    wait_for_inputs(OVERLAP)

    slot = tl.load(slots + token)
    cosines = tl.load(cos + token * stride_cos + pairs, mask=pairs < HALF, other=0).to(tl.float32)
    sines = tl.load(sin + token * stride_sin + pairs, mask=pairs < HALF, other=0).to(tl.float32)
    # Across a barrier the assembler cannot put the loads above off until somebody needs them.
    tl.debug_barrier()
    source = qkv + token * stride_token + heads * stride_qkv_head
    first = tl.load(source + pairs, mask=keep, other=0).to(tl.float32)
    second = tl.load(source + pairs + HALF, mask=keep, other=0).to(tl.float32)
    if 2 * HALF < HEAD_DIM:
        last = tl.load(source + rest, mask=keep_rest, other=0).to(tl.float32)
    if q_weight is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if 2 * HALF < HEAD_DIM:
            squares += tl.sum(last * last, axis=1)
        inverse = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
        is_normed = heads < ROTATED
        first = tl.where(is_normed, _scaled(first, inverse, first_weights, dtype), first)
        second = tl.where(is_normed, _scaled(second, inverse, second_weights, dtype), second)
        if 2 * HALF < HEAD_DIM:
            last = tl.where(is_normed, _scaled(last, inverse, last_weights, dtype), last)
    # Every product and sum rounds to the dtype on its own, as the reference does.
    left = (first * cosines).to(dtype).to(tl.float32) - (second * sines).to(dtype).to(tl.float32)
    right = (second * cosines).to(dtype).to(tl.float32) + (first * sines).to(dtype).to(tl.float32)
    left, right = tl.where(heads < ROTATED, left, first), tl.where(heads < ROTATED, right, second)

    q_out += token * (NUM_HEADS * HEAD_DIM)
    k_out += token * (NUM_KV_HEADS * HEAD_DIM)
    target = (slot // PAGE_SIZE) * stride_page + (slot % PAGE_SIZE) * stride_slot
    key_cache += target
    value_cache += target
    # fmt: off
    _put(left, heads, pairs, keep, q_out, k_out, key_cache, value_cache, stride_head,
         NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    _put(right, heads, pairs + HALF, keep, q_out, k_out, key_cache, value_cache, stride_head,
         NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    if 2 * HALF < HEAD_DIM:
        _put(last, heads, rest, keep_rest, q_out, k_out, key_cache, value_cache, stride_head,
             NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    # fmt: on
