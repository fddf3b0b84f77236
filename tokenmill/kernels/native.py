"""The C kernels of `cpu.c`: compiled once for this machine, kept in the user's cache folder, called here.

Where no C compiler is found everything runs on the torch references, slower. The files beside this one
decide when a kernel is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger("tokenmill")
_SOURCE = Path(__file__).with_name("cpu.c")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# Sums may be reordered into vectors; infinities and NaN keep their meaning.
_FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno"]
_FLAGS += ["-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-ffp-contract=off"]


class _Caches(ctypes.Structure):
    """`struct caches`: keys and values of one layer, laid out alike."""

    _fields_ = [("keys", c_void_p), ("values", c_void_p)] + [
        (name, c_long)
        for name in ("stride_page", "stride_token", "stride_head", "page_size", "heads", "head_dim")
    ]


_SIGNATURES: dict[str, list[type]] = {
    "use_team": [c_void_p],
    "rms_norm": [c_void_p] * 5 + [c_long] * 5 + [c_float, c_int],
    "gated_silu": [c_void_p] * 2 + [c_long] * 2 + [c_int],
    "rotate": [c_void_p] * 4 + [c_long] * 6 + [c_int],
    "store": [ctypes.POINTER(_Caches)] + [c_void_p] * 3 + [c_long] * 5 + [c_int],
    "decode": [ctypes.POINTER(_Caches)] + [c_void_p] * 4 + [c_long] * 6 + [c_float, c_int],
}


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
    for name, arguments in _SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, None
    kernels.use_team(_start_of_torch_team())
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
    folder = _cache_folder()
    path = folder / f"cpu-{name}.so"
    if not path.exists():
        # Under another name first: a second process may be doing the same.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            command = [*compiler, *_FLAGS, f"-DBFLOAT16={_DTYPES[dtype]}", str(_SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            made.replace(path)
    return path


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "tokenmill"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="tokenmill-"))  # a home that cannot be written to
    return folder


def _processor() -> str:
    """The instructions of this processor: `-march=native` means another thing on another machine."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return next((line for line in info.splitlines() if line.startswith(("flags", "Features"))), "")


def _start_of_torch_team() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded; None leaves one thread.

    Sharing it matters: two pools of spinning workers would fight for the cores.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.rpartition(" ")[2]
        if "omp" in Path(path).name:
            runtime = ctypes.CDLL(path)
            if hasattr(runtime, "GOMP_parallel"):
                return ctypes.cast(runtime.GOMP_parallel, c_void_p).value
    return None


# ── calls ─────────────────────────────────────────────────────────────────────────────────────


def rms_norm(kernels: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As `norm.rms_norm_torch`, of `x` with two or three dimensions, the last one contiguous."""
    inner = x.shape[-2] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype)
    kernels.rms_norm(
        x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None,
        x.shape[0], inner, x.stride(0), x.stride(-2), x.shape[-1], epsilon, torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(
    kernels: ctypes.CDLL, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(norm of the sum, sum)`; both inputs contiguous."""
    out_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    num_rows, size = x_TD.shape
    kernels.rms_norm(
        x_TD.data_ptr(), residual_TD.data_ptr(), weight.data_ptr(), out_TD.data_ptr(), total_TD.data_ptr(),
        num_rows, 1, size, size, size, epsilon, torch.get_num_threads(),
    )  # fmt: skip
    return out_TD, total_TD


def gated_silu(kernels: ctypes.CDLL, gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """As `activation.gated_silu_torch`, of a contiguous tensor."""
    num_rows, width = gate_up_T2F.shape
    out_TF = torch.empty((num_rows, width // 2), dtype=gate_up_T2F.dtype)
    kernels.gated_silu(
        gate_up_T2F.data_ptr(), out_TF.data_ptr(), num_rows, width // 2, torch.get_num_threads()
    )
    return out_TF


def rotate(
    kernels: ctypes.CDLL, x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
) -> torch.Tensor:
    """The rotation of `rotary.rotate_torch` for queries or for keys; contiguous cosines and sines."""
    num_tokens, num_heads, head_dim = x_THD.shape
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype)
    kernels.rotate(
        x_THD.data_ptr(), cos_TR.data_ptr(), sin_TR.data_ptr(), out_THD.data_ptr(),
        num_tokens, num_heads, x_THD.stride(0), x_THD.stride(1), head_dim, cos_TR.shape[1],
        torch.get_num_threads(),
    )  # fmt: skip
    return out_THD


class PagedCaches:
    """Keys and values [N, B, K, D] of one layer as the kernels see them. Keeps the tensors alive."""

    def __init__(self, kernels: ctypes.CDLL, keys_NBKD: torch.Tensor, values_NBKD: torch.Tensor) -> None:
        assert keys_NBKD.stride() == values_NBKD.stride(), "keys and values must be laid out alike"
        assert keys_NBKD.stride(3) == 1
        self._kernels = kernels
        self._tensors = (keys_NBKD, values_NBKD)
        self._layout = _Caches(
            keys_NBKD.data_ptr(), values_NBKD.data_ptr(), *keys_NBKD.stride()[:3], *keys_NBKD.shape[1:]
        )

    def store(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Write token t to slot `slots_T[t]` (int64, page * B + offset)."""
        self._kernels.store(
            self._layout, k_TKD.data_ptr(), v_TKD.data_ptr(), slots_T.data_ptr(), len(slots_T),
            k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0), v_TKD.stride(1), torch.get_num_threads(),
        )  # fmt: skip

    def decode(
        self,
        q_RHD: torch.Tensor,
        page_table_RP: torch.Tensor,
        lengths_R: torch.Tensor,
        *,
        window: int | None,
        scale: float,
        out_RHD: torch.Tensor,
    ) -> None:
        """Attention of each row's last token, into the contiguous `out_RHD`; tables and lengths int32."""
        num_rows, num_heads, _ = q_RHD.shape
        self._kernels.decode(
            self._layout,
            q_RHD.data_ptr(), page_table_RP.data_ptr(), lengths_R.data_ptr(), out_RHD.data_ptr(),
            num_rows, num_heads // self._layout.heads, q_RHD.stride(0), q_RHD.stride(1),
            page_table_RP.stride(0), window or 0, scale, torch.get_num_threads(),
        )  # fmt: skip
