"""How many threads compute on a CPU: as many as find a processor of their own.

The threads of a step meet hundreds of times. Where other work holds a processor, the thread that should run
there comes late to every meeting while the others wait for it actively, and the step takes several times as
long as with one thread less, or even a hundred times as long. So the engine watches how long its threads
wait for a processor, makes do with fewer while they do, and tries more again now and then: for a moment
without a step first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tokenmill.kernels import openmp

_log = logging.getLogger("tokenmill")
# How often to look. A look reads a small file for each thread of the process, 0.01 ms each: rarely, where
# there are thousands.
LOOK_SECONDS = 0.1
_MOST_LOOKING = 0.01  # of the time
# Seconds that threads wait, together, in each second in which other work wants a processor as much as they
# do: 0.5 to 1 for each such processor. Beside work of a few milliseconds now and then it is below 0.2.
_CROWDED = 0.4
# Less may be a moment of other work. When more threads are tried again, one look is enough.
_CROWDED_SECONDS = 0.2
# Some turns of all who share a processor.
REHEARSAL_SECONDS = 0.02
_REHEARSED = 2**21  # numbers, of which each thread of torch's takes 2**15 or more
# Before more threads are tried again; twice as long after each time in vain.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0


class CpuThreads:
    """Sets the number of threads that compute for whoever calls `follow`, always the same thread."""

    def __init__(
        self,
        most: int,
        set_number: Callable[[int], object],
        seconds_waited: Callable[[], float],
        rehearse: Callable[[], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seconds_waited` tells how long these threads have waited for processors up to now; `rehearse` has
        them meet, as in a step, for `REHEARSAL_SECONDS`."""
        self._most = self._number = most
        self._set_number = set_number
        self._seconds_waited = seconds_waited
        self._rehearse = rehearse
        self._clock = clock
        self._is_new = True
        self._looked, self._waited = clock(), seconds_waited()
        self._next_look = self._looked + LOOK_SECONDS
        self._crowded_seconds = 0.0  # up to now, without a break
        self._is_trial = False
        self._pause = FIRST_PAUSE_SECONDS
        self._next_change = 0.0  # when more threads are tried, or, with all of them, are taken for granted

    def follow(self) -> None:
        """Look whether threads wait for processors, if it is time to. Call before each step."""
        now = self._clock()
        if self._is_new:
            self._is_new = False
            self._try(self._most)
            return
        if now < self._next_look:
            return
        seconds, waiting = self._look()
        self._next_look = now + max(LOOK_SECONDS, (self._clock() - now) / _MOST_LOOKING)
        if waiting > _CROWDED and self._number > 1:
            self._crowded_seconds += seconds
            if self._is_trial or self._crowded_seconds > _CROWDED_SECONDS:
                self._give_way(waiting)
            return
        self._crowded_seconds = 0.0
        self._is_trial = False
        if now < self._next_change:
            return
        if self._number < self._most:
            self._try(min(2 * self._number, self._most))
        else:
            self._pause = FIRST_PAUSE_SECONDS

    def _look(self) -> tuple[float, float]:
        """The seconds since the last look, and how many threads waited in them, on average."""
        now, waited = self._clock(), self._seconds_waited()
        seconds = now - self._looked
        waiting = (waited - self._waited) / seconds
        self._looked, self._waited = now, waited
        return seconds, waiting

    def _try(self, number: int) -> None:
        """Use so many threads if they find processors now."""
        self._use(number)
        self._looked, self._waited = self._clock(), self._seconds_waited()
        self._rehearse()
        _, waiting = self._look()
        if waiting > _CROWDED and number > 1:
            self._give_way(waiting)
        else:
            self._is_trial = True
            self._next_change = self._looked + self._pause

    def _give_way(self, waiting: float) -> None:
        """Use as many threads less as wait all the time."""
        self._use(self._number - min(max(1, round(waiting)), self._number - 1))
        self._is_trial = False
        self._next_change = self._looked + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    def _use(self, number: int) -> None:
        if number != self._number:
            _log.debug("%d threads compute instead of %d", number, self._number)
            self._set_number(number)
            self._number = number
        self._crowded_seconds = 0.0


def cpu_threads() -> CpuThreads | None:
    """For the current thread; None where there is but one processor, or no way to choose."""
    runtime, most = openmp.runtime(), torch.get_num_threads()
    if runtime is None or most == 1:
        return None
    return CpuThreads(most, runtime.omp_set_num_threads, _seconds_waited, _rehearse)


def _rehearse() -> None:
    values = torch.zeros(_REHEARSED)
    end = time.monotonic() + REHEARSAL_SECONDS
    while time.monotonic() < end:
        values.add_(1.0)


def _seconds_waited() -> float:
    """How long threads of this process, together, were ready to run and had no processor: this one and those
    that Python did not start. 0 where the system does not tell (proc(5), schedstat)."""
    others = {thread.native_id for thread in threading.enumerate()} - {threading.get_native_id()}
    total = 0
    for thread in os.listdir("/proc/self/task"):
        if int(thread) not in others:
            # It may have just ended, or too many files may be open.
            with contextlib.suppress(OSError, IndexError):
                total += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
    return total * 1e-9
