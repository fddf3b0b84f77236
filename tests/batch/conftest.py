"""Jobs in a folder of their own; a summary with everything in it, and a browser for its page."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.batch.row_files import SHORT, Rows, write
from tokenmill import Engine, batch
from tokenmill.batch.figures import Figures

# What the browser would ask the network for by itself is switched off.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@pytest.fixture
def do(tmp_path: Path, tiny_engine: Engine) -> Callable[..., dict[str, Any]]:
    """Runs a job on `in.jsonl`, made of `rows` if they are given, with the shared engine."""

    def run(rows: Rows | None = None, output: Any = "out.jsonl", **arguments: Any) -> dict[str, Any]:
        source = tmp_path / "in.jsonl"
        if rows is not None:
            write(source, rows)
        place = tmp_path / output if isinstance(output, str) and output else output
        return batch.run(source, place, engine=tiny_engine, **{"sampling_params": SHORT, **arguments})

    return run


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def result() -> Callable[..., dict[str, Any]]:
    """`result(prompt=10, output=5, …)`: what the engine gives for a row."""

    def make(prompt: int = 10, output: int = 5, cached: int = 0, latency: float = 0.5) -> dict[str, Any]:
        facts = {
            "id": "x",
            "finish_reason": {"type": "length", "length": output},
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "cached_tokens": cached,
            "e2e_latency": latency,
        }
        return {"text": "", "output_ids": [0] * output, "meta_info": facts, "error": None}

    return make


@pytest.fixture
def failure() -> Callable[[str, str], dict[str, Any]]:
    """`failure("too_long", "message")`: what the engine gives for a row that failed."""

    def make(kind: str, message: str) -> dict[str, Any]:
        facts = {"id": "x", "finish_reason": {"type": "abort", "err_type": kind}, "prompt_tokens": 0}
        error = {"type": kind, "message": message, "status_code": 400}
        return {"text": "", "output_ids": [], "meta_info": facts, "error": error}

    return make


@pytest.fixture
def summary(
    clock: Clock, result: Callable[..., dict[str, Any]], failure: Callable[[str, str], dict[str, Any]]
) -> dict[str, Any]:
    """Of a job of a minute with errors of two types, and a plan."""
    figures = Figures(clock=clock)
    figures.started(num_rows=1000)
    figures.watched(idle_seconds=0.0, busy_seconds=0.0)
    figures.replayed(80)
    figures.duplicate(20)
    draw = random.Random(4)
    for number in range(900):
        clock.now += 1 / 15
        if number % 100 == 7:
            row = failure("too_long" if number % 200 == 7 else "timeout", f"message {number}")
            figures.finished([row])
            figures.failed(number, [row["error"]])
        else:
            prompt = int(draw.lognormvariate(5, 0.8)) + 1
            output = int(draw.lognormvariate(4, 1)) + 1
            figures.finished(
                [result(prompt, output, cached=prompt // 2, latency=draw.lognormvariate(1, 0.4))]
            )
        figures.watched(idle_seconds=number * 0.002, busy_seconds=number * 0.06)
    made = figures.summary()
    made["job"] = {"input": "in.jsonl", "model": "tiny", "parameters": {"temperature": 0.5}}
    made["plan"] = {
        "predicted": {"output_tokens": 90_000, "seconds": 48.0},
        "actual": {"output_tokens": made["tokens"]["output"], "seconds": made["seconds"]},
    }
    return made


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium without a screen, driven by selenium; `scripts/setup-browser` installs it."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver: scripts/setup-browser installs them")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile: Path = tmp_path_factory.mktemp("profile")
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as opened:
        yield opened
