"""Launching a kernel again without Triton's way to find out which compiled one that is.

A step launches some ten kernels in each layer, those of one layer as those of another but for addresses. A
launch by Triton takes the host 20 to 70 microseconds, of which looking at the operands, to find the compiled
kernel for them, is 17 to 38 % (benchmarks/launches.py). Captures, and steps without a graph, are mostly
launches. Kernels that a step launches once have no need of this.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

_ALIGNMENT = 16  # of addresses in bytes, and a divisor of numbers: Triton compiles other code for both
_INT32 = range(-(2**31), 2**31)


class _Compiled(NamedTuple):
    function: Any  # the `triton.jit` function: while it is held, nothing else has its id
    kernel: Any  # triton.compiler.CompiledKernel
    constants: tuple[Any, ...]  # the last parameters


_COMPILED: dict[Hashable, _Compiled] = {}


def launch(function: Any, grid: tuple[int, ...], /, *operands: Any, **options: Any) -> None:
    """Do `function[grid](*operands, **options)`.

    The first parameters of the `triton.jit` function are the operands: tensors, descriptors of tensors,
    numbers, None. The options name all of its others, which are constexpr, and tell how to compile it.
    """
    key = (id(function), tuple([_kind(operand) for operand in operands]), *options.items())
    compiled = _COMPILED.get(key)
    if compiled is not None:  # it takes all parameters in order, as Triton gives them to it (3.6 and 3.7)
        compiled.kernel[(*grid, 1, 1)[:3]](*operands, *compiled.constants)
        return
    kernel = function[grid](*operands, **options)
    if kernel is not None:  # as it is in the interpreter, and where kernels are only found (compilation.py)
        constants = tuple(options[name] for name in function.arg_names[len(operands) :])
        _COMPILED[key] = _Compiled(function, kernel, constants)


def _kind(operand: Any) -> Hashable:
    """All of an operand that a kernel is compiled for, and where it is."""
    if isinstance(operand, torch.Tensor):
        return operand.dtype, operand.get_device(), operand.data_ptr() % _ALIGNMENT == 0
    if type(operand) is int:
        return operand == 1, operand % _ALIGNMENT == 0, operand in _INT32
    if operand is None or isinstance(operand, float | bool):
        return type(operand).__name__
    layout = getattr(operand, "layout", None)
    base = operand.base
    return type(operand), base.dtype, base.get_device(), *operand.block_shape, layout, operand.padding
