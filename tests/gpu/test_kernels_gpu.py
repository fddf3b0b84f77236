"""Norms, activation, rotary embedding and products of a few rows at real sizes on a GPU, against their torch
references there."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.activation import gated_silu, gated_silu_torch
from tokenmill.kernels.launching import replayed
from tokenmill.kernels.linear import (
    Addend,
    add_norm_linear,
    add_norm_linear_torch,
    computed,
    linear,
    linear_torch,
)
from tokenmill.kernels.norm import add_rms_norm, rms_norm, rms_norm_torch
from tokenmill.kernels.operands import CacheSlots, HeadNorms, Heads, Norm
from tokenmill.kernels.product_tilings import ProductTiling
from tokenmill.kernels.rotary import heads_of_product, rotate, rotate_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * 3).to(dtype)


def assert_within_a_unit(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the last bits: sums in another order, and exponentials, may round the other way."""
    rtol = 4e-6 if expected.dtype == torch.float32 else 2 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 256, 5000])
@pytest.mark.parametrize("size", [64, 128, 896, 4096, 5120, 8192])
def test_norms(dtype: torch.dtype, tokens: int, size: int) -> None:
    x, residual = numbers(tokens, size, dtype=dtype), numbers(tokens, size, dtype=dtype, seed=1)
    weight = numbers(size, dtype=dtype, seed=2)
    assert_within_a_unit(rms_norm(x, weight, 1e-6), rms_norm_torch(x, weight, 1e-6))
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_within_a_unit(normed, rms_norm_torch(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_heads_in_a_fused_tensor(dtype: torch.dtype) -> None:
    fused = numbers(777, (32 + 8 + 8) * 128, dtype=dtype)
    weight = numbers(128, dtype=dtype, seed=1)
    for heads in (fused[:, : 32 * 128].view(777, 32, 128), fused[:, 32 * 128 : 40 * 128].view(777, 8, 128)):
        assert_within_a_unit(rms_norm(heads, weight, 1e-6), rms_norm_torch(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 4864), (256, 3072), (5000, 14336), (7, 1001)])
def test_activation(dtype: torch.dtype, tokens: int, size: int) -> None:
    gate_up = numbers(tokens, 2 * size, dtype=dtype)
    assert_within_a_unit(gated_silu(gate_up), gated_silu_torch(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 256, 5000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half"),
    [(14, 2, 64, 32), (32, 8, 128, 64), (32, 32, 80, 16), (24, 8, 96, 48), (8, 4, 256, 128)],
)
def test_rotary(dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, half: int) -> None:
    fused = numbers(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, _ = fused.split([heads, kv_heads, kv_heads], dim=1)
    angles = numbers(tokens, half, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    exact = rotate_torch(q.double(), k.double(), cos.double(), sin.double())
    plain = rotate_torch(q, k, cos, sin)
    for ours, theirs, truth in zip(rotate(q, k, cos, sin), plain, exact, strict=True):
        # The compiler may keep products in float32 that torch rounds: never worse, by chance better.
        assert (ours.double() - truth).norm() <= 1.01 * (theirs.double() - truth).norm()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def widened(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias", "gated"),
    [
        (896, 1152, True, False),
        (896, 4864, False, True),
        (4864, 896, False, False),
        (4096, 14336, False, True),
        (14336, 4096, False, False),
        (4096, 4096, False, False),
        (1001, 77, True, True),
    ],
)
def test_products_of_a_few_rows(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int, bias: bool, gated: bool
) -> None:
    weight = numbers(outputs * (2 if gated else 1), inputs, dtype=dtype) / inputs**0.5
    bias_O = numbers(len(weight), dtype=dtype, seed=1) if bias else None
    x, residual = numbers(2, rows, inputs, dtype=dtype, seed=2)
    norm = Norm(numbers(inputs, dtype=dtype, seed=3), 1e-6)
    exact = linear_torch(x.double(), weight.double(), widened(bias_O), gated=gated)
    limit = 1.2 * relative_error(linear_torch(x, weight, bias_O, gated=gated), exact)
    assert relative_error(linear(x, weight, bias_O, gated=gated), exact) < limit
    fused, total = add_norm_linear(x, residual, norm, weight_OI=weight, bias_O=bias_O, gated=gated)
    assert torch.equal(total, x + residual)
    normed = rms_norm_torch(total, norm.weight_I, norm.epsilon)
    exact = linear_torch(normed.double(), weight.double(), widened(bias_O), gated=gated)
    limit = 1.2 * relative_error(linear_torch(normed, weight, bias_O, gated=gated), exact)
    assert relative_error(fused, exact) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [2, 3, 17, 32, 40, 64, 65, 128, 200, 256])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias", "gated"),
    [
        (896, 1152, True, False),
        (896, 4864, False, True),
        (4864, 896, False, False),
        (1024, 3072, True, True),
        (2048, 1000, True, False),
        (136, 72, True, True),
        (72, 136, True, False),
        (4096, 6144, True, False),
        (1536, 8960, True, True),
        (2560, 9728, False, True),
        (4096, 14336, False, True),
        (5120, 17408, False, True),
        (14336, 4096, False, False),
        (4096, 4096, False, False),
        (1024, 30_000, False, False),
        (896, 1001, True, False),
        (512, 333, False, True),
        (1024, 4096, False, False),
    ],
)
def test_products_in_graphs(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int, bias: bool, gated: bool
) -> None:
    """Products by tiles, whole and in pieces, are as exact as those of torch; between others' rows, too."""
    weight = numbers(outputs * (2 if gated else 1), inputs, dtype=dtype) / inputs**0.5
    bias_O = numbers(len(weight), dtype=dtype, seed=1) if bias else None
    x = numbers(rows, inputs + 8, dtype=dtype, seed=2)[:, :inputs]
    exact = linear_torch(x.double(), weight.double(), widened(bias_O), gated=gated)
    limit = 1.2 * relative_error(linear_torch(x, weight, bias_O, gated=gated), exact)
    with replayed():
        assert relative_error(linear(x, weight, bias_O, gated=gated), exact) < limit
        if not gated:
            product = Addend(x, weight, bias_O).computed()
            whole = product.sum(dim=0).to(dtype) if product.dim() == 3 else product
            assert relative_error(whole, exact) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [33, 64, 100, 256])
@pytest.mark.parametrize(
    ("inputs", "heads", "kv_heads", "head_dim", "normed", "tiling"),
    [
        (896, 14, 2, 64, False, ProductTiling(64, 32, 128, 4)),
        (896, 14, 2, 64, True, ProductTiling(64, 64, 128, 4)),
        (1024, 16, 8, 128, True, ProductTiling(64, 128, 64, 4)),
        (1024, 16, 8, 128, True, ProductTiling(128, 128, 64, 4)),
        (2048, 32, 8, 64, False, ProductTiling(128, 64, 64, 4)),
        (136, 3, 1, 128, False, ProductTiling(128, 32, 64, 2)),
    ],
)
def test_heads_that_a_product_rotates_and_stores(
    dtype: torch.dtype,
    rows: int,
    inputs: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    normed: bool,
    tiling: ProductTiling,
) -> None:
    """As one kernel after the other, but for sums that are added up in another order."""
    from tokenmill.kernels import hopper_heads
    from tokenmill.kernels.triton_rotary import rotate_and_store

    weight = numbers((heads + 2 * kv_heads) * head_dim, inputs, dtype=dtype) / inputs**0.5
    bias = None if normed else numbers(len(weight), dtype=dtype, seed=1)
    x = numbers(rows, inputs, dtype=dtype, seed=2)
    angles = numbers(rows, head_dim // 2, dtype=torch.float32, seed=3)
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = HeadNorms(*numbers(2, head_dim, dtype=dtype, seed=4), 1e-6) if normed else None
    pages = rows // 16 + 2
    slots = torch.randperm(pages * 16, device="cuda")[:rows]
    both = []
    for _ in range(2):
        caches = torch.full((2, pages, 16, kv_heads, head_dim), torch.nan, dtype=dtype, device="cuda")
        both.append((caches, Heads(rotation, norms, CacheSlots(caches[0], caches[1], slots))))
    (ours, heads_here), (plain, heads_there) = both
    assert hopper_heads.can_take(heads_here, tiling)
    queries = hopper_heads.product(x, weight, bias, heads_here, tiling)
    product = linear(x, weight, bias).view(rows, -1, head_dim)
    expected, _ = rotate_and_store(product, rotation, norms, heads_there.cache)
    assert relative_error(queries, expected) < 4 * torch.finfo(dtype).eps
    assert torch.equal(ours.isnan(), plain.isnan())
    assert relative_error(ours.nan_to_num(), plain.nan_to_num()) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tiling", ["WIDE", "NARROW"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(5000, 896, 4864), (1300, 4096, 1000), (300, 72, 200)]
)
def test_gated_products_of_many_rows(
    dtype: torch.dtype, tiling: str, rows: int, inputs: int, outputs: int
) -> None:
    """As exact as those of torch, also between others' rows, in tiles that end anywhere."""
    from tokenmill.kernels import hopper_gated

    weight = numbers(2 * outputs, inputs, dtype=dtype) / inputs**0.5
    x = numbers(rows, inputs + 8, dtype=dtype, seed=2)[:, :inputs]
    exact = linear_torch(x.double(), weight.double(), None, gated=True)
    limit = 1.2 * relative_error(linear_torch(x, weight, None, gated=True), exact)
    assert relative_error(hopper_gated.product(x, weight, getattr(hopper_gated, tiling)), exact) < limit
    with replayed():
        assert relative_error(linear(x, weight, None, gated=True), exact) < limit


@pytest.mark.parametrize("kernel", ["weights left", "rows left", "WIDE", "NARROW"])
def test_gates_of_any_size(kernel: str) -> None:
    """All numbers of bfloat16 as a gate, and 1 behind it: as torch rounds them, but for some below 1e-30."""
    from tokenmill.kernels import hopper_gated, hopper_linear
    from tokenmill.kernels.product_tilings import ProductTiling

    every = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    gates_ON = every[: len(every) // 1024 * 1024].view(-1, 64)
    last_ON = every[-16 * 64 :].view(-1, 64)
    gates_ON = torch.cat((gates_ON, last_ON))
    weight = torch.cat((gates_ON, torch.ones_like(gates_ON)))
    x = torch.eye(64, dtype=torch.bfloat16, device="cuda")
    if kernel.isupper():
        made = hopper_gated.product(x, weight, getattr(hopper_gated, kernel))
    else:
        tiling = ProductTiling(64, 128, 64, 4, weights_left=kernel == "weights left")
        made = hopper_linear.product(x, weight, None, tiling, gated=True)
    expected = gated_silu_torch(torch.cat((gates_ON.T, torch.ones_like(gates_ON.T)), 1))
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-30)


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("inputs", [64, 128, 1000, 4864])
@pytest.mark.parametrize(
    ("rows", "more", "weights_left"),
    [
        *((64, 0, False), (64, 32, False), (128, 0, False), (128, 32, False)),
        *((16, 0, True), (32, 0, True), (64, 0, True)),
    ],
)
def test_tiles_of_any_shape(rows: int, pieces: int, inputs: int, more: int, weights_left: bool) -> None:
    """More pieces than steps, parts of tiles, and more steps than stages."""
    from tokenmill.kernels import hopper_linear
    from tokenmill.kernels.product_tilings import ProductTiling

    dtype, outputs = torch.bfloat16, 200
    weight = numbers(outputs, inputs, dtype=dtype) / inputs**0.5
    bias_O = numbers(outputs, dtype=dtype, seed=1)
    x = numbers(200, inputs, dtype=dtype, seed=2)
    x[150:] = torch.nan  # behind the rows
    x = x[:150]
    exact = linear_torch(x.double(), weight.double(), bias_O.double())
    tiling = ProductTiling(
        rows,
        outputs=64,
        inputs=128,
        stages=3,
        pieces=pieces,
        more=more,
        weights_left=weights_left,
        registers=128 if rows == 16 else None,
    )
    product = hopper_linear.product(x, weight, bias_O, tiling)
    assert product.shape == ((pieces,) if pieces > 1 else ()) + (150, outputs)
    whole = product.sum(dim=0) if pieces > 1 else product
    assert relative_error(whole, exact) < 4e-3


@pytest.mark.parametrize("rows", [3, 16, 32, 33, 64, 100, 128, 200, 256])
@pytest.mark.parametrize(
    ("size", "outputs", "inner", "bias"),
    [(896, 896, 4864, False), (2048, 1536, 3072, False), (1536, 1536, 4608, True), (136, 264, 520, True)],
)
def test_a_gated_product_of_a_sum_needs_no_norm(
    rows: int, size: int, outputs: int, inner: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as exact as with a kernel for the norm, which is not called."""
    from tokenmill.kernels import linear as products

    dtype = torch.bfloat16
    first = numbers(outputs, size, dtype=dtype) / size**0.5
    second = numbers(2 * inner, outputs, dtype=dtype, seed=1) / outputs**0.5
    biases = [numbers(len(each), dtype=dtype, seed=2) if bias else None for each in (first, second)]
    x = numbers(rows, size, dtype=dtype, seed=3)
    residual = 30 * numbers(rows, outputs, dtype=dtype, seed=4)
    norm = Norm(numbers(outputs, dtype=dtype, seed=5), 1e-6)
    addend = Addend(x, first, biases[0])
    plain, sums = add_norm_linear(
        addend.computed(), residual, norm, weight_OI=second, bias_O=biases[1], gated=True
    )
    exact_sums = linear_torch(x.double(), first.double(), widened(biases[0])) + residual.double()
    normed = rms_norm_torch(exact_sums, norm.weight_I.double(), norm.epsilon)
    exact = linear_torch(normed, second.double(), widened(biases[1]), gated=True)
    monkeypatch.setattr(products, "add_rms_norm", None)
    with replayed():
        ours, total = add_norm_linear(addend, residual, norm, weight_OI=second, bias_O=biases[1], gated=True)
    assert relative_error(total, exact_sums) < 1.2 * relative_error(sums, exact_sums)
    assert relative_error(ours, exact) < 1.2 * relative_error(plain, exact)


def test_a_small_weight_is_streamed_for_two_rows_though_a_norm_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes behind it may go by tiles; its weight is too large to be streamed twice."""
    from tokenmill.kernels import hopper_linear

    first, second = (
        numbers(2048, 2048, dtype=torch.bfloat16) / 50,
        numbers(8192, 2048, dtype=torch.bfloat16) / 50,
    )
    x, residual = (
        numbers(2, 2048, dtype=torch.bfloat16, seed=1),
        numbers(2, 2048, dtype=torch.bfloat16, seed=2),
    )
    norm = Norm(torch.ones_like(first[0]), 1e-6)
    exact, _ = add_norm_linear_torch(
        linear_torch(x.double(), first.double(), None),
        residual.double(),
        Norm(norm.weight_I.double(), norm.epsilon),
        weight_OI=second.double(),
        bias_O=None,
        gated=True,
    )
    monkeypatch.setattr(hopper_linear, "add", None)
    with replayed():
        ours, _ = add_norm_linear(
            Addend(x, first, None), residual, norm, weight_OI=second, bias_O=None, gated=True
        )
    assert relative_error(ours, exact) < 1e-2


@pytest.mark.parametrize("size", [1024, 2048])  # the second is left in pieces with few rows
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 30, 60, 128, 200, 300])
def test_overlapping_kernels_wait_for_each_other(
    rows: int, gated: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of products replayed from a graph gives the bits of the same chain without any overlap."""
    from tokenmill.kernels import hopper_gated, triton_overlap

    if rows > 256:  # tiles for so many, though so small a product would be left to cuBLAS
        monkeypatch.setattr(hopper_gated, "choose_tiling", lambda *_: hopper_gated.NARROW)
    dtype = torch.bfloat16
    halves = 2 if gated else 1
    weights = [
        numbers(size if seed % 2 else halves * size, size, dtype=dtype, seed=seed) / size**0.5
        for seed in range(40)
    ]
    norm = Norm(numbers(size, dtype=dtype, seed=41), 1e-6)
    start = numbers(rows, size, dtype=dtype, seed=42)

    def chain() -> torch.Tensor:
        x: torch.Tensor | Addend = start
        residual = torch.zeros_like(start)
        with replayed():
            for first, second in zip(weights[::2], weights[1::2], strict=True):
                x, residual = add_norm_linear(x, residual, norm, weight_OI=first, bias_O=None, gated=gated)
                x = Addend(x, second, None)
            return add_rms_norm(computed(x), residual, norm.weight_I, norm.epsilon)[0]

    monkeypatch.setattr(triton_overlap, "ENABLED", False)
    expected = chain()
    monkeypatch.setattr(triton_overlap, "ENABLED", True)
    assert torch.equal(chain(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(50):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("tokens", [1, 256, 5000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "half"),
    [(14, 2, 64, 32), (32, 8, 128, 64), (32, 32, 80, 16), (8, 4, 256, 128)],
)
def test_from_product_to_cache(
    dtype: torch.dtype, normed: bool, tokens: int, heads: int, kv_heads: int, head_dim: int, half: int
) -> None:
    from tokenmill.kernels.triton_rotary import rotate_and_store

    qkv = numbers(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    angles = numbers(tokens, half, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = HeadNorms(*numbers(2, head_dim, dtype=dtype, seed=2), 1e-6) if normed else None
    pages = tokens // 16 + 2
    slots = torch.randperm(pages * 16, device="cuda")[:tokens]
    caches = torch.full((2, pages, 16, kv_heads, head_dim), torch.nan, dtype=dtype, device="cuda")
    results = rotate_and_store(qkv, (cos, sin), norms, CacheSlots(caches[0], caches[1], slots))
    for result, plain in zip(results, heads_of_product(qkv, (cos, sin), norms, kv_heads), strict=False):
        assert relative_error(result, plain) < 2 * torch.finfo(dtype).eps
    keys, values = caches.flatten(1, 2)
    assert torch.equal(keys[slots], results[1])
    assert torch.equal(values[slots], qkv[:, -kv_heads:])
    for flat in (keys, values):
        assert int(flat.isnan().all(-1).all(-1).sum()) == pages * 16 - tokens
