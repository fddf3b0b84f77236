"""How long the device had steps to run, and how long it had none although requests were there."""

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
