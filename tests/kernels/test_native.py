"""The C kernels of the CPU against the torch references, and life without a compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tokenmill.kernels import native
from tokenmill.kernels.activation import gated_silu, gated_silu_torch
from tokenmill.kernels.norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch
from tokenmill.kernels.rotary import rotate, rotate_torch

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(native.library(torch.float32) is None, reason="there is no C compiler"),
]
DTYPES = [torch.float32, torch.bfloat16]
# Sums of squares are added in another order, which may turn both of the roundings.
CLOSE = {torch.float32: {"rtol": 1e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-6, "atol": 1e-6}}


@pytest.fixture(autouse=True)
def random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """The library is looked for anew, and again after the test."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 384), (33, 1000), (2000, 64)])
def test_norms(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual, weight = (torch.randn(*size).to(dtype) for size in (shape, shape, shape[1:]))
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_torch(x, weight, 1e-6), **CLOSE[dtype])
    ours, theirs = (call(x, residual, weight, 1e-6) for call in (add_rms_norm, add_rms_norm_torch))
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[0], theirs[0], **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_in_a_wider_product(dtype: torch.dtype) -> None:
    qkv = torch.randn(7, 10, 64).to(dtype)
    weight = torch.randn(64).to(dtype)
    heads = qkv[:, 6:8]
    assert not heads.is_contiguous()
    torch.testing.assert_close(
        rms_norm(heads, weight, 1e-5), rms_norm_torch(heads, weight, 1e-5), **CLOSE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (5, 1024), (700, 88)])
def test_gated_silu(dtype: torch.dtype, rows: int, size: int) -> None:
    x = torch.randn(rows, 2 * size).to(dtype) * 20
    x[0, 0], x[0, 1] = -200, 200
    torch.testing.assert_close(gated_silu(x), gated_silu_torch(x), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (80, 40), (64, 16)])
def test_rotation_is_the_same_bit_for_bit(dtype: torch.dtype, head_dim: int, half: int) -> None:
    qkv = torch.randn(40, 9, head_dim).to(dtype)
    angles = torch.rand(40, half) * 100
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k = qkv[:, :5], qkv[:, 5:7]
    for ours, theirs in zip(rotate(q, k, cos, sin), rotate_torch(q, k, cos, sin), strict=True):
        assert torch.equal(ours, theirs)


def test_infinities_and_nan_stay_what_they_are() -> None:
    x = torch.tensor([[1.0, torch.inf, 2.0, 3.0], [torch.nan, 1.0, 1.0, 1.0]]).to(torch.bfloat16)
    weight = torch.ones(4).to(torch.bfloat16)
    assert torch.equal(
        rms_norm(x, weight, 1e-6).isnan(), torch.tensor([[False, True, False, False], [True] * 4])
    )
    assert gated_silu(x).isnan().tolist() == [[False, True], [True, False]] or gated_silu(x)[1, 0].isnan()


def test_no_rows_is_no_work() -> None:
    empty = torch.empty(0, 64)
    assert rms_norm(empty, torch.ones(64), 1e-6).shape == (0, 64)
    assert gated_silu(empty).shape == (0, 32)


def test_the_pool_of_workers_is_the_one_of_torch() -> None:
    """A second OpenMP runtime in the process would fight torch's own for the cores."""
    code = (
        "import torch\n"
        "from tokenmill.kernels import native\n"
        "def runtimes():\n"
        "    lines = open('/proc/self/maps').read().splitlines()\n"
        "    return {line.split()[-1] for line in lines if 'omp' in line.split()[-1].rpartition('/')[2]}\n"
        "before = runtimes()\n"
        "assert native.library(torch.float32)\n"
        "assert runtimes() == before, runtimes()\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_as_many_workers_as_torch_has() -> None:
    code = (
        "import os, torch\n"
        "from tokenmill.kernels import native, native_calls\n"
        "kernels, x = native.library(torch.float32), torch.ones(4000, 512)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "for number in (1, 3):\n"
        "    torch.set_num_threads(number)\n"
        "    native_calls.gated_silu(kernels, x)\n"
        "    assert len(os.listdir('/proc/self/task')) == before + number - 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    monkeypatch.setattr(native, "_compiler", lambda: None)
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert native.library(torch.float32) is None
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm_torch(x, weight, 1e-6))


def test_a_broken_compiler_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, forgotten: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_compiler", lambda: ["false"])
    assert native.library(torch.float32) is None
    assert "could not be compiled" in caplog.text


def test_compiled_once_for_all_processes(
    monkeypatch: pytest.MonkeyPatch, forgotten: None, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library(torch.bfloat16) is not None
    (made,) = (tmp_path / "tokenmill").iterdir()
    native.library.cache_clear()
    stamp = made.stat().st_mtime_ns
    assert native.library(torch.bfloat16) is not None
    assert made.stat().st_mtime_ns == stamp


def test_a_folder_that_cannot_be_written_to_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, forgotten: None, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native.library(torch.float32) is not None
