"""The code of the documents the product is made from, verbatim but for the import line and the model path."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
REPEATABLE = Path(__file__).parent / "repeatable.py"
ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str, stdin: str | None = None, folder: Path | None = None) -> str:
    """Run a script as a user would, from another folder, with seeds that repeat; returns what it printed."""
    command = [sys.executable, "-W", "error", str(REPEATABLE), str(SCRIPTS / script), *arguments]
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=110,
        env=environment(),
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}


def sections(printed: str, marker: str) -> list[str]:
    return printed.split(marker)[1:]


def test_notebook_in_four_modes() -> None:
    printed = run("offline_engine_notebook.py")
    answers = sections(printed, "The capital of France is\nGenerated text: ")
    assert len(answers) == 4
    assert all("Paris" in answer.split("\n\n")[0] for answer in answers)
    assert len(sections(printed, "Generated text: ")) == 4 + 3 * 3


def test_merging_streams() -> None:
    printed = run("offline_engine_with_merge.py")
    assert printed.count("=== Testing") == 3
    assert len(sections(printed, "Generated text:")) == 4 + 3 * 3
    factual = sections(printed, "The capital of France is\nGenerated text:")
    assert len(factual) == 4
    assert all("Paris" in answer.split("Prompt:")[0] for answer in factual)


def test_native_api() -> None:
    printed = run("native_api.py")
    responses = [line for line in printed.splitlines() if line.startswith("Response ")]
    assert len(responses) == 3
    assert "Paris" in printed
    assert "Berlin" in printed
    assert "Rome" in printed
    assert "Invalid parameter: " in printed
    assert "temperature" in printed
    tokens = next(line for line in printed.splitlines() if line.startswith("Tokens: "))
    assert "prompt" in tokens
    sampled = next(line for line in printed.splitlines() if line.startswith("Sampled: "))
    assert int(sampled.split()[1]) >= 10, "stop tokens of another model end nothing"


def test_native_api_with_token_ids(make_model: Callable[..., Path]) -> None:
    """The model's vocabulary is larger than its tokenizer's, so what is printed may be empty text."""
    model = make_model("llama", vocab_size=128256, hidden_size=32, max_position_embeddings=512)
    run("native_api_token_ids.py", str(model))


def printed_value(line: str) -> Any:
    """What a line prints after its label."""
    return ast.literal_eval(line.partition(": ")[2])


def test_native_api_beyond_text(tmp_path: Path) -> None:
    printed = run("native_api_insight.py", folder=tmp_path).splitlines()
    drawn = [line for line in printed if line.startswith("Token logprob: ")]
    tops = [line for line in printed if line.startswith("Top 3 alternatives: ")]
    assert 1 <= len(drawn) == len(tops) <= 5, "what is drawn may be the end"
    for entry in map(printed_value, drawn):
        assert entry[0] <= 0, "exactly 0 where the model is certain"
    for entries in map(printed_value, tops):
        assert [len(entry) for entry in entries] == [3, 3, 3]
        assert all(entry[0] <= 0 for entry in entries)
    assert "Number: " + "7" * 10 in printed
    [states] = [line for line in printed if line.startswith("Hidden states: ")]
    assert re.fullmatch(r"Hidden states: ([1-5]) entries, \1 tokens", states)
    assert printed[-3:] == ["Model: tiny", "TP size: 1", "Max tokens: 8192"]
    [trace] = (tmp_path / "profiles").iterdir()
    assert trace.name.startswith("my_profile-")
    assert trace.stat().st_size > 1000


def test_sessions() -> None:
    assert "Alice" in run("sessions.py")


def test_structured_output() -> None:
    printed = run("structured_output.py").splitlines()
    assert re.fullmatch(r"Name: .*, Age: -?\d+", printed[0])
    assert re.fullmatch(r"\d{3}-\d{3}-\d{4}", printed[1])
    assert re.fullmatch(r'[0-9+\-*/()" ]+', printed[2])


def test_notebook_in_ipython() -> None:
    """In IPython a loop may run already, and nobody applies nest_asyncio."""
    pytest.importorskip("IPython")
    code = (
        "import tokenmill as sgl\n"
        "llm = sgl.Engine(model_path='tiny')\n"
        "import asyncio\n"
        "async def inside():\n"
        "    return llm.generate('The capital of France is', {'temperature': 0, 'max_new_tokens': 8})\n"
        "result = await inside()\n"
        "print('sync in a loop:', result['text'])\n"
        "params = {'temperature': 0, 'max_new_tokens': 8}\n"
        "result = await llm.async_generate('The capital of Italy is', params)\n"
        "print('awaited:', result['text'])\n"
        "llm.shutdown()\n"
    )
    program = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        f"outcome = shell.run_cell({code!r})\n"
        "outcome.raise_error()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=110,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout.split("sync in a loop:")[1].splitlines()[0]
    assert "Rome" in done.stdout.split("awaited:")[1].splitlines()[0]
