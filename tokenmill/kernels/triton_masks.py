"""Masks of allowed tokens on the GPU. The reference is `sampling/masks.py`."""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.sizes import ceil_div

_BLOCK = tl.constexpr(4096)
_WORDS = tl.constexpr(256)


def apply_masks(logits_RV: torch.Tensor, rows_M: torch.Tensor, bits_MW: torch.Tensor) -> torch.Tensor:
    """See `sampling.masks.apply_masks`; the logits of a row must be contiguous."""
    assert logits_RV.stride(1) == 1, "rows of logits are contiguous"
    assert bits_MW.is_contiguous(), "masks are contiguous"
    num_masks, num_words = bits_MW.shape
    vocab_size = logits_RV.shape[1]
    if num_masks:
        grid = (ceil_div(vocab_size, _BLOCK.value), num_masks)
        _mask_kernel[grid](
            logits_RV, logits_RV.stride(0), vocab_size, rows_M, bits_MW, num_words, num_warps=8
        )
    return logits_RV


def apply_host_masks(logits_RV: torch.Tensor, place_3: torch.Tensor) -> torch.Tensor:
    """See `sampling.masks.apply_host_masks`; the logits of a row must be contiguous."""
    assert logits_RV.stride(1) == 1, "rows of logits are contiguous"
    num_rows, vocab_size = logits_RV.shape
    num_words = ceil_div(vocab_size, 32)
    grid = (ceil_div(num_words, _WORDS.value), num_rows)
    _host_mask_kernel[grid](logits_RV, logits_RV.stride(0), vocab_size, place_3, num_words, num_warps=8)
    return logits_RV


@triton.jit
def _mask_kernel(logits, logits_stride, vocab_size, rows, bits, num_words):
    mask = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    row = tl.load(rows + mask).to(tl.int64)
    words = ids // 32
    word = tl.load(bits + mask * num_words + words, mask=words < num_words, other=0)
    _forbid(logits + row * logits_stride, ids, vocab_size, ((word >> (ids % 32)) & 1) == 0)


@triton.jit
def _host_mask_kernel(logits, logits_stride, vocab_size, place, num_words):
    row = tl.program_id(1).to(tl.int64)
    if row < tl.load(place + 2):
        bits = tl.load(place).to(tl.pointer_type(tl.int32)) + row * tl.load(place + 1)
        words = tl.program_id(0) * _WORDS + tl.arange(0, _WORDS)
        # Each word comes once, over the bus perhaps, many at a time, and is spread out then.
        word = tl.load(bits + words, mask=words < num_words, other=0)
        places = tl.arange(0, 32)[None, :]
        ids = words[:, None] * 32 + places
        _forbid(logits + row * logits_stride, ids, vocab_size, ((word[:, None] >> places) & 1) == 0)


@triton.jit
def _forbid(logits, ids, vocab_size, forbidden):
    is_token = ids < vocab_size
    kept = tl.load(logits + ids, mask=is_token).to(tl.float32)
    # All are written, for gaps between them would cost several times as much.
    tl.store(logits + ids, tl.where(forbidden, float("-inf"), kept), mask=is_token)
