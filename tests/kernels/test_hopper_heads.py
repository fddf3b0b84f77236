"""Products that end as queries, keys and values against torch; `gluon_on_cpu.py` runs the kernel."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenmill.kernels import linear
from tokenmill.kernels.linear import linear_torch
from tokenmill.kernels.norm import rms_norm_torch
from tokenmill.kernels.operands import CacheSlots, HeadNorms, Heads, Norm, UnscaledRows
from tokenmill.kernels.product_tilings import ProductTiling
from tokenmill.kernels.rotary import heads_of_product

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def hopper(load_on_cpu: Callable[[str], ModuleType]) -> Any:
    return load_on_cpu("hopper_heads")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(40))
def test_random_heads(hopper: Any, seed: int) -> None:
    """Parts of heads and whole ones, norms, a bias, parts of tiles; what is in no slot stays as it is. Rows
    may be those of a norm that are still to be scaled."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    head_dim, is_normed = draw.choice((32, 64, 128)), draw.random() < 0.5
    num_heads, num_kv_heads, page_size = draw.randint(1, 5), draw.randint(1, 3), draw.choice((4, 16))
    rows, size = draw.randint(1, 150), 8 * draw.randint(1, 60)
    tiling = ProductTiling(
        rows=draw.choice((64, 128)),
        outputs=head_dim if is_normed else draw.choice([n for n in (16, 32, 64, 128) if n <= head_dim]),
        inputs=draw.choice((64, 128)),
        stages=draw.randint(2, 5),
    )
    x, weight = numbers(rows, size), numbers((num_heads + 2 * num_kv_heads) * head_dim, size) / size**0.5
    bias = numbers(len(weight)) if draw.random() < 0.5 else None
    caches = [numbers(-(-rows // page_size) + 3, page_size, num_kv_heads, head_dim) for _ in range(2)]
    slots = torch.randperm(len(caches[0]) * page_size, generator=generator)[:rows]
    angles = numbers(rows, head_dim // 2)
    rotation = angles.cos(), angles.sin()
    norms = HeadNorms(numbers(head_dim), numbers(head_dim), 1e-6) if is_normed else None
    scaled = None
    if draw.random() < 0.5:  # a norm whose rows are still to be multiplied by their factors
        squares = torch.stack([part.square().sum(dim=1) for part in x.chunk(draw.randint(1, 8), dim=1)])
        scaled, x = UnscaledRows(x, squares, 1e-5), rms_norm_torch(x, torch.ones(size), 1e-5)
    exact = linear_torch(x.double(), weight.double(), None if bias is None else bias.double()).float()
    expected = heads_of_product(exact.view(rows, -1, head_dim), rotation, norms, num_kv_heads)
    heads = Heads(rotation, norms, CacheSlots(caches[0].clone(), caches[1].clone(), slots))
    assert hopper.can_take(heads, tiling)
    queries = hopper.product(x if scaled is None else scaled, weight, bias, heads, tiling)
    torch.testing.assert_close(queries, expected[0], atol=1e-4, rtol=1e-4)
    for before, cache, stored in zip(
        caches, (heads.cache.key_cache_NBKD, heads.cache.value_cache_NBKD), expected[1:], strict=True
    ):
        after = before.clone()
        after.view(-1, num_kv_heads, head_dim)[slots] = stored
        torch.testing.assert_close(cache, after, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("head_dim", "rotated", "is_normed", "outputs", "expected"),
    [
        (64, 64, False, 32, True),
        (128, 128, True, 128, True),
        (96, 96, False, 32, True),  # three parts
        (96, 96, False, 64, False),  # one and a half
        (96, 96, True, 96, False),  # 48 outputs are no power of two
        (128, 128, True, 64, False),  # half a head cannot be normalised
        (256, 256, True, 256, False),  # too wide
        (128, 64, False, 32, False),  # half of each head stays as it is
    ],
)
def test_which_heads_end_such_tiles(
    hopper: Any, head_dim: int, rotated: int, is_normed: bool, outputs: int, expected: bool
) -> None:
    cache, angles = torch.empty(1, 4, 2, head_dim), torch.empty(3, rotated // 2)
    norms = HeadNorms(torch.ones(head_dim), torch.ones(head_dim), 1e-6) if is_normed else None
    heads = Heads((angles, angles), norms, CacheSlots(cache, cache, torch.arange(3)))
    assert hopper.can_take(heads, ProductTiling(64, outputs, 64, 3)) == expected


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [40, 100])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_layer_takes_them_where_its_steps_are_graphs(
    hopper: Any, monkeypatch: pytest.MonkeyPatch, rows: int, is_normed: bool, is_first: bool
) -> None:
    """As on a Hopper GPU, but for the dtype; the residual of the first layer is one row of zeros for all."""
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    from tokenmill.kernels import hopper_heads, hopper_linear, triton_attention, triton_rotary

    monkeypatch.setattr(linear, "_are_some_rows_of_a_graph", lambda x: True)
    monkeypatch.setattr(linear, "_has_hopper_kernels", lambda device: True)
    monkeypatch.setattr(triton_attention, "num_processors", lambda device: 132)
    monkeypatch.setattr(hopper_linear, "can_take", lambda x, weight: x.shape[1] == weight.shape[1])
    monkeypatch.setattr(hopper_heads, "product", hopper.product)
    monkeypatch.setattr(triton_rotary, "rotate_and_store", None)  # the other way
    x, residual = (
        torch.randn(rows, 72),
        torch.zeros(72).expand(rows, 72) if is_first else torch.randn(rows, 72),
    )
    weight, bias, norm = torch.randn(4 * 64, 72) / 8, torch.randn(4 * 64), Norm(torch.randn(72), 1e-6)
    angles, (keys, values) = torch.randn(rows, 32), torch.zeros(2, rows // 4 + 1, 4, 1, 64)
    norms = HeadNorms(torch.randn(64), torch.randn(64), 1e-6) if is_normed else None
    heads = Heads((angles.cos(), angles.sin()), norms, CacheSlots(keys, values, torch.arange(rows)))
    product, expected_total = linear.add_norm_linear_torch(x, residual, norm, weight_OI=weight, bias_O=bias)
    expected = heads_of_product(product.view(rows, 4, 64), heads.rotation, norms, 1)
    queries, total = linear.queries_after_norm(x, residual, norm, weight_OI=weight, bias_O=bias, heads=heads)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(queries, expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(keys.view(-1, 1, 64)[:rows], expected[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(values.view(-1, 1, 64)[:rows], expected[2], atol=1e-4, rtol=1e-4)
