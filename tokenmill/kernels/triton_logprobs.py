"""One pass over logits for log-probabilities on the GPU. The reference is `sampling/logprobs.py`."""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = tl.constexpr(4096)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_INSTEAD_OF_INFINITY = tl.constexpr(2.0**127)
# Beyond this many, taking maximum after maximum out of every block is slower than sorting.
_MOST_BY_MAXIMA = 32


def summarize(
    logits_RV: torch.Tensor, temperatures_R: torch.Tensor, *, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `sampling.logprobs.summarize_torch`; each block gives its likeliest as candidates."""
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    num_rows, vocab_size = logits_RV.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK.value)
    maxima_RN = logits_RV.new_empty((num_rows, num_blocks), dtype=torch.float32)
    sums_RN = torch.empty_like(maxima_RN)
    by_maxima = num_top <= _MOST_BY_MAXIMA
    num_candidates = num_blocks * num_top if by_maxima else 0
    values_RC = logits_RV.new_empty((num_rows, num_candidates), dtype=torch.float32)
    ids_RC = torch.empty_like(values_RC, dtype=torch.int64)
    if num_rows:
        _summarize_kernel[(num_blocks, num_rows)](
            logits_RV,
            logits_RV.stride(0),
            vocab_size,
            temperatures_R,
            maxima_RN,
            sums_RN,
            values_RC,
            ids_RC,
            num_blocks,
            NUM_TOP=num_top if by_maxima else 0,
            num_warps=8,
        )
    if not by_maxima:
        cleaned_RV = logits_RV.float().nan_to_num(nan=-torch.inf, posinf=2.0**127, neginf=-torch.inf)
        values_RC, ids_RC = cleaned_RV.topk(min(num_top, vocab_size), dim=1)
    return maxima_RN, sums_RN, values_RC, ids_RC


@triton.jit
def _summarize_kernel(
    logits,
    logits_stride,
    vocab_size,
    temperatures,
    maxima,
    sums,
    values_out,
    ids_out,
    num_blocks,
    NUM_TOP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    lanes = tl.arange(0, _BLOCK)
    ids = block * _BLOCK + lanes
    values = tl.load(logits + row * logits_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    values = values.to(tl.float32)
    values = tl.where(values != values, float("-inf"), values)
    values = tl.where(values == float("inf"), _INSTEAD_OF_INFINITY, values)
    maximum = tl.max(values, 0)
    scale = 1.0 / tl.load(temperatures + row)
    total = tl.sum(tl.exp((values - tl.maximum(maximum, _LOWEST)) * scale), 0)
    tl.store(maxima + row * num_blocks + block, maximum)
    tl.store(sums + row * num_blocks + block, total)
    place = (row * num_blocks + block) * NUM_TOP
    taken = ids >= vocab_size
    for index in tl.static_range(NUM_TOP):
        # The likeliest that is left: among equals the first, and one that is -inf before what is no token.
        best = tl.max(tl.where(taken, float("-inf"), values), 0)
        lane = tl.min(tl.where((values == best) & (taken == 0), lanes, _BLOCK), 0)
        # A block with fewer tokens than asked for repeats its last id with no probability.
        found = lane < _BLOCK
        tl.store(values_out + place + index, tl.where(found, best, float("-inf")))
        tl.store(ids_out + place + index, (block * _BLOCK + tl.where(found, lane, 0)).to(tl.int64))
        taken = taken | (lanes == lane)
