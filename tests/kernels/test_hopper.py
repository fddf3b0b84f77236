"""Kernels compile for an H100 or H200 without one: registers suffice, and products use the tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return result


def test_no_register_is_spilled(compiled: dict[str, dict[str, Any]]) -> None:
    assert {name: facts["spills"] for name, facts in compiled.items()} == dict.fromkeys(compiled, 0)


def test_shared_memory_fits(compiled: dict[str, dict[str, Any]]) -> None:
    for name, facts in compiled.items():
        # Two decoding programs to a processor at least, of 228 KiB, less 1 KiB each.
        limit = 113 * 1024 if name.startswith("decode") else 227 * 1024
        assert facts["shared"] <= limit, name


def test_prefill_multiplies_with_warp_groups(compiled: dict[str, dict[str, Any]]) -> None:
    for name in ("prefill 64 window", "prefill 128", "prefill 256"):
        assert compiled[name]["HGMMA"] > 0, name


def test_decode_multiplies_on_tensor_cores(compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled["decode 64"]["HMMA"] > 0
    assert compiled["decode 128 split"]["HMMA"] > 0


def test_keys_and_values_are_fetched_ahead_in_wide_copies(compiled: dict[str, dict[str, Any]]) -> None:
    for name in ("decode 64", "decode 128 split", "prefill 64 window", "prefill 128", "prefill 256"):
        assert compiled[name]["wide_copies"] >= 16, name
