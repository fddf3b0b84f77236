"""Which graph takes a step: one that is captured for it, or one that serves until there is time for that.

A device without memory for another graph goes on with those it has, or without.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenmill.runner import graphs
from tokenmill.runner.capture import CapturePolicy
from tokenmill.runner.recorder import StepKind
from tokenmill.sampling import SamplingNeeds

pytestmark = pytest.mark.cpu

PLAIN = StepKind(SamplingNeeds(random=True, filters=False))


@pytest.fixture
def decode_graphs(monkeypatch: pytest.MonkeyPatch) -> graphs.DecodeGraphs:
    """Graphs that are captured without a device, up to 64 rows; sizes above 16 need too much memory.

    After one step with padding a smaller graph is wanted.
    """
    policy = CapturePolicy(64, row_seconds=0.02)
    nothing: Any = None
    made = graphs.DecodeGraphs(nothing, nothing, policy=policy, recorder=nothing)

    def capture(size: int, kind: StepKind) -> Any:
        if size > 16:
            raise torch.OutOfMemoryError
        policy.captured(size, kind, seconds=0.01)
        return size

    monkeypatch.setattr(made, "_capture", capture)
    return made


def test_graphs_that_exist_are_used_when_memory_is_out(decode_graphs: graphs.DecodeGraphs) -> None:
    assert decode_graphs._graph(9, PLAIN) == 16
    assert decode_graphs._graph(20, PLAIN) is None
    assert decode_graphs._graph(2, PLAIN) == 16
    assert decode_graphs._graph(1, StepKind(SamplingNeeds(random=True, filters=True))) is None
    assert decode_graphs._graph(64, PLAIN) is None


def test_a_smaller_graph_can_wait(decode_graphs: graphs.DecodeGraphs) -> None:
    assert decode_graphs._graph(9, PLAIN) == 16
    assert decode_graphs.wanted_seconds == 0
    assert decode_graphs._graph(2, PLAIN) == 16
    assert decode_graphs.wanted_seconds == 0.01
    decode_graphs.capture_wanted()
    assert decode_graphs.wanted_seconds == 0
    assert decode_graphs._graph(2, PLAIN) == 2
    decode_graphs.capture_wanted()
    assert decode_graphs._graph(4, PLAIN) == 16  # nothing else was captured


def test_a_graph_is_not_wanted_forever(decode_graphs: graphs.DecodeGraphs) -> None:
    assert [decode_graphs._graph(rows, PLAIN) for rows in (9, 2, 2)] == [16, 16, 2]
    assert decode_graphs.wanted_seconds == 0


def test_a_wanted_graph_for_which_there_is_no_memory(decode_graphs: graphs.DecodeGraphs) -> None:
    decode_graphs._graph(9, PLAIN)
    decode_graphs._wanted = 24, PLAIN
    decode_graphs.capture_wanted()
    assert decode_graphs.wanted_seconds == 0
    assert [decode_graphs._graph(rows, PLAIN) for rows in (2, 2, 2)] == [16, 16, 16]
