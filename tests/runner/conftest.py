"""Fixtures of the runner's tests."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

_INTERPRETER = runpy.run_path(str(Path(__file__).parents[1] / "kernels" / "interpreter.py"))
_INTERPRETER["choose"]()


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Where Triton kernels run: "cuda", or "cpu" in the interpreter."""
    return str(_INTERPRETER["device"]())


@dataclass
class GraphCalls:
    """What stands in for the device's graphs has done; those of draws are counted apart."""

    captured: list[str] = field(default_factory=list)
    replayed: int = 0
    captured_draws: list[str] = field(default_factory=list)
    replayed_draws: int = 0
    full_for: str | None = None  # there is no memory for graphs whose title begins so
    capture_seconds: float = 0.0  # that a capture seems to take
    captures_ahead: bool = False  # while prompts are computed, which takes the interpreter long
    compiles: bool = False  # whether kernels are still being compiled, it seems
    failing: frozenset[int] = frozenset()  # replays that cannot be launched, as `replayed` counts them


@pytest.fixture
def graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch, triton_device: str) -> GraphCalls:
    """Steps as graphs without a GPU: a graph is the function that would be captured, called again at each
    replay, and the kernels run in Triton's interpreter."""
    if triton_device != "cpu":
        pytest.skip("there is a GPU, whose tests do the same")
    from tokenmill.attention import triton_backend
    from tokenmill.runner import graph_sets, hardware, prompt_graphs

    calls = GraphCalls()

    class Replay:
        def __init__(self, step: Callable[[], Any], *, draws: bool) -> None:
            self.step, self.made, self.seconds = step, step(), calls.capture_seconds
            self.draws = draws

        def replay(self) -> None:
            calls.replayed += not self.draws
            calls.replayed_draws += self.draws
            if not self.draws and calls.replayed in calls.failing:
                raise RuntimeError("this graph cannot be launched")
            _overwrite(self.made, self.step())

    class Again:
        def __init__(self, *_: object) -> None:
            self.num_captures = 0

        @property
        def is_ready(self) -> bool:
            return not calls.compiles

        def record(
            self,
            step: Callable[[], Any],
            title: str,
            *,
            may_run: bool = True,
            before_it_runs: Callable[[], object] = lambda: None,
        ) -> Replay:
            self.num_captures += 1
            if not may_run:
                raise RuntimeError("here a capture runs what it records")
            if calls.full_for is not None and title.startswith(calls.full_for):
                raise torch.OutOfMemoryError(title)
            draws = title.startswith("the draw")
            (calls.captured_draws if draws else calls.captured).append(title)
            before_it_runs()  # here a capture runs what it records, as one does that fails at first
            return Replay(step, draws=draws)

    prepare_more = graph_sets.GraphSets.prepare_more

    def prepare_if_wanted(self: graph_sets.GraphSets, num_rows: int) -> bool:
        return calls.captures_ahead and prepare_more(self, num_rows)

    monkeypatch.setattr(graph_sets.GraphSets, "prepare_more", prepare_if_wanted)
    monkeypatch.setattr(hardware, "_attention_backend", lambda *_: "triton")
    monkeypatch.setattr(graph_sets, "Recorder", Again)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(prompt_graphs, "FIRST_CAPTURE_SECONDS", 0.0)
    monkeypatch.setattr(triton_backend, "SHARING_BYTES", 0)  # these models are too small for it to pay
    return calls


def _overwrite(made: Any, again: Any) -> None:
    """What a graph makes lies in the same memory each time."""
    if isinstance(made, torch.Tensor):
        made.copy_(again)
    elif dataclasses.is_dataclass(made):
        for each in dataclasses.fields(made):
            _overwrite(getattr(made, each.name), getattr(again, each.name))
