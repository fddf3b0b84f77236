"""Random ragged steps over a paged cache, and what attention must answer, computed the slow way."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenmill.attention.base import AttentionSpec, StepLayout


class Ragged(NamedTuple):
    """One step: its layout, the caches before it, its tensors, and the right answer in float64."""

    layout: StepLayout
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    expected: torch.Tensor


def ragged_step(
    spec: AttentionSpec,
    rows: list[tuple[int, int]],
    *,
    page_size: int,
    dtype: torch.dtype,
    seed: int,
    heads_first: bool = False,
    device: str = "cpu",
) -> Ragged:
    """A step of rows (queries, length), those with one query first, their pages shuffled.

    Every slot that no row has filled is NaN, and page numbers past a row's length lie outside the cache, so
    that reading either shows.
    """
    rows = sorted(rows, key=lambda row: row[0] > 1)
    with torch.device(device):
        return _ragged_step(
            spec, rows, page_size, dtype, torch.Generator(device).manual_seed(seed), heads_first
        )


def _ragged_step(
    spec: AttentionSpec,
    rows: list[tuple[int, int]],
    page_size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    heads_first: bool,
) -> Ragged:
    counts = [-(-length // page_size) for _, length in rows]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages, generator=generator).split([*counts, 2])[:-1]
    table = torch.full((len(rows), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
    key_cache, value_cache = (
        torch.full(shape, torch.nan, dtype=dtype),
        torch.full(shape, torch.nan, dtype=dtype),
    )
    queries, keys, values, positions, slots, expected = [], [], [], [], [], []
    for index, ((num_queries, length), pages) in enumerate(zip(rows, order, strict=True)):
        table[index, : len(pages)] = pages
        k, v = torch.randn(2, length, *shape[2:], generator=generator).to(dtype)
        q = torch.randn(num_queries, spec.num_heads, spec.head_dim, generator=generator).to(dtype)
        where = torch.arange(length)
        prefix = length - num_queries
        row_slots = pages[where // page_size] * page_size + where % page_size
        key_cache.view(-1, *shape[2:])[row_slots[:prefix]] = k[:prefix]
        value_cache.view(-1, *shape[2:])[row_slots[:prefix]] = v[:prefix]
        queries.append(q)
        keys.append(k[prefix:])
        values.append(v[prefix:])
        positions.append(where[prefix:])
        slots.append(row_slots[prefix:])
        expected.append(naive_attention(q, k, v, spec))
    if heads_first:  # the same numbers, stored [N, K, B, D]
        key_cache = key_cache.transpose(1, 2).contiguous().transpose(1, 2)
        value_cache = value_cache.transpose(1, 2).contiguous().transpose(1, 2)
    query_lengths, lengths = [row[0] for row in rows], [row[1] for row in rows]
    layout = StepLayout(
        positions_T=torch.cat(positions),
        slot_mapping_T=(torch.cat(slots),),
        page_table_RP=(table,),
        query_starts=torch.tensor([0, *query_lengths]).cumsum(0).to(torch.int32),
        lengths_R=torch.tensor(lengths, dtype=torch.int32),
        num_decodes=query_lengths.count(1),
        host_query_lengths=query_lengths,
        host_lengths=lengths,
    )
    # Queries, keys and values are views of one fused tensor, as a model's projection makes them.
    fused = torch.cat((torch.cat(queries), torch.cat(keys), torch.cat(values)), dim=1)
    q, k, v = fused.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    return Ragged(layout, key_cache, value_cache, q, k, v, torch.cat(expected))


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """[queries, heads, size] in float64: softmax over every visible key, one head at a time."""
    group = spec.num_heads // spec.num_kv_heads
    query_position = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    key_position = torch.arange(len(k), device=q.device)[None, :]
    visible = key_position <= query_position
    if spec.window is not None:
        visible &= key_position > query_position - spec.window
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for head in range(spec.num_heads):
        scores = q[:, head].double() @ k[:, head // group].double().T * spec.scale
        out[:, head] = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v[:, head // group].double()
    return out


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expected."""
    return float((actual.double() - expected).norm() / expected.norm())
