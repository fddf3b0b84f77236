"""Fixtures of the attention tests."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

_FOLDER = Path(__file__).parent
_INTERPRETER = runpy.run_path(str(_FOLDER.parent / "kernels" / "interpreter.py"))
_INTERPRETER["choose"]()


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Where Triton kernels run: "cuda", or "cpu" in the interpreter."""
    return str(_INTERPRETER["device"]())


@pytest.fixture(scope="session")
def ragged() -> SimpleNamespace:
    """The functions of `ragged.py`."""
    return SimpleNamespace(**runpy.run_path(str(_FOLDER / "ragged.py")))
