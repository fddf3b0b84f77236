"""Notices that work stands still: counts running time without a step, and says where every thread is then.

Time counts in ticks of a thread of its own, so that a machine that slept, or a process that was stopped, has
lost one tick and no more. What follows a stall is for the launcher of the core to decide.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Protocol

from tokenmill.errors import EngineDead

_TICK_SECONDS = 1.0
_TICKS_PER_TIMEOUT = 8  # at least, so that short timeouts are kept, too
# While the first steps run, kernels may still be compiled.
_PATIENCE_AT_FIRST = 4
_FIRST_STEPS = 3
_DEBUGGERS = ("bdb.py", "pydevd.py")


class Pulse:
    """What a loop shows of itself to other threads, in plain attributes; only the loop's thread writes."""

    def __init__(self) -> None:
        self.num_steps = 0  # taken in
        # Whether it does nothing that a step could be expected of: it sleeps, or answers a call.
        self.is_resting = True
        self.awaits_step = False  # whether it waits for the result of a step

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """A block that may take as long as it likes."""
        before, self.is_resting = self.is_resting, True
        try:
            yield
        finally:
            self.is_resting = before


class Watched(Protocol):
    """What a watchdog needs of a loop."""

    @property
    def pulse(self) -> Pulse: ...
    @property
    def num_requests(self) -> int: ...


class Watchdog:
    """Watches a loop in a daemon thread until it stalls or `close` is called."""

    def __init__(
        self, loop: Watched, seconds: float | None, *, stalled: Callable[[EngineDead], object]
    ) -> None:
        """`stalled` is called once, by the watching thread, after `seconds` without a step; 0: never."""
        self._loop = loop
        self._seconds = seconds or 0.0
        self._stalled = stalled
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tokenmill-watchdog", daemon=True)
        if self._seconds:
            self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        tick = min(_TICK_SECONDS, self._seconds / _TICKS_PER_TIMEOUT)
        pulse, seen, quiet = self._loop.pulse, 0, 0.0
        while not self._closed.wait(tick):
            quiet += tick
            if pulse.is_resting or pulse.num_steps != seen:
                seen, quiet = pulse.num_steps, 0.0
            elif quiet >= self._seconds * (_PATIENCE_AT_FIRST if seen < _FIRST_STEPS else 1):
                if _is_debugged():
                    quiet = 0.0
                    continue
                self._stalled(self._stall(quiet))
                return

    def _stall(self, quiet: float) -> EngineDead:
        return EngineDead(
            f"the engine stalled: no step finished for {quiet:.3g} seconds of running time, and "
            f"{self._loop.num_requests} requests wait (watchdog_timeout={self._seconds:g}; raise it if a "
            f"step may take that long; 0 turns it off); stacks of all threads:\n{stacks()}"
        )


def stacks() -> str:
    """Where every thread of this process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


def _is_debugged() -> bool:
    """Whether somebody looks at a thread that a debugger holds."""
    debuggers = [name for name in ("bdb", "pydevd") if name in sys.modules]
    return bool(debuggers) and any(
        frame_.f_code.co_filename.endswith(_DEBUGGERS)
        for frame in sys._current_frames().values()
        for frame_, _ in traceback.walk_stack(frame)
    )
