"""What a job tells while it runs."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import struct
import sys
import termios
import threading
from itertools import pairwise

import pytest

from tokenmill.batch import progress as module
from tokenmill.batch.figures import Figures, Snapshot
from tokenmill.batch.progress import Progress, clock, fitted, parts_of, short

pytestmark = pytest.mark.unit


def snapshot(seconds: float = 20.0, **changes: int | float | None) -> Snapshot:
    values = {
        "seconds": seconds,
        "rows_done": 1234,
        "rows_total": 10_000,
        "prompt_tokens": 100_000,
        "cached_tokens": 25_000,
        "output_tokens": 40_000,
        "num_errors": 0,
        "seconds_left": 125.0,
    }
    return Snapshot(**{**values, **changes})  # type: ignore[arg-type]


def test_a_line_says_it_all() -> None:
    before = snapshot(10.0, prompt_tokens=0, output_tokens=30_000)
    line = fitted(parts_of(snapshot(num_errors=2), before), 200)
    assert line == "1,234/10,000 rows  2 errors  in 10k/s  out 1.0k/s  cached 25%  2:05 left"


@pytest.mark.parametrize("width", range(1, 90))
def test_a_line_fits_any_width(width: int) -> None:
    line = fitted(parts_of(snapshot(num_errors=2), None), width)
    assert len(line) <= width
    assert line.startswith("1,234/10,000 rows"[:width])
    if width >= 40:
        assert "2 errors" in line
        assert "took" in line


def test_what_is_not_known_is_not_told() -> None:
    line = fitted(parts_of(snapshot(rows_total=None, seconds_left=None, prompt_tokens=0), None), 200)
    assert line == "1,234 rows  in 0/s  out 2.0k/s  took 0:20"


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("wanted", [None, True])
def test_without_standard_error_nothing_is_shown(
    monkeypatch: pytest.MonkeyPatch, is_there: bool, wanted: bool | None
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if is_there else None)
    with Progress(Figures(), wanted=wanted):
        pass


def test_numbers_and_times_are_short() -> None:
    assert [short(n) for n in (0, 7.4, 999.4, 999.6, 1000, 9949, 9999, 34_567, 5.6e6, 9.9996e8)] == [
        "0", "7", "999", "1.0k", "1.0k", "9.9k", "10k", "35k", "5.6M", "1.0G",
    ]  # fmt: skip
    assert [clock(s) for s in (0, 7, 59.6, 750, 3600, 11_100, 200_000)] == [
        "0:00", "0:07", "1:00", "12:30", "1:00:00", "3:05:00", "2.3 days",
    ]  # fmt: skip


class Elapsed:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_on_a_terminal_one_line_is_written_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.01)
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    clock = Elapsed()
    figures = Figures(clock=clock)
    figures.started(num_rows=3)
    figures.duplicate(1)
    clock.now = 5.0
    with os.fdopen(writer, "w") as terminal, Progress(figures, stream=terminal):
        written = b""
        while b"\r1/3 rows" not in written:
            written += os.read(reader, 1000)
        figures.duplicate(2)
        while b"\r3/3 rows" not in written:
            written += os.read(reader, 1000)
    written += os.read(reader, 1000)
    os.close(reader)
    text = written.decode()
    assert text.count("\n") == 1
    assert text.endswith("3/3 rows  out 0/s  took 0:05\r\n")
    assert max(len(line.rstrip("\r\n")) for line in text.split("\r")) < 30


def test_elsewhere_the_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A job of eight hours, looked at every five seconds."""
    monkeypatch.setattr(module, "_LINE_SECONDS", 1e-4)
    caplog.set_level(logging.INFO, logger="tokenmill")
    clock = Elapsed()
    figures = Figures(clock=clock)
    figures.started(num_rows=10)
    times: list[float] = []
    ended = threading.Event()

    def look() -> None:
        times.extend([clock.now] * (len(caplog.records) - len(times)))
        clock.now += 5.0
        if clock.now > 8 * 3600:
            ended.set()

    with Progress(figures, stream=io.StringIO(), look=look):
        assert ended.wait(60)
    assert times[0] <= 15
    assert len([t for t in times if t <= 60]) <= 4
    assert 20 < len(times) < 120
    gaps = [after - before for before, after in pairwise(times)]
    assert max(before - after for before, after in pairwise(gaps)) <= 5, "it grows, as far as looks let it"
    assert caplog.messages[-1].startswith("the job ended: 0/10 rows")


def test_a_short_job_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tokenmill")
    stream = io.StringIO()
    figures = Figures()
    for wanted in (None, True, False):
        with Progress(figures, stream=stream, wanted=wanted):
            pass
    assert stream.getvalue() == ""
    assert not caplog.records


def test_a_terminal_that_goes_away_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.001)
    clock = Elapsed()
    figures = Figures(clock=clock)
    clock.now = 10.0
    stream = io.StringIO()
    stream.close()
    with Progress(figures, stream=stream, wanted=True):
        figures.duplicate(1)
    assert not [t for t in threading.enumerate() if t.name == "tokenmill-progress"]
