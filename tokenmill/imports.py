"""Makes the import of torch short, which is most of a start.

It is Python code of 1,000 modules. Where nobody keeps the byte code each start compiles them anew, for
seconds; and while they run, one core is busy and what the GPU's libraries do first can be done on another.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from tokenmill.cache_folder import cache_folder
from tokenmill.garbage import make_old, uncollected
from tokenmill.triton_key import make_key, recall_key

_importing_transformers = threading.Lock()
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the second one on Windows' Linux


def may_use_gpu() -> bool:
    """Whether there is a GPU of NVIDIA, and a torch that can use it; without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or not any(device.exists() for device in _GPU_DEVICES):
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return Path(spec.origin).with_name("lib").joinpath("libtorch_cuda.so").exists()


def import_transformers() -> Any:
    """transformers, which is imported by one thread at a time.

    At the end of its import it puts a module that knows its contents in its own place, which a thread that
    imported it meanwhile would not see.
    """
    with _importing_transformers:
        import transformers
    return transformers


@contextmanager
def quick_imports(*, gpu: int | None = None) -> Iterator[None]:
    """A block that imports torch; `gpu` is the index of one that this process will use afterwards."""
    with nullcontext() if gpu is None else _preparing(gpu):
        if "torch" in sys.modules:
            yield
        else:
            with uncollected(), kept_byte_code("torch"):  # a tenth of the time would go to the collector
                yield
                make_old()


@contextmanager
def kept_byte_code(package: str) -> Iterator[None]:
    """What is imported in the block is compiled only once, also if Python was told to keep no byte code.

    Only where `package` came without byte code and Python would not write any (`python -B`,
    PYTHONDONTWRITEBYTECODE, as in many containers): then it goes to our folder, not beside the sources.
    """
    is_lost = sys.dont_write_bytecode and _lacks_byte_code(package)
    if not is_lost or (folder := cache_folder()) is None:
        yield
        return
    _redirection.begin(folder / "bytecode")
    try:
        yield
    finally:
        _redirection.end()


class _Redirection:
    """Python's settings for byte code, changed as long as any thread is in a block for which they must be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before: tuple[bool, str | None] = False, None

    def begin(self, folder: Path) -> None:
        with self._lock:
            if self._count == 0:
                self._before = sys.dont_write_bytecode, sys.pycache_prefix
                sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder)
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                sys.dont_write_bytecode, sys.pycache_prefix = self._before


_redirection = _Redirection()


def _lacks_byte_code(package: str) -> bool:
    if package in sys.modules:
        return False
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return False
    return not Path(importlib.util.cache_from_source(spec.origin)).exists()


@contextmanager
def _preparing(index: int) -> Iterator[None]:
    """What a GPU needs once is done beside the block."""
    if not may_use_gpu():
        yield
        return
    kept_key = None
    with suppress(Exception), kept_byte_code("triton"):  # where it matters somebody else says what is wrong
        kept_key = recall_key()
    thread = threading.Thread(target=_prepare, args=(index, kept_key), name="tokenmill-prepare", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _prepare(index: int, kept_key: Path | None) -> None:
    """Open the context that all libraries of the process share, and have Triton do what it does once."""
    with suppress(Exception):  # it comes again where somebody listens
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # half a second
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        if not hasattr(CudaUtils, "instance"):
            CudaUtils()  # for a first start a C compiler makes it, in a third of a second
    if kept_key is not None:
        with suppress(Exception):
            make_key(kept_key)
