"""How long the device had steps."""

from __future__ import annotations

import pytest

from tokenmill.core.device_watch import DeviceWatch, StepClock

pytestmark = pytest.mark.unit


def test_seconds_add_up_by_what_there_was_to_do() -> None:
    now = 10.0
    watch = DeviceWatch(clock=lambda: now)
    assert watch.seconds() == {"busy": 0, "idle": 0}
    for seconds, has_steps, has_requests in (
        (5, False, False),  # nobody asks
        (1, False, True),  # the host plans the first step
        (4, True, True),
        (2, True, True),
        (0.5, False, True),
        (3, True, False),  # all have ended, but for a step in flight
        (7, False, False),
    ):
        watch.note(has_steps=has_steps, has_requests=has_requests)
        now += seconds
    assert watch.seconds() == {"busy": 9, "idle": 1.5}
    watch.note(has_steps=True, has_requests=True)
    now += 1
    assert watch.seconds() == {"busy": 10, "idle": 1.5}
    assert watch.seconds() == {"busy": 10, "idle": 1.5}


def test_a_step_takes_the_time_between_two_results_in_a_row() -> None:
    now = 10.0
    clock = StepClock(clock=lambda: now)
    for seconds, is_steady, expected in (
        (1, False, 0.001),  # nothing is known
        (5, True, 0.001),  # since something else
        (2, True, 2),
        (3, True, 3),
        (7, False, 3),  # the device waited, or many results were there already
        (9, True, 3),
        (0, True, 1e-5),
    ):
        now += seconds
        clock.collected(is_steady=is_steady)
        assert clock.seconds == expected
