"""A layer of a decode step, by the number of rows: microseconds, the floor, and the kernels one by one.

    python benchmarks/layers.py --models Qwen3-0.6B Qwen3-4B --rows 8 64 256
    python benchmarks/layers.py --models Qwen3-0.6B --without attention pieces
    python benchmarks/layers.py --models Qwen3-4B --rows 64 --trace

A few layers with random weights of their own, so that none stays in the cache, over rows of 450 to 900 keys
on shuffled pages, are captured and replayed as the engine does it. `--without` leaves parts out, one at a
time: what comes out means nothing then, and the difference is what could be saved at most. So short a run is
not slowed down by the power that long ones take.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import more_models
import torch
from floors import FLOPS, READ, Shape, shape_of
from linear import captured, milliseconds
from torch.profiler import ProfilerActivity, profile

from tokenmill.attention import triton_backend
from tokenmill.attention.base import Step, StepLayout
from tokenmill.kernels import linear as products
from tokenmill.kernels import triton_balanced, triton_rotary
from tokenmill.kernels.launching import replayed
from tokenmill.kvcache.pool import PagePool
from tokenmill.models import build_model, read_spec
from tokenmill.runner.executor import layer_shapes

LAYERS = 4
PAGE_SIZE = 16
KEYS = (450, 900)
ROWS = (1, 4, 8, 16, 32, 64, 96, 128, 192, 256)
DEVICE = torch.device("cuda")


class Layers:
    """The first layers of a model, and pages for so many rows."""

    def __init__(self, folder: Path, most_rows: int) -> None:
        spec = read_spec(folder)
        self._specs = spec.attention
        self._model = build_model(spec, dtype=torch.bfloat16, device=DEVICE)
        for weight in self._model.parameters():
            weight.normal_(0, 0.02) if weight.dim() > 1 else weight.fill_(1)
        self._columns = -(-KEYS[1] // PAGE_SIZE)
        self._pool = PagePool(
            layer_shapes(self._specs),
            num_pages=most_rows * self._columns,
            page_size=PAGE_SIZE,
            dtype=torch.bfloat16,
            device=DEVICE,
        )

    def step(self, lengths: Sequence[int]) -> Callable[[], torch.Tensor]:
        """A step of rows with so many keys, up to its hidden states, to be captured."""
        rows, layout = len(lengths), self._layout(lengths)
        keys, values = self._pool.keys, self._pool.values
        backend = triton_backend.TritonBackend(self._specs, keys, values, PAGE_SIZE)
        tokens = torch.randint(0, 1000, (rows,), device=DEVICE)

        def run() -> torch.Tensor:
            with replayed():
                backend.plan(layout)
                return self._model.forward(tokens, Step(layout.positions_T, backend))

        return run

    def _layout(self, lengths: Sequence[int]) -> StepLayout:
        rows = len(lengths)
        pages = torch.randperm(len(self._pool.keys[0]), device=DEVICE)[: rows * self._columns]
        lengths_R = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        positions_R = (lengths_R - 1).long()
        page_table_RP = pages.view(rows, self._columns).to(torch.int32)
        last_page_R1 = page_table_RP.gather(1, (positions_R // PAGE_SIZE).unsqueeze(1))
        return StepLayout(
            positions_T=positions_R,
            slot_mapping_T=(last_page_R1.squeeze(1).long() * PAGE_SIZE + positions_R % PAGE_SIZE,),
            page_table_RP=(page_table_RP,),
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
            lengths_R=lengths_R,
            num_decodes=rows,
            host_query_lengths=[1] * rows,
            host_lengths=[KEYS[1]] * rows,
        )


# ── parts that are left out ───────────────────────────────────────────────────────────────────


def nothing(*_: Any, **__: Any) -> None:
    """In place of a launch."""


class NoKernel:
    """In place of a kernel."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return nothing


def queries_as_they_are(product_TSD: torch.Tensor, *others: Any) -> tuple[torch.Tensor, None]:
    """In place of `rotate_and_store`: as many numbers of the product, side by side."""
    num_kv_heads = others[-1].key_cache_NBKD.shape[2]
    _, heads, size = shape = product_TSD[:, : -2 * num_kv_heads].shape
    return product_TSD.as_strided(shape, (heads * size, size, 1)), None


def sums_as_they_are(x: torch.Tensor, residual: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of `add_rms_norm`, where it is a kernel: as many numbers, if need be those of a piece."""
    pieces = x.dim() > residual.dim()
    return x[0].view(residual.dtype)[:, : residual.shape[1]] if pieces else x, residual


@contextmanager
def without_rotation() -> Iterator[None]:
    """By a kernel of its own, or in the end of the product."""
    with (
        mock.patch.object(products, "choose_heads_tiling", nothing),
        mock.patch.object(triton_rotary, "rotate_and_store", queries_as_they_are),
    ):
        yield


WITHOUT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "norms": lambda: mock.patch.object(products, "add_rms_norm", sums_as_they_are),
    "rotation": without_rotation,
    "pieces": lambda: mock.patch.object(triton_balanced, "_join_kernel", NoKernel()),
    "attention": lambda: mock.patch.object(triton_balanced, "decode", nothing),
}


# ── what is printed ───────────────────────────────────────────────────────────────────────────


def microseconds(step: Callable[[], torch.Tensor], left_out: AbstractContextManager[Any]) -> float:
    """Of a layer; a step's rows are listed once, and its embedding looked up, for all of them."""
    with left_out:
        graph, _ = captured(step, {})
        return milliseconds(graph) * 1e3 / LAYERS


def floor(shape: Shape, lengths: Sequence[int]) -> float:
    """Microseconds for the weights, or their operations, and the keys and values of a layer."""
    work = max(2 * shape.layer_parameters / READ, 2 * shape.layer_parameters * len(lengths) / FLOPS)
    return 1e6 * (work + 2 * shape.key_value_numbers * sum(lengths) / READ)


def show_kernels(step: Callable[[], torch.Tensor]) -> None:
    """Those of one layer, from one attention to the next, with their starts and durations in microseconds."""
    graph, _ = captured(step, {})
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        graph.replay()
        torch.cuda.synchronize()
    kernels = sorted(
        (event for event in trace.events() if event.device_type.name == "CUDA"),
        key=lambda event: event.time_range.start,
    )
    begins = [place for place, event in enumerate(kernels) if "_decode_kernel" in event.name]
    if len(begins) < 3:
        print("    no attention in runs was traced")
        return
    first = kernels[begins[1]].time_range.start
    for event in kernels[begins[1] : begins[2]]:
        time = event.time_range
        print(f"    {time.start - first:7.1f} + {time.end - time.start:6.1f}  {event.name[:80]}")


def main() -> None:
    parser = more_models.parser_of_rows(__doc__, ROWS)
    parser.add_argument("--without", nargs="+", choices=list(WITHOUT), default=[], help="parts to leave out")
    parser.add_argument("--trace", action="store_true", help="show the kernels of a layer")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds of a layer")
    names = [f"no {name}" for name in options.without]
    print(f"{'model':<22} {'rows':>5} {'floor':>8} {'all':>8}", *(f"{name:>12}" for name in names))
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            layers = Layers(more_models.write(Path(folder), name, layers=LAYERS), max(options.rows))
            for rows in options.rows:
                draw = random.Random(0)
                lengths = [draw.randint(*KEYS) for _ in range(rows)]
                step = layers.step(lengths)
                least = floor(shape_of(more_models.CONFIGS[name]), lengths)
                times = [
                    microseconds(step, left_out)
                    for left_out in (nullcontext(), *(WITHOUT[part]() for part in options.without))
                ]
                cells = [f"{time:12.1f}" for time in times[1:]]
                print(f"{name:<22} {rows:>5} {least:8.1f} {times[0]:8.1f}", *cells, flush=True)
                if options.trace:
                    show_kernels(step)


if __name__ == "__main__":
    main()
