"""Products by tiles for Hopper against float64; `gluon_on_cpu.py` runs the kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenmill.kernels.linear import linear_torch
from tokenmill.kernels.norm import rms_norm_torch
from tokenmill.kernels.operands import Norm
from tokenmill.kernels.product_tilings import ProductTiling, choose_tiling
from tokenmill.kernels.spare_rows import rows_to_copy

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def hopper(load_on_cpu: Callable[[str], ModuleType]) -> Any:
    return load_on_cpu("hopper_linear")


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_others_behind(x: torch.Tensor, count: int) -> torch.Tensor:
    """The same rows, and so many of NaN in the memory behind them."""
    behind = torch.full((count, x.shape[1]), torch.nan)
    return torch.cat([x, behind])[: len(x)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(80))
def test_random_products(hopper: Any, seed: int) -> None:
    """Parts of tiles, more steps than stages, pieces without a step, a bias, and a stride between rows."""
    draw = random.Random(seed)
    gated, weights_left = draw.random() < 0.4, draw.random() < 0.5
    rows, size, outputs = draw.randint(1, 200), 8 * draw.randint(1, 120), draw.randint(1, 150)
    tiling = hopper.ProductTiling(
        rows=draw.choice((16, 32, 64) if weights_left else (64, 128)),
        outputs=draw.choice((64, 128) if weights_left else (32, 64, 128, 256)),
        inputs=draw.choice((64, 128)) if weights_left or not gated else 64,
        stages=draw.randint(2, 5),
        pieces=1 if gated else draw.choice((1, 1, 2, 4)),
        more=0 if weights_left else draw.choice((0, 0, 32, 64)),
        weights_left=weights_left,
    )
    x = with_others_behind(numbers(rows, size + 8, seed=seed), draw.choice((0, 3, 128)))[:, :size]
    weight = numbers((2 if gated else 1) * outputs, size, seed=seed + 1) / size**0.5
    bias = numbers(len(weight), seed=seed + 2) if draw.random() < 0.5 else None
    product = hopper.product(x, weight, bias, tiling, gated=gated)
    assert product.shape == (() if tiling.pieces == 1 else (tiling.pieces,)) + (rows, outputs)
    whole = product if tiling.pieces == 1 else product.sum(dim=0)
    exact = linear_torch(x.double(), weight.double(), None if bias is None else bias.double(), gated=gated)
    torch.testing.assert_close(whole.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(60))
def test_random_sums_and_what_their_norm_is_multiplied_by(hopper: Any, seed: int) -> None:
    """A product added to a residual, and one of the norm of that, of which the first has left the factors."""
    draw = random.Random(seed)
    gated, rows, size, middle = (
        draw.random() < 0.6,
        draw.randint(1, 200),
        8 * draw.randint(1, 60),
        8 * draw.randint(1, 60),
    )
    outputs = draw.randint(1, 150)

    def tiling(*, gated: bool) -> ProductTiling:
        weights_left = draw.random() < 0.5
        return ProductTiling(
            rows=draw.choice((16, 32, 64) if weights_left else (64, 128)),
            outputs=draw.choice((64, 128) if weights_left else (32, 64, 128)),
            inputs=draw.choice((64, 128)) if weights_left or not gated else 64,
            stages=draw.randint(2, 5),
            more=0 if weights_left or not gated else draw.choice((0, 0, 32, 64)),
            weights_left=weights_left,
        )

    x = with_others_behind(numbers(rows, size, seed=seed), draw.choice((0, 3, 128)))
    first = numbers(middle, size, seed=seed + 1) / size**0.5
    second = numbers((2 if gated else 1) * outputs, middle, seed=seed + 2) / middle**0.5
    residual, weight = numbers(rows, middle, seed=seed + 3), numbers(middle, seed=seed + 4)
    biases = [numbers(len(each), seed=seed + 5) if draw.random() < 0.3 else None for each in (first, second)]
    scaled, total = hopper.add(x, first, biases[0], residual, Norm(weight, 1e-5), tiling(gated=False))
    expected = linear_torch(x.double(), first.double(), None if biases[0] is None else biases[0].double())
    expected += residual.double()
    torch.testing.assert_close(total.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scaled.numbers_NI, total * weight)
    torch.testing.assert_close(scaled.squares_CN.sum(dim=0), total.square().sum(dim=1), atol=1e-3, rtol=1e-4)
    product = hopper.product(scaled, second, biases[1], tiling(gated=gated), gated=gated)
    normed = rms_norm_torch(expected, weight.double(), 1e-5)
    bias = None if biases[1] is None else biases[1].double()
    exact = linear_torch(normed, second.double(), bias, gated=gated)
    torch.testing.assert_close(product.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_rows", "size", "outputs", "gated", "expected"),
    [  # inputs, stages, pieces, and whether another program finds room beside this one
        (8, 4096, 14336, True, (128, 5, 1, False)),  # Llama-3.1-8B: in two turns
        (16, 3072, 8192, True, (128, 3, 1, True)),  # Llama-3.2-3B: all at once
        (24, 3072, 8192, True, (64, 5, 1, True)),
        (8, 1024, 3072, True, (64, 6, 1, True)),  # Qwen3-0.6B: a short sum
        (64, 4096, 14336, True, (128, 4, 1, False)),
        (8, 4096, 4096, False, (128, 5, 2, True)),
        (32, 4096, 4096, False, (128, 4, 2, True)),
        (8, 14336, 4096, False, (128, 8, 2, False)),
        (64, 14336, 4096, False, (128, 6, 2, False)),
        (8, 896, 896, False, (128, 5, 1, True)),
    ],
)
def test_programs_of_few_rows_are_launched_as_measured(
    hopper: Any,
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    size: int,
    outputs: int,
    gated: bool,
    expected: tuple[int, int, int, bool],
) -> None:
    tiling = choose_tiling(num_rows, size, outputs, gated=gated, may_split=not gated, processors=132)
    assert tiling is not None
    launched: list[tuple[tuple[int, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        hopper, "launch", lambda _, grid, *operands, **options: launched.append((grid, options))
    )
    hopper.product(
        torch.empty(num_rows, size),
        torch.empty((2 if gated else 1) * outputs, size),
        None,
        tiling,
        gated=gated,
    )
    [(grid, options)] = launched
    assert options["WEIGHTS_LEFT"]
    assert options["num_warps"] == 4
    assert options["maxnreg"] in (None, 128)
    assert grid == (outputs // 64, 1, expected[2])
    assert (options["BLOCK_K"], options["STAGES"], tiling.pieces, options["maxnreg"] == 128) == expected


def test_rows_behind_are_told_to_the_device_and_kept_for_the_next(
    hopper: Any, gated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.empty(128, 64)[:70]
    tiling = ProductTiling(rows=128, outputs=64, inputs=64, stages=2)
    seen: list[Any] = []
    for module in (hopper, gated):
        monkeypatch.setattr(
            module, "launch", lambda _, __, x, *operands, **options: seen.append(x.source.shape)
        )
    outs = (
        hopper.product(x, torch.empty(64, 64), None, tiling),
        gated.product(x, torch.empty(128, 64), gated.WIDE),
    )
    assert seen == [(128, 64), (128, 64)]
    assert [rows_to_copy(out, 128) for out in outs] == [128, 128]


@pytest.fixture(scope="module")
def gated(load_on_cpu: Callable[[str], ModuleType]) -> Any:
    return load_on_cpu("hopper_gated")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("seed", range(30))
def test_random_gated_products(gated: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of tiles, several tiles of a program, groups of blocks, and more and fewer steps than stages."""
    draw = random.Random(seed)
    rows, size, outputs = draw.randint(1, 700), 8 * draw.randint(1, 60), 8 * draw.randint(1, 60)
    x = with_others_behind(numbers(rows, size + 8, seed=seed), draw.choice((0, 3, 128)))[:, :size]
    weight = numbers(2 * outputs, size, seed=seed + 1) / size**0.5
    monkeypatch.setattr(gated, "GROUP_BLOCKS", draw.choice((1, 2, 4, 16)))
    processors = draw.choice((1, 2, 3, 7, 100))
    monkeypatch.setattr(gated, "num_processors", lambda _: processors)
    tiling = gated.GatedTiling(outputs=draw.choice((64, 128)), stages=draw.randint(2, 5))
    product = gated.product(x, weight, tiling)
    assert product.shape == (rows, outputs)
    exact = linear_torch(x.double(), weight.double(), None, gated=True)
    torch.testing.assert_close(product.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "size", "outputs", "chosen"),
    [
        (8192, 4096, 14336, "WIDE"),
        (8192, 896, 4864, "WIDE"),
        (2048, 1024, 3072, "WIDE"),
        (1024, 1024, 3072, "NARROW"),  # two turns of wide tiles, a quarter of them idle
        (1024, 896, 4864, "NARROW"),
        (512, 1024, 3072, "WIDE"),  # 96 tiles in one turn
        (448, 1024, 3072, None),
        (384, 4096, 14336, "WIDE"),  # 336 tiles in three turns
        (416, 4096, 14336, None),
        (256, 4096, 14336, "WIDE"),  # 224 tiles in two turns
        (320, 1536, 8960, None),
        (448, 1536, 8960, "NARROW"),
        (192, 896, 4864, None),
        (1, 896, 4864, None),
        (192, 3072, 8192, "WIDE"),  # all tiles at once, where cuBLAS takes as long as for 256 rows
        (191, 3072, 8192, None),
        (224, 4096, 12288, None),  # three turns of narrow tiles
        (256, 4096, 12288, "NARROW"),
    ],
)
def test_a_gated_product_goes_by_tiles_that_fill_the_device(
    gated: Any, rows: int, size: int, outputs: int, chosen: str | None
) -> None:
    """As was measured with the shapes of public models."""
    expected = None if chosen is None else getattr(gated, chosen)
    assert gated.choose_tiling(rows, size, outputs, 132) == expected


def test_each_tiling_is_launched_for_the_compiler(gated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows come first; numbers of four bytes have no such kernel."""
    launched: list[int] = []
    monkeypatch.setattr(gated, "launch", lambda *_, BLOCK_F, **__: launched.append(BLOCK_F))
    gated.compile_tilings(torch.float32, torch.device("cpu"))
    assert launched == []
    gated.compile_tilings(torch.float16, torch.device("cpu"))
    assert launched == [128, 64]
