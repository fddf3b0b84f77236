"""Launches within a `ParallelCompilation` only compile; the same launches afterwards run what it compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.slow]


def test_kernels_compile_side_by_side_and_run_later(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_in_parallel.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kernels = ["_rms_norm_kernel", "_add_rms_norm_kernel", "_gated_silu_kernel"]
    assert found["skipped"]
    assert found["kernels"] == len(kernels)
    assert found["compiled"] == sorted(kernels)
    assert found["compiled again"] == 0
    assert found["launched"] == kernels * 2
    assert all(name.startswith("tokenmill-compile") for name in found["threads"])
