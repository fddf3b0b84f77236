"""Threads take turns more often within a block, however many overlap, and as often as before behind all."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

import pytest

from tokenmill.switching import switching_often

pytestmark = pytest.mark.unit


def test_the_interval_is_short_within_and_what_it_was_behind() -> None:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(0.02)
    try:
        with contextlib.suppress(ValueError), switching_often():
            assert sys.getswitchinterval() < 0.001
            raise ValueError
        assert sys.getswitchinterval() == pytest.approx(0.02)
    finally:
        sys.setswitchinterval(usual)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_a_forked_process_has_the_interval_of_before() -> None:
    """Whatever threads were in the middle of."""
    usual = sys.getswitchinterval()
    with switching_often():
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.getswitchinterval() == pytest.approx(usual) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_blocks_of_several_threads_overlap() -> None:
    usual = sys.getswitchinterval()
    entered, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with switching_often():
            entered.set()
            assert may_leave.wait(10)

    thread = threading.Thread(target=other)
    with switching_often():
        thread.start()
        assert entered.wait(10)
    assert sys.getswitchinterval() < usual  # the other one is still within
    may_leave.set()
    thread.join(10)
    assert sys.getswitchinterval() == pytest.approx(usual)
