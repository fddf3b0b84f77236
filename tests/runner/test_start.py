"""What a start asks for before it imports torch, and what becomes of that when the start fails."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill import runner
from tokenmill.arguments import ServerArgs
from tokenmill.errors import ModelNotFound
from tokenmill.kernels.compilers import Compilers
from tokenmill.runner import early

pytestmark = pytest.mark.cpu


class FakeCompilers(Compilers):
    """Compilers without a process that know whether they are closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def started(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> tuple[list[str], FakeCompilers]:
    """For which purposes processes were started by a start that finds no model."""
    purposes: list[str] = []
    compilers = FakeCompilers()
    monkeypatch.setattr(early, "start_compilers", lambda purpose: purposes.append(purpose) or compilers)
    with pytest.raises(ModelNotFound):
        runner.start(ServerArgs(model_path="./nowhere", **arguments).fixed())
    return purposes, compilers


def test_starts_that_need_the_same_kernels_have_one_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would start processes for kernels that are on the disk."""
    (plain,), _ = started(monkeypatch)
    (again,), _ = started(monkeypatch, log_level="debug", random_seed=17, served_model_name="mine")
    (other,), _ = started(monkeypatch, dtype="float16")
    assert plain == again != other


def test_no_process_outlives_a_start_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    _, compilers = started(monkeypatch)
    assert compilers.is_closed


def test_a_cpu_needs_no_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    purposes, _ = started(monkeypatch, device="cpu")
    assert purposes == []
