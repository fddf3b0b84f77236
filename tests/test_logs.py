"""Log lines that somebody wants are seen, once, whatever logging the program has set up, or none."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill as sgl
from tokenmill import logs

ROOT = Path(__file__).parent.parent
_log = logging.getLogger("tokenmill")


def set_up_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that has set up no logging."""
    for logger in (_log, logging.getLogger()):
        monkeypatch.setattr(logger, "handlers", [])


@pytest.mark.unit
def test_lines_are_seen_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_none(monkeypatch)
    for _ in range(2):
        logs.set_level("info")
    _log.info("shown")
    _log.debug("not shown")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO tokenmill: shown")


@pytest.mark.unit
@pytest.mark.parametrize("whose", ["tokenmill", ""])
def test_the_logging_of_a_program_takes_over(
    whose: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_none(monkeypatch)
    logs.set_level("info")
    logging.getLogger(whose).addHandler(logging.StreamHandler(sys.stdout))
    _log.info("shown")
    assert capsys.readouterr() == ("shown\n", "")


@pytest.mark.unit
def test_nothing_is_set_up_for_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_none(monkeypatch)
    logs.set_level("warning")
    assert not _log.handlers


@pytest.mark.cpu
def test_a_job_off_a_terminal_says_how_far_it_is(tmp_path: Path) -> None:
    """After ten seconds; here after none."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"{n} is"}) + "\n" for n in range(8)))
    script = """
import sys
from tokenmill.batch import progress
from tokenmill.cli import main
progress._FIRST_LOG_SECONDS = progress._QUIET_SECONDS = 0.0
progress._LINE_SECONDS = 0.01
main(["batch", "in.jsonl", "--max-new-tokens", "8", "--ignore-eos", *sys.argv[1:]])
"""
    for flags, is_told in (((), True), (("--log-level", "error", "--overwrite"), False)):
        command = [sys.executable, "-c", script, *flags]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        told = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True, env=env
        ).stderr
        assert ("INFO tokenmill.batch: the job ended: 8/8 rows" in told) == is_told, told
        assert ("rows, in " in told) == is_told


def test_arguments_that_change_nothing_are_told_of_whatever_the_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with sgl.Engine(model_path="tiny", log_level="critical"):
        caplog.clear()
        logs.warn_once.cache_clear()
        with sgl.Engine(model_path="tiny", log_level="error", host="0.0.0.0") as second:
            assert [record.name for record in caplog.records] == ["tokenmill.arguments"]
            assert caplog.messages[0].startswith("host is ignored")
            second.generate("The", {"max_new_tokens": 1}, priority=5)
    assert caplog.messages[1].startswith("priority is ignored")
