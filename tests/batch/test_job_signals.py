"""Signals and jobs: what they end is whole, and none is lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.batch.row_files import SHORT, capitals, read, write
from tokenmill import Engine
from tokenmill.batch import command
from tokenmill.batch.figures import Figures
from tokenmill.batch.job import BatchJob
from tokenmill.batch.line_file import LineFile
from tokenmill.cli import main

pytestmark = pytest.mark.cpu


@pytest.fixture
def job(tmp_path: Path, tiny_engine: Engine) -> Callable[[], BatchJob]:
    """Makes a job of 300 rows, of which one in 50 is like the first and one in 40 fails."""
    rows = capitals(300)
    for number in range(0, 300, 50):
        rows[number]["prompt"] = rows[0]["prompt"]
    for number in range(7, 300, 40):
        rows[number]["sampling_params"] = {"max_new_tokens": -1}
    source = write(tmp_path / "in.jsonl", rows)
    return lambda: BatchJob(source, tmp_path / "out.jsonl", engine=tiny_engine, sampling_params=SHORT)


@pytest.mark.parametrize(
    ("place", "at"),
    [
        ((Figures, "finished"), 60),
        ((Figures, "duplicate"), 2),
        ((Figures, "failed"), 3),
        ((LineFile, "add"), 60),
    ],
)
def test_as_many_rows_are_counted_as_written_wherever_a_signal_comes(
    job: Callable[[], BatchJob],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: tuple[type, str],
    at: int,
) -> None:
    """It used to come between the two, where it ended the work on a row half-way."""
    plain, count = getattr(*place), itertools.count(1)

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        if next(count) == at:
            signal.raise_signal(signal.SIGINT)
        return plain(*arguments, **keywords)

    first = job()
    with monkeypatch.context() as patch:
        patch.setattr(*place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.run()
    rows = first.summary()["rows"]
    assert 0 < rows["done"] < 300
    assert len(read(tmp_path / "out.jsonl")) == rows["done"]
    again = job()
    again.run()
    assert again.summary()["rows"]["done"] == len(read(tmp_path / "out.jsonl")) == 300


def test_replayed_rows_are_counted_as_written(
    job: Callable[[], BatchJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job().run()
    replayed, add, added = Figures.replayed, LineFile.add, []

    def interrupted(figures: Figures, count: int) -> None:
        if not added:
            signal.raise_signal(signal.SIGTERM)
        replayed(figures, count)

    def noted(file: LineFile, index: int, line: bytes) -> None:
        added.append(index)
        add(file, index, line)

    before = signal.signal(signal.SIGTERM, command._interrupt)
    again = job()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Figures, "replayed", interrupted)
            patch.setattr(LineFile, "add", noted)
            with pytest.raises(KeyboardInterrupt):
                again.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert 0 < again.summary()["rows"]["done"] == len(added) < 300
    assert len(read(tmp_path / "out.jsonl")) == 300, "what was there before stays until there is more"


@pytest.fixture
def interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], tuple[int, Path]]]:
    """Runs the command, and sends its process a signal once something is in the output."""

    def run(number: int) -> tuple[int, Path]:
        source = write(tmp_path / "in.jsonl", capitals(400))
        output = tmp_path / "out.jsonl"

        def send() -> None:
            while not (output.exists() and output.stat().st_size):
                time.sleep(0.01)
            os.kill(os.getpid(), number)

        thread = threading.Thread(target=send)
        thread.start()
        code = main(["batch", str(source), "-o", str(output), "--max-new-tokens", "12"])
        thread.join()
        return code, output

    return run


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_in_good_order(
    interrupted: Callable[[int], tuple[int, Path]],
    capsys: pytest.CaptureFixture[str],
    number: int,
    code: int,
) -> None:
    before = signal.getsignal(number)
    given, output = interrupted(number)
    told = capsys.readouterr()
    assert given == code
    assert "the same command goes on" in told.err
    done = json.loads(told.out)["rows"]
    assert 0 < done["computed"] < 400
    assert len(read(output)) == done["done"]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_in_a_destructor_is_not_lost(number: signal.Signals) -> None:
    """Python ignores what is raised there."""

    class Ended:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def run() -> None:
        with command._signals():
            Ended()
            assert signal.getsignal(number) == command._interrupt, "the next one must not leave at once"
            time.sleep(30)

    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt) as raised:
        run()
    assert isinstance(raised.value, command._Terminated) == (number == signal.SIGTERM)
    assert sys.unraisablehook == hook


def test_a_signal_that_a_shell_has_made_it_ignore_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with command._signals():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == command._interrupt
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN, "it ends nothing now either"
            assert signal.getsignal(signal.SIGTERM) == command._leave
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
