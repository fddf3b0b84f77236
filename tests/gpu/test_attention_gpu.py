"""The Triton and the torch backend at real sizes on a GPU, against attention written out in float64 there."""

from __future__ import annotations

import dataclasses
import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenmill.attention import create_backend
from tokenmill.attention.base import AttentionSpec, Backend
from tokenmill.kernels import triton_overlap
from tokenmill.kernels.launching import replayed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The relative error of a whole step. Rounding the weights and the output to bfloat16 alone makes 3e-3.
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
HEADS = [(14, 2, 64), (16, 8, 128), (32, 8, 128), (12, 12, 80), (24, 8, 96), (8, 4, 256), (16, 1, 128)]


@pytest.fixture(scope="module")
def ragged() -> SimpleNamespace:
    path = Path(__file__).parents[1] / "attention" / "ragged.py"
    return SimpleNamespace(**runpy.run_path(str(path)))


@pytest.fixture(scope="module")
def forests() -> SimpleNamespace:
    path = Path(__file__).parents[1] / "attention" / "forests.py"
    return SimpleNamespace(**runpy.run_path(str(path)))


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Memory that the allocator hands out next is NaN: an output that nobody wrote shows."""
    for size in (2**28, 2**24, 2**20, 2**16):
        torch.full((size,), torch.nan, device="cuda")


def backend_for(step: Any, spec: AttentionSpec, page_size: int, name: str = "triton") -> Backend:
    return create_backend(name, [spec], [step.key_cache], [step.value_cache], page_size)


def set_runs(monkeypatch: pytest.MonkeyPatch, *, fewest: int, have_short: bool) -> None:
    """From how many pairs of row and key head on rows go by runs; whether few rows have short ones, too."""
    from tokenmill.kernels import triton_balanced

    monkeypatch.setattr(triton_balanced, "FEWEST_STREAMS", fewest)
    if fewest > 1:  # Hopper's kernel takes all rows
        monkeypatch.setattr(triton_balanced, "_is_for_hopper", lambda q, rows: False)
    if have_short:
        monkeypatch.setattr(triton_balanced, "FEWEST_ROWS", 0)
        monkeypatch.setattr(triton_balanced, "FEWEST_TILES", 1)


# Few rows in pieces of their own, by runs of equal length, and by runs of which some are short.
RUNS = pytest.mark.parametrize(
    ("fewest", "have_short"), [(1000, False), (1, False), (1, True)], ids=["pieces", "runs", "short runs"]
)


def answer(backend: Backend, step: Any) -> torch.Tensor:
    backend.plan(step.layout)
    return backend.run(step.q, step.k, step.v, 0)


def random_rows(draw: random.Random) -> list[tuple[int, int]]:
    decodes = [(1, draw.randint(1, draw.choice((20, 700, 5000)))) for _ in range(draw.choice((0, 1, 5, 40)))]
    prefills = []
    for _ in range(draw.choice((0, 1, 3, 9))):
        queries = draw.randint(2, draw.choice((20, 200, 1500)))
        prefills.append((queries, queries + draw.choice((0, draw.randint(1, 2000)))))
    return decodes + prefills or [(1, 1)]


@RUNS
@pytest.mark.parametrize("seed", range(14))
def test_random_batches(
    ragged: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, seed: int, fewest: int, have_short: bool
) -> None:
    set_runs(monkeypatch, fewest=fewest, have_short=have_short)
    draw = random.Random(seed)
    heads, kv_heads, head_dim = HEADS[seed % len(HEADS)]
    dtype = list(LIMITS)[seed % 3]
    page_size = draw.choice((1, 16, 64))
    spec = AttentionSpec(
        heads, kv_heads, head_dim, scale=head_dim**-0.5, window=draw.choice((None, None, 1, 100, 1024))
    )
    step = ragged.ragged_step(
        spec,
        random_rows(draw),
        page_size=page_size,
        dtype=dtype,
        seed=seed,
        heads_first=draw.random() < 0.3,
        device="cuda",
    )
    for name in ("triton", "torch"):
        out = answer(backend_for(step, spec, page_size, name), step)
        assert ragged.relative_error(out, step.expected) < LIMITS[dtype], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2, 16, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS[:3])
def test_decoding(
    ragged: SimpleNamespace, dtype: torch.dtype, batch: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    draw = random.Random(batch)
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5)
    longest = 1100 if batch == 256 else 9000
    rows = [(1, longest), *((1, draw.randint(1, longest)) for _ in range(batch - 1))]
    step = ragged.ragged_step(spec, rows, page_size=16, dtype=dtype, seed=batch, device="cuda")
    assert ragged.relative_error(answer(backend_for(step, spec, 16), step), step.expected) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("row", [(4096, 4096), (1000, 6000), (20, 6000)])
def test_a_long_prompt(
    ragged: SimpleNamespace, dtype: torch.dtype, window: int | None, row: tuple[int, int]
) -> None:
    spec = AttentionSpec(4, 2, 128, scale=128**-0.5, window=window)
    step = ragged.ragged_step(spec, [row], page_size=16, dtype=dtype, seed=1, device="cuda")
    assert ragged.relative_error(answer(backend_for(step, spec, 16), step), step.expected) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_prompts_of_every_head_size(
    ragged: SimpleNamespace, heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5, window=window)
    rows = [(1, 900), (2100, 2100), (513, 2950), (65, 2000), (7, 7)]
    step = ragged.ragged_step(spec, rows, page_size=16, dtype=dtype, seed=head_dim, device="cuda")
    assert ragged.relative_error(answer(backend_for(step, spec, 16), step), step.expected) < LIMITS[dtype]


@RUNS
def test_a_captured_step_follows_the_device(
    ragged: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fewest: int, have_short: bool
) -> None:
    """A graph planned with upper bounds gives each row's own answer after lengths and pages have changed."""
    set_runs(monkeypatch, fewest=fewest, have_short=have_short)
    spec = AttentionSpec(16, 8, 128, scale=128**-0.5)
    first, second = (
        ragged.ragged_step(
            spec,
            [(1, length) for length in lengths],
            page_size=16,
            dtype=torch.bfloat16,
            seed=9,
            device="cuda",
        )
        for lengths in ((30, 4000, 700), (2900, 1, 801))
    )
    width = max(step.layout.page_table_RP[0].shape[1] for step in (first, second))
    tables = [
        torch.nn.functional.pad(
            step.layout.page_table_RP[0], (0, width - step.layout.page_table_RP[0].shape[1])
        )
        for step in (first, second)
    ]
    pages = max(first.key_cache.shape[0], second.key_cache.shape[0])
    caches = [torch.zeros(pages, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    layout = first.layout
    layout.page_table_RP = (tables[0].clone(),)
    layout.host_lengths = [8000] * 3
    q, k, v = first.q.clone(), first.k.clone(), first.v.clone()
    backend = create_backend("triton", [spec], caches[:1], caches[1:], 16)
    backend.plan(layout)
    backend.run(q, k, v, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.plan(layout)
        out = backend.run(q, k, v, 0)
    for step, table in zip((first, second), tables, strict=True):
        for cache, filled in zip(caches, (step.key_cache, step.value_cache), strict=True):
            cache[: len(filled)] = filled
        layout.page_table_RP[0].copy_(table)
        layout.lengths_R.copy_(step.layout.lengths_R)
        layout.slot_mapping_T[0].copy_(step.layout.slot_mapping_T[0])
        for mine, theirs in ((q, step.q), (k, step.k), (v, step.v)):
            mine.copy_(theirs)
        graph.replay()
        assert ragged.relative_error(out, step.expected) < LIMITS[torch.bfloat16]


@pytest.mark.parametrize("seed", range(10))
def test_layers_one_after_the_other_in_a_graph(
    ragged: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Attention may begin while the kernel before it still runs, which stores the newest keys: until then
    these are NaN, as is all that belongs to nobody."""
    set_runs(monkeypatch, fewest=1, have_short=seed > 4)
    draw = random.Random(seed)
    heads, kv_heads, head_dim = [(14, 2, 64), (16, 8, 128), (32, 8, 128), (16, 1, 128), (40, 4, 128)][
        seed % 5
    ]
    dtype, page_size = (torch.float16, torch.bfloat16)[seed % 2], draw.choice((16, 32, 64))
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5)
    lengths = [draw.randint(1, draw.choice((2, 20, 300, 3000))) for _ in range(draw.choice((96, 130, 256)))]
    step = ragged.ragged_step(
        spec, [(1, length) for length in lengths], page_size=page_size, dtype=dtype, seed=seed, device="cuda"
    )
    product = torch.cat((step.q, step.k, step.v), dim=1)
    half = torch.ones(len(lengths), head_dim // 2, dtype=dtype, device="cuda")
    rotation = (half, torch.zeros_like(half))  # none
    caches = [[cache.clone() for cache in (step.key_cache, step.value_cache)] for _ in range(4)]
    keys, values = zip(*caches, strict=True)
    backend = create_backend("triton", [spec] * 4, keys, values, page_size)
    graph = torch.cuda.CUDAGraph()
    with replayed():
        backend.plan(step.layout)
        backend.run_product(product, rotation, None, 0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            backend.plan(step.layout)
            outs = [backend.run_product(product, rotation, None, layer) for layer in range(4)]
    for cache, unwritten in ((keys, step.key_cache), (values, step.value_cache)):
        for layer in cache:
            layer.copy_(unwritten)
    graph.replay()
    for out in outs:
        assert ragged.relative_error(out, step.expected) < LIMITS[dtype]
    before = torch.stack(outs)
    for _ in range(20):
        graph.replay()
        assert torch.equal(torch.stack(outs), before), "the bits depend on which program took a run"


@pytest.mark.parametrize("seed", range(14))
def test_random_forests(forests: SimpleNamespace, ragged: SimpleNamespace, seed: int) -> None:
    draw = random.Random(seed)
    heads, kv_heads, head_dim = HEADS[seed % len(HEADS)]
    dtype = list(LIMITS)[seed % 3]
    page_size = draw.choice((1, 16, 64))
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5)
    longest = draw.choice((300, 2000)) // page_size
    rows = forests.random_forest(draw, draw.choice((2, 30, 120)), longest)
    rows += [max(rows, key=len)] * draw.choice((1, 100))
    step = forests.forest_step(
        spec,
        rows,
        costs=forests.eager_costs(spec, dtype, page_size=page_size, device="cuda"),
        page_size=page_size,
        dtype=dtype,
        seed=seed,
        device="cuda",
        padding=draw.choice((0, 3)),
    )
    assert step.layout.shared is not None
    out = answer(backend_for(step, spec, page_size), step)
    assert ragged.relative_error(out, step.expected) < LIMITS[dtype]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 64), (16, 8, 128), (4, 4, 128)])
def test_kernels_beside_each_other_answer_as_one_after_the_other(
    forests: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """Each layer's queries are the answers of the layer before, bit by bit, and the newest keys are NaN until
    they are stored: whoever reads too early shows."""
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5)
    step = forests.forest_step(
        spec,
        [
            [*range(60 + 8 * (row % 3)), *range(200 + 20 * row, 200 + 20 * row + row % 12)]
            for row in range(70)
        ],
        costs=forests.eager_costs(spec, torch.bfloat16, page_size=16, device="cuda"),
        page_size=16,
        dtype=torch.bfloat16,
        seed=9,
        device="cuda",
    )
    half = torch.ones(len(step.q), head_dim // 2, dtype=torch.bfloat16, device="cuda")
    rotation = (half, torch.zeros_like(half))  # none
    unwritten = (step.key_cache, step.value_cache)
    caches = [[cache.clone() for _ in range(6)] for cache in unwritten]
    backend = create_backend("triton", [spec] * 6, *caches, 16)

    def layers() -> torch.Tensor:
        backend.plan(step.layout)
        q = step.q
        for layer in range(6):
            q = backend.run_product(torch.cat((8 * q, step.k, step.v), dim=1), rotation, None, layer)
        return q

    monkeypatch.setattr(triton_overlap, "ENABLED", False)
    expected = layers()
    monkeypatch.setattr(triton_overlap, "ENABLED", True)
    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    for _ in range(50):
        out.zero_()
        for cache, before in zip(caches, unwritten, strict=True):
            for layer in cache:
                layer.copy_(before)
        graph.replay()
        assert torch.equal(out, expected)


def test_a_captured_step_follows_the_forest(forests: SimpleNamespace, ragged: SimpleNamespace) -> None:
    """One graph answers for two forests: all that it knows of them lies in tensors."""
    spec = AttentionSpec(16, 8, 128, scale=128**-0.5)
    first, second = (
        forests.forest_step(
            spec,
            rows,
            costs=forests.eager_costs(spec, torch.bfloat16, page_size=16, device="cuda"),
            page_size=16,
            dtype=torch.bfloat16,
            seed=5,
            device="cuda",
        )
        for rows in (
            [[*range(70), 100 + row] for row in range(40)],
            [
                [row // 4, 20 + row // 4, *range(50 + 20 * (row // 4), 70 + 20 * (row // 4))]
                for row in range(40)
            ],
        )
    )
    pages = max(len(first.key_cache), len(second.key_cache))
    caches = [torch.zeros(pages, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    width = max(step.layout.page_table_RP[0].shape[1] for step in (first, second))
    layout = dataclasses.replace(
        first.layout,
        page_table_RP=(torch.zeros(40, width, dtype=torch.int32, device="cuda"),),
        lengths_R=first.layout.lengths_R.clone(),
        slot_mapping_T=(first.layout.slot_mapping_T[0].clone(),),
        host_lengths=[8000] * 40,
    )
    assert layout.shared is not None
    items = torch.zeros(200, layout.shared.items_IF.shape[1], dtype=torch.int32, device="cuda")
    members = torch.zeros(200, dtype=torch.int32, device="cuda")
    layout.shared = dataclasses.replace(
        layout.shared,
        num_items=layout.shared.num_items.clone(),
        items_IF=items,
        members_M=members,
        own_starts_R=layout.shared.own_starts_R.clone(),
        num_pieces_R=layout.shared.num_pieces_R.clone(),
        longest_own=8000,
    )
    q, k, v = (tensor.clone() for tensor in (first.q, first.k, first.v))
    backend = create_backend("triton", [spec], caches[:1], caches[1:], 16)

    def load(step: Any) -> None:
        for cache, filled in zip(caches, (step.key_cache, step.value_cache), strict=True):
            cache[: len(filled)] = filled
        table = step.layout.page_table_RP[0]
        layout.page_table_RP[0][:, : table.shape[1]] = table
        layout.lengths_R.copy_(step.layout.lengths_R)
        layout.slot_mapping_T[0].copy_(step.layout.slot_mapping_T[0])
        assert layout.shared is not None
        for name in ("num_items", "own_starts_R", "num_pieces_R"):
            getattr(layout.shared, name).copy_(getattr(step.layout.shared, name))
        number = int(step.layout.shared.num_items)
        items[:number] = step.layout.shared.items_IF[:number]
        members[: len(step.layout.shared.members_M)] = step.layout.shared.members_M
        for mine, theirs in ((q, step.q), (k, step.k), (v, step.v)):
            mine.copy_(theirs)

    load(second)
    backend.plan(layout)
    backend.run(q, k, v, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.plan(layout)
        out = backend.run(q, k, v, 0)
    for step in (first, second, first):
        load(step)
        graph.replay()
        assert ragged.relative_error(out, step.expected) < LIMITS[torch.bfloat16]


@RUNS
def test_a_row_of_length_zero_harms_nobody(
    ragged: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fewest: int, have_short: bool
) -> None:
    set_runs(monkeypatch, fewest=fewest, have_short=have_short)
    spec = AttentionSpec(14, 2, 64, scale=0.125)
    step = ragged.ragged_step(
        spec, [(1, 50), (1, 900), (1, 3)], page_size=16, dtype=torch.bfloat16, seed=2, device="cuda"
    )
    backend = backend_for(step, spec, 16)
    answer(backend, step)
    step.layout.lengths_R[1] = 0
    out = answer(backend, step)
    for row in (0, 2):
        assert ragged.relative_error(out[row], step.expected[row]) < LIMITS[torch.bfloat16]


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of the kernels compiled (or fetched from the disk) during the test."""
    import triton

    names: list[str] = []
    hook = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = lambda **facts: names.append(str(facts["repr"]))
    yield names
    triton.knobs.runtime.jit_cache_hook = hook


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_steps_of_one_engine_share_kernels_and_never_wait(
    ragged: SimpleNamespace, compilations: list[str]
) -> None:
    """Row counts between powers of two, table widths and where slices begin change nothing that a kernel is
    compiled for."""
    spec = AttentionSpec(14, 2, 64, scale=0.125)
    # Few rows and many, a tiling for many queries and one for few.
    known = ((4, 3, 20), (8, 0, 0), (16, 0, 0), (70, 1, 2))
    batches = [
        [(1, 10)] * decodes + [(queries, queries + 3)] * prefills
        for decodes, prefills, queries in (*known, (7, 2, 64), (15, 5, 33), (90, 1, 7))
    ]
    steps = [
        ragged.ragged_step(spec, rows, page_size=16, dtype=torch.bfloat16, seed=index, device="cuda")
        for index, rows in enumerate(batches)
    ]
    for step in steps[: len(known)]:
        answer(backend_for(step, spec, 16), step)
    steps = steps[len(known) :]
    compilations.clear()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [answer(backend_for(step, spec, 16), step) for step in steps]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compilations == []
    for out, step in zip(outs, steps, strict=True):
        assert ragged.relative_error(out, step.expected) < LIMITS[torch.bfloat16]
