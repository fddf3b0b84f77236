"""The first start keeps Python's byte code where nobody else does, and looks for a GPU without torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tokenmill import imports

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).parents[1]
# Imports `made`, and prints whether Python's settings are what they were.
SCRIPT = """
import sys
from tokenmill.imports import kept_byte_code

before = sys.dont_write_bytecode, sys.pycache_prefix
with kept_byte_code("made"):
    import made
print(made.ANSWER, made.__cached__, before == (sys.dont_write_bytecode, sys.pycache_prefix))
"""


def import_made(folder: Path, *flags: str, **environment: str) -> tuple[str, Path, bool]:
    """What `made` says, where its byte code is or would be, and whether the settings are as before."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", SCRIPT],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
            "XDG_CACHE_HOME": str(folder / "cache"),
            **environment,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    answer, cached, is_as_before = done.stdout.split()
    return answer, Path(cached), is_as_before == "True"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "made.py").write_text("ANSWER = 1\n")
    return tmp_path


@pytest.mark.parametrize("how", [{"flags": ("-B",)}, {"environment": {"PYTHONDONTWRITEBYTECODE": "1"}}])
def test_byte_code_goes_to_the_cache_folder_where_python_would_keep_none(folder: Path, how: dict) -> None:
    answer, cached, is_as_before = import_made(folder, *how.get("flags", ()), **how.get("environment", {}))
    assert (answer, is_as_before) == ("1", True)
    assert cached.is_file()
    assert cached.is_relative_to(folder / "cache" / "tokenmill" / "bytecode")
    assert not (folder / "__pycache__").exists()


def test_kept_byte_code_is_used_and_follows_the_source(folder: Path) -> None:
    _, cached, _ = import_made(folder, "-B")
    written = cached.stat().st_mtime_ns
    assert import_made(folder, "-B")[0] == "1"
    assert cached.stat().st_mtime_ns == written
    (folder / "made.py").write_text("ANSWER = 'another'\n")
    assert import_made(folder, "-B")[0] == "another"


def test_python_keeps_its_own_byte_code_where_it_may(folder: Path) -> None:
    _, cached, is_as_before = import_made(folder)
    assert (cached.is_file(), cached.parent, is_as_before) == (True, folder / "__pycache__", True)
    # Now it is there, and nothing is lost when Python may not write.
    _, found, _ = import_made(folder, "-B")
    assert found == cached
    assert not (folder / "cache" / "tokenmill" / "bytecode").exists()


def test_a_home_that_cannot_be_written_to_changes_nothing(folder: Path) -> None:
    (folder / "file").write_text("")
    answer, cached, is_as_before = import_made(folder, "-B", XDG_CACHE_HOME=str(folder / "file"))
    assert (answer, is_as_before, cached.exists()) == ("1", True, False)


@pytest.mark.parametrize(
    ("has_gpu", "library", "visible", "expected"),
    [
        (True, "libtorch_cuda.so", None, True),
        (True, "libtorch_cuda.so", "1", True),
        (True, "libtorch_cuda.so", "", False),
        (True, "libtorch_cpu.so", None, False),
        (False, "libtorch_cuda.so", None, False),
    ],
)
def test_a_gpu_counts_where_torch_is_built_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
    library: str,
    visible: str | None,
    expected: bool,
) -> None:
    """Else a context on it would be opened, and processes started, for nothing."""
    (tmp_path / "lib").mkdir()
    for path in (tmp_path / "lib" / library, *([tmp_path / "gpu"] if has_gpu else [])):
        path.touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    torch = importlib.util.spec_from_file_location("torch", tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: torch)
    monkeypatch.setattr(imports, "_GPU_DEVICES", (tmp_path / "gpu",))
    assert imports.may_use_gpu() == expected


def test_threads_that_import_transformers_at_once_all_get_the_whole(tmp_path: Path) -> None:
    """The module puts another one in its place, as the true one does; a plain import gets the first one."""
    (tmp_path / "transformers.py").write_text(
        "import sys, time, types\n"
        "time.sleep(0.5)\n"
        "whole = types.ModuleType('transformers')\n"
        "whole.AutoTokenizer = 5\n"
        "sys.modules['transformers'] = whole\n"
    )
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from tokenmill.imports import import_transformers\n"
        "with ThreadPoolExecutor(4) as threads:\n"
        "    jobs = [threads.submit(lambda: import_transformers().AutoTokenizer) for _ in range(4)]\n"
        "print([job.result() for job in jobs])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[5, 5, 5, 5]\n", done.stderr


def test_settings_for_byte_code_are_as_before_when_blocks_of_threads_overlap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both threads see that byte code would be lost before either changes that."""
    both = threading.Barrier(2, timeout=10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(imports, "_lacks_byte_code", lambda package: both.wait() >= 0)

    entered: list[int] = []

    def enter(number: int) -> None:
        with imports.kept_byte_code("anything"):
            entered.append(number)
            both.wait()
            time.sleep(0.1 * (number != entered[0]))  # who came first leaves first
            assert not sys.dont_write_bytecode

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(enter, range(2)))
    assert (sys.dont_write_bytecode, sys.pycache_prefix) == (True, None)
