"""Where what was made once for this user stays for the next start: compiled kernels, Python's byte code."""

from __future__ import annotations

import os
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
