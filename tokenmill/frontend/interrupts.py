"""Ctrl-C while a call waits for its results: noted, so that the call can end in good order.

Owns the handler of SIGINT for as long as the main thread waits, and nothing else: where somebody has put a
handler of their own, or in other threads, nothing changes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """Within the block, the first Ctrl-C calls `wake`; a second one is a KeyboardInterrupt at once."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called between any two operations of the waiting thread, so it must not take a lock."""
        self.happened = False
        self._wake = wake
        self._is_installed = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.happened:
            raise KeyboardInterrupt
        self.happened = True
        self._wake()
