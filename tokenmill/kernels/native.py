"""The C kernels of `cpu.c`: compiled once for this machine, kept in the user's cache folder, opened here.

Where no C compiler is found everything runs on the torch references, slower. The files beside this one
decide when a kernel is used; `native_calls.py` has the calls.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from tokenmill.cache_folder import cache_folder
from tokenmill.kernels import openmp

_log = logging.getLogger("tokenmill")
_SOURCE = Path(__file__).with_name("cpu.c")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# Sums may be reordered into vectors; infinities and NaN keep their meaning.
_FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno"]
_FLAGS += ["-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-ffp-contract=off"]


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The kernels for a dtype; None without a compiler, or for a dtype that has none. Compiles for a second
    when this machine's cache folder does not hold them yet."""
    if dtype not in _DTYPES or sys.platform != "linux":
        return None
    compiler = _compiler()
    if compiler is None:
        _log.info("no C compiler was found: small operations run on torch, slower; see the extra 'native'")
        return None
    try:
        kernels = ctypes.CDLL(str(_compiled(compiler, dtype)))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("the CPU kernels could not be compiled, small operations run on torch: %s", error)
        return None
    if (runtime := openmp.runtime()) is not None:
        kernels.use_team(runtime.GOMP_parallel, runtime.omp_get_max_threads)
    return kernels


def for_tensor(x: torch.Tensor) -> ctypes.CDLL | None:
    """The kernels that can read `x`; None if there are none."""
    return library(x.dtype) if x.device.type == "cpu" else None


def _compiler() -> list[str] | None:
    """The system's C compiler, or the one of the extra `native`."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def _compiled(compiler: list[str], dtype: torch.dtype) -> Path:
    """Path of the shared library, made if it is not there."""
    source = _SOURCE.read_bytes()
    facts = [*compiler, *_FLAGS, str(_DTYPES[dtype]), platform.machine(), _processor()]
    name = hashlib.sha256(source + "\n".join(facts).encode()).hexdigest()[:24]
    folder = cache_folder() or Path(tempfile.mkdtemp(prefix="tokenmill-"))  # a home that cannot be written to
    path = folder / f"cpu-{name}.so"
    if not path.exists():
        # Under another name first: a second process may be doing the same.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            command = [*compiler, *_FLAGS, f"-DBFLOAT16={_DTYPES[dtype]}", str(_SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            made.replace(path)
    return path


def _processor() -> str:
    """The instructions of this processor: `-march=native` means another thing on another machine."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return next((line for line in info.splitlines() if line.startswith(("flags", "Features"))), "")
