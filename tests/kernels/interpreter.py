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
    _remember_types()
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

    It looks for overflow with 64-bit twins of all sums and products, which compiled kernels do not have,
    through all of Triton's names at every launch, and once more wherever a kernel calls a function.
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

    patched: set[int] = set()  # modules of functions; a launch puts back only what it has patched itself

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (module := id(self.fn.__globals__)) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_builtin = patch_builtin
    interpreter.InterpretedFunction.__call__ = call


def _remember_types() -> None:
    """Make what every operation knows of a shape once: the interpreter makes it anew, from types of types,
    for each tensor and each of their types, which takes it longer than to compute."""
    from triton.language import core
    from triton.runtime import interpreter

    if getattr(core.block_type.__init__, "remembers", False):
        return
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    number_type, are_equal = interpreter._get_np_dtype, core.tuple.__eq__
    types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    number_types: dict[str, Any] = {}

    def new_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if not all(type(size) is int for size in sizes):
            make_type(self, element_ty, shape)
            return
        if (known := types.get((element_ty.name, sizes))) is None:
            make_type(self, element_ty, shape)
            known = types[element_ty.name, sizes] = dict(vars(self))
        self.__dict__.update(known, element_ty=element_ty)

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if (known := shapes.get(sizes)) is None:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    def number_type_of(tt_dtype: Any) -> Any:
        name = tt_dtype.name
        if name not in number_types:
            number_types[name] = number_type(tt_dtype)
        return number_types[name]

    def are_equal_sizes(self: Any, other: Any) -> Any:
        return self.values == other if type(other) is list else are_equal(self, other)

    new_type.remembers = True  # type: ignore[attr-defined]
    core.block_type.__init__, core.tensor.__init__ = new_type, new_tensor
    interpreter._get_np_dtype, core.tuple.__eq__ = number_type_of, are_equal_sizes
