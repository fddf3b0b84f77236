"""How near the GPU kernels come to the limits of the device: one table, no model.

    python3 benchmarks/single_kernels.py                 # under two minutes
    python3 benchmarks/single_kernels.py --tune decode   # tilings and splits side by side, a minute each

Every measurement replays a CUDA graph of many launches over inputs that together exceed the L2 cache, and
takes the median of the replays. Bytes and operations are those that the task needs, whatever the kernel does.
The limits are measured in the same way: the faster of a copy and a sum at first, the faster of two products
right before prompts, for the device slows down as it gets hot.

(Not `kernels.py`: transformers takes whatever has that name for Hugging Face's library of kernels.)
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from replays import median_milliseconds

from tokenmill.attention import create_backend
from tokenmill.attention.base import AttentionSpec
from tokenmill.kernels import hopper_prefill, triton_balanced, triton_decode, triton_prefill
from tokenmill.kernels.activation import gated_silu
from tokenmill.kernels.compilation import ParallelCompilation
from tokenmill.kernels.hopper_prefill import HopperTiling
from tokenmill.kernels.norm import add_rms_norm, rms_norm
from tokenmill.kernels.rotary import rotate
from tokenmill.kernels.sharing import SharedPrefixes
from tokenmill.kernels.triton_attention import PagedRows
from tokenmill.kernels.triton_decode import Tiling
from tokenmill.kernels.triton_prefill import KeyTile, PrefillTiling
from tokenmill.runner.forest import Forest

COLD_BYTES = 200e6  # several times the L2 cache
PAGE_SIZE = 16
HEADS = [(14, 2, 64), (16, 8, 128), (32, 8, 128)]
DECODE_HEADS = [*HEADS, (16, 8, 64), (16, 2, 128)]
BATCHES = [1, 16, 64, 256, 512]
CONTEXTS = [1024, 4096, 16384, 65536, 131072, 262144, 524288]
MOST_CACHE_BYTES = 20e9  # longer contexts of so many rows are left out
REPLAYS = 9


def seconds_each(calls: Iterable[Callable[[], object]]) -> float:
    """Median over graph replays of the time of one call, on average over `calls`."""
    calls = list(calls)
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_milliseconds(graph, REPLAYS) / 1e3 / len(calls)


@functools.cache
def bytes_per_second() -> float:
    """What the device's memory reaches, read alone or read and written."""
    x = torch.ones(2**28, device="cuda")
    y = torch.empty_like(x)
    copied = 2 * x.nbytes / seconds_each([partial(y.copy_, x)] * 4)
    return max(copied, x.nbytes / seconds_each([x.sum] * 4))


def flops_per_second() -> float:
    """What large products of bfloat16 reach now."""
    rates = []
    for size in (4096, 8192):
        x, y, out = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        rates.append(2 * size**3 / seconds_each([partial(torch.mm, x, y, out=out)] * 4))
    return max(rates)


def paged_rows(batch: int, context: int, kv_heads: int, head_dim: int) -> PagedRows:
    """Rows of one length on shuffled pages."""
    pages = context // PAGE_SIZE
    shape = (batch * pages, PAGE_SIZE, kv_heads, head_dim)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    table = torch.randperm(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages)
    return PagedRows(keys, values, table, torch.full((batch,), context, dtype=torch.int32, device="cuda"))


def decode_calls(
    batch: int, context: int, heads: tuple[int, int, int], *, in_splits: bool
) -> list[Callable[[], object]]:
    """Decode attention as layers launch it, over as many separate caches as exceed the L2 cache."""
    num_heads, kv_heads, head_dim = heads
    cache_bytes = batch * context * kv_heads * head_dim * 4
    num_caches = cold_copies(cache_bytes, fewest=2, most=800)
    caches = [paged_rows(batch, context, kv_heads, head_dim) for _ in range(num_caches)]
    q = torch.randn(batch, num_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    attend = split_decode(q, context, out) if in_splits else chosen_decode(q, caches[0], context, out)
    return [partial(attend, rows=rows) for rows in caches] * (4 if num_caches < 8 else 1)


def cold_copies(num_bytes: float, *, fewest: int, most: int) -> int:
    """How many inputs of so many bytes exceed the L2 cache together, within these bounds."""
    return max(fewest, min(most, int(COLD_BYTES / num_bytes) + 1))


def split_decode(q: torch.Tensor, longest: int, out: torch.Tensor) -> Callable[..., object]:
    """Decode attention of `rows=` by the kernels for splits, which know of shared prefixes, too."""
    scale = q.shape[2] ** -0.5
    return partial(triton_decode.decode, q, scale=scale, window=None, longest=longest, out_RHD=out)


def chosen_decode(q: torch.Tensor, rows: PagedRows, longest: int, out: torch.Tensor) -> Callable[..., object]:
    """Decode attention of `rows=` like these, by the kernels that the engine chooses."""
    shape = triton_balanced.choose_shape(q, rows, longest)
    if shape is None:
        return split_decode(q, longest, out)
    runs = triton_balanced.plan_runs(rows.lengths_R, shape, longest=longest)
    torch.cuda.synchronize()  # the launches below read the runs at once, for they are not new to them
    scale = q.shape[2] ** -0.5
    return partial(triton_balanced.decode, q, runs=runs, scale=scale, out_RHD=out, are_new=False)


def decode_seconds(
    batch: int, context: int, heads: tuple[int, int, int], *, in_splits: bool = False
) -> float:
    """Time of decode attention by the kernels that the engine chooses, or by those for splits."""
    return seconds_each(decode_calls(batch, context, heads, in_splits=in_splits))


def report_decode() -> None:
    print("\ndecode attention: GB/s of keys and values (share), microseconds")
    print(f"{'heads':>12} {'batch':>6} " + " ".join(f"{f'context {context}':>22}" for context in CONTEXTS))
    for heads, batch in itertools.product(DECODE_HEADS, BATCHES):
        cells = []
        for context in CONTEXTS:
            cache_bytes = batch * context * heads[1] * heads[2] * 4
            if cache_bytes > MOST_CACHE_BYTES:
                cells.append("")
                continue
            seconds = decode_seconds(batch, context, heads)
            rate = cache_bytes / seconds
            cells.append(f"{rate / 1e9:6.0f} ({rate / bytes_per_second():4.0%}) {seconds * 1e6:8.1f}")
        print(f"{heads[0]}:{heads[1]} d{heads[2]:<5} {batch:>6} " + " ".join(f"{cell:>22}" for cell in cells))


def prefill_call(
    queries: int, context: int, heads: tuple[int, int, int], rows: int = 1
) -> tuple[Callable[[], object], PagedRows, torch.Tensor]:
    """Attention of the last `queries` tokens of `rows` sequences of `context` tokens, as a call that returns
    its output; their caches; the step's queries, keys and values side by side.
    """
    num_heads, kv_heads, head_dim = heads
    paged = paged_rows(rows, context, kv_heads, head_dim)
    shape = (rows * queries, num_heads + 2 * kv_heads, head_dim)
    step = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    q, k, v = step.split((num_heads, kv_heads, kv_heads), dim=1)
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * queries
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device="cuda")
    taken = torch.zeros(2, dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        triton_prefill.prefill(
            q,
            k,
            v,
            paged,
            query_starts=starts,
            longest_query=queries,
            longest_row=context,
            scale=head_dim**-0.5,
            window=None,
            out_THD=out,
            taken_2=taken,
        )
        return out

    return call, paged, step


def prefill_seconds(queries: int, context: int, heads: tuple[int, int, int], rows: int = 1) -> float:
    """Time of causal attention of the last `queries` tokens of `rows` sequences of `context` tokens."""
    call, _, _ = prefill_call(queries, context, heads, rows)
    return seconds_each([call] * 4)


# Tokens with queries, tokens in all, prompts.
PREFILLS = [
    *((32768, 32768, 1), (16384, 16384, 1), (8192, 8192, 1), (2048, 8192, 1), (2048, 2048, 4)),
    *((64, 2112, 128), (1024, 1024, 8), (512, 512, 16), (256, 256, 32)),
]


def prefill_flops(queries: int, context: int, rows: int, heads: tuple[int, int, int]) -> float:
    visible = queries * (context - queries) + queries * (queries + 1) / 2
    return 4 * rows * visible * heads[0] * heads[2]


def report_prefill() -> None:
    limit = flops_per_second()
    print(f"\nprefill attention: TFLOP/s (share of {limit / 1e12:.0f}), milliseconds")
    titles = [f"{rows} x {queries} of {context}" for queries, context, rows in PREFILLS]
    print(f"{'heads':>12} " + " ".join(f"{title:>20}" for title in titles))
    for heads in [*HEADS, (8, 4, 256)]:
        cells = []
        for queries, context, rows in PREFILLS:
            seconds = prefill_seconds(queries, context, heads, rows)
            rate = prefill_flops(queries, context, rows, heads) / seconds
            cells.append(f"{rate / 1e12:5.0f} ({rate / limit:4.0%}) {seconds * 1e3:7.3f}")
        print(f"{heads[0]}:{heads[1]} d{heads[2]:<6} " + " ".join(f"{cell:>20}" for cell in cells))


def small_kernels(tokens: int, hidden: int, inner: int) -> dict[str, tuple[int, list[Callable[[], object]]]]:
    """Name -> (elements read and written per token, calls on different inputs)."""
    copies = min(256, int(COLD_BYTES / (tokens * hidden * 4)) + 2)

    def fresh(size: int) -> list[torch.Tensor]:
        return [torch.randn(tokens, size, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]

    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    cos = torch.randn(tokens, 32, dtype=torch.bfloat16, device="cuda")
    xs, residuals, wides = fresh(hidden), fresh(hidden), fresh(2 * inner)
    heads = [x.view(tokens, -1, 64) for x in xs]
    pairs = list(zip(xs, residuals, strict=True))
    return {
        "rms_norm": (2 * hidden, [partial(rms_norm, x, weight, 1e-6) for x in xs]),
        "add_rms_norm": (4 * hidden, [partial(add_rms_norm, x, y, weight, 1e-6) for x, y in pairs]),
        "gated_silu": (3 * inner, [partial(gated_silu, x) for x in wides]),
        "rotate": (2 * hidden, [partial(rotate, x[:, :-2], x[:, -2:], cos, cos) for x in heads]),
    }


def report_small_kernels() -> None:
    print("\nsmall kernels: GB/s read and written (share), microseconds")
    for tokens, hidden, inner in ((8192, 4096, 12288), (256, 4096, 12288), (256, 896, 4864), (1, 896, 4864)):
        for name, (elements, calls) in small_kernels(tokens, hidden, inner).items():
            seconds = seconds_each(calls)
            rate = tokens * elements * 2 / seconds
            share = rate / bytes_per_second()
            print(
                f"{name:>14} {tokens:>6} x {hidden:<6} {rate / 1e9:6.0f} ({share:4.0%}) {seconds * 1e6:8.2f}"
            )


def tune_decode() -> None:
    """Tilings and splits of decode attention, the best first for each case."""
    cases = [(1, 4096), (16, 1024), (256, 1024), (256, 300)]
    for heads, (batch, context) in itertools.product(HEADS, cases):
        found = []
        for tile_bytes, stages in itertools.product((8192, 16384), (3, 5)):
            triton_decode.decode_tiling = lambda block_dim, size, *, tile=(tile_bytes, stages): Tiling(
                min(128, max(16, tile[0] // (block_dim * size))), 4, tile[1]
            )
            for programs, few, many in ((512, 64, 512), (1024, 64, 512), (1024, 128, 1024)):
                triton_decode.DECODE_PROGRAMS = programs
                triton_decode.SPLIT_KEYS_FEW_ROWS = few
                triton_decode.SPLIT_KEYS_MANY_ROWS = many
                setting = f"{tile_bytes >> 10}K s{stages} programs {programs} splits {few}/{many}"
                found.append((decode_seconds(batch, context, heads, in_splits=True), setting))
        floor = batch * context * heads[1] * heads[2] * 4 / bytes_per_second() * 1e6
        title = f"{heads[0]}:{heads[1]} d{heads[2]}, batch {batch}, context {context}"
        print(f"\n{title}: floor {floor:.1f} us", flush=True)
        for seconds, setting in sorted(found)[:4]:
            print(f"  {seconds * 1e6:8.1f} us  {setting}")


# Groups, rows of each, keys that a group shares, keys of each row alone.
FORESTS = [
    *((1, 512, 2048, 96), (64, 8, 2048, 96), (8, 8, 512, 512), (1, 16, 8192, 96), (1, 2, 8192, 96)),
    *((12, 16, 2048, 32), (5, 50, 4096, 128)),  # a few more items than programs, if cut without care
]


def shared_rows(
    shape: tuple[int, int, int, int], heads: tuple[int, int, int]
) -> tuple[PagedRows, SharedPrefixes | None]:
    """Rows of a forest of one level on shuffled pages, and what they share if that pays."""
    groups, members, shared, own = shape
    num_rows, columns = groups * members, shared // PAGE_SIZE
    num_pages = groups * columns + num_rows * (own // PAGE_SIZE)
    cache = (num_pages, PAGE_SIZE, heads[1], heads[2])
    keys, values = (torch.randn(cache, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    pages = torch.randperm(num_pages, dtype=torch.int32)
    prefixes = pages[: groups * columns].view(groups, columns).repeat_interleave(members, 0)
    table = torch.cat((prefixes, pages[groups * columns :].view(num_rows, -1)), 1)
    lengths = torch.full((num_rows,), shared + own, dtype=torch.int32, device="cuda")
    rows = PagedRows(keys, values, table.cuda(), lengths)
    spec = AttentionSpec(heads[0], heads[1], heads[2], scale=heads[2] ** -0.5)
    costs = create_backend("triton", [spec], [keys], [values], PAGE_SIZE).sharing
    assert costs is not None
    forest = Forest(costs, max_rows=num_rows, page_size=PAGE_SIZE, device=lengths.device)
    slots = np.arange(num_rows, dtype=np.int32)
    positions = np.full(num_rows, shared + own - 1, dtype=np.int32)
    found = forest.update(table.numpy(), slots, positions)
    return rows, None if found is None else forest.shared(num_rows, found)


def shared_seconds(
    forest: tuple[int, int, int, int], heads: tuple[int, int, int]
) -> tuple[float, float | None, float]:
    """Time of decode attention row by row, time with the prefixes read once, and by how much they differ."""
    groups, members, shared, own = forest
    cache_bytes = groups * (shared + members * own) * heads[1] * heads[2] * 4
    cases = [shared_rows(forest, heads) for _ in range(cold_copies(cache_bytes, fewest=3, most=24))]
    q = torch.randn(cases[0][0].lengths_R.shape[0], heads[0], heads[2], dtype=torch.bfloat16, device="cuda")
    outs = [torch.empty_like(q) for _ in range(2)]
    longest = shared + own
    attend = chosen_decode(q, cases[0][0], longest, outs[0])
    plain = seconds_each([partial(attend, rows=rows) for rows, _ in cases])
    if cases[0][1] is None:
        return plain, None, 0.0
    attend = partial(split_decode(q, longest, outs[1]), are_new=False)  # as in all layers but the first
    seconds = seconds_each([partial(attend, rows=rows, shared=found) for rows, found in cases])
    return plain, seconds, float((outs[0].float() - outs[1].float()).norm() / outs[0].float().norm())


def report_shared() -> None:
    print("\ndecode attention with shared prefixes: microseconds row by row, and with prefixes read once")
    for heads, forest in itertools.product(HEADS, FORESTS):
        plain, seconds, error = shared_seconds(forest, heads)
        title = "{} x {} rows, {} keys shared, {} own".format(*forest)
        found = "not worth the while" if seconds is None else f"{seconds * 1e6:8.1f}"
        wrong = f"  WRONG by {error:.1e}" if error > 8e-3 else ""
        print(
            f"{heads[0]}:{heads[1]} d{heads[2]:<5} {title:<45} {plain * 1e6:8.1f} {found}{wrong}", flush=True
        )


def shared_times(heads: tuple[int, int, int]) -> list[float]:
    """Microseconds of each forest; NaN where sharing does not pay, or the answer is wrong."""
    times = []
    for forest in FORESTS:
        _, seconds, error = shared_seconds(forest, heads)
        times.append(float("nan") if seconds is None or error > 8e-3 else seconds * 1e6)
    return times


def tune_shared() -> None:
    """Tiles, programs and splits of shared segments: microseconds of each forest, best in the first first."""
    for heads in HEADS:
        found = [(shared_times(heads), "as chosen")]
        with mock.patch.object(triton_decode, "_is_shared_for_hopper", return_value=False):
            for queries, programs, stages in itertools.product((64, 128), (132, 264, 396), (2, 3)):
                triton_decode.SHARED_PROGRAMS = programs
                triton_decode.shared_tiling = lambda *_, tile=(queries, stages): Tiling(
                    keys=64, num_warps=tile[0] // 16, num_stages=tile[1], queries=tile[0]
                )
                setting = f"{queries} queries, {programs} programs, {stages} stages"
                found.append((shared_times(heads), f"plain: {setting}"))
        titles = " ".join(f"{f'{forest[0]}x{forest[1]}x{forest[2]}':>12}" for forest in FORESTS)
        print(f"\nshared {heads[0]}:{heads[1]} d{heads[2]}, us: {titles}")
        for times, setting in sorted(found):
            print(" " * 23 + " ".join(f"{time:12.1f}" for time in times) + f"  {setting}", flush=True)


def prefill_candidate(
    keys: int, num_warps: int, stages: int, gathered: KeyTile, max_registers: int | None = None
) -> PrefillTiling:
    """128 queries, with the same tile for all keys that are gathered."""
    whole = KeyTile(keys, stages)
    return PrefillTiling(128, num_warps, whole, gathered, gathered, max_registers=max_registers)


# Head size -> candidates.
PREFILL_TILINGS: dict[int, list[PrefillTiling | HopperTiling]] = {
    64: [
        prefill_candidate(64, 8, 3, KeyTile(64, 3), 128),
        prefill_candidate(64, 4, 3, KeyTile(32, 3), 168),
        prefill_candidate(128, 4, 2, KeyTile(32, 2)),
        HopperTiling(128, 4),
        HopperTiling(128, 3),
        HopperTiling(64, 6),
    ],
    128: [
        prefill_candidate(64, 8, 3, KeyTile(64, 3)),
        prefill_candidate(64, 4, 2, KeyTile(32, 2)),
        prefill_candidate(64, 8, 2, KeyTile(32, 2), 128),
        HopperTiling(128, 2),
        HopperTiling(64, 4),
    ],
}


def prefill_error(heads: tuple[int, int, int]) -> float:
    """Relative error of attention after a prefix, against torch in float32."""
    queries, context, rows = 500, 800, 3
    call, paged, step = prefill_call(queries, context, heads, rows)
    out = call()
    assert isinstance(out, torch.Tensor)
    q, k, v = (
        step.float().unflatten(0, (rows, queries)).transpose(1, 2).split((heads[0], heads[1], heads[1]), 1)
    )
    before = context - queries
    prefixes = (
        cache[paged.page_table_RP].flatten(1, 2)[:, :before].transpose(1, 2).float()
        for cache in (paged.key_cache_NBKD, paged.value_cache_NBKD)
    )
    keys, values = (torch.cat((prefix, own), 2) for prefix, own in zip(prefixes, (k, v), strict=True))
    visible = torch.ones(queries, context, dtype=torch.bool, device="cuda").tril(before)
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)
    expected = expected.transpose(1, 2).flatten(0, 1)
    return float((out.float() - expected).norm() / expected.norm())


def choose_prefill(tiling: PrefillTiling | HopperTiling) -> None:
    """Let every call of prefill attention use this tiling, and the kernel that it belongs to."""
    for_hopper = isinstance(tiling, HopperTiling)
    hopper_prefill.pays = lambda *_: for_hopper
    module, name = (hopper_prefill, "hopper_tiling") if for_hopper else (triton_prefill, "prefill_tiling")
    setattr(module, name, lambda *_: tiling)


def tune_prefill() -> None:
    """Tilings of prefill attention: TFLOP/s of each case."""
    candidates = [
        (heads, tiling) for heads in ((14, 2, 64), (32, 8, 128)) for tiling in PREFILL_TILINGS[heads[2]]
    ]
    with ParallelCompilation(torch.device("cuda", torch.cuda.current_device())) as compilation:
        for heads, tiling in candidates:
            choose_prefill(tiling)
            prefill_call(64, 64, heads)[0]()
    compilation.wait()
    titles = [f"{rows}x{queries}/{context}" for queries, context, rows in PREFILLS]
    print("\nprefill, TFLOP/s: " + " ".join(f"{title:>12}" for title in titles))
    for heads, tiling in candidates:
        choose_prefill(tiling)
        title = f"{heads[0]}:{heads[1]} d{heads[2]} {tiling}"
        try:
            error = prefill_error(heads)
            rates = [
                prefill_flops(queries, context, rows, heads) / prefill_seconds(queries, context, heads, rows)
                for queries, context, rows in PREFILLS
            ]
        except Exception as problem:  # too much shared memory: not a candidate
            print(f"  {title}: {type(problem).__name__}: {str(problem)[:80]}", flush=True)
            continue
        wrong = "" if error < 6e-3 else f"  WRONG by {error:.1e}"
        print(" " * 18 + " ".join(f"{rate / 1e12:12.0f}" for rate in rates) + f"  {title}{wrong}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tune", choices=("decode", "prefill", "shared"), help="compare the tilings of one kernel"
    )
    tune = parser.parse_args().tune
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, pages of {PAGE_SIZE} tokens")
    print(f"limit: {bytes_per_second() / 1e9:.0f} GB/s")
    for part in {
        None: (report_decode, report_shared, report_prefill, report_small_kernels),
        "decode": (tune_decode,),
        "shared": (report_shared, tune_shared),
        "prefill": (tune_prefill,),
    }[tune]:
        part()


if __name__ == "__main__":
    main()
