"""A decode step without attention and drawing: what products of a few rows and the kernels between them cost.

    python benchmarks/linear.py                       # check, then separate kernels against fused ones
    python benchmarks/linear.py --tune 1              # kernels and tilings at one row (or two), in the step

A step is one captured graph over random weights in the shapes of a public model, each layer with its own, so
that nothing stays in the cache. `separate` is cuBLAS and one kernel for each operation, `fused` what
`kernels/linear.py` (in a graph) and the attention backend choose, `overlap` the same with programmatic
dependent launch.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from replays import median_milliseconds

from tokenmill.kernels import linear, triton_linear, triton_overlap
from tokenmill.kernels.activation import gated_silu
from tokenmill.kernels.launching import replayed
from tokenmill.kernels.linear import add_norm_linear, add_norm_linear_torch
from tokenmill.kernels.norm import add_rms_norm, rms_norm
from tokenmill.kernels.operands import CacheSlots, HeadNorms, Norm
from tokenmill.kernels.rotary import rotate
from tokenmill.kernels.triton_attention import store
from tokenmill.kernels.triton_linear import LinearTiling
from tokenmill.kernels.triton_rotary import rotate_and_store

PEAK_BYTES_PER_SECOND = 4.3e12  # what a copy reaches on an H200
REPLAYS = 15
PAGE_SIZE = 16
ROWS = (1, 2, 4, 16, 32, 64, 128, 192, 256)


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    bias: bool = False
    head_norms: bool = False


MODELS = {
    "Qwen2.5-0.5B": Shape(24, 896, 4864, 14, 2, 64, 151936, bias=True),
    "Qwen3-0.6B": Shape(28, 1024, 3072, 16, 8, 128, 151936, head_norms=True),
    "Llama-3.1-8B": Shape(32, 4096, 14336, 32, 8, 128, 128256),
}


@dataclass(frozen=True)
class Layer:
    input_norm: Norm
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norms: HeadNorms | None
    output: torch.Tensor
    inner_norm: Norm
    gate_up: torch.Tensor
    down: torch.Tensor


class Network:
    """The layers of a model and its output layer, with the inputs of a step of `rows` tokens."""

    def __init__(self, shape: Shape) -> None:
        def weights(*size: int) -> torch.Tensor:
            return torch.randn(size, dtype=torch.bfloat16, device="cuda") * size[-1] ** -0.5

        def norm(size: int) -> torch.Tensor:
            return 1 + torch.randn(size, dtype=torch.bfloat16, device="cuda") / 8

        self.shape = shape
        heads, dim = shape.heads + 2 * shape.kv_heads, shape.head_dim
        self.layers = [
            Layer(
                Norm(norm(shape.hidden), 1e-6),
                weights(heads * dim, shape.hidden),
                norm(heads * dim) if shape.bias else None,
                HeadNorms(norm(dim), norm(dim), 1e-6) if shape.head_norms else None,
                weights(shape.hidden, shape.heads * dim),
                Norm(norm(shape.hidden), 1e-6),
                weights(2 * shape.inner, shape.hidden),
                weights(shape.hidden, shape.inner),
            )
            for _ in range(shape.layers)
        ]
        self.head = weights(shape.vocab, shape.hidden)

    def num_bytes(self) -> int:
        layer = self.layers[0]
        matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
        return 2 * (len(self.layers) * sum(matrix.numel() for matrix in matrices) + self.head.numel())

    def inputs(self, rows: int) -> dict[str, Any]:
        shape = self.shape
        angles = torch.rand(rows, shape.head_dim // 2, device="cuda") * 100
        caches = torch.zeros(2, 64, PAGE_SIZE, shape.kv_heads, shape.head_dim, device="cuda").bfloat16()
        return {
            "x": torch.randn(rows, shape.hidden, dtype=torch.bfloat16, device="cuda"),
            "rotation": (angles.cos().bfloat16(), angles.sin().bfloat16()),
            "cache": CacheSlots(caches[0], caches[1], torch.randperm(64 * PAGE_SIZE, device="cuda")[:rows]),
        }

    def separate(self, x: torch.Tensor, rotation: Any, cache: CacheSlots) -> torch.Tensor:
        """Logits, every operation a kernel of its own."""
        shape, residual = self.shape, torch.zeros_like(x)
        heads = [shape.heads, shape.kv_heads, shape.kv_heads]
        for layer in self.layers:
            x, residual = add_rms_norm(x, residual, layer.input_norm.weight_I, layer.input_norm.epsilon)
            qkv = F.linear(x, layer.qkv, layer.qkv_bias)
            q, k, v = qkv.view(len(x), -1, shape.head_dim).split(heads, dim=1)
            if layer.head_norms is not None:
                q = rms_norm(q, layer.head_norms.query_D, layer.head_norms.epsilon)
                k = rms_norm(k, layer.head_norms.key_D, layer.head_norms.epsilon)
            q, k = rotate(q, k, *rotation)
            store(
                k,
                v,
                slots_T=cache.slots_T,
                key_cache_NBKD=cache.key_cache_NBKD,
                value_cache_NBKD=cache.value_cache_NBKD,
            )
            x = F.linear(q.flatten(1), layer.output)
            x, residual = add_rms_norm(x, residual, layer.inner_norm.weight_I, layer.inner_norm.epsilon)
            x = F.linear(gated_silu(F.linear(x, layer.gate_up)), layer.down)
        x, _ = add_rms_norm(x, residual, layer.input_norm.weight_I, layer.input_norm.epsilon)
        return F.linear(x, self.head)

    def fused(self, x: torch.Tensor, rotation: Any, cache: CacheSlots) -> torch.Tensor:
        """Logits, by the kernels chosen for so many rows of a step that is captured."""
        with replayed():
            return self._fused(x, rotation, cache)

    def _fused(self, x: torch.Tensor, rotation: Any, cache: CacheSlots) -> torch.Tensor:
        residual = torch.zeros_like(x)
        for layer in self.layers:
            qkv, residual = add_norm_linear(
                x, residual, layer.input_norm, weight_OI=layer.qkv, bias_O=layer.qkv_bias
            )
            product = qkv.view(len(residual), -1, self.shape.head_dim)  # `x` may be pieces
            q, _ = rotate_and_store(product, rotation, layer.head_norms, cache)
            x = linear.Addend(q.flatten(1), layer.output, None)
            x, residual = add_norm_linear(
                x, residual, layer.inner_norm, weight_OI=layer.gate_up, bias_O=None, gated=True
            )
            x = linear.Addend(x, layer.down, None)
        hidden = linear.computed(x)
        x, _ = add_rms_norm(hidden, residual, layer.input_norm.weight_I, layer.input_norm.epsilon)
        return linear.linear(x, self.head, None)


# ── measuring ─────────────────────────────────────────────────────────────────────────────────


@contextmanager
def overlapping(enabled: bool) -> Iterator[None]:
    before, triton_overlap.ENABLED = triton_overlap.ENABLED, enabled
    try:
        yield
    finally:
        triton_overlap.ENABLED = before


def captured(step: Callable[..., torch.Tensor], inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    step(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step(**inputs)
    return graph, logits


def milliseconds(graph: Any) -> float:
    """Median of the replays."""
    return median_milliseconds(graph, REPLAYS)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def check_products(network: Network, rows: int) -> str:
    """The worst of our errors against float64, as a multiple of the separate kernels' error there."""
    layer, worst = network.layers[0], 0.0
    for norm, weight, bias, gated in (
        (layer.input_norm, layer.qkv, layer.qkv_bias, False),
        (layer.inner_norm, layer.gate_up, None, True),
    ):
        x, residual = torch.randn(2, rows, weight.shape[1], device="cuda").bfloat16()
        ours, total = add_norm_linear(x, residual, norm, weight_OI=weight, bias_O=bias, gated=gated)
        assert torch.equal(total, x + residual)
        normed, _ = add_rms_norm(x, residual, norm.weight_I, norm.epsilon)
        theirs = F.linear(normed, weight, bias)
        exact, _ = add_norm_linear_torch(
            total.double() - residual.double(),
            residual.double(),
            Norm(norm.weight_I.double(), norm.epsilon),
            weight_OI=weight.double(),
            bias_O=None if bias is None else bias.double(),
            gated=gated,
        )
        errors = [relative_error(y, exact) for y in (ours, gated_silu(theirs) if gated else theirs)]
        worst = max(worst, errors[0] / errors[1])
    for weight in (layer.output, layer.down, network.head):
        x = torch.randn(rows, weight.shape[1], device="cuda").bfloat16()
        exact = F.linear(x.double(), weight.double())
        errors = [relative_error(y, exact) for y in (linear.linear(x, weight, None), F.linear(x, weight))]
        worst = max(worst, errors[0] / errors[1])
    return f"{worst:.2f}"


def report(name: str) -> None:
    """One line for each number of rows."""
    network = Network(MODELS[name])
    floor = network.num_bytes() / PEAK_BYTES_PER_SECOND * 1e3
    print(f"\n{name}: floor {floor:.3f} ms", flush=True)
    print(f"{'rows':>5} {'separate':>9} {'fused':>9} {'overlap':>9} {'share':>6}  error, difference, stable")
    for rows in ROWS:
        inputs = network.inputs(rows)
        graph, plain = captured(network.separate, inputs)
        separate = milliseconds(graph)
        with overlapping(False):
            graph, fused = captured(network.fused, inputs)
            alone = milliseconds(graph)
        with overlapping(True):
            graph, logits = captured(network.fused, inputs)
            overlap = milliseconds(graph)
            stable = True
            for _ in range(20):  # a kernel that does not wait where it must shows as a change
                logits.zero_()
                graph.replay()
                stable &= torch.equal(logits, fused)
            error = check_products(network, rows)
        print(
            f"{rows:>5} {separate:9.3f} {alone:9.3f} {overlap:9.3f} {floor / overlap:6.0%}  "
            f"{error}, {relative_error(fused, plain):.4f}, {stable}",
            flush=True,
        )


# ── tuning ────────────────────────────────────────────────────────────────────────────────────


def candidates(size: int, num_outputs: int, gated: bool) -> Iterator[LinearTiling]:
    chosen = triton_linear.choose_tiling(size, num_outputs, gated)
    for outputs, warps in itertools.product((1, 2, 4, 8, 16), (4, 8, 16)):
        held = outputs * (2 if gated else 1) * size / (32 * warps)
        if 12 <= held <= 128 and 256 * warps <= max(1024, 2 * size) and chosen.outputs / 4 <= outputs:
            yield LinearTiling(outputs, warps)


def compare_ways(network: Network, inputs: dict[str, Any]) -> None:
    """Every product by cuBLAS, and every product streamed."""
    for title, rows, small in (("cuBLAS", 0, 0), ("streamed", len(inputs["x"]), sys.maxsize)):
        with mock.patch.multiple(
            linear,
            STREAMED_ROWS=rows,
            SMALL_WEIGHT_BYTES=small,
            MOST_TILED_ROWS=0,
            _tiled_gated=lambda *_: None,
        ):
            print(f"  {milliseconds(captured(network.fused, inputs)[0]):8.3f} ms  {title}", flush=True)


def tune(name: str, rows: int) -> None:
    """Each product's tilings in turn, the others as chosen: the time of the whole step, the best first."""
    network = Network(MODELS[name])
    inputs, shape = network.inputs(rows), network.shape
    original = triton_linear.choose_tiling
    products = {
        "qkv": (shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, False),
        "output": (shape.heads * shape.head_dim, shape.hidden, False),
        "gate_up": (shape.hidden, shape.inner, True),
        "down": (shape.inner, shape.hidden, False),
        "head": (shape.hidden, shape.vocab, False),
    }
    now = milliseconds(captured(network.fused, inputs)[0])
    print(f"\n{name}, {rows} rows: {now:.3f} ms with the chosen tilings", flush=True)
    compare_ways(network, inputs)
    for title, product in products.items():
        found = []
        for tiling in candidates(*product):

            def one(*key: Any, tiling: Any = tiling, product: Any = product) -> Any:
                return tiling if key == product else original(*key)

            triton_linear.choose_tiling = one
            found.append((milliseconds(captured(network.fused, inputs)[0]), str(tiling)))
        triton_linear.choose_tiling = original
        print(f"  {title}: chosen {original(*product)}")
        for milli, tiling in sorted(found)[:4]:
            print(f"    {milli:8.3f} ms  {tiling}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--tune", type=int, metavar="ROWS", help="compare kernels and tilings at so many rows"
    )
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, milliseconds of a step")
    for name in arguments.models:
        with torch.inference_mode():
            if arguments.tune:
                tune(name, arguments.tune)
            else:
                report(name)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
