"""What was finished comes to the disk soon, and before an interrupt ends the job."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.batch import journal as journal_module
from tokenmill.batch.commits import Commits
from tokenmill.batch.journal import Journal
from tokenmill.batch.line_file import LineFile
from tokenmill.errors import JobStopped

pytestmark = pytest.mark.unit

KEY = b"k" * 16


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "journal")
    yield opened
    opened.close()


@pytest.fixture
def output(tmp_path: Path) -> Iterator[LineFile]:
    opened = LineFile(tmp_path / "out.jsonl")
    yield opened
    opened.close()


def add_row(journal: Journal, output: LineFile) -> None:
    journal.add(KEY, {"text": "a"})
    output.add(0, b"a\n")


def test_an_interrupt_comes_when_all_is_on_the_disk(
    journal: Journal, output: LineFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that comes while the job waits for the disk at its end, and once more."""
    synced = []

    def sync(number: int) -> None:
        for delay in (0.1, 0.2):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(0.5)
        synced.append(output.path.read_bytes())

    def run() -> None:
        with Commits(journal, [output]):
            add_row(journal, output)
            monkeypatch.setattr(journal_module, "_sync", sync)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert synced == [b"a\n"]
    assert output.num_waiting_bytes == 0
    path = journal.path
    journal.close()
    with contextlib.closing(Journal(path)) as again:
        assert again.find(KEY) is not None


def test_a_disk_that_is_slow_to_sync_holds_no_row_up(
    journal: Journal, output: LineFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed process loses does not depend on it."""
    begun, ended = threading.Event(), threading.Event()

    def sync(number: int) -> None:
        begun.set()
        ended.wait(60)

    monkeypatch.setattr(journal_module, "_sync", sync)
    with Commits(journal, [output]):
        assert begun.wait(60)
        add_row(journal, output)
        until = time.monotonic() + 60
        while not output.path.read_bytes() and time.monotonic() < until:
            time.sleep(0.01)
        assert output.path.read_bytes() == b"a\n"
        ended.set()


def test_a_disk_that_fails_to_sync_stops_the_job(
    journal: Journal, output: LineFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(number: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(journal_module, "_sync", sync)

    def run() -> None:
        with Commits(journal, [output]) as commits:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                commits.check()
                time.sleep(0.01)

    with pytest.raises(JobStopped, match="Input/output error"):
        run()
