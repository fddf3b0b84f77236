"""Makes the import of torch short, which is most of a start.

It is Python code of 1,000 modules. Where nobody keeps the byte code each start compiles them anew, for
seconds; and while they run, one core is busy and what the GPU's libraries do first can be done on another.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokenmill.cache_folder import cache_folder
from tokenmill.garbage import make_old, uncollected


@contextmanager
def quick_imports(*, for_gpu: bool) -> Iterator[None]:
    """A block that imports torch; with `for_gpu`, a GPU of this process will be used afterwards."""
    thread = threading.Thread(target=_prepare_gpu, name="tokenmill-prepare", daemon=True)
    if for_gpu:
        thread.start()
    try:
        if "torch" in sys.modules:
            yield
        else:
            with uncollected(), kept_byte_code("torch"):  # a tenth of the time would go to the collector
                yield
                make_old()
    finally:
        if for_gpu:
            thread.join()


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
    before = sys.dont_write_bytecode, sys.pycache_prefix
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder / "bytecode")
    try:
        yield
    finally:
        sys.dont_write_bytecode, sys.pycache_prefix = before


def _lacks_byte_code(package: str) -> bool:
    if package in sys.modules:
        return False
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return False
    return not Path(importlib.util.cache_from_source(spec.origin)).exists()


def _prepare_gpu() -> None:
    """Wake the driver, and let Triton compute the key of its kernel cache."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # no GPU
    driver.cuInit(0)
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()  # reads the whole compiler, half a second, and is remembered
