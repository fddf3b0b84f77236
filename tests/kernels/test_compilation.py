"""Launches in a `ParallelCompilation` only compile; launches afterwards, or awaited, run what it compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmill.kernels import compilers

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

KERNELS = ["_rms_norm_kernel", "_add_rms_norm_kernel", "_gated_silu_kernel"]


def found(when: str, cache: Path) -> dict[str, Any]:
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_CACHE_DIR": str(cache)}
    script = Path(__file__).with_name("compile_in_parallel.py")
    command = [sys.executable, str(script), when]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_kernels_compile_side_by_side_and_run_later(tmp_path: Path) -> None:
    result = found("afterwards", tmp_path)
    assert result["skipped"]
    assert result["held"]
    assert result["kernels"] == len(KERNELS)
    assert result["compiled"] == sorted(KERNELS)
    assert result["compiled again"] == 0
    assert result["launched"] == KERNELS * 2
    assert all(name.startswith("tokenmill-compile") for name in result["threads"])


def test_a_launch_waits_for_its_own_kernel_alone(tmp_path: Path) -> None:
    result = found("meanwhile", tmp_path)
    # One thread was held up in the first kernel: the second was still queued, the third unknown.
    assert result["before"] == KERNELS[1:]
    assert result["over"] == [False, True]
    assert result["launched"] == [*KERNELS[1:], KERNELS[0], *KERNELS * 2]
    assert result["compiled"] == sorted(KERNELS)


def test_launches_run_when_no_thread_compiles_for_them(tmp_path: Path) -> None:
    """One kernel fails in its thread, the others are taken from the queue when the start fails."""
    result = found("in_vain", tmp_path)
    assert result["launched"] == KERNELS * 2
    assert result["compiled"] == sorted(KERNELS)
    assert result["threads"] == ["MainThread"]


def test_what_comes_later_compiles_what_is_missing_then(tmp_path: Path) -> None:
    result = found("one_after_the_other", tmp_path)
    assert result["before"] == KERNELS[:1]
    assert result["kernels"] == 2
    assert sorted(result["compiled"]) == sorted(KERNELS)
    assert result["launched"][-6:] == KERNELS * 2


def test_processes_compile_what_is_not_on_the_disk_yet(tmp_path: Path) -> None:
    result = found("in_processes", tmp_path)
    # The second start for a purpose knows that it needs none.
    assert result["processes"] == [4, 0, 4, 4]
    assert result["remembered"] == [True, False] * 2 + [False]  # the last one when a kernel was gone
    # What they compiled is found on the disk. What lost ones would have compiled, a thread does; and what
    # they may compile from other sources.
    assert result["hits"] == {
        "_read_kernel": True,
        "_draw_kernel": True,
        "_add_rms_norm_kernel": True,
        "_rms_norm_kernel": False,
        "_gated_silu_kernel": False,
    }
    assert result["launched"] == KERNELS * 2
    # Whoever still waits for closed ones is told, and all are gone; at once, if they have nothing to do.
    assert result["failure"] == "RuntimeError"
    assert result["status"][1:3] == [-9, -9]
    assert set(result["status"]) <= {0, -9}


@pytest.mark.parametrize(
    "content",
    ["", "[", "5", "null", "[]", '["facts", 5.5]', '["facts", null]', '"facts"', '["facts", "gone"]'],
)
def test_what_was_remembered_may_be_broken(tmp_path: Path, content: str) -> None:
    mark = tmp_path / "mark"
    known = compilers.Compilers(mark=mark)
    assert not known.has_all("facts")
    mark.write_text(content)
    assert not known.has_all("facts")
    known.remember("facts", [str(tmp_path)])
    assert known.has_all("facts")


def test_a_full_disk_leaves_what_was_remembered_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    known = compilers.Compilers(mark=mark)
    known.remember("facts", [str(tmp_path)])

    def write(path: Path, text: str, **_: Any) -> int:
        path.write_bytes(text[:5].encode())
        raise OSError("no space is left")

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(OSError, match="no space"):
        known.remember("others", [str(tmp_path)])
    assert list(tmp_path.iterdir()) == [mark]
    assert known.has_all("facts")


def test_processes_have_every_kernel_without_torch() -> None:
    """A module that they cannot import leaves its kernels to threads, without a word."""
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    code = (
        "import json, sys\n"
        "from tokenmill.kernels import compilers\n"
        "compilers._import_all()\n"
        "print(json.dumps(list(sys.modules)))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout)
    assert [name for name in imported if name.startswith("torch.")] == []
    folder = Path(compilers.__file__).parent
    there = {path.stem for pattern in ("triton_*.py", "hopper_*.py") for path in folder.glob(pattern)}
    assert {f"tokenmill.kernels.{name}" for name in there} <= set(imported)
