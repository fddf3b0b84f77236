"""Penalties on the GPU in one pass. The reference, and what it computes, is `kernels/penalty.py`."""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.sizes import ceil_div

_BLOCK = tl.constexpr(4096)
_COUNT_BITS = tl.constexpr(2**30 - 1)


def penalize(
    logits_RV: torch.Tensor, slots_R: torch.Tensor, penalties_S3: torch.Tensor, counts_SV: torch.Tensor
) -> torch.Tensor:
    """See `kernels.penalty.penalize`."""
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    num_rows, vocab_size = logits_RV.shape
    result_RV = logits_RV.new_empty((num_rows, vocab_size), dtype=torch.float32)
    grid = (ceil_div(vocab_size, _BLOCK.value), num_rows)
    _penalize_kernel[grid](
        logits_RV, logits_RV.stride(0), vocab_size, slots_R, penalties_S3, counts_SV, result_RV, num_warps=8
    )
    return result_RV


@triton.jit
def _penalize_kernel(logits, logits_stride, vocab_size, slots, penalties, counts, result):
    row = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = ids < vocab_size
    slot = tl.load(slots + row).to(tl.int64)
    frequency = tl.load(penalties + 3 * slot)
    presence = tl.load(penalties + 3 * slot + 1)
    repetition = tl.load(penalties + 3 * slot + 2)
    values = tl.load(logits + row * logits_stride + ids, mask=inside, other=0.0).to(tl.float32)
    # Rows without penalties do not read their counts.
    if (frequency != 0) | (presence != 0) | (repetition != 1):
        seen = tl.load(counts + slot * vocab_size + ids, mask=inside, other=0)
        count = (seen & _COUNT_BITS).to(tl.float32)
        values = values - frequency * count - tl.where(count > 0, presence, 0.0)
        scaled = tl.where(values < 0, values * repetition, tl.div_rn(values, values * 0 + repetition))
        values = tl.where(seen > 0, scaled, values)
    tl.store(result + row * vocab_size + ids, values, mask=inside)
