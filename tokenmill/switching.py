"""How soon a thread gets Python's interpreter back from another one that computes.

Usually after 5 milliseconds. A thread that launches kernels lets go of it some hundred times for each step
that it captures, so beside a thread of the caller's that computes, a capture of 10 milliseconds takes 200.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 5e-5
_lock = threading.Lock()
_num_blocks, _usual = 0, 0.0  # that threads are in now, and the interval outside of them


@contextmanager
def switching_often() -> Iterator[None]:
    """Within the block threads take turns a hundred times as often. Blocks may overlap in several threads."""
    global _num_blocks, _usual
    with _lock:
        if _num_blocks == 0:
            _usual = sys.getswitchinterval()
            sys.setswitchinterval(_SECONDS)
        _num_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _num_blocks -= 1
            if _num_blocks == 0:
                sys.setswitchinterval(_usual)


def _forget() -> None:
    """In a forked process: the other threads are gone with their blocks, and whoever held the lock."""
    global _lock, _num_blocks
    _lock = threading.Lock()
    if _num_blocks:
        sys.setswitchinterval(_usual)
    _num_blocks = 0


if hasattr(os, "register_at_fork"):  # else this system forks no processes
    os.register_at_fork(after_in_child=_forget)
