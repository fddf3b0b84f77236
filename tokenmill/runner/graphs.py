"""CUDA graphs for steps in which every row decodes. Which sizes there are is decided in `capture.py`.

A graph holds the whole step: last tokens, embedding, layers, logits, sampling, and the write of the new last
tokens. Its inputs are the rows' slots and positions; everything else lies in the persistent rows.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass

import numpy as np
import torch

from tokenmill.messages import IntArray
from tokenmill.runner.batch import Rows
from tokenmill.runner.capture import CapturePolicy
from tokenmill.runner.executor import Executor
from tokenmill.sampling import SamplingNeeds, sample

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
    inputs_2B: torch.Tensor  # int64: slots, and positions of the tokens to compute
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

    def replay(self, slots: IntArray, positions: IntArray, needs: SamplingNeeds) -> torch.Tensor | None:
        """Queue one step; returns its tokens (int64 [rows]), valid until the next replay of this size.

        None: there is no graph that is large enough, and no memory to capture one.
        """
        count = len(slots)
        captured = self._graph(count, self._kind(slots, positions, needs))
        if captured is None:
            return None
        inputs = np.zeros((2, captured.inputs_2B.shape[1]), dtype=np.int64)
        inputs[0, :count] = slots
        inputs[0, count:] = self._rows.spare_slot
        inputs[1, :count] = positions
        captured.inputs_2B.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.tokens_B[:count]

    def _kind(self, slots: IntArray, positions: IntArray, needs: SamplingNeeds) -> StepKind:
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
        inputs_2B = torch.zeros((2, size), dtype=torch.int64, device=self._device)
        inputs_2B[0] = self._rows.spare_slot
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if not self._graphs:  # cuBLAS takes its workspace for this stream
                decode_step(self._executor, self._rows, inputs_2B, kind)
            try:
                graph, tokens_B = self._record(inputs_2B, kind)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # something sets itself up at its first use, not in a capture
                _log.warning("capturing %d rows failed, trying again after a run: %s", size, error)
                decode_step(self._executor, self._rows, inputs_2B, kind)
                graph, tokens_B = self._record(inputs_2B, kind)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        seconds = time.perf_counter() - began
        self._policy.captured(size, kind, seconds=seconds)
        _log.debug("captured %d rows, %s, in %.3f s", size, kind, seconds)
        return _Graph(graph, inputs_2B, tokens_B)

    def _record(self, inputs_2B: torch.Tensor, kind: StepKind) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The step as a graph, and the tokens it will draw. Nothing runs."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (a second engine) may go on using the device meanwhile.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        try:
            tokens_B = decode_step(self._executor, self._rows, inputs_2B, kind)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is void, which is no news
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, tokens_B


def decode_step(executor: Executor, rows: Rows, inputs_2B: torch.Tensor, kind: StepKind) -> torch.Tensor:
    """One token of each row, from device tensors alone: slots and positions in, tokens out (int64)."""
    slots_B, positions_B = inputs_2B
    token_ids_B = rows.last_token_S[slots_B]
    layout = rows.decode_layout(slots_B, positions_B, longest=kind.longest, max_pieces=kind.max_pieces)
    hidden_BD = executor.forward(token_ids_B, layout)
    columns = rows.sampling_columns(slots_B, positions_B + 1)
    tokens_B = sample(executor.logits(hidden_BD), columns, kind.needs)
    rows.last_token_S[slots_B] = tokens_B
    return tokens_B
