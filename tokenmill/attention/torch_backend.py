"""Attention in plain torch: the backend of the CPU, and the reference for the others on any device.

Keys and values of a row are gathered from its pages by token, never by whole page, so that what an
earlier owner left in a page cannot reach a row. Letters as in `base.py`; G query heads per key head,
L keys of a row or of the longest row of a batch, N rows of a batch, Q query tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F

from tokenmill.attention.base import AttentionSpec, StepLayout
from tokenmill.kernels.operands import HeadNorms, Rotation
from tokenmill.kernels.rotary import heads_of_product
from tokenmill.kernels.sharing import SharingCosts

# Queries of a prompt that need a mask are taken in blocks: keys that no query of a block sees are skipped.
QUERY_BLOCK = 256
# Decoding rows are padded to the longest of their bucket, at most to this many times their own length.
MAX_PADDING = 2.0
SMALL_LENGTH = 64  # rows up to this many keys share one bucket whatever their ratio


@dataclass(frozen=True, slots=True)
class _Span:
    """The keys a row attends to in this step: positions [first, stop) of its sequence."""

    row: int
    first: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class _DecodeBucket:
    """Decoding rows of similar length, attended to in one batch."""

    rows_N: torch.Tensor | None  # int64; None: all decoding rows, in order
    slots_NL: torch.Tensor  # int64; past a row's length, the slot of its last token
    mask_N11L: torch.Tensor  # 0 or -inf


@dataclass(frozen=True, slots=True)
class _QueryBlock:
    """Query tokens [start, stop) of a row against keys [key_start, key_stop) of its span."""

    start: int
    stop: int
    key_start: int
    key_stop: int
    mask_QL: torch.Tensor | None  # 0 or -inf; None: query i sees keys up to i


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """A row with a run of query tokens."""

    token_start: int
    token_stop: int
    slots_L: torch.Tensor | None  # int64; None: its keys are exactly this step's
    blocks: list[_QueryBlock]


@dataclass(slots=True)
class _Work:
    """Everything that the layers of one page group and window share in a step."""

    slots_T: torch.Tensor
    prefills: list[_PrefillRow]
    decodes: list[_DecodeBucket] = field(default_factory=list)


class TorchBackend:
    """See `base.Backend`. Works with every dtype and device that `scaled_dot_product_attention` knows."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        key_caches: Sequence[torch.Tensor],
        value_caches: Sequence[torch.Tensor],
        page_size: int,
    ) -> None:
        self.sharing: SharingCosts | None = None
        self._specs = tuple(specs)
        self._page_size = page_size
        self._keys = [_TokenStore(cache) for cache in key_caches]
        self._values = [_TokenStore(cache) for cache in value_caches]
        self._dtypes = {
            (spec.group, spec.window): cache.dtype
            for spec, cache in zip(self._specs, key_caches, strict=True)
        }
        self._works: dict[tuple[int, int | None], _Work] = {}

    def plan(self, layout: StepLayout) -> None:
        """Build indices and masks of the step, once for all layers that share a group and a window."""
        self.plan_prefills(layout, range(layout.num_decodes, len(layout.host_lengths)))
        for (group, window), dtype in self._dtypes.items():
            self._works[group, window].decodes = _decode_buckets(
                layout, group, window, page_size=self._page_size, dtype=dtype
            )

    def plan_prefills(self, layout: StepLayout, rows: Sequence[int]) -> None:
        """As `plan`, for some of the prefilling rows only."""
        self._works = {
            (group, window): _Work(
                layout.slot_mapping_T[group],
                _prefill_rows(layout, rows, group, window, page_size=self._page_size, dtype=dtype),
            )
            for (group, window), dtype in self._dtypes.items()
        }

    def run(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int) -> torch.Tensor:
        """Store keys and values, then attend; inputs may be strided views, the result is contiguous."""
        spec = self._specs[layer]
        work = self._works[spec.group, spec.window]
        keys, values = self._keys[layer], self._values[layer]
        keys.write(work.slots_T, k_TKD)
        values.write(work.slots_T, v_TKD)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        for bucket in work.decodes:
            _attend_bucket(bucket, q_THD, keys, values, spec, out_THD)
        self.attend_prefills(q_THD, k_TKD, v_TKD, layer, out_THD=out_THD)
        return out_THD

    def run_product(
        self,
        product_TSD: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        layer: int,
        needed_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `base.Backend`."""
        num_kv_heads = self._specs[layer].num_kv_heads
        out_THD = self.run(*heads_of_product(product_TSD, rotation, norms, num_kv_heads), layer)
        return out_THD if needed_N is None else out_THD[needed_N]

    def decoding(self, rotation: Rotation, norms: HeadNorms | None, layer: int) -> None:
        """See `base.Backend`; nothing would be gained."""

    def attend_prefills(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        layer: int,
        *,
        out_THD: torch.Tensor,
    ) -> None:
        """Attention of the planned prefilling rows, whose keys and values are stored already."""
        spec = self._specs[layer]
        keys, values = self._keys[layer], self._values[layer]
        for row in self._works[spec.group, spec.window].prefills:
            tokens = slice(row.token_start, row.token_stop)
            k_LKD = k_TKD[tokens] if row.slots_L is None else keys.read(row.slots_L)
            v_LKD = v_TKD[tokens] if row.slots_L is None else values.read(row.slots_L)
            _attend_row(row, q_THD[tokens], k_LKD, v_LKD, spec, out_THD[tokens])


class _TokenStore:
    """One cache [N, B, K, D] addressed by slot (page * B + offset)."""

    def __init__(self, cache_NBKD: torch.Tensor) -> None:
        self._cache_NBKD = cache_NBKD
        num_pages, self._page_size, num_heads, head_dim = cache_NBKD.shape
        # Where tokens of all pages are evenly spaced, one index does; it is several times faster than two.
        even = cache_NBKD.stride(0) == self._page_size * cache_NBKD.stride(1)
        self._flat = cache_NBKD.view(num_pages * self._page_size, num_heads, head_dim) if even else None

    def write(self, slots_T: torch.Tensor, x_TKD: torch.Tensor) -> None:
        if self._flat is not None:
            self._flat.index_copy_(0, slots_T, x_TKD)
        else:
            self._cache_NBKD[slots_T // self._page_size, slots_T % self._page_size] = x_TKD

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """[*slots.shape, K, D]"""
        if self._flat is not None:
            return self._flat.index_select(0, slots.flatten()).view(*slots.shape, *self._flat.shape[1:])
        return self._cache_NBKD[slots // self._page_size, slots % self._page_size]


# ── planning ──────────────────────────────────────────────────────────────────────────────────


def _decode_buckets(
    layout: StepLayout, group: int, window: int | None, *, page_size: int, dtype: torch.dtype
) -> list[_DecodeBucket]:
    """Rows [0, num_decodes) in buckets of similar length, the longest first."""
    spans = [
        _Span(row, 0 if window is None else max(0, length - window), length)
        for row, length in enumerate(layout.host_lengths[: layout.num_decodes])
    ]
    buckets: list[list[_Span]] = []
    for span in sorted(spans, key=lambda span: span.count, reverse=True):
        longest = buckets[-1][0].count if buckets else 0
        if buckets and longest <= max(SMALL_LENGTH, MAX_PADDING * span.count):
            buckets[-1].append(span)
        else:
            buckets.append([span])
    if len(buckets) == 1:
        return [_decode_bucket(layout, group, spans, None, page_size=page_size, dtype=dtype)]
    device = layout.positions_T.device
    return [
        _decode_bucket(
            layout,
            group,
            bucket,
            torch.tensor([span.row for span in bucket], device=device),
            page_size=page_size,
            dtype=dtype,
        )
        for bucket in buckets
    ]


def _decode_bucket(
    layout: StepLayout,
    group: int,
    spans: list[_Span],
    rows_N: torch.Tensor | None,
    *,
    page_size: int,
    dtype: torch.dtype,
) -> _DecodeBucket:
    device = layout.positions_T.device
    first_N1, stop_N1 = torch.tensor(
        [[span.first for span in spans], [span.stop for span in spans]], device=device
    ).unsqueeze(-1)
    positions_NL = first_N1 + torch.arange(max(span.count for span in spans), device=device)
    mask_NL = torch.zeros(positions_NL.shape, dtype=dtype, device=device)
    mask_NL.masked_fill_(positions_NL >= stop_N1, -torch.inf)
    pages_NP = layout.page_table_RP[group][: layout.num_decodes]
    if rows_N is not None:
        pages_NP = pages_NP[rows_N]
    slots_NL = _slots(pages_NP, positions_NL.minimum(stop_N1 - 1), page_size)
    return _DecodeBucket(rows_N, slots_NL, mask_NL[:, None, None, :])


def _slots(pages_NP: torch.Tensor, positions_NL: torch.Tensor, page_size: int) -> torch.Tensor:
    pages_NL = pages_NP.gather(1, positions_NL // page_size).long()
    return pages_NL * page_size + positions_NL % page_size


def _prefill_rows(
    layout: StepLayout,
    rows: Sequence[int],
    group: int,
    window: int | None,
    *,
    page_size: int,
    dtype: torch.dtype,
) -> list[_PrefillRow]:
    """Rows after the decoding ones, each with its keys and its blocks of queries."""
    planned = []
    token_starts = list(accumulate(layout.host_query_lengths, initial=0))
    device = layout.positions_T.device
    for row in rows:
        token_start = token_starts[row]
        num_queries, length = layout.host_query_lengths[row], layout.host_lengths[row]
        prefix = length - num_queries
        span = _Span(row, 0 if window is None else max(0, prefix - window + 1), length)
        slots_L = None
        if prefix:
            positions_1L = torch.arange(span.first, span.stop, device=device).unsqueeze(0)
            slots_L = _slots(layout.page_table_RP[group][row : row + 1], positions_1L, page_size)[0]
        blocks = _query_blocks(num_queries, span, window, device=device, dtype=dtype)
        planned.append(_PrefillRow(token_start, token_start + num_queries, slots_L, blocks))
    return planned


def _query_blocks(
    num_queries: int, span: _Span, window: int | None, *, device: torch.device, dtype: torch.dtype
) -> list[_QueryBlock]:
    prefix = span.stop - num_queries
    if prefix == 0 and (window is None or window >= span.stop):
        return [_QueryBlock(0, num_queries, 0, num_queries, None)]
    blocks = []
    for start in range(0, num_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_queries)
        first = 0 if window is None else max(0, prefix + start - window + 1)
        query_Q1 = torch.arange(prefix + start, prefix + stop, device=device).unsqueeze(1)
        key_1L = torch.arange(first, prefix + stop, device=device).unsqueeze(0)
        hidden_QL = key_1L > query_Q1
        if window is not None:
            hidden_QL |= key_1L <= query_Q1 - window
        mask_QL = torch.zeros(hidden_QL.shape, dtype=dtype, device=device).masked_fill_(hidden_QL, -torch.inf)
        blocks.append(_QueryBlock(start, stop, first - span.first, prefix + stop - span.first, mask_QL))
    return blocks


# ── running ───────────────────────────────────────────────────────────────────────────────────


def _attend_bucket(
    bucket: _DecodeBucket,
    q_THD: torch.Tensor,
    keys: _TokenStore,
    values: _TokenStore,
    spec: AttentionSpec,
    out_THD: torch.Tensor,
) -> None:
    num_rows = bucket.slots_NL.shape[0]
    q_NHD = q_THD[:num_rows] if bucket.rows_N is None else q_THD[bucket.rows_N]
    # The query heads of a key head stand in the place of query tokens: they share its keys without a copy.
    out_NKGD = F.scaled_dot_product_attention(
        q_NHD.reshape(num_rows, spec.num_kv_heads, -1, spec.head_dim),
        keys.read(bucket.slots_NL).transpose(1, 2),
        values.read(bucket.slots_NL).transpose(1, 2),
        attn_mask=bucket.mask_N11L,
        scale=spec.scale,
    )
    out_NHD = out_NKGD.reshape(num_rows, spec.num_heads, spec.head_dim)
    if bucket.rows_N is None:
        out_THD[:num_rows] = out_NHD
    else:
        out_THD[bucket.rows_N] = out_NHD


def _attend_row(
    row: _PrefillRow,
    q_QHD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKD: torch.Tensor,
    spec: AttentionSpec,
    out_QHD: torch.Tensor,
) -> None:
    # Key heads are the batch and the query heads of one are its heads: expanding costs no copy.
    heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)
    q_KGQD = q_QHD.unflatten(1, heads).permute(1, 2, 0, 3)
    out_KGQD = out_QHD.unflatten(1, heads).permute(1, 2, 0, 3)
    k_KGLD = k_LKD.transpose(0, 1).unsqueeze(1).expand(-1, heads[1], -1, -1)
    v_KGLD = v_LKD.transpose(0, 1).unsqueeze(1).expand(-1, heads[1], -1, -1)
    for block in row.blocks:
        queries, seen = slice(block.start, block.stop), slice(block.key_start, block.key_stop)
        out_KGQD[:, :, queries] = F.scaled_dot_product_attention(
            q_KGQD[:, :, queries],
            k_KGLD[:, :, seen],
            v_KGLD[:, :, seen],
            attn_mask=block.mask_QL,
            is_causal=block.mask_QL is None,
            scale=spec.scale,
        )
