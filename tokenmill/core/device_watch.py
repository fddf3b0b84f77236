"""How long the device had steps to run, or had none although requests were there; what a step takes."""

from __future__ import annotations

import time

from tokenmill.core.deadlines import Clock


class DeviceWatch:
    """Adds up seconds; told by the loop whenever that may have changed.

    A step counts as running from its launch until its result is taken in. So what is called idle was idle for
    certain, and the device may have been so for longer: between the end of a step and the look at its result.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self._state: str | None = None
        self._seconds = {"busy": 0.0, "idle": 0.0}

    def note(self, *, has_steps: bool, has_requests: bool) -> None:
        """From now on the device has steps or not, and there are requests that could have one or not."""
        state = "busy" if has_steps else "idle" if has_requests else None
        if state != self._state:
            self._add_up()
            self._state = state

    def seconds(self) -> dict[str, float]:
        """Seconds `busy` and `idle` until now."""
        self._add_up()
        return dict(self._seconds)

    def _add_up(self) -> None:
        now = self._clock()
        if self._state is not None:
            self._seconds[self._state] += now - self._since
        self._since = now


class StepClock:
    """What a step takes, by the time between two results where the device always had another step to run."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.seconds = 0.001  # a guess, until it is known
        self._clock = clock
        self._last: float | None = None

    def collected(self, *, is_steady: bool) -> None:
        """A result has come; `is_steady` if as many steps were in flight as usual."""
        now = self._clock()
        if is_steady and self._last is not None:
            self.seconds = max(now - self._last, 1e-5)
        self._last = now if is_steady else None
