"""CUDA graphs for steps in which every row decodes. Which sizes there are is decided in `capture.py`.

A graph holds the whole step: page-table entries, last tokens, embedding, layers, logits, sampling, and the
write of the new last tokens; a late one ends with the logits. Its inputs are the rows' slots, positions and
new pages, in one copy; everything else lies in the persistent rows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from tokenmill.messages import StepPlan
from tokenmill.runner.batch import Rows
from tokenmill.runner.capture import CapturePolicy
from tokenmill.runner.drawing import Sampled, Unsampled, draw_tokens
from tokenmill.runner.executor import Executor
from tokenmill.runner.recorder import Graph, Recorder, StepKind, step_kind
from tokenmill.sampling import SamplingColumns

_log = logging.getLogger("tokenmill")


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured step for a fixed number of rows. The tensors are the graph's own."""

    graph: Graph[Sampled | Unsampled]
    inputs_FB: torch.Tensor  # int32, see `read_rows`


class DecodeGraphs:
    """Replays decode steps. Not thread-safe; owned by one runner."""

    def __init__(self, executor: Executor, rows: Rows, *, policy: CapturePolicy, recorder: Recorder) -> None:
        self._executor = executor
        self._rows = rows
        self._policy = policy
        self._recorder = recorder
        self._graphs: dict[tuple[int, StepKind], _Captured] = {}
        # To be captured, while a larger one serves. No other step can be launched before a late one is drawn.
        self._wanted: tuple[int, StepKind] | None = None

    @property
    def wanted_seconds(self) -> float:
        """What `capture_wanted` would take; 0: no graph is wanted."""
        return 0.0 if self._wanted is None else self._policy.capture_seconds

    def capture_wanted(self) -> None:
        """Capture what larger graphs have stood in for."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._capture_if_possible(*wanted)

    def replay(self, plan: StepPlan, *, late: bool) -> Sampled | Unsampled | None:
        """Queue a step whose rows all decode, if `late` up to its logits; it may have made more rows.

        What it made is valid until the next replay. None: there is no graph that is large enough, and no
        memory to capture one.
        """
        captured = self._graph(len(plan.slots), step_kind(self._rows, plan, late=late))
        if captured is None:
            return None
        inputs = self._rows.decode_inputs(plan, size=captured.inputs_FB.shape[1])
        captured.inputs_FB.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.graph.made

    def expect(self, num_rows: int, kind: StepKind) -> Sampled | Unsampled | None:
        """Have a graph for such a step before it comes; what it will make. None: there is no memory."""
        captured = self._graph(num_rows, kind)
        return None if captured is None else captured.graph.made

    def _graph(self, num_rows: int, kind: StepKind) -> _Captured | None:
        """A graph for at least so many rows. What the policy wants is captured now, unless another serves:
        then there is time for it at `capture_wanted`, but only until the policy wants one again.
        """
        size = self._policy.choose(num_rows, kind)
        if size is not None and (size, kind) not in self._graphs:
            serving = self._policy.serving(num_rows, kind)
            if serving is not None and self._wanted is None and not kind.late:
                self._wanted, size = (size, kind), serving
            else:
                self._wanted = None
                self._capture_if_possible(size, kind)
                size = self._policy.serving(num_rows, kind)
        return None if size is None else self._graphs[size, kind]

    def _capture_if_possible(self, size: int, kind: StepKind) -> None:
        try:
            self._graphs[size, kind] = self._capture(size, kind)
        except torch.OutOfMemoryError:
            _log.warning("no memory is left to capture %d rows; no more graphs are captured", size)
            self._policy.stop()

    def _capture(self, size: int, kind: StepKind) -> _Captured:
        """Record the step on the spare row."""
        inputs_FB = self._rows.spare_inputs(size)
        graph = self._recorder.record(
            lambda: decode_step(self._executor, self._rows, inputs_FB, kind), f"{size} rows, {kind}"
        )
        self._policy.captured(size, kind, seconds=graph.seconds)
        return _Captured(graph, inputs_FB)


def decode_step(
    executor: Executor, rows: Rows, inputs_FB: torch.Tensor, kind: StepKind
) -> Sampled | Unsampled:
    """One token of each row, from what `Rows.decode_inputs` says of it."""
    step = rows.read(inputs_FB)
    layout = rows.decode_layout(step, longest=kind.longest, max_pieces=kind.max_pieces)
    hidden_BD = executor.forward_for_graph(step.token_id_B, layout)
    logits_BV = executor.logits(hidden_BD)
    columns = SamplingColumns(
        temperatures_R=step.temperature_B,
        top_ks_R=step.top_k_B,
        top_ps_R=step.top_p_B,
        min_ps_R=step.min_p_B,
        seeds_R=step.seed_B,
        positions_R=step.drawn_position_B,
    )
    if kind.late:
        return Unsampled(logits_BV, hidden_BD, step.slot_B, columns)
    return draw_tokens(rows, logits_BV, step.slot_B, columns, kind.needs)
