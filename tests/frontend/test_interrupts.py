"""The handler of Ctrl-C: first noted, then raised, gone afterwards, and nobody else's is touched."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tokenmill.frontend.interrupts import Interrupts

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_is_noted_and_the_second_is_raised() -> None:
    wakes: list[None] = []
    with Interrupts(lambda: wakes.append(None)) as interrupts:
        assert not interrupts.happened
        signal.raise_signal(signal.SIGINT)
        assert interrupts.happened
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(wakes) == 1
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_another_thread_receives_is_noted_soon() -> None:
    with Interrupts(lambda: None) as interrupts:
        thread = threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,))
        thread.start()
        thread.join()
        time.sleep(0)
        assert interrupts.happened


def test_a_handler_of_somebody_else_stays() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with Interrupts(lambda: None) as interrupts:
        signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGINT]
    assert not interrupts.happened


def test_other_threads_touch_nothing() -> None:
    handlers = []

    def work() -> None:
        with Interrupts(lambda: None):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
