"""The OpenMP runtime that torch has loaded. Its workers serve torch and our C kernels.

Each thread that computes gets workers of its own. A worker that waits for work does so actively while the
process has no more of them than there are processors; with more, it goes to sleep at once, and steps take up
to twice as long. So there must be no second runtime, and workers of threads that rest are released.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

_NEEDED = ("GOMP_parallel", "omp_get_max_threads", "omp_set_num_threads")
_PAUSE_SOFT = 1  # omp_pause_soft of OpenMP 5.0


def runtime() -> ctypes.CDLL | None:
    """The runtime; None where none is loaded, or one without the functions that are needed."""
    return _find() if "torch" in sys.modules else None


def release_workers() -> None:
    """End the workers of the calling thread. They come again, in some 0.1 ms, when it computes again."""
    found = runtime()
    if found is not None and hasattr(found, "omp_pause_resource_all"):
        found.omp_pause_resource_all(_PAUSE_SOFT)


@cache
def _find() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.rpartition(" ")[2]
        if "omp" in Path(path).name:
            found = ctypes.CDLL(path)
            if all(hasattr(found, name) for name in _NEEDED):
                return found
    return None
