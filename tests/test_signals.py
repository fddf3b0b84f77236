"""Signals that wait: called at the end of the block, once each, and handlers are whose they were."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from tokenmill.signals import HeldSignals

pytestmark = pytest.mark.unit


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """The signals that handlers were called for: SIGTERM's and SIGALRM's note them; SIGINT's is Python's."""
    calls: list[int] = []
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number)),
        signal.SIGALRM: signal.signal(signal.SIGALRM, lambda number, frame: calls.append(number)),
    }
    yield calls
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]


def test_handlers_are_called_at_the_end_and_stay_whose_they_were(seen: list[int]) -> None:
    before = handlers()
    with HeldSignals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGALRM)
        assert not seen
    assert seen == [signal.SIGTERM, signal.SIGALRM]
    assert handlers() == before


def test_an_interrupt_is_raised_at_the_end(seen: list[int]) -> None:
    done = []

    def work() -> None:
        with HeldSignals():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_of_a_kind_does_not_wait(seen: list[int]) -> None:
    with HeldSignals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        signal.raise_signal(signal.SIGALRM)
        assert seen == [signal.SIGTERM]
    assert seen == [signal.SIGTERM, signal.SIGTERM, signal.SIGALRM]


def test_blocks_may_be_nested(seen: list[int]) -> None:
    with HeldSignals():
        with HeldSignals():
            signal.raise_signal(signal.SIGTERM)
        assert not seen
    assert seen == [signal.SIGTERM]


def test_an_error_in_the_block_does_not_swallow_the_signal(seen: list[int]) -> None:
    def work() -> None:
        with HeldSignals():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        work()
    assert seen == [signal.SIGTERM]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_not_python_s_stays(seen: list[int], handler: signal.Handlers) -> None:
    signal.signal(signal.SIGALRM, handler)
    with HeldSignals():
        assert signal.getsignal(signal.SIGALRM) == handler
    assert signal.getsignal(signal.SIGALRM) == handler


def test_a_handler_that_is_set_within_the_block_stays(seen: list[int]) -> None:
    def other(number: int, frame: object) -> None: ...

    with HeldSignals():
        signal.signal(signal.SIGTERM, other)
    assert signal.getsignal(signal.SIGTERM) == other


def test_other_threads_touch_nothing(seen: list[int]) -> None:
    before, within = handlers(), []

    def work() -> None:
        with HeldSignals():
            within.extend(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert within == before


def test_a_signal_while_handlers_are_put_in_place_leaves_none_behind(
    seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = handlers()
    look: Callable[[int], object] = signal.getsignal

    def interrupting(number: int) -> object:
        if number == signal.SIGALRM and look(signal.SIGTERM) not in before:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return look(number)

    monkeypatch.setattr(signal, "getsignal", interrupting)
    with pytest.raises(KeyboardInterrupt), HeldSignals():
        pass
    assert handlers() == before
