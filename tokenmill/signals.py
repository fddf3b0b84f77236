"""Signals that wait until something is done whole: half a message, or a row counted and not written, is worse
than a handler that is called a moment later.

Owns the handlers of signals within its blocks, in the main thread, the only one that Python calls them in.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# Those by which a user, a system or a time limit ends what runs.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


class HeldSignals:
    """Within the block, signals with handlers of Python's are only noted; at its end the handlers are called.

    A second signal of the same number does not wait. Blocks may be nested. In other threads nothing changes.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: list[int] = []
        self._holds = True

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _ENDING:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # a signal that came before its handler was ours
            self._put_back()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()
        for number in self._noted:
            self._handlers[number](number, None)

    def _put_back(self) -> None:
        self._holds = False  # whatever interrupts this, the rest of them do as the caller's do
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._holds and number not in self._noted:
            self._noted.append(number)
        else:
            self._handlers[number](number, frame)
