"""Who is told that work takes long, and who is not."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from tokenmill.grammar.time_limits import TimeLimits

pytestmark = pytest.mark.unit


@pytest.fixture
def told() -> queue.Queue[tuple[str, str]]:
    return queue.Queue()


@pytest.fixture
def limits(told: queue.Queue[tuple[str, str]]) -> TimeLimits[str]:
    """A short and a long one, in this order or another."""
    return TimeLimits(
        (0.06, lambda work: told.put(("long", work))), (0.02, lambda work: told.put(("short", work)))
    )


def take(told: queue.Queue[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    return [told.get(timeout=10) for _ in range(count)]


def test_each_limit_is_told_once(limits: TimeLimits[str], told: queue.Queue[tuple[str, str]]) -> None:
    with limits.watch("a"):
        assert take(told, 2) == [("short", "a"), ("long", "a")]
        time.sleep(0.1)
    with limits.watch("b"):  # after a while in which there was nothing to do
        assert take(told, 2) == [("short", "b"), ("long", "b")]
    assert told.empty()
    limits.close()


def test_work_that_ends_is_not_told(limits: TimeLimits[str], told: queue.Queue[tuple[str, str]]) -> None:
    with limits.watch("long work"):
        for _ in range(1000):
            with limits.watch("short work"):
                pass
        assert take(told, 2) == [("short", "long work"), ("long", "long work")]
    with pytest.raises(ZeroDivisionError), limits.watch("broken work"):
        _ = 1 / 0
    time.sleep(0.1)
    assert told.empty()
    limits.close()


def test_pieces_of_work_side_by_side_have_limits_of_their_own(
    limits: TimeLimits[str], told: queue.Queue[tuple[str, str]]
) -> None:
    is_done = threading.Event()

    def work(name: str) -> None:
        with limits.watch(name):
            is_done.wait(10)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    found = take(told, 6)
    is_done.set()
    for thread in threads:
        thread.join()
    for name in "abc":
        assert [limit for limit, work in found if work == name] == ["short", "long"]
    limits.close()


def test_without_a_thread_nobody_is_told_until_there_is_one(
    limits: TimeLimits[str], told: queue.Queue[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", fail)
        with limits.watch("a"):
            time.sleep(0.05)
    assert told.empty()
    with limits.watch("b"):
        assert take(told, 2) == [("short", "b"), ("long", "b")]
    limits.close()


def test_one_that_cannot_be_told_keeps_nobody_else_from_it(told: queue.Queue[tuple[str, str]]) -> None:
    def fail(work: str) -> None:
        raise RuntimeError("can't start new thread")

    limits: TimeLimits[str] = TimeLimits((0.01, fail), (0.02, lambda work: told.put(("long", work))))
    with limits.watch("a"):
        assert take(told, 1) == [("long", "a")]
    limits.close()


def test_the_thread_ends_with_its_owner(limits: TimeLimits[str]) -> None:
    others = set(threading.enumerate())
    with limits.watch("a"):
        [thread] = set(threading.enumerate()) - others
    limits.close()
    thread.join(10)
    assert not thread.is_alive()
