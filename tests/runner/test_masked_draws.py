"""When masks are copied to the device early, and when a draw reads them where they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenmill.runner import masked_draws
from tokenmill.runner.masked_draws import _EarlyCopies

BITS = np.zeros((4, 10), dtype=np.int32)
COPY = 1


class Room:
    """Copies nothing; raises the problem that it has, if any."""

    made = 0
    problem_of_room: Exception | None = None
    problem_of_copy: Exception | None = None

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        type(self).made += 1
        if self.problem_of_room is not None:
            raise self.problem_of_room

    def copy(self, bits: np.ndarray) -> int:
        if self.problem_of_copy is not None:
            raise self.problem_of_copy
        return COPY


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> type[Room]:
    class Made(Room):
        pass

    monkeypatch.setattr(masked_draws, "_Room", Made)
    return Made


def ways(waits: list[float], bits: np.ndarray = BITS) -> list[str]:
    """How each of some steps gets its masks, after waits of so many microseconds."""
    copies, found = _EarlyCopies((8, 10), torch.device("cpu")), []
    for microseconds in waits:
        copies.waited_seconds = microseconds * 1e-6
        address = copies.address(bits)
        assert address in (COPY, bits.ctypes.data)
        found.append("copied" if address == COPY else "read")
    return found


def test_copies_begin_where_the_host_waits_and_end_where_it_has_no_time_left(room: type[Room]) -> None:
    assert ways([0, 200, 300, 100, 60, 40, 200, 300]) == [
        *("read", "read", "copied", "copied"),
        *("copied", "read", "read", "copied"),
    ]
    assert room.made == 1


def test_masks_that_do_not_lie_side_by_side_are_read(room: type[Room]) -> None:
    wide = np.zeros((4, 12), dtype=np.int32)
    assert ways([300, 300], wide[:, :10]) == ["read", "read"]
    assert not room.made


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError("full"), RuntimeError("CUDA error")])
@pytest.mark.parametrize("where", ["problem_of_room", "problem_of_copy"])
def test_where_they_cannot_be_copied_they_are_read_from_then_on(
    room: type[Room], problem: Exception, where: str
) -> None:
    setattr(room, where, problem)
    assert ways([300, 300, 300]) == ["read", "read", "read"]
    assert room.made == 1
