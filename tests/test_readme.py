"""Code blocks of the README and of `docs/` run: Python in one namespace per page, shell lines one by one.

A `text` block after a Python block is what that block prints, exactly. A `console` block names commands for a
fresh checkout; only their existence is checked.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tokenmill.cli import main

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in FENCE.finditer(text)]


def with_outputs(blocks: list[Block]) -> Iterator[tuple[Block, str | None]]:
    """Python blocks, each with the output that stands after it."""
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language == "python":
            yield block, after.text if after is not None and after.language == "text" else None


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in blocks_of(page))]


def page_name(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", pages_with("python"), ids=page_name)
def test_python_blocks_run_and_print_what_the_page_says(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        for block, expected in with_outputs(blocks_of(page)):
            # Empty lines in front, so that a traceback names the line of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            exec(code, namespace)
            printed = capsys.readouterr().out
            if expected is not None:
                assert printed == expected, f"{page.name}:{block.line}"
    finally:
        engine = namespace.get("llm")
        if engine is not None:
            engine.shutdown()  # type: ignore[attr-defined]


def shell_lines(page: Path) -> list[str]:
    blocks = [block for block in blocks_of(page) if block.language == "bash"]
    return [line for block in blocks for line in block.text.splitlines() if line]


@pytest.mark.parametrize(
    ("page", "line"),
    [(page, line) for page in PAGES for line in shell_lines(page)],
    ids=lambda value: value.name if isinstance(value, Path) else value[:40],
)
def test_shell_lines_run(
    page: Path, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is piped into `tokenmill` comes from a real shell; `tokenmill` itself runs in this process."""
    source, _, command = line.rpartition("tokenmill ")
    if source:
        piped = subprocess.run(
            ["bash", "-c", source.rstrip(" |")], capture_output=True, text=True, check=True
        ).stdout
        monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    code = main(shlex.split(command))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.out.strip()
    assert captured.err == ""


def test_commands_for_a_fresh_checkout_exist() -> None:
    named = [
        line.removeprefix("$ ").split()[0]
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "console"
        for line in block.text.splitlines()
        if line.startswith("$ ./")
    ]
    assert {"./scripts/run", "./scripts/test"} <= set(named)
    for command in named:
        assert (ROOT / command).stat().st_mode & 0o111, f"{command} cannot be run"


def test_every_fence_has_a_known_language() -> None:
    """A block in a language that no test runs would be a claim that nobody checks."""
    for page in PAGES:
        languages = re.findall(r"^```(\w*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(languages) <= {"python", "text", "bash", "console", ""}, page.name
        assert languages.count("") == len(languages) - languages.count(""), page.name


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_examples_run() -> None:
    """The main job, as a newcomer starts it."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "quickstart.py")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("Generated text: ") == 12
