"""Where what was made once for this user stays for the next start: compiled kernels, Python's byte code.

And what tells whether it is still true, where it was made of files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def cache_folder() -> Path | None:
    """`$XDG_CACHE_HOME/tokenmill`, by default `~/.cache/tokenmill`, made if needed; None if it cannot be."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "tokenmill"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def keep_text(path: Path, text: str) -> None:
    """Have a file hold the text, or be as it was (OSError): who reads it meanwhile sees one or the other."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)  # the disk may be full


def digest_of_files(files: Iterable[Path]) -> str:
    """What changes with the size or the time of any file, in whatever order they come; none is read.

    A link that leads nowhere, as some editors put beside a file, counts by its name.
    """
    known = sorted((str(path), *_size_and_time(path)) for path in files)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        file = path.stat()
    except OSError:  # also of a file that has gone since it was listed
        return -1, -1
    return file.st_size, file.st_mtime_ns
