"""CUDA graphs for steps in which every row decodes: one graph per batch size, captured when first needed.

A graph holds the whole step: last tokens, embedding, layers, logits, sampling, and the write of the new last
tokens. Its inputs are the rows' slots and positions; everything else lies in the persistent rows.
"""

from __future__ import annotations

import bisect
import logging
import time
from dataclasses import dataclass

import numpy as np
import torch

from tokenmill.messages import IntArray
from tokenmill.runner.batch import Rows
from tokenmill.runner.executor import Executor
from tokenmill.sampling import SamplingNeeds, sample

_log = logging.getLogger("tokenmill")


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step for a fixed number of rows. The tensors are the graph's own."""

    graph: torch.cuda.CUDAGraph
    inputs_2B: torch.Tensor  # int64: slots, and positions of the tokens to compute
    tokens_B: torch.Tensor  # int64, what was drawn


def batch_sizes(most: int) -> list[int]:
    """Sizes worth a graph: dense where a padded row costs most of a step's time, sparse above."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, most, 64)]
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    """Replays decode steps. Not thread-safe; owned by one runner."""

    def __init__(self, executor: Executor, rows: Rows, *, max_rows: int, device: torch.device) -> None:
        self._executor = executor
        self._rows = rows
        self._sizes = batch_sizes(max_rows)
        self._device = device
        self._graphs: dict[tuple[int, SamplingNeeds], _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def replay(self, slots: IntArray, positions: IntArray, needs: SamplingNeeds) -> torch.Tensor:
        """Queue one step; returns its tokens (int64 [rows]), valid until the next replay of this size."""
        count = len(slots)
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        captured = self._graphs.get((size, needs)) or self._capture(size, needs)
        inputs = np.zeros((2, size), dtype=np.int64)
        inputs[0, :count] = slots
        inputs[0, count:] = self._rows.spare_slot
        inputs[1, :count] = positions
        captured.inputs_2B.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.tokens_B[:count]

    def _capture(self, size: int, needs: SamplingNeeds) -> _Graph:
        """Record the step on the spare row, after one run that compiles what is missing."""
        began = time.perf_counter()
        inputs_2B = torch.zeros((2, size), dtype=torch.int64, device=self._device)
        inputs_2B[0] = self._rows.spare_slot
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._step(inputs_2B, needs)
            # Other threads (a second engine) may go on using the device meanwhile.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            tokens_B = self._step(inputs_2B, needs)
            graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._graphs[size, needs] = captured = _Graph(graph, inputs_2B, tokens_B)
        _log.debug("captured %d rows, %s, in %.3f s", size, needs, time.perf_counter() - began)
        return captured

    def _step(self, inputs_2B: torch.Tensor, needs: SamplingNeeds) -> torch.Tensor:
        slots_B, positions_B = inputs_2B
        token_ids_B = self._rows.last_token_S[slots_B]
        hidden_BD = self._executor.forward(token_ids_B, self._rows.decode_layout(slots_B, positions_B))
        columns = self._rows.sampling_columns(slots_B, positions_B + 1)
        tokens_B = sample(self._executor.logits(hidden_BD), columns, needs)
        self._rows.last_token_S[slots_B] = tokens_B
        return tokens_B
