"""Room for the recursion of grammar libraries, which end the process where a thread's stack is too small."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

# For `references.MAX_LEVELS`, of which llguidance takes 4 KiB each; memory that is not used is not taken.
_STACK_BYTES = 128 * 2**20
_setting = threading.Lock()  # the size is one for all threads that start

Result = TypeVar("Result")


@contextmanager
def deep_stacks() -> Iterator[None]:
    """A block in which threads start with room for deep recursion."""
    with _setting:
        before = threading.stack_size(_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


def run_deep(work: Callable[[], Result]) -> Result:
    """What a function gives, called in a thread with room for deep recursion."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenmill-grammar") as threads:
        with deep_stacks():
            future = threads.submit(work)
        return future.result()
