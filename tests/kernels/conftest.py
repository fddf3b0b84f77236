"""Fixtures of the kernel tests."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

_FOLDER = Path(__file__).parent
_INTERPRETER = runpy.run_path(str(_FOLDER / "interpreter.py"))
_INTERPRETER["choose"]()


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Where Triton kernels run: "cuda", or "cpu" in the interpreter."""
    return str(_INTERPRETER["device"]())


@pytest.fixture(scope="session")
def ragged() -> SimpleNamespace:
    """The functions of `attention/ragged.py`."""
    return SimpleNamespace(**runpy.run_path(str(_FOLDER.parent / "attention" / "ragged.py")))


@pytest.fixture(scope="session")
def load_on_cpu() -> Callable[[str], ModuleType]:
    """`load_on_cpu(name)`: a fresh copy of a module of kernels in Gluon that runs on the CPU."""
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    load_module = runpy.run_path(str(_FOLDER / "gluon_on_cpu.py"))["load_module"]
    kernels = _FOLDER.parents[1] / "tokenmill" / "kernels"

    def load(name: str) -> ModuleType:
        module: ModuleType = load_module(kernels / f"{name}.py")
        return module

    return load


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that the kernels allocate holds NaN until they write it."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(torch.nan))
