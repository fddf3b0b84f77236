"""Triton's key of its own files is made once for all processes, and anew when one of the files changes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tokenmill import triton_key
from tokenmill.cache_folder import digest_of_files

pytestmark = pytest.mark.cpu

# Prints where the key should be kept, the key, and how often Triton itself made it.
SCRIPT = """
import json
from triton.runtime import cache
from tokenmill import triton_key

make = cache.triton_key
kept = triton_key.recall_key()
if kept is not None:
    triton_key.make_key(kept)
again = triton_key.recall_key()
key = cache.triton_key()
times = make.cache_info().misses
print(json.dumps([kept and kept.name, again, key, times, key == make()]))
"""


def printed(script: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TRITON_CACHE_DIR": str(folder)},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("harm", [None, "empty", "no text", "of another Triton"])
def test_a_second_process_has_the_key_that_triton_would_make(tmp_path: Path, harm: str | None) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    name, again, key, times, is_right = json.loads(printed(SCRIPT, tmp_path))
    assert (again, times, is_right) == (None, 1, True)
    (kept,) = tmp_path.iterdir()
    assert kept.name == name
    if harm is not None:
        kept.write_bytes({"empty": b"", "no text": b"\xff\xfe", "of another Triton": b"0.0-1"}[harm])
    next_name, _, next_key, next_times, is_right = json.loads(printed(SCRIPT, tmp_path))
    assert (next_key, is_right) == (key, True)
    assert (next_name, next_times) == ((None, 0) if harm is None else (name, 1))
    assert kept.read_text() == key


def test_two_threads_make_it_once() -> None:
    calls: list[int] = []

    @functools.cache
    def make() -> str:
        calls.append(1)
        time.sleep(0.05)
        return "key"

    key = triton_key._Key(make)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: key(), range(100))) == {"key"}
    assert len(calls) == 1


@pytest.mark.parametrize(
    "name", ["runtime/cache.py", "compiler/code.py", "backends/nvidia/driver.py", "language/extra/core.py"]
)
def test_each_file_that_triton_reads_counts(tmp_path: Path, name: str) -> None:
    for path in ("runtime/cache.py", "_C/libtriton.so", name, "compiler/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("1")
    before = triton_key._digest_of_files(tmp_path)
    assert triton_key._digest_of_files(tmp_path) == before
    (tmp_path / name).write_text("22")
    changed = triton_key._digest_of_files(tmp_path)
    os.utime(tmp_path / "_C" / "libtriton.so", (1, 1))
    assert len({before, changed, triton_key._digest_of_files(tmp_path)}) == 3


def test_a_link_that_leads_nowhere_is_no_failure(tmp_path: Path) -> None:
    """Some editors put one beside a file that is being changed."""
    (tmp_path / "a.py").write_text("1")
    before = digest_of_files(tmp_path.iterdir())
    (tmp_path / ".#a.py").symlink_to("somebody@somewhere.1")
    changed = digest_of_files(tmp_path.iterdir())
    assert changed != before
    assert digest_of_files(tmp_path.iterdir()) == changed


def test_files_behind_links_count(tmp_path: Path) -> None:
    """Triton's own tree, from which developers install, has folders of backends elsewhere."""
    elsewhere = tmp_path / "third_party"
    elsewhere.mkdir()
    (elsewhere / "driver.py").write_text("1")
    (tmp_path / "triton" / "backends").mkdir(parents=True)
    (tmp_path / "triton" / "backends" / "nvidia").symlink_to(elsewhere)
    before = triton_key._digest_of_files(tmp_path / "triton")
    (elsewhere / "driver.py").write_text("22")
    assert triton_key._digest_of_files(tmp_path / "triton") != before


# As a start with a GPU does it, which this machine need not have.
PREPARED = """
from tokenmill import imports

imports.may_use_gpu = lambda: True
with imports.quick_imports(gpu=0):
    from triton.runtime import cache
print(cache.triton_key())
"""


def test_a_folder_that_cannot_be_written_to_fails_no_start(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    (tmp_path / "file").write_text("")
    keys = {printed(PREPARED, tmp_path / name) for name in ("file", "file/folder", "folder", "folder")}
    assert len(keys) == 1
    assert [each.name.startswith("tokenmill-key-") for each in (tmp_path / "folder").iterdir()] == [True]
