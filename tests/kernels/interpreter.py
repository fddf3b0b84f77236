"""Where the tests run Triton kernels: on the GPU if there is one, else in Triton's interpreter on the CPU.

Loaded by path from the conftests beside the tests that need it.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch


def choose() -> None:
    """Choose the interpreter where there is no GPU. Triton reads the choice once, when it is imported."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def device() -> str:
    """The device for a test's tensors; skips the test without Triton."""
    triton = pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    if torch.cuda.is_available():
        return "cuda"
    if isinstance(triton.language.standard.cdiv, triton.runtime.JITFunction):
        pytest.fail("Triton was imported before TRITON_INTERPRET=1 was set; set it in the environment")
    _multiply_bfloat16_by_value()
    _run_in_half_the_time()
    return "cpu"


def _multiply_bfloat16_by_value() -> None:
    """The interpreter keeps bfloat16 as bits, and its dot product multiplies those: widen them first."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder.create_dot, "widens", False):
        return
    original = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _widened(a), _widened(b), *rest)

    def _widened(handle: Any) -> Any:
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        bits = handle.data.view(np.uint16).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    create_dot.widens = True  # type: ignore[attr-defined]
    builder.create_dot = create_dot


def _run_in_half_the_time() -> None:
    """Leave out what the interpreter does in vain, in the versions in which it does.

    It looks for overflow with 64-bit twins of all sums and products, which compiled kernels do not have, and
    through all of Triton's names at every launch.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not getattr(builder.options, "sanitize_overflow", False):
        return
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    @cache
    def names(package: Any) -> list[str]:
        return [
            name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member)
        ]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            member = getattr(package, name)
            if interpreter.tl.core.is_builtin(member):  # a package that two names lead to comes twice
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
