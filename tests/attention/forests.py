"""Decoding steps whose rows share prefixes of pages at random, and what attention must answer."""

from __future__ import annotations

import dataclasses
import random
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenmill.attention import create_backend
from tokenmill.attention.base import AttentionSpec, StepLayout
from tokenmill.kernels.sharing import SharingCosts
from tokenmill.runner.forest import Forest

_RAGGED = runpy.run_path(str(Path(__file__).with_name("ragged.py")))


def random_forest(
    draw: random.Random, num_rows: int, num_pages: int, *, alone: float = 0.2
) -> list[list[int]]:
    """The full pages of each row: some begin anew (`alone` is their share), others branch off another row."""
    fresh = iter(range(10**6))
    rows: list[list[int]] = []
    for _ in range(num_rows):
        pages: list[int] = []
        if rows and draw.random() >= alone:
            parent = draw.choice(rows)
            pages = parent[: draw.randint(0, len(parent))]
        rows.append((pages + [next(fresh) for _ in range(num_pages)])[: draw.randint(0, num_pages)])
    draw.shuffle(rows)
    return rows


def forest_step(
    spec: AttentionSpec,
    rows: list[list[int]],
    *,
    costs: SharingCosts | None,
    page_size: int,
    dtype: torch.dtype,
    seed: int,
    device: str = "cpu",
    padding: int = 0,
) -> Any:
    """A `Ragged` step in which row r decodes behind the full pages `rows[r]` and a part of one of its own.

    Slots that no row has filled are NaN, and pages of no row lie outside the cache. `padding` rows of
    length 1 follow; they write to a page of nobody.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = random.Random(seed)
    rows = [*rows, *([[]] * padding)]
    lengths = [len(pages) * page_size + draw.randint(1, page_size) for pages in rows]
    lengths[len(rows) - padding :] = [1] * padding
    used = sorted({page for pages in rows for page in pages})
    place = dict(zip(used, torch.randperm(len(used) + len(rows), generator=generator).tolist(), strict=False))
    own = [page for page in range(len(used) + len(rows)) if page not in set(place.values())]
    shape = (len(used) + len(rows), page_size, spec.num_kv_heads, spec.head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    table = torch.full((len(rows), max(map(len, rows)) + 2), 2**31 - 1, dtype=torch.int32)
    q = torch.randn(len(rows), spec.num_heads, spec.head_dim, generator=generator).to(dtype)
    new_keys, new_values, slots, expected = [], [], [], []
    filled = torch.zeros(shape[:2], dtype=torch.bool)
    for row, (pages, length) in enumerate(zip(rows, lengths, strict=True)):
        all_pages = torch.tensor([*(place[page] for page in pages), own[row]])
        table[row, : len(all_pages)] = all_pages
        where = torch.arange(length)
        pages_L, offsets_L = all_pages[where // page_size], where % page_size
        k, v = keys[pages_L, offsets_L], values[pages_L, offsets_L]
        filled[pages_L[:-1], offsets_L[:-1]] = True
        new_keys.append(k[-1:])
        new_values.append(v[-1:])
        slots.append(pages_L[-1:] * page_size + offsets_L[-1:])
        expected.append(_RAGGED["naive_attention"](q[row : row + 1], k, v, spec))
    keys[~filled], values[~filled] = torch.nan, torch.nan
    layout = StepLayout(
        positions_T=torch.tensor(lengths, device=device) - 1,
        slot_mapping_T=(torch.cat(slots).to(device),),
        page_table_RP=(table.to(device),),
        query_starts=torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
        lengths_R=torch.tensor(lengths, dtype=torch.int32, device=device),
        num_decodes=len(rows),
        host_query_lengths=[1] * len(rows),
        host_lengths=lengths,
    )
    if costs is not None:
        share(layout, table, lengths, costs=costs, page_size=page_size, padding=padding)
    tensors = (keys, values, q, torch.cat(new_keys), torch.cat(new_values), torch.cat(expected))
    return _RAGGED["Ragged"](layout, *(tensor.to(device) for tensor in tensors))


def eager_costs(
    spec: AttentionSpec, dtype: torch.dtype, *, page_size: int = 1, device: str = "cpu", **more: int
) -> SharingCosts:
    """What the backend says of its tiles for such pages, and that all sharing pays."""
    cache = torch.zeros(1, page_size, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device)
    costs = create_backend("triton", [spec], [cache], [cache], page_size).sharing
    assert costs is not None
    return dataclasses.replace(costs, piece_keys=0, worthwhile_keys=0, **more)


def share(
    layout: StepLayout,
    table: torch.Tensor,
    lengths: list[int],
    *,
    costs: SharingCosts,
    page_size: int,
    padding: int,
) -> None:
    """Describe in the layout what its rows share, as the runner does."""
    num_rows = len(lengths)
    forest = Forest(costs, max_rows=num_rows, page_size=page_size, device=layout.positions_T.device)
    positions = np.asarray(lengths, dtype=np.int32)[: num_rows - padding] - 1
    slots = np.arange(num_rows - padding, dtype=np.int32)
    found = forest.update(table.numpy(), slots, positions)
    if found is not None:
        layout.shared = forest.shared(num_rows, found)
