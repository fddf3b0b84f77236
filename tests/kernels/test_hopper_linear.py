"""Products by tiles for Hopper against float64; `gluon_on_cpu.py` runs the kernel."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenmill.kernels.linear import linear_torch

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def hopper(load_on_cpu: Callable[[str], ModuleType]) -> Any:
    return load_on_cpu("hopper_linear")


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(40))
def test_random_products(hopper: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of tiles, more steps than stages, pieces without a step, a bias, and a stride between rows."""
    draw = random.Random(seed)
    gated = draw.random() < 0.4
    rows, size, outputs = draw.randint(1, 200), 8 * draw.randint(1, 120), draw.randint(1, 150)
    tiling = hopper.ProductTiling(
        rows=draw.choice((64, 128)),
        outputs=draw.choice((32, 64, 128, 256)),
        inputs=64 if gated else draw.choice((64, 128)),
        stages=draw.randint(2, 5),
        pieces=1 if gated else draw.choice((1, 1, 2, 4)),
        more=draw.choice((0, 0, 32, 64)),
    )
    x = numbers(rows, size + 8, seed=seed)[:, :size]
    weight = numbers((2 if gated else 1) * outputs, size, seed=seed + 1) / size**0.5
    bias = numbers(len(weight), seed=seed + 2) if draw.random() < 0.5 else None
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan))
    product = hopper.product(x, weight, bias, tiling, gated=gated)
    assert product.shape == (() if tiling.pieces == 1 else (tiling.pieces,)) + (rows, outputs)
    whole = product if tiling.pieces == 1 else product.sum(dim=0)
    exact = linear_torch(x.double(), weight.double(), None if bias is None else bias.double(), gated=gated)
    torch.testing.assert_close(whole.double(), exact, atol=1e-5, rtol=1e-5)
