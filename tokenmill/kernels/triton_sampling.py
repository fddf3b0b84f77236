"""Drawing tokens on the GPU: one pass over the logits, then one small program per row. Nothing synchronises.

The reference, and the explanation of the method, is `sampling/torch_draw.py`; both give the same tokens up to
the last bits of `exp2`. Weights are whole numbers: every sum is exact, whatever order a compiler gives it.

Terms: a block is BLOCK ids, a stripe STRIPE ids. A key is a logit as an integer of the same order, without
the SHIFT low bits that its type never uses.
"""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from tokenmill.kernels.sizes import ceil_div, next_power_of_2

BLOCK = tl.constexpr(4096)
STRIPE = tl.constexpr(64)
# Stripes that one program looks at together; first guess of how many hold all survivors of a filter.
TILE_STRIPES = tl.constexpr(64)

_WEIGHT_ONE = tl.constexpr(2.0**40)
LOG2_E = tl.constexpr(1.4426950408889634)
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_LARGEST = tl.constexpr(2.0**127)  # logits beyond it, +inf among them, count as this
_INSTEAD_OF_NAN = tl.constexpr(1.5 * 2.0**127)  # larger than any logit, so that a row's maximum tells it
NOT_A_NUMBER = tl.constexpr(-1)
NOTHING_ALLOWED = tl.constexpr(-2)
_LOWEST_TEMPERATURE = tl.constexpr(1e-30)
_HIGHEST_TEMPERATURE = tl.constexpr(1e30)
_NO_LIMIT = tl.constexpr(2**62)
_NO_STRIPE = tl.constexpr(2**24)  # its ids are past every vocabulary
_LOWEST_KEY = tl.constexpr(-2139095041)  # of -inf, before the shift
_BEFORE_ALL_KEYS = tl.constexpr(-(2**31))

# Low bits of a float32 that a logit of this type leaves zero.
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


class Columns(Protocol):
    """What `sampling.SamplingColumns` offers; see there."""

    @property
    def temperatures_R(self) -> torch.Tensor: ...
    @property
    def top_ks_R(self) -> torch.Tensor: ...
    @property
    def top_ps_R(self) -> torch.Tensor: ...
    @property
    def min_ps_R(self) -> torch.Tensor: ...
    @property
    def seeds_R(self) -> torch.Tensor: ...
    @property
    def positions_R(self) -> torch.Tensor: ...


def sample(logits_RV: torch.Tensor, columns: Columns, *, filters: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of `sampling.Draw`. `filters` is False when no row needs top_k, top_p or min_p.

    A row's token does not depend on `filters` unless it uses one. Two launches, three with filters;
    shapes depend on those of the logits only, so they can be captured in a CUDA graph.
    """
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    num_rows, vocab_size = logits_RV.shape
    num_blocks = ceil_div(vocab_size, BLOCK.value)
    num_stripes = num_blocks * (BLOCK.value // STRIPE.value)
    # Not one tensor: with an odd number of rows its second half would want kernels of its own.
    tokens_R, told_R = (logits_RV.new_empty(num_rows, dtype=torch.int64) for _ in range(2))
    if not num_rows:
        return tokens_R, told_R
    block_maxima_RN = logits_RV.new_empty((num_rows, num_blocks), dtype=torch.float32)
    block_facts_RN = logits_RV.new_empty((num_rows, num_blocks), dtype=torch.int64)
    stripe_maxima_RS = logits_RV.new_empty((num_rows, num_stripes if filters else 1), dtype=torch.float32)
    rows = (logits_RV, logits_RV.stride(0), vocab_size, columns.temperatures_R, columns.top_ks_R)
    facts = (block_maxima_RN, block_facts_RN, num_blocks)
    limits = (columns.top_ps_R, columns.min_ps_R)
    dice = (columns.seeds_R, columns.positions_R)
    _read_kernel[(num_blocks, num_rows)](*rows, *facts, stripe_maxima_RS, FILTERS=filters, num_warps=4)
    blocks_padded = next_power_of_2(num_blocks)
    _draw_kernel[(num_rows,)](
        *rows,
        *limits,
        *dice,
        *facts,
        tokens_R,
        told_R,
        FILTERS=filters,
        BLOCKS_PADDED=blocks_padded,
        num_warps=8,
    )
    if filters:
        _draw_filtered_kernel[(num_rows,)](
            *rows,
            *limits,
            *dice,
            *facts,
            stripe_maxima_RS,
            torch.empty_like(stripe_maxima_RS, dtype=torch.int32),
            tokens_R,
            told_R,
            BLOCKS_PADDED=blocks_padded,
            STRIPES_PADDED=next_power_of_2(num_stripes),
            SHIFT=_SHIFTS[logits_RV.dtype],
            num_warps=8,
        )
    return tokens_R, told_R


# ── values and weights ────────────────────────────────────────────────────────────────────────


@triton.jit
def _load(logits, ids, vocab_size):
    """Float32 logits; NaN and +inf become very large numbers, so that no difference is NaN."""
    values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(values != values, _INSTEAD_OF_NAN, tl.minimum(values, _LARGEST))


@triton.jit
def _told(token, maximum):
    """What the host is told of a row: its token, or why none can be drawn."""
    told = tl.where(maximum == float("-inf"), NOTHING_ALLOWED, token)
    return tl.where(maximum > _LARGEST, NOT_A_NUMBER, told).to(tl.int64)


@triton.jit
def _scale(temperature):
    bounded = tl.minimum(tl.maximum(temperature, _LOWEST_TEMPERATURE), _HIGHEST_TEMPERATURE)
    return tl.div_rn(tl.full([], LOG2_E, tl.float32), bounded)


@triton.jit
def _exponential(values, maximum, scale):
    return tl.exp2((values - tl.maximum(maximum, -_FLOAT_MAX)) * scale)


@triton.jit
def _weight(values, maximum, scale):
    return (_exponential(values, maximum, scale) * _WEIGHT_ONE).to(tl.int64)


@triton.jit
def _block_weights(block_maxima, block_sums, scale):
    """Sums of blocks relative to the maximum of the row, which is returned, too."""
    maximum = tl.max(block_maxima, 0)
    shares = _exponential(tl.maximum(block_maxima, -_FLOAT_MAX), maximum, scale)
    return maximum, (block_sums.to(tl.float64) * shares.to(tl.float64)).to(tl.int64)


@triton.jit
def _is_greedy(temperature, top_k):
    return (temperature <= 0) | (top_k == 1)


@triton.jit
def _uses_filters(top_k, top_p, min_p, vocab_size):
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)


@triton.jit
def _target(seed, position, total):
    """floor(u * total); u in [0, 1) is a function of seed and position."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, 0, 0)
    bits = (first >> 5).to(tl.int64) * 67108864 + (second >> 6).to(tl.int64)
    uniform = bits.to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    return (uniform * total.to(tl.float64)).to(tl.int64)


# ── whole vocabulary ──────────────────────────────────────────────────────────────────────────


@triton.jit
def _read_kernel(
    logits,
    stride_logits,
    vocab_size,
    temperatures,
    top_ks,
    block_maxima,
    block_facts,
    num_blocks,
    stripe_maxima,
    FILTERS: tl.constexpr,
):
    """One block: its maximum, and the first id of it (greedy rows) or the sum of its weights (the others)."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    values = _load(logits + row * stride_logits, ids, vocab_size)
    maximum = tl.max(values, 0)
    place = row * num_blocks + block
    tl.store(block_maxima + place, maximum)
    temperature = tl.load(temperatures + row)
    if _is_greedy(temperature, tl.load(top_ks + row)):
        first = tl.min(tl.where(values == maximum, ids, vocab_size), 0)
        tl.store(block_facts + place, first.to(tl.int64))
    else:
        tl.store(block_facts + place, tl.sum(_weight(values, maximum, _scale(temperature)), 0))
    if FILTERS:
        stripes = tl.max(tl.reshape(values, (BLOCK // STRIPE, STRIPE)), 1)
        stripe_ids = tl.arange(0, BLOCK // STRIPE)
        tl.store(stripe_maxima + place * (BLOCK // STRIPE) + stripe_ids, stripes)


@triton.jit
def _draw_kernel(
    logits,
    stride_logits,
    vocab_size,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    block_maxima,
    block_facts,
    num_blocks,
    tokens,
    told,
    FILTERS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
):
    """One row that is greedy or drawn from the whole vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    greedy = _is_greedy(temperature, top_k)
    if FILTERS:
        filtered = _uses_filters(top_k, tl.load(top_ps + row), tl.load(min_ps + row), vocab_size)
        if filtered & (greedy == 0):
            return
    blocks = tl.arange(0, BLOCKS_PADDED)
    valid = blocks < num_blocks
    maxima = tl.load(block_maxima + row * num_blocks + blocks, mask=valid, other=float("-inf"))
    facts = tl.load(block_facts + row * num_blocks + blocks, mask=valid, other=0)
    maximum = tl.max(maxima, 0)
    if greedy:
        best = valid & (maxima == maximum)
        token = tl.min(tl.where(best, facts, vocab_size), 0)
    else:
        token = _draw_plain(
            logits + row * stride_logits,
            vocab_size,
            _scale(temperature),
            tl.load(seeds + row),
            tl.load(positions + row),
            blocks,
            maxima,
            facts,
        )
    tl.store(tokens + row, token)
    tl.store(told + row, _told(token, maximum))


@triton.jit
def _draw_plain(logits, vocab_size, scale, seed, position, blocks, block_maxima, block_sums):
    _, weights = _block_weights(block_maxima, block_sums, scale)
    total = tl.sum(weights, 0)
    target = _target(seed, position, total)
    hit = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    weight = tl.sum(tl.where(blocks == hit, weights, 0), 0)
    block_sum = tl.sum(tl.where(blocks == hit, block_sums, 0), 0)
    within = target - tl.sum(tl.where(blocks < hit, weights, 0), 0)
    # From the row's scale to the block's own, finer one; here rounding may reach the sum.
    local = within.to(tl.float64) * block_sum.to(tl.float64) / tl.maximum(weight, 1).to(tl.float64)
    local_target = tl.minimum(local.to(tl.int64), block_sum - 1)
    ids = hit * BLOCK + tl.arange(0, BLOCK)
    values = _load(logits, ids, vocab_size)
    block_weights = _weight(values, tl.max(values, 0), scale)
    token = hit * BLOCK + tl.sum((tl.cumsum(block_weights, 0) <= local_target).to(tl.int32), 0)
    return tl.where(total > 0, token, 0).to(tl.int64)


# ── survivors of top-k, top-p and min-p ───────────────────────────────────────────────────────


@triton.jit
def _key(values, SHIFT: tl.constexpr):
    positive_zero = tl.where(values == 0, 0.0, values)
    bits = positive_zero.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The logit of a key."""
    low_bits = tl.where(key < 0, (1 << SHIFT) - 1, 0)
    bits = (key << SHIFT) | low_bits
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load_stripes(logits, vocab_size, listed, start, num_listed):
    """Logits and ids of up to TILE_STRIPES listed stripes, in the order of ids."""
    places = start + tl.arange(0, TILE_STRIPES)
    stripes = tl.load(listed + places, mask=places < num_listed, other=_NO_STRIPE)
    ids = stripes[:, None] * STRIPE + tl.arange(0, STRIPE)[None, :]
    return _load(logits, ids, vocab_size), ids


@triton.jit
def _above(key, logits, vocab_size, listed, num_listed, maximum, scale, SHIFT: tl.constexpr):
    """Number and weight of the logits above a key, in the listed stripes."""
    count = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.int64)
    for start in range(0, num_listed, TILE_STRIPES):
        values, _ = _load_stripes(logits, vocab_size, listed, start, num_listed)
        above = _key(values, SHIFT) > key
        weights = tl.where(above, _weight(values, maximum, scale), 0)
        count += tl.sum(tl.sum(above.to(tl.int32), 1), 0)
        mass += tl.sum(tl.sum(weights, 1), 0)
    return count, mass


@triton.jit
def _list_stripes(stripe_keys, stripe_ids, capacity, top_key, listed, SHIFT: tl.constexpr):
    """List the best stripes, ascending, at most `capacity`; all logits from the floor on are in them."""
    low = tl.full([], _LOWEST_KEY >> SHIFT, tl.int64)
    high = top_key.to(tl.int64) + 1
    while low < high:
        middle = (low + high) >> 1
        fits = tl.sum((stripe_keys >= middle.to(tl.int32)).to(tl.int32), 0) <= capacity
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    floor = low.to(tl.int32)
    chosen = stripe_keys >= floor
    places = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(listed + places, stripe_ids, mask=chosen)
    tl.debug_barrier()  # the list is read by other threads
    return floor, tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _draw_filtered_kernel(
    logits,
    stride_logits,
    vocab_size,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    block_maxima,
    block_sums,
    num_blocks,
    stripe_maxima,
    listed,
    tokens,
    told,
    BLOCKS_PADDED: tl.constexpr,
    STRIPES_PADDED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """One row with filters: find the key where the survivors end by bisection, then draw among them."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    if _is_greedy(temperature, top_k) | (_uses_filters(top_k, top_p, min_p, vocab_size) == 0):
        return
    logits += row * stride_logits
    scale = _scale(temperature)
    top_k = tl.where(top_k > 0, tl.minimum(top_k, vocab_size), vocab_size)

    blocks = tl.arange(0, BLOCKS_PADDED)
    valid = blocks < num_blocks
    maxima = tl.load(block_maxima + row * num_blocks + blocks, mask=valid, other=float("-inf"))
    sums = tl.load(block_sums + row * num_blocks + blocks, mask=valid, other=0)
    maximum, weights = _block_weights(maxima, sums, scale)
    # A token survives top_p if the weight before it is below this whole number.
    share = tl.ceil(top_p.to(tl.float64) * tl.sum(weights, 0).to(tl.float64)).to(tl.int64)
    limit = tl.where(top_p < 1, tl.maximum(share, 1), _NO_LIMIT)

    # All survivors lie in a few stripes, as a rule; if they do not, more and at last all stripes are listed.
    num_stripes = num_blocks * (BLOCK // STRIPE)
    listed += row * num_stripes
    stripe_ids = tl.arange(0, STRIPES_PADDED)
    in_row = stripe_ids < num_stripes
    stripe_values = tl.load(stripe_maxima + row * num_stripes + stripe_ids, mask=in_row, other=0.0)
    stripe_keys = tl.where(in_row, _key(stripe_values, SHIFT), _BEFORE_ALL_KEYS)
    top_key = _key(maximum, SHIFT)
    capacity = tl.full([], TILE_STRIPES, tl.int32)
    decided = tl.full([], 0, tl.int32)
    floor = top_key
    num_listed = tl.full([], 0, tl.int32)
    while decided == 0:
        floor, num_listed = _list_stripes(stripe_keys, stripe_ids, capacity, top_key, listed, SHIFT)
        count, mass = _above(floor - 1, logits, vocab_size, listed, num_listed, maximum, scale, SHIFT)
        ends = (count >= top_k) | (mass >= limit)
        ends = ends | (_exponential(_value(floor - 1, SHIFT), maximum, scale) < min_p)
        decided = (ends | (floor == (_LOWEST_KEY >> SHIFT))).to(tl.int32)
        capacity = capacity * 8

    low = floor.to(tl.int64)
    high = top_key.to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        key = middle.to(tl.int32)
        count, mass = _above(key, logits, vocab_size, listed, num_listed, maximum, scale, SHIFT)
        survives = (count < top_k) & (mass < limit)
        survives = survives & (_exponential(_value(key, SHIFT), maximum, scale) >= min_p)
        high = tl.where(survives, middle, high)
        low = tl.where(survives, low, middle + 1)
    token = _draw_survivors(
        low.to(tl.int32),
        top_k,
        limit,
        tl.load(seeds + row),
        tl.load(positions + row),
        logits,
        vocab_size,
        listed,
        num_listed,
        maximum,
        scale,
        SHIFT,
    )
    tl.store(tokens + row, token)
    tl.store(told + row, _told(token, maximum))


@triton.jit
def _draw_survivors(
    key,
    top_k,
    limit,
    seed,
    position,
    logits,
    vocab_size,
    listed,
    num_listed,
    maximum,
    scale,
    SHIFT: tl.constexpr,
):
    """Draw among the logits above the key and the first of those equal to it, in the order of ids."""
    count, mass = _above(key, logits, vocab_size, listed, num_listed, maximum, scale, SHIFT)
    count_with_ties, _ = _above(key - 1, logits, vocab_size, listed, num_listed, maximum, scale, SHIFT)
    tie_weight = _weight(_value(key, SHIFT), maximum, scale)
    by_mass = (limit - mass + tie_weight - 1) // tl.maximum(tie_weight, 1)
    num_ties = tl.minimum(
        tl.minimum((top_k - count).to(tl.int64), by_mass), (count_with_ties - count).to(tl.int64)
    )
    total = mass + num_ties * tie_weight
    target = _target(seed, position, total)
    token = tl.full([], 0, tl.int32) + vocab_size
    mass_before = tl.zeros([], tl.int64)
    ties_before = tl.zeros([], tl.int32)
    for start in range(0, num_listed, TILE_STRIPES):
        tile, tile_ids = _load_stripes(logits, vocab_size, listed, start, num_listed)
        values = tl.reshape(tile, (TILE_STRIPES * STRIPE,))
        ids = tl.reshape(tile_ids, (TILE_STRIPES * STRIPE,))
        keys = _key(values, SHIFT)
        is_tie = (keys == key).to(tl.int32)
        early_tie = (is_tie > 0) & ((ties_before + tl.cumsum(is_tie, 0)).to(tl.int64) <= num_ties)
        weights = tl.where((keys > key) | early_tie, _weight(values, maximum, scale), 0)
        passed = mass_before + tl.cumsum(weights, 0) > target
        token = tl.minimum(token, tl.min(tl.where(passed, ids, vocab_size), 0))
        mass_before += tl.sum(weights, 0)
        ties_before += tl.sum(is_tie, 0)
    return tl.where(total > 0, token, 0).to(tl.int64)
