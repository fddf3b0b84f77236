"""Triton's keys of functions, the same in whatever order functions are looked at.

A kernel is found on the disk by a key of its function. Triton makes that of the source, of the keys of the
functions that it calls, and of the constants that these were known to use: of those whose keys had been asked
for before, that is, while others' constants were left out. So a start that launches the same kernels in
another order would look for some under another key, and compile them again.
"""

from __future__ import annotations

import functools
import threading

from triton.runtime.jit import JITCallable


@functools.cache
def settle_keys() -> None:
    """From now on in this process, a key for which others were made first is made once more, with theirs."""
    make, lock = JITCallable.cache_key.fget, threading.RLock()
    num_made = 0

    def settled(function: JITCallable) -> str:
        nonlocal num_made
        with lock:
            if function.hash is None:
                before = num_made
                make(function)
                if num_made != before:
                    function.hash = None
                    make(function)
                num_made += 1
            return str(function.hash)

    JITCallable.cache_key = property(settled)
