"""A kernel is launched directly only where Triton would have taken the same compiled one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenmill.kernels import direct_launch
from tokenmill.kernels.direct_launch import launch

pytestmark = pytest.mark.cpu


class Function:
    """In the place of a `triton.jit` function of `x`, `n` and `BLOCK`: takes note of who launches."""

    arg_names = ("x", "n", "BLOCK")

    def __init__(self, *, compiles: bool = True) -> None:
        self.compiles = compiles
        self.searched: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def search(*operands: Any, **options: Any) -> Any:
            self.searched.append((grid, operands, options))
            return Kernel(self, len(self.searched)) if self.compiles else None

        return search


class Kernel:
    def __init__(self, function: Function, number: int) -> None:
        self.function, self.number = function, number

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.function.direct.append((self.number, grid, *arguments))


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_launch, "_COMPILED", {})


def test_the_second_launch_is_direct() -> None:
    function, first, second = Function(), torch.zeros(8), torch.ones(8)
    launch(function, (3,), first, 48, BLOCK=32, num_warps=4)
    launch(function, (5, 2), second, 64, BLOCK=32, num_warps=4)
    assert function.searched == [((3,), (first, 48), {"BLOCK": 32, "num_warps": 4})]
    ((number, grid, *arguments),) = function.direct
    assert (number, grid) == (1, (5, 2, 1))
    assert arguments[0] is second  # not what was given at first
    assert arguments[1:] == [64, 32]


BYTES = torch.zeros(64, dtype=torch.uint8)
OTHERS: list[tuple[Any, Any, dict[str, Any]]] = [
    (BYTES[1:], 48, {}),  # an address that is no multiple of 16
    (BYTES.view(torch.int16), 48, {}),
    (BYTES, 1, {}),  # becomes a constant
    (BYTES, 47, {}),  # no multiple of 16
    (BYTES, 48 * 2**31, {}),  # a number of 64 bits
    (BYTES, 48.0, {}),
    (BYTES, True, {}),
    (None, 48, {}),
    (BYTES, 48, {"BLOCK": 64}),
    (BYTES, 48, {"num_warps": 8}),
]


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_compiled_otherwise_is_searched(other: tuple[Any, Any, dict[str, Any]]) -> None:
    function, usual = Function(), {"BLOCK": 32, "num_warps": 4}
    x, n, options = other
    for _ in range(2):
        launch(function, (3,), BYTES, 48, **usual)
        launch(function, (3,), x, n, **{**usual, **options})
    assert len(function.searched) == 2
    assert [number for number, *_ in function.direct] == [1, 2]


def tiles(block: list[int], layout: str = "128 bytes", base: torch.Tensor = BYTES) -> Any:
    return SimpleNamespace(base=base, block_shape=block, layout=layout, padding="zero")


def test_tiles_are_told_apart_by_size_type_and_layout() -> None:
    function = Function()
    for x in (tiles([4, 8]), tiles([8, 8]), tiles([4, 8], "64 bytes"), tiles([4, 8], base=torch.zeros(64))):
        launch(function, (3,), x, 48, BLOCK=32)
        launch(function, (3,), tiles(list(x.block_shape), x.layout, torch.zeros_like(x.base)), 48, BLOCK=32)
    assert len(function.searched) == 4
    assert [number for number, *_ in function.direct] == [1, 2, 3, 4]


def test_functions_are_told_apart() -> None:
    functions = [Function(), Function()]
    for function in functions * 2:
        launch(function, (3,), BYTES, 48, BLOCK=32)
    assert [len(function.searched) for function in functions] == [1, 1]
    assert [len(function.direct) for function in functions] == [1, 1]


def test_without_a_compiled_kernel_every_launch_is_searched() -> None:
    """As in the interpreter, and while kernels are only found."""
    function = Function(compiles=False)
    for _ in range(3):
        launch(function, (3,), BYTES, 48, BLOCK=32)
    function.compiles = True
    launch(function, (3,), BYTES, 48, BLOCK=32)
    launch(function, (3,), BYTES, 48, BLOCK=32)
    assert (len(function.searched), len(function.direct)) == (4, 1)
