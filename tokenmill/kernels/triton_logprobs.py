"""Log-probabilities on the GPU: one pass over the logits, then one small program for each row.

The reference, and what the columns of the result are, is `sampling/logprobs.py`. The likeliest tokens are
looked for in the maxima of stripes: the K likeliest stand in the K stripes of the largest maxima, where of
equals the one with the lowest ids goes first.
"""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.sizes import ceil_div, next_power_of_2
from tokenmill.kernels.triton_sampling import LOG2_E

# Beyond this many, taking maximum after maximum is slower than sorting.
MOST_TOP = 32

_BLOCK = tl.constexpr(4096)
_STRIPE = tl.constexpr(32)
_STRIPES_OF_BLOCK = tl.constexpr(4096 // 32)
_GIVEN_AT_ONCE = tl.constexpr(128)
_NO_STRIPE = tl.constexpr(2**24)  # its ids are past every vocabulary
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_PIECE = tl.constexpr(8)  # ids of a lane: logits of two bytes that one load takes
_INSTEAD_OF_INFINITY = tl.constexpr(2.0**127)


def pack_logprobs(
    logits_RV: torch.Tensor,
    temperatures_R: torch.Tensor,
    tokens_R: torch.Tensor,
    given_ids_RI: torch.Tensor,
    *,
    num_top: int,
) -> torch.Tensor:
    """See `sampling.logprobs.pack_torch`; at most `MOST_TOP` likeliest, and no more than there are tokens."""
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    num_rows, vocab_size = logits_RV.shape
    num_given = given_ids_RI.shape[1]
    num_blocks = ceil_div(vocab_size, _BLOCK.value)
    num_stripes = num_blocks * _STRIPES_OF_BLOCK.value
    packed_RC = logits_RV.new_empty((num_rows, 2 + 2 * num_top + num_given), dtype=torch.int32)
    maxima_RN = logits_RV.new_empty((num_rows, num_blocks), dtype=torch.float32)
    sums_RN = torch.empty_like(maxima_RN)
    stripes_RS = logits_RV.new_empty((num_rows, num_stripes if num_top else 0), dtype=torch.float32)
    if not num_rows:
        return packed_RC
    rows = (logits_RV, logits_RV.stride(0), vocab_size, temperatures_R)
    blocks = (maxima_RN, sums_RN, stripes_RS, num_blocks)
    _summarize_kernel[(num_blocks, num_rows)](*rows, *blocks, HAS_TOP=num_top > 0, num_warps=4)
    _pack_kernel[(num_rows,)](
        *rows,
        *blocks,
        tokens_R,
        given_ids_RI,
        given_ids_RI.stride(0),
        given_ids_RI.stride(1),
        num_given,
        packed_RC,
        NUM_TOP=num_top,
        TOP_PADDED=next_power_of_2(max(num_top, 1)),
        BLOCKS_PADDED=next_power_of_2(num_blocks),
        STRIPES_PADDED=next_power_of_2(num_stripes),
        num_warps=8,
    )
    return packed_RC


@triton.jit
def _cleaned(values):
    """Float32; NaN becomes -inf and +inf a very large number, so that differences are never NaN."""
    values = values.to(tl.float32)
    values = tl.where(values != values, float("-inf"), values)
    return tl.where(values == float("inf"), _INSTEAD_OF_INFINITY, values)


@triton.jit
def _summarize_kernel(
    logits,
    stride_logits,
    vocab_size,
    temperatures,
    maxima,
    sums,
    stripes,
    num_blocks,
    HAS_TOP: tl.constexpr,
):
    """One block: its maximum, the sum of exp((logit - maximum) / temperature), the maxima of its stripes."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = block * _BLOCK + tl.arange(0, _BLOCK // _PIECE)[:, None] * _PIECE + tl.arange(0, _PIECE)[None, :]
    logits += row * stride_logits
    is_token = ids < vocab_size
    values = tl.load(logits + ids, mask=is_token, other=float("-inf")).to(tl.float32)
    scale = LOG2_E / tl.load(temperatures + row)
    maximum, total = _sum(values, scale)
    if total != total:  # rare, and cleaning all values would take longer than reading these again
        values = _cleaned(tl.load(logits + ids, mask=is_token, other=float("-inf")))
        maximum, total = _sum(values, scale)
    place = row * num_blocks + block
    tl.store(maxima + place, maximum)
    tl.store(sums + place, total)
    if HAS_TOP:
        stripe_ids = tl.arange(0, _STRIPES_OF_BLOCK)
        found = tl.max(tl.reshape(values, (_STRIPES_OF_BLOCK, _STRIPE)), 1)
        tl.store(stripes + place * _STRIPES_OF_BLOCK + stripe_ids, found)


@triton.jit
def _sum(values, scale):
    """Maximum and sum of exp2((value - maximum) * scale), each lane by itself until the end.

    The sum is NaN if some value is, or is +inf.
    """
    maxima = tl.maximum(tl.max(values, 1), _LOWEST)
    sums = tl.sum(tl.exp2((values - maxima[:, None]) * scale), 1)
    maximum = tl.max(maxima, 0)
    return maximum, tl.sum(sums * tl.exp2((maxima - maximum) * scale), 0)


@triton.jit
def _pack_kernel(
    logits,
    stride_logits,
    vocab_size,
    temperatures,
    maxima,
    sums,
    stripes,
    num_blocks,
    tokens,
    given_ids,
    stride_given_row,
    stride_given_id,
    num_given,
    packed,
    NUM_TOP: tl.constexpr,
    TOP_PADDED: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    STRIPES_PADDED: tl.constexpr,
):
    """One row: everything that is told of it."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_logits
    packed += row * (2 + 2 * NUM_TOP + num_given)
    scale = 1.0 / tl.load(temperatures + row)
    blocks = tl.arange(0, BLOCKS_PADDED)
    is_block = blocks < num_blocks
    block_maxima = tl.load(maxima + row * num_blocks + blocks, mask=is_block, other=float("-inf"))
    block_sums = tl.load(sums + row * num_blocks + blocks, mask=is_block, other=0.0)
    maximum = tl.maximum(tl.max(block_maxima, 0), _LOWEST)
    shares = tl.exp((tl.maximum(block_maxima, _LOWEST) - maximum) * scale)
    normalizer = tl.log(tl.sum(block_sums * shares, 0))

    token = tl.load(tokens + row)
    tl.store(packed, token.to(tl.int32))
    value = _cleaned(tl.load(logits + tl.maximum(token, 0)))  # below 0 where none was drawn
    tl.store(packed + 1, _bits(value, maximum, scale, normalizer))
    if NUM_TOP > 0:
        stripe_maxima = stripes + row * num_blocks * _STRIPES_OF_BLOCK
        chosen = _best_stripes(stripe_maxima, num_blocks, NUM_TOP, TOP_PADDED, STRIPES_PADDED)
        ids = tl.reshape(chosen[:, None] * _STRIPE + tl.arange(0, _STRIPE)[None, :], (TOP_PADDED * _STRIPE,))
        is_left = ids < vocab_size
        values = _cleaned(tl.load(logits + ids, mask=is_left, other=float("-inf")))
        for index in range(NUM_TOP):
            # The likeliest that is left: of equals the first, and one that is -inf before what is no token.
            best = tl.max(tl.where(is_left, values, float("-inf")), 0)
            best_id = tl.min(tl.where(is_left & (values == best), ids, vocab_size), 0)
            is_left = is_left & (ids != best_id)
            tl.store(packed + 2 + index, _bits(best, maximum, scale, normalizer))
            tl.store(packed + 2 + NUM_TOP + index, best_id)
    given_ids += row * stride_given_row
    for start in range(0, num_given, _GIVEN_AT_ONCE):
        places = start + tl.arange(0, _GIVEN_AT_ONCE)
        is_given = places < num_given
        scored = tl.load(given_ids + places * stride_given_id, mask=is_given, other=0)
        found = _cleaned(tl.load(logits + scored, mask=is_given, other=0.0))
        bits = _bits(found, maximum, scale, normalizer)
        tl.store(packed + 2 + 2 * NUM_TOP + places, bits, mask=is_given)


@triton.jit
def _bits(values, maximum, scale, normalizer):
    """The bits of the log-probabilities of cleaned logits."""
    found = (values - maximum) * scale - normalizer
    found = tl.where(found != found, _LOWEST, found)  # no token has probability
    return tl.minimum(tl.maximum(found, _LOWEST), 0.0).to(tl.int32, bitcast=True)


@triton.jit
def _best_stripes(
    maxima, num_blocks, NUM_TOP: tl.constexpr, TOP_PADDED: tl.constexpr, STRIPES_PADDED: tl.constexpr
):
    """Numbers of the stripes that hold the likeliest tokens, [TOP_PADDED]."""
    stripes = tl.arange(0, STRIPES_PADDED)
    is_left = stripes < num_blocks * _STRIPES_OF_BLOCK
    values = tl.load(maxima + stripes, mask=is_left, other=float("-inf"))
    places = tl.arange(0, TOP_PADDED)
    chosen = tl.full((TOP_PADDED,), _NO_STRIPE, tl.int32)
    for index in range(NUM_TOP):
        best = tl.max(tl.where(is_left, values, float("-inf")), 0)
        stripe = tl.min(tl.where(is_left & (values == best), stripes, _NO_STRIPE), 0)
        is_left = is_left & (stripes != stripe)
        chosen = tl.where(places == index, stripe, chosen)
    return chosen
