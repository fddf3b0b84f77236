"""Where the tests run Triton kernels: on the GPU if there is one, else in Triton's interpreter on the CPU.

Loaded by path from the conftests beside the tests that need it.
"""

from __future__ import annotations

import os
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
