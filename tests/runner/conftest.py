"""Fixtures of the runner's tests."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

_INTERPRETER = runpy.run_path(str(Path(__file__).parents[1] / "kernels" / "interpreter.py"))
_INTERPRETER["choose"]()


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Where Triton kernels run: "cuda", or "cpu" in the interpreter."""
    return str(_INTERPRETER["device"]())
