"""CUDA graphs for steps in which every row decodes. Which sizes there are is decided in `capture.py`.

A graph holds the whole step: page-table entries, last tokens, embedding, layers, logits, sampling, and the
write of the new last tokens. Its inputs are the rows' slots, positions and new pages, in one copy; everything
else lies in the persistent rows.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass

import torch

from tokenmill.messages import IntArray, StepPlan
from tokenmill.runner.batch import Rows
from tokenmill.runner.capture import CapturePolicy
from tokenmill.runner.executor import Executor
from tokenmill.sampling import SamplingColumns, SamplingNeeds, sample

_log = logging.getLogger("tokenmill")


# Rows that read no more keys than this by themselves are not split where rows are many, and a graph of only
# such rows is spared the programs that would find nothing to do.
SHORT_KEYS = 512


@dataclass(frozen=True, slots=True)
class StepKind:
    """What decides which kernels a step launches, beside the number of its rows."""

    needs: SamplingNeeds
    longest: int | None = None  # bound of the keys that a row reads by itself; None: as many as it can have
    max_pieces: int = 0  # bound of the pieces that shared prefixes leave in a row; 0: nothing is shared


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step for a fixed number of rows. The tensors are the graph's own."""

    graph: torch.cuda.CUDAGraph
    inputs_FB: torch.Tensor  # int32, see `read_rows`
    tokens_B: torch.Tensor  # int64, what was drawn


class DecodeGraphs:
    """Replays decode steps. Not thread-safe; owned by one runner.

    Kernels are compiled before (`warmup.py`), so a capture only records. All graphs share one memory pool,
    because they never run at the same time.
    """

    def __init__(
        self, executor: Executor, rows: Rows, *, policy: CapturePolicy, device: torch.device
    ) -> None:
        self._executor = executor
        self._rows = rows
        self._policy = policy
        self._device = device
        self._graphs: dict[tuple[int, StepKind], _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def replay(self, plan: StepPlan) -> torch.Tensor | None:
        """Queue a step whose rows all decode; returns its tokens (int64 [rows]), valid until the next replay
        of this size.

        None: there is no graph that is large enough, and no memory to capture one.
        """
        captured = self._graph(len(plan.slots), self._kind(plan.slots, plan.starts))
        if captured is None:
            return None
        inputs = self._rows.decode_inputs(plan, size=captured.inputs_FB.shape[1])
        captured.inputs_FB.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.tokens_B[: len(plan.slots)]

    def _kind(self, slots: IntArray, positions: IntArray) -> StepKind:
        needs = self._rows.sampling_needs(slots)
        # Greedy rows are drawn by the same kernels as random ones.
        needs = SamplingNeeds(random=True, filters=needs.random and needs.filters)
        found = self._rows.find_shared(slots, positions)
        longest = int(positions.max()) + 1 if found is None else found.longest_own
        return StepKind(
            needs, SHORT_KEYS if longest <= SHORT_KEYS else None, 0 if found is None else found.max_pieces
        )

    def _graph(self, num_rows: int, kind: StepKind) -> _Graph | None:
        """A graph for at least so many rows, captured now if the policy wants it."""
        size = self._policy.choose(num_rows, kind)
        while size is not None and (size, kind) not in self._graphs:
            try:
                self._graphs[size, kind] = self._capture(size, kind)
            except torch.OutOfMemoryError:
                _log.warning("no memory is left to capture %d rows; no more graphs are captured", size)
                self._policy.stop()
                size = self._policy.choose(num_rows, kind)
        return None if size is None else self._graphs[size, kind]

    def _capture(self, size: int, kind: StepKind) -> _Graph:
        """Record the step on the spare row."""
        began = time.perf_counter()
        inputs_FB = self._rows.spare_inputs(size)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if not self._graphs:  # cuBLAS takes its workspace for this stream
                decode_step(self._executor, self._rows, inputs_FB, kind)
            try:
                graph, tokens_B = self._record(inputs_FB, kind)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # something sets itself up at its first use, not in a capture
                _log.warning("capturing %d rows failed, trying again after a run: %s", size, error)
                decode_step(self._executor, self._rows, inputs_FB, kind)
                graph, tokens_B = self._record(inputs_FB, kind)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        seconds = time.perf_counter() - began
        self._policy.captured(size, kind, seconds=seconds)
        _log.debug("captured %d rows, %s, in %.3f s", size, kind, seconds)
        return _Graph(graph, inputs_FB, tokens_B)

    def _record(self, inputs_FB: torch.Tensor, kind: StepKind) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The step as a graph, and the tokens it will draw. Nothing runs."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (a second engine) may go on using the device meanwhile.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        try:
            tokens_B = decode_step(self._executor, self._rows, inputs_FB, kind)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is void, which is no news
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, tokens_B


def decode_step(executor: Executor, rows: Rows, inputs_FB: torch.Tensor, kind: StepKind) -> torch.Tensor:
    """One token of each row, from what `Rows.decode_inputs` says of it; the tokens drawn (int64)."""
    step = rows.read(inputs_FB)
    layout = rows.decode_layout(step, longest=kind.longest, max_pieces=kind.max_pieces)
    hidden_BD = executor.forward(step.token_id_B, layout)
    columns = SamplingColumns(
        temperatures_R=step.temperature_B,
        top_ks_R=step.top_k_B,
        top_ps_R=step.top_p_B,
        min_ps_R=step.min_p_B,
        seeds_R=step.seed_B,
        positions_R=step.drawn_position_B,
    )
    tokens_B = sample(executor.logits(hidden_BD), columns, kind.needs)
    rows.state.last_token_S[step.slot_B] = tokens_B
    return tokens_B
