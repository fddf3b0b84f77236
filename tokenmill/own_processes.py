"""Processes that run a module of this very package, without a main guard in the program that starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def start_module(
    module: str, *arguments: str, passed: Sequence[int], stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Do `python -m module arguments`, with the descriptors `passed` open; `stdout` is as for `Popen`.

    Raises OSError where no process can be started.
    """
    package_parent = Path(__file__).resolve().parents[1]
    paths = [str(package_parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        # What just happens to lie in the current folder is nobody's (-P).
        [sys.executable, "-P", "-m", module, *arguments],
        pass_fds=passed,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # Ctrl-C is the parent's to handle
    )
