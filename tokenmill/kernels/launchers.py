"""Triton's launchers, each with the function that it was built with.

For every list of argument types Triton has a C module whose function launches kernels, all of one name. When
Python loads one that the process has loaded before, it puts that function into whichever module of the name
was loaded last. So of two threads that load at the same time, one may be left with the launcher of the other,
and its kernel is launched with arguments that are taken for something else.
"""

from __future__ import annotations

import functools
import threading
from types import ModuleType

from triton.runtime import build


@functools.cache
def keep_apart() -> None:
    """From now on, all of this process are loaded one at a time, into modules that nobody else is given."""
    load, lock = build._load_module_from_path, threading.Lock()

    def load_apart(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with lock:
            vars(own).update(vars(load(name, path)))
        return own

    build._load_module_from_path = load_apart
