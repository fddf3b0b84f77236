"""Drawing in plain torch: the path of the CPU, and the reference of the Triton kernels.

A draw is an inverse cumulative distribution over the ids in ascending order. Weights are whole numbers
(fixed point, WEIGHT_BITS bits), so every sum is exact and no order of summing, block or thread can
change a token. Two levels: sums of blocks of ids, then a search in the one block that was hit; within a
block weights are relative to the block's largest logit, so that the tail keeps its precision.

Shapes: R rows, V vocabulary, N blocks of BLOCK ids, S stripes of STRIPE ids, L ids in a tile, M sorted
values. A trailing 1 is a kept dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.sampling.columns import NOT_A_NUMBER, NOTHING_ALLOWED, Draw, SamplingColumns, SamplingNeeds
from tokenmill.sampling.philox import uniforms

BLOCK = 4096
ARGMAX_BLOCK = 256  # of the greedy choice, which reads one block of each row a second time
STRIPE = 64
WEIGHT_BITS = 40
LOG2_E = 1.4426950408889634
# A temperature outside of these would make the scale zero or infinite; the draw is the same long before.
TEMPERATURES = (1e-30, 1e30)

_FLOAT_MAX = torch.finfo(torch.float32).max
_INT_MAX = torch.iinfo(torch.int64).max
_LARGEST = 2.0**127  # logits beyond it, +inf among them, count as this
# Rows are worked on in chunks of about this many logits, which stay in the processor's cache.
_CHUNK_LOGITS = 2**17
_VECTORS = 64  # elements: a multiple of what torch takes at a time, on any processor
_PIECE = 2**14  # elements: fewer than torch shares among threads
# The logits that decide most filtered rows come from this many stripes.
_TILE_STRIPES = 128


@dataclass(frozen=True, slots=True)
class _Rows:
    """Random rows with what one reading of their logits told."""

    logits_RV: torch.Tensor  # of all rows of the step, contiguous
    rows_R: torch.Tensor  # int64, which of them
    scales_R: torch.Tensor  # float32, log2(e) / temperature: weights are powers of two
    uniforms_R: torch.Tensor  # float64
    top_ks_R: torch.Tensor  # int64, at most V
    top_ps_R: torch.Tensor
    min_ps_R: torch.Tensor
    maxima_R: torch.Tensor  # float32, NaN if there is one
    stripe_maxima_RS: torch.Tensor  # float32
    block_sums_RN: torch.Tensor  # int64, weights relative to the block's maximum

    def __getitem__(self, chosen: torch.Tensor | slice) -> _Rows:
        columns = (getattr(self, name)[chosen] for name in list(self.__dataclass_fields__)[1:])
        return _Rows(self.logits_RV, *columns)


def sample(logits_RV: torch.Tensor, columns: SamplingColumns, needs: SamplingNeeds) -> Draw:
    """`tokenmill.sampling.sample` in torch; on CUDA it works, but synchronises."""
    if not needs.random or not len(logits_RV):
        return _draw(*_argmax(logits_RV))
    logits_RV = logits_RV.contiguous()
    greedy_R = (columns.temperatures_R <= 0) | (columns.top_ks_R == 1)
    filtered_R = torch.zeros_like(greedy_R)
    if needs.filters:
        filtered_R = ~greedy_R & _uses_filters(columns, logits_RV.shape[1])
    tokens_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    maxima_R = torch.empty_like(tokens_R, dtype=torch.float32)
    greedy, plain, filtered = (
        torch.nonzero(rows_R).squeeze(1) for rows_R in (greedy_R, ~greedy_R & ~filtered_R, filtered_R)
    )
    if len(greedy):
        tokens_R[greedy], maxima = _argmax(logits_RV.index_select(0, greedy))
        maxima_R[greedy] = maxima.to(torch.float32)
    for some, draw in ((plain, _draw_plain), (filtered, _draw_filtered)):
        if len(some):
            rows = _read(logits_RV, columns, some)
            tokens_R[some], maxima_R[some] = draw(rows), rows.maxima_R
    return _draw(tokens_R, maxima_R)


def _draw(tokens_R: torch.Tensor, maxima_R: torch.Tensor) -> Draw:
    """The largest logit of a row says whether a token can be drawn; it is NaN if any is."""
    if bool((maxima_R > -torch.inf).all()):
        return Draw(tokens_R, tokens_R)
    told_R = tokens_R.masked_fill(maxima_R.isnan(), NOT_A_NUMBER)
    return Draw(tokens_R, told_R.masked_fill_(maxima_R == -torch.inf, NOTHING_ALLOWED))


def _uses_filters(columns: SamplingColumns, vocab_size: int) -> torch.Tensor:
    limited_R = (columns.top_ks_R > 0) & (columns.top_ks_R < vocab_size)
    return limited_R | (columns.top_ps_R < 1) | (columns.min_ps_R > 0)


def _argmax(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest id of the largest logit, and that logit. By blocks: `amax` is far quicker than `argmax`."""
    vocab_size = logits_RV.shape[1]
    whole = vocab_size - vocab_size % ARGMAX_BLOCK
    maxima = [logits_RV[:, :whole].unflatten(1, (-1, ARGMAX_BLOCK)).amax(-1)] if whole else []
    if whole < vocab_size:
        maxima.append(logits_RV[:, whole:].amax(1, keepdim=True))
    maxima_RN = torch.cat(maxima, 1)
    starts_R = maxima_RN.argmax(1) * ARGMAX_BLOCK
    # Past the end the last id is repeated; the first of equals wins, so the repetition never does.
    lanes = torch.arange(min(ARGMAX_BLOCK, vocab_size), device=logits_RV.device)
    ids_RB = (starts_R[:, None] + lanes).clamp_(max=vocab_size - 1)
    return starts_R + logits_RV.gather(1, ids_RB).argmax(1), maxima_RN.amax(1)


def _clean(values: torch.Tensor) -> torch.Tensor:
    """In place: NaN becomes -inf, +inf a very large number, so that differences of values are never NaN."""
    return values.nan_to_num_(nan=-torch.inf, neginf=-torch.inf).clamp_(max=_LARGEST)


def _exponentials(values: torch.Tensor, maxima: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """In place and in [0, 1]: exp((value - maximum) / temperature)."""
    return _raise_two(values.sub_(maxima.clamp(min=-_FLOAT_MAX)).mul_(scales))


def _raise_two(values: torch.Tensor) -> torch.Tensor:
    """In place: 2 to the power of each, whose bits depend on nothing else.

    torch goes through a tensor in whole vectors and does what is left over in another way, which may round
    differently; how much that is depends on the number of elements, and of threads. So there is nothing left
    over here, and no piece is shared among threads.
    """
    num_values = values.numel()
    whole = values.reshape(-1)
    if num_values % _VECTORS:
        whole = torch.nn.functional.pad(whole, (0, -num_values % _VECTORS))
    for piece in whole.split(_PIECE):
        piece.exp2_()
    if whole.data_ptr() != values.data_ptr():
        values.copy_(whole[:num_values].view(values.shape))
    return values


def _weights(values: torch.Tensor, maxima: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Exponentials as whole numbers, int64; `values` are overwritten."""
    return _exponentials(values, maxima, scales).mul_(2.0**WEIGHT_BITS).to(torch.int64)


def _read(logits_RV: torch.Tensor, columns: SamplingColumns, rows_R: torch.Tensor) -> _Rows:
    """Read the logits of the given rows once: maxima of stripes, sums of blocks."""
    vocab_size = logits_RV.shape[1]
    temperatures_R = columns.temperatures_R[rows_R].clamp(*TEMPERATURES)
    scales_R = torch.full_like(temperatures_R, LOG2_E) / temperatures_R
    top_ks_R = columns.top_ks_R[rows_R].to(torch.int64)
    maxima_R, stripe_maxima_RS, block_sums_RN = _sum_rows(logits_RV, rows_R, scales_R)
    return _Rows(
        logits_RV=logits_RV,
        rows_R=rows_R,
        scales_R=scales_R,
        uniforms_R=uniforms(columns.seeds_R[rows_R], columns.positions_R[rows_R]),
        top_ks_R=torch.where(top_ks_R > 0, top_ks_R, vocab_size).clamp(max=vocab_size),
        top_ps_R=columns.top_ps_R[rows_R],
        min_ps_R=columns.min_ps_R[rows_R],
        maxima_R=maxima_R,
        stripe_maxima_RS=stripe_maxima_RS,
        block_sums_RN=block_sums_RN,
    )


def _sum_rows(
    logits_RV: torch.Tensor, rows_R: torch.Tensor, scales_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maxima of rows and stripes, sums of blocks of the given rows; chunk by chunk in two small buffers."""
    num_rows, vocab_size = len(rows_R), logits_RV.shape[1]
    unit = BLOCK if vocab_size > BLOCK else STRIPE
    padded_size = -(-vocab_size // unit) * unit
    step = min(num_rows, max(1, _CHUNK_LOGITS // padded_size))
    floats = logits_RV.new_empty((step, padded_size), dtype=torch.float32)
    doubles = torch.empty_like(floats, dtype=torch.float64)
    parts = []
    for chunk_R, scales in zip(rows_R.split(step), scales_R.split(step), strict=True):
        count = len(chunk_R)
        for place, row in enumerate(chunk_R.tolist()):
            floats[place, :vocab_size].copy_(logits_RV[row])
        floats[:count, vocab_size:].fill_(-torch.inf)
        parts.append(_sum_blocks(floats[:count], scales, doubles[:count]))
    maxima, stripe_maxima, block_sums = zip(*parts, strict=True)
    return torch.cat(maxima), torch.cat(stripe_maxima), torch.cat(block_sums)


def _sum_blocks(
    floats: torch.Tensor, scales: torch.Tensor, doubles: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maxima of rows and stripes, sums of blocks of padded float32 rows, which are overwritten.

    The whole numbers are summed as float64: quicker than int64, exact up to BLOCK * 2**WEIGHT_BITS = 2**52.
    """
    stripe_maxima = floats.unflatten(1, (-1, STRIPE)).amax(-1)
    maxima = stripe_maxima.amax(1)
    if not bool((maxima <= _LARGEST).all()):
        stripe_maxima = _clean(floats).unflatten(1, (-1, STRIPE)).amax(-1)
    block_maxima = _block_maxima(stripe_maxima)[:, :, None]
    blocks = floats.unflatten(1, (block_maxima.shape[1], -1))
    _exponentials(blocks, block_maxima, scales[:, None, None]).mul_(2.0**WEIGHT_BITS).floor_()
    sums = doubles.copy_(floats).view(blocks.shape).sum(-1)
    return maxima, stripe_maxima, sums.to(torch.int64)


def _block_maxima(stripe_maxima_RS: torch.Tensor) -> torch.Tensor:
    stripes_per_block = min(BLOCK // STRIPE, stripe_maxima_RS.shape[1])
    maxima_RN: torch.Tensor = stripe_maxima_RS.unflatten(1, (-1, stripes_per_block)).amax(-1)
    return maxima_RN


def _block_weights(rows: _Rows) -> torch.Tensor:
    """Sums of blocks relative to the row's maximum, int64 [R, N]."""
    block_maxima_RN = _block_maxima(rows.stripe_maxima_RS).clamp_(min=-_FLOAT_MAX)
    maxima_R1 = block_maxima_RN.amax(1, keepdim=True)
    shares_RN = _exponentials(block_maxima_RN, maxima_R1, rows.scales_R[:, None])
    return (rows.block_sums_RN.to(torch.float64) * shares_RN.to(torch.float64)).to(torch.int64)


def _pick(weights_RL: torch.Tensor, targets_R: torch.Tensor) -> torch.Tensor:
    """Index of the first element whose cumulative weight exceeds the target; never one of weight zero."""
    return (weights_RL.cumsum(1) <= targets_R[:, None]).sum(1)


def _targets(uniforms_R: torch.Tensor, totals_R: torch.Tensor) -> torch.Tensor:
    """floor(u * total). Rounding never lifts it to the total: u is at most 1 - 2**-53."""
    return (uniforms_R * totals_R.to(torch.float64)).to(torch.int64)


def _draw_plain(rows: _Rows) -> torch.Tensor:
    """Draw from the whole vocabulary: the block first, then the id in it."""
    weights_RN = _block_weights(rows)
    totals_R = weights_RN.sum(1)
    targets_R = _targets(rows.uniforms_R, totals_R)
    hit_R1 = _pick(weights_RN, targets_R)[:, None].clamp(max=weights_RN.shape[1] - 1)
    weight_R1 = weights_RN.gather(1, hit_R1)
    within_R1 = targets_R[:, None] - (weights_RN.cumsum(1).gather(1, hit_R1) - weight_R1)
    sum_R1 = rows.block_sums_RN.gather(1, hit_R1)
    # From the row's scale to the block's own, finer one; here rounding may reach the sum.
    local_R1 = (
        within_R1.to(torch.float64) * sum_R1.to(torch.float64) / weight_R1.clamp(min=1).to(torch.float64)
    )
    local_R1 = torch.minimum(local_R1.to(torch.int64), sum_R1 - 1)
    lanes = torch.arange(min(BLOCK, rows.logits_RV.shape[1]), device=hit_R1.device)
    ids_RL = hit_R1 * BLOCK + lanes
    values_RL = _gather(rows, ids_RL)
    weights_RL = _weights(values_RL, values_RL.amax(1, keepdim=True), rows.scales_R[:, None])
    tokens_R = hit_R1.squeeze(1) * BLOCK + _pick(weights_RL, local_R1.squeeze(1))
    return torch.where(totals_R > 0, tokens_R, 0)


def _gather(rows: _Rows, ids_RL: torch.Tensor) -> torch.Tensor:
    """Clean float32 logits of the given ids; -inf past the end of the vocabulary."""
    vocab_size = rows.logits_RV.shape[1]
    places_RL = ids_RL.clamp(max=vocab_size - 1) + rows.rows_R[:, None] * vocab_size
    values_RL = rows.logits_RV.view(-1).index_select(0, places_RL.view(-1)).to(torch.float32)
    return _clean(values_RL.view(ids_RL.shape)).masked_fill_(ids_RL >= vocab_size, -torch.inf)


def _draw_filtered(rows: _Rows) -> torch.Tensor:
    """Draw among the survivors of top-k, top-p and min-p, without a sort of the vocabulary.

    The largest logits alone decide nearly every row; a row that they do not decide is drawn by a histogram.
    """
    limits_R = _mass_limits(rows)
    tile = _largest_stripes(rows)
    cut, decided_R = _cut_by_sort(rows, tile, limits_R)
    tokens_R = _draw_survivors(rows, tile, cut)
    for row in torch.nonzero(~decided_R).squeeze(1).tolist():
        one = slice(row, row + 1)
        tile = _whole_row(rows[one])
        tokens_R[one] = _draw_survivors(rows[one], tile, _cut_by_histogram(rows[one], tile, limits_R[one]))
    return tokens_R


def _mass_limits(rows: _Rows) -> torch.Tensor:
    """top_p as a whole number, int64 [R]: a token survives if the weight before it is below the limit."""
    totals_R = _block_weights(rows).sum(1).to(torch.float64)
    limits_R = (rows.top_ps_R.to(torch.float64) * totals_R).ceil().to(torch.int64).clamp(min=1)
    return torch.where(rows.top_ps_R < 1, limits_R, _INT_MAX)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some ids of each row, ascending, and their logits. Every logit above `floors_R` is among them."""

    ids_RL: torch.Tensor
    values_RL: torch.Tensor
    floors_R: torch.Tensor | None  # None: the tile is the whole row


@dataclass(frozen=True, slots=True)
class _Cut:
    """The end of the survivors: logits above the threshold, and the first `ties_R` of those equal to it."""

    thresholds_R: torch.Tensor
    ties_R: torch.Tensor


def _largest_stripes(rows: _Rows) -> _Tile:
    """The stripes with the largest maxima."""
    num_stripes = rows.stripe_maxima_RS.shape[1]
    largest = rows.stripe_maxima_RS.topk(min(_TILE_STRIPES, num_stripes), dim=1)
    stripes_RC = largest.indices.sort(1).values
    ids_RCB = stripes_RC[:, :, None] * STRIPE + torch.arange(STRIPE, device=stripes_RC.device)
    ids_RL = ids_RCB.flatten(1)
    return _Tile(
        ids_RL, _gather(rows, ids_RL), largest.values[:, -1] if num_stripes > _TILE_STRIPES else None
    )


def _whole_row(rows: _Rows) -> _Tile:
    vocab_size = rows.logits_RV.shape[1]
    ids_RL = torch.arange(vocab_size, device=rows.rows_R.device).expand(len(rows.rows_R), vocab_size)
    return _Tile(ids_RL, _gather(rows, ids_RL), None)


def _cut_by_sort(rows: _Rows, tile: _Tile, limits_R: torch.Tensor) -> tuple[_Cut, torch.Tensor]:
    """Look for the end of the survivors among the tile's largest values; bool [R]: it was found there."""
    num_sorted = min(2 * _TILE_STRIPES, tile.values_RL.shape[1])
    sorted_RM = tile.values_RL.topk(num_sorted, dim=1).values
    exponentials_RM = _exponentials(sorted_RM.clone(), sorted_RM[:, :1], rows.scales_R[:, None])
    weights_RM = (exponentials_RM * 2.0**WEIGHT_BITS).to(torch.int64)
    survives_RM = weights_RM.cumsum(1) - weights_RM < limits_R[:, None]
    survives_RM &= torch.arange(num_sorted, device=sorted_RM.device) < rows.top_ks_R[:, None]
    survives_RM &= exponentials_RM >= rows.min_ps_R[:, None]
    num_survivors_R = survives_RM.sum(1).clamp(min=1)
    thresholds_R = sorted_RM.gather(1, num_survivors_R[:, None] - 1).squeeze(1)
    ties_R = num_survivors_R - (sorted_RM > thresholds_R[:, None]).sum(1)
    decided_R = (num_survivors_R < num_sorted) | (rows.top_ks_R <= num_sorted)
    if tile.floors_R is not None:
        # Logits equal to the floor may also lie outside of the tile.
        decided_R &= thresholds_R > tile.floors_R
        decided_R |= sorted_RM[:, 0] == -torch.inf  # nothing can be drawn
    return _Cut(thresholds_R, ties_R), decided_R


def _cut_by_histogram(row: _Rows, tile: _Tile, limit: torch.Tensor) -> _Cut:
    """The same for one whole row: weights are counted by their leading bits, then one bin is sorted."""
    values_V = tile.values_RL[0]
    exponentials_V = _exponentials(values_V.clone(), values_V.amax(), row.scales_R)
    weights_V = (exponentials_V * 2.0**WEIGHT_BITS).to(torch.int64)
    bins_V = _bins(exponentials_V)
    num_bins = int(_bins(torch.ones(1, dtype=torch.float32))) + 1
    # Bins in descending order, as the survivors are.
    counts = torch.bincount(bins_V, minlength=num_bins).flip(0)
    masses = torch.zeros_like(counts).scatter_add_(0, num_bins - 1 - bins_V, weights_V)
    counts_before, masses_before = counts.cumsum(0) - counts, masses.cumsum(0) - masses
    reached = (counts > 0) & (masses_before < limit) & (counts_before < row.top_ks_R)
    reached[num_bins - int(_bins(row.min_ps_R).clamp(max=num_bins - 1)) :] = False
    last = torch.nonzero(reached)[-1]
    members = torch.nonzero(bins_V == num_bins - 1 - last).squeeze(1)
    sorted_M, order = values_V[members].sort(descending=True)
    members = members[order]
    survives_M = masses_before[last] + weights_V[members].cumsum(0) - weights_V[members] < limit
    survives_M &= counts_before[last] + torch.arange(len(members), device=members.device) < row.top_ks_R
    survives_M &= exponentials_V[members] >= row.min_ps_R
    num_survivors = survives_M.sum(0, keepdim=True)
    threshold = sorted_M[(num_survivors - 1).clamp(min=0)]
    return _Cut(threshold, num_survivors - (sorted_M > threshold).sum())


def _bins(exponentials: torch.Tensor) -> torch.Tensor:
    """Sign, exponent and leading bits of numbers in [0, 1], int64: 4,065 bins, larger for larger numbers."""
    return (exponentials.view(torch.int32) >> 18).to(torch.int64)


def _draw_survivors(rows: _Rows, tile: _Tile, cut: _Cut) -> torch.Tensor:
    """Draw in the order of ids among the survivors in the tile; of equal logits the lowest ids survive."""
    thresholds_R1 = cut.thresholds_R[:, None]
    equal_RL = tile.values_RL == thresholds_R1
    survives_RL = equal_RL & (equal_RL.cumsum(1) <= cut.ties_R[:, None])
    survives_RL |= tile.values_RL > thresholds_R1
    values_RL = tile.values_RL.masked_fill(~survives_RL, -torch.inf)
    weights_RL = _weights(values_RL, values_RL.amax(1, keepdim=True), rows.scales_R[:, None])
    totals_R = weights_RL.sum(1)
    picks_R = _pick(weights_RL, _targets(rows.uniforms_R, totals_R))
    picks_R = picks_R.clamp(max=weights_RL.shape[1] - 1)
    tokens_R = tile.ids_RL.gather(1, picks_R[:, None]).squeeze(1)
    return torch.where(totals_R > 0, tokens_R, 0)
