"""Triton's key of its own files, which is part of the key of every kernel, kept on the disk.

Triton makes it anew in each process, of half a gigabyte. Beside the import of torch that takes a second,
because at every megabyte it waits for Python's interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from glob import iglob
from pathlib import Path

from tokenmill.cache_folder import digest_of_files, keep_text


def recall_key() -> Path | None:
    """Have Triton use the key that it made of the same files in an earlier process.

    Where there is none, returns where `make_key` should keep it. Imports Triton, which may be missing
    (ImportError).
    """
    from triton import __version__, knobs
    from triton.runtime import cache

    if isinstance(cache.triton_key, _Key):
        return None
    kept = Path(knobs.cache.dir) / f"tokenmill-key-{_digest_of_files(Path(cache.__file__).parents[1])}"
    try:
        key = kept.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        key = ""
    is_known = key.startswith(__version__)
    cache.triton_key = _Key((lambda: key) if is_known else cache.triton_key)
    return None if is_known else kept


def make_key(kept: Path) -> None:
    """Have Triton make its key now, and keep it for later processes."""
    from triton.runtime import cache

    key = cache.triton_key()
    kept.parent.mkdir(parents=True, exist_ok=True)
    keep_text(kept, key)


class _Key:
    """In place of Triton's function, which two threads would have made it twice."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make  # remembers
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            return self._make()


def _digest_of_files(triton: Path) -> str:
    """What changes with any file of which Triton makes its key, without reading them."""
    sources = [f"{part}/**/*.py" for part in ("compiler", "backends", "language")]
    return digest_of_files(
        triton / name
        for pattern in (*sources, "_C/libtriton.*", "runtime/cache.py")
        for name in iglob(pattern, root_dir=triton, recursive=True)  # follows links, as Triton does
    )
