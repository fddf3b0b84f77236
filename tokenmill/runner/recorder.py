"""How a step becomes a CUDA graph, and what kinds of graph there are."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from tokenmill.messages import StepPlan
from tokenmill.runner.batch import Rows
from tokenmill.sampling import SamplingNeeds

if TYPE_CHECKING:
    from tokenmill.kernels.compilation import ParallelCompilation  # needs Triton

_Made = TypeVar("_Made")
_log = logging.getLogger("tokenmill")

# Rows that read no more keys than this by themselves are not split where rows are many, and a graph of only
# such rows is spared the programs that would find nothing to do.
SHORT_KEYS = 512
# What a captured draw has to do for rows without special wishes.
PLAIN_DRAW = SamplingNeeds(random=True, filters=False)


@dataclass(frozen=True, slots=True)
class StepKind:
    """What decides which kernels a step launches, beside the number of its rows."""

    longest: int | None = None  # bound of the keys that a decoding row reads by itself; None: all it can have
    max_pieces: int = 0  # bound of the pieces that shared prefixes leave in a row; 0: nothing is shared


def step_kind(rows: Rows, plan: StepPlan) -> StepKind:
    """The kind of a step; what its decoding rows share is brought up to date."""
    slots, positions = plan.slots[: plan.num_decodes], plan.starts[: plan.num_decodes]
    if not len(slots):
        return StepKind(SHORT_KEYS)
    found = rows.find_shared(slots, positions)
    if found is None:
        return StepKind(longest_keys(int(positions.max()) + 1))
    return StepKind(longest_keys(found.longest_own), found.max_pieces)


def longest_keys(longest: int) -> int | None:
    """`StepKind.longest` of rows that read so many keys at most."""
    return SHORT_KEYS if longest <= SHORT_KEYS else None


def drawing_needs(rows: Rows, plan: StepPlan) -> SamplingNeeds:
    """What a captured draw has to do. Greedy rows are drawn by the same kernels as random ones."""
    needs = rows.sampling_needs(plan.slots)
    return replace(needs, random=True, filters=needs.random and needs.filters)


@dataclass(frozen=True, slots=True)
class Graph(Generic[_Made]):
    """A captured step, or a part of one. What it makes lies in tensors of its own, valid until the next step:
    of the memory for what it works with, other graphs make use."""

    graph: torch.cuda.CUDAGraph
    made: _Made
    seconds: float  # that the capture took

    def replay(self) -> None:
        """Queue the step."""
        self.graph.replay()


class Recorder:
    """Captures steps of one runner. Kernels are compiled before (`warmup.py`), so a capture only records: the
    first one waits for all of them, and loads at most what an earlier start left on the disk.

    All graphs share one memory pool, because they never run at the same time.
    """

    def __init__(
        self,
        device: torch.device,
        kernels: ParallelCompilation | None,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`stream`: where steps are captured; None: one of its own, with all of the device."""
        self._device = device
        self._kernels = kernels
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = stream or torch.cuda.Stream(device)
        self._used = False
        self.num_captures = 0  # that were begun so far
        self._first: torch.cuda.CUDAGraph | None = None  # keeps the pool alive, whoever lets go of it
        self._num_bytes: int | None = 0  # None: not known since the last capture

    @property
    def is_ready(self) -> bool:
        """Whether a capture would begin at once."""
        return self._kernels is None or self._kernels.is_over

    @property
    def num_bytes(self) -> int:
        """Device memory that the graphs hold."""
        if self._num_bytes is None:  # looking at all memory takes a tenth of a second
            segments = torch.cuda.memory_snapshot()
            mine = [each for each in segments if tuple(each["segment_pool_id"]) == tuple(self._memory)]
            self._num_bytes = sum(segment["total_size"] for segment in mine)
        return self._num_bytes

    def record(
        self,
        step: Callable[[], _Made],
        title: str,
        *,
        may_run: bool = True,
        before_it_runs: Callable[[], object] = lambda: None,
    ) -> Graph[_Made]:
        """Capture `step`, which returns the tensors it makes.

        Where that fails at first, the step is run, if it `may_run`, and captured again; `before_it_runs`
        has to see to it that this happens on nobody's rows.

        Raises torch.OutOfMemoryError if there is no memory for the graph, and RuntimeError if it cannot be
        captured.
        """
        if self._kernels is not None:
            self._kernels.wait()
        began = time.perf_counter()
        self.num_captures += 1
        self._num_bytes = None
        with self._aside():
            if not self._used:
                self._take_workspaces()
                self._used = True
            try:
                graph, made = self._capture(step)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # something sets itself up at its first use, not in a capture
                if not may_run:
                    raise
                _log.warning("capturing %s failed, trying again after a run: %s", title, error)
                before_it_runs()
                step()
                graph, made = self._capture(step)
        seconds = time.perf_counter() - began
        _log.debug("captured %s, in %.3f s", title, seconds)
        return Graph(graph, made, seconds)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """What is launched within goes to a stream of its own, behind what was launched before and, also if
        it fails half-way, before what is launched afterwards."""
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            usual.wait_stream(self._stream)

    def _take_workspaces(self) -> None:
        """Let cuBLAS, and its other half for products with a bias, have what each wants for a stream.

        It must not come from the memory of a graph.
        """
        square = torch.zeros((16, 16), dtype=torch.bfloat16, device=self._device)
        torch.mm(square, square)
        torch.addmm(square[0], square, square)

    def _capture(self, step: Callable[[], _Made]) -> tuple[torch.cuda.CUDAGraph, _Made]:
        """The step as a graph, and what it will make. Nothing runs."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (a second engine) may go on using the device meanwhile.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        try:
            made = step()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is void, which is no news
                graph.capture_end()
            if self._first is None:  # a pool dies with its only graph, and gives its memory back
                self._memory = torch.cuda.graph_pool_handle()
            raise
        graph.capture_end()
        self._first = self._first or graph
        return graph, made
