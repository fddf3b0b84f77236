"""The graphs of a runner: of steps that have the whole device, and of those in lanes beside each other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from tokenmill.messages import Lane
from tokenmill.runner.batch import Rows
from tokenmill.runner.capture import CapturePolicy, lane_sizes, order_of_use, padding_seconds, row_seconds
from tokenmill.runner.executor import Executor
from tokenmill.runner.graphs import DecodeGraphs
from tokenmill.runner.hardware import Placement
from tokenmill.runner.lanes import Lanes
from tokenmill.runner.mailbox import Mailbox
from tokenmill.runner.masked_draws import MaskedDraws
from tokenmill.runner.prompt_graphs import PromptGraphs
from tokenmill.runner.recorder import Recorder
from tokenmill.switching import switching_often

if TYPE_CHECKING:
    from tokenmill.kernels.compilation import ParallelCompilation  # needs Triton

_log = logging.getLogger("tokenmill")

# Of a lane: what steps there lack is captured while rows that decode have the whole device.
_MOST_WANTED = 16
# Captures ahead that fail before there are no more: others may have used the device in a way that forbids
# one, but one that always fails only takes time.
_MOST_FAILURES = 3


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """Those of steps whose rows all decode, and of steps with prompts."""

    decodes: DecodeGraphs
    prompts: PromptGraphs
    recorders: tuple[Recorder, ...]

    @property
    def num_bytes(self) -> int:
        """Device memory that they hold."""
        return sum(recorder.num_bytes for recorder in self.recorders)

    @property
    def num_captures(self) -> int:
        """That were begun so far."""
        return sum(recorder.num_captures for recorder in self.recorders)


@dataclass(frozen=True, slots=True)
class Graphs(StepGraphs):
    """With what draws under masks, which is done with the whole device only."""

    draws: MaskedDraws


class GraphSets:
    """Those that are open, and what is captured when the device, or the host, has nothing else to do."""

    def __init__(
        self,
        open_whole: Callable[[], Graphs | None],
        open_beside: Callable[[], StepGraphs],
        lanes: Lanes,
        *,
        has_room: Callable[[], bool],
        tell: Callable[[Exception], object],
    ) -> None:
        """`has_room` knows whether the device has memory for graphs that nobody wants yet. `tell` hears of
        captures that fail, where the error is handled."""
        self._open_whole = open_whole
        self._open_beside = open_beside
        self._lanes = lanes
        self._has_room = has_room
        self._tell = tell
        self._num_failures = 0  # of captures of those that nobody wants yet
        self._num_known = 0  # all captures, when one of those was last asked for
        self.whole = open_whole()  # of the whole device; None: there are no graphs
        self.beside: StepGraphs | None = None  # of the lanes; None: they are not open

    def of(self, lane: Lane) -> StepGraphs | None:
        """Those that steps of a lane replay."""
        return self.whole if lane is Lane.WHOLE else self.beside

    @property
    def num_bytes(self) -> int:
        """Device memory that they hold."""
        return sum(graphs.num_bytes for graphs in self._opened)

    @property
    def _opened(self) -> list[StepGraphs]:
        return [graphs for graphs in (self.whole, self.beside) if graphs is not None]

    def reopen(self) -> None:
        """Begin anew after `close`."""
        self.whole, self._num_failures = self._open_whole(), 0

    def close(self) -> None:
        """Let go of all graphs."""
        if self.whole is not None:
            self.whole.decodes.close()
            self.whole.draws.close()
        if self.beside is not None:
            self.beside.decodes.close()
        self.whole = self.beside = None

    # ── what is captured while steps run ──────────────────────────────────────────────────────

    @property
    def preparation_seconds(self) -> float:
        """See `messages.Runner`."""
        graphs, _ = self._wanting
        return 0.0 if graphs is None else graphs.wanted_seconds

    def rehearse(self) -> None:
        """Load the kernels of the graph that larger ones have stood in for."""
        graphs, lane = self._wanting
        if graphs is not None:
            self._attempt(graphs.rehearse_wanted, lane)

    def prepare(self) -> None:
        """Capture that graph."""
        graphs, lane = self._wanting
        if graphs is not None:
            self._attempt(graphs.capture_wanted, lane)

    def put_off(self) -> None:
        """Forget that it is wanted."""
        graphs, _ = self._wanting
        if graphs is not None:
            graphs.forget_wanted()

    @property
    def _wanting(self) -> tuple[DecodeGraphs | None, Lane]:
        """Those that want a graph, and its lane; None: nobody does."""
        for lane, graphs in self._decodes:
            if graphs.wanted_seconds:
                return graphs, lane
        return None, Lane.WHOLE

    # ── what is captured before it is wanted ──────────────────────────────────────────────────

    def part(self, num_rows: int) -> bool:
        """See `messages.Runner`."""
        beside = self._parted()
        return beside is not None and beside.decodes.are_ready(num_rows)

    def prepare_more(self, num_rows: int) -> bool:
        """See `messages.Runner`."""
        if self.whole is None or self._num_failures >= _MOST_FAILURES:
            return False
        if not all(recorder.is_ready for recorder in self.whole.recorders):
            return False
        known, self._num_known = self._num_known, self._num_captures
        if self._num_known != known:  # so the host was busy while it would have had nothing to do
            return False
        lacking = self._lacking(num_rows)
        if lacking is None or not self._has_room():
            return False
        capture, lane = lacking
        with switching_often():
            is_done = self._attempt(capture, lane)
        self._num_failures += not is_done
        self._num_known = self._num_captures
        return is_done

    @property
    def _num_captures(self) -> int:
        return sum(graphs.num_captures for graphs in self._opened)

    def _lacking(self, num_rows: int) -> tuple[Callable[[], None], Lane] | None:
        """What captures the next graph, in its lane: what lanes cannot do without, for jobs begin with them;
        then what serves the most numbers of rows."""
        beside = self._parted()
        if beside is not None and not beside.decodes.are_ready(num_rows):
            size = beside.decodes.next_size(num_rows)
            if size is not None:
                return partial(beside.decodes.capture_size, size), Lane.DECODES
        elif beside is not None and (shape := beside.prompts.next_shape) is not None:
            return partial(beside.prompts.capture, shape), Lane.PROMPTS
        sizes = [(graphs.next_size(num_rows), graphs, lane) for lane, graphs in self._decodes]
        lacking = [(size, graphs, lane) for size, graphs, lane in sizes if size is not None]
        if not lacking:
            return None
        size, graphs, lane = min(lacking, key=lambda each: order_of_use(each[0]))
        return partial(graphs.capture_size, size), lane

    def _parted(self) -> StepGraphs | None:
        """Those of the lanes; None: these are not open yet, but begin to open now."""
        if self.beside is None and self.whole is not None and self._lanes.are_open():
            try:
                self.beside = self._open_beside()
                self._lanes.catch_up()
            except RuntimeError as error:  # no memory, say; steps with prompts go on as they did
                _log.warning("prompts are not computed beside rows that decode: %s", error)
                self._lanes.close()
        return self.beside

    @property
    def _decodes(self) -> list[tuple[Lane, DecodeGraphs]]:
        sets = ((Lane.WHOLE, self.whole), (Lane.DECODES, self.beside))
        return [(lane, graphs.decodes) for lane, graphs in sets if graphs is not None]

    def _attempt(self, capture: Callable[[], None], lane: Lane) -> bool:
        """Whether it did not fail."""
        try:
            with torch.inference_mode(), self._lanes.within(lane):
                capture()
        except Exception as error:
            self._tell(error)
            return False
        return True


def open_graphs(
    executor: Executor,
    rows: Rows,
    placement: Placement,
    num_parameters: int,
    vocab_size: int,
    kernels: ParallelCompilation | None,
) -> Graphs | None:
    """Those of the whole device, none of which is captured yet; None: none is to be."""
    if not placement.cuda_graphs:
        return None
    recorder = Recorder(placement.device, kernels)
    most_rows = placement.max_running_requests
    return Graphs(
        DecodeGraphs(
            executor,
            rows,
            Mailbox(num_lines=rows.num_inputs, most_rows=most_rows, device=placement.device),
            policy=CapturePolicy(most_rows, row_seconds=padding_seconds(num_parameters)),
            recorder=recorder,
        ),
        PromptGraphs(
            executor,
            rows,
            row_seconds=row_seconds(num_parameters),
            most_rows=most_rows,
            full_step=placement.max_step_tokens,
            recorder=recorder,
        ),
        (recorder,),
        MaskedDraws(rows, vocab_size=vocab_size, most_rows=most_rows, recorder=recorder),
    )


def open_lane_graphs(
    executor: Executor, rows: Rows, placement: Placement, num_parameters: int, lanes: Lanes
) -> StepGraphs:
    """Those of two lanes. They run at the same time, so each has memory of its own, and rows that decode have
    another mailbox. A row takes the longer, the fewer processors there are for it."""
    most_rows, device = placement.max_running_requests, placement.device
    decoding, prompting = lanes.partitions[Lane.DECODES], lanes.partitions[Lane.PROMPTS]
    every = decoding.num_processors + prompting.num_processors
    recorders = tuple(Recorder(device, None, stream=part.stream) for part in (decoding, prompting))
    return StepGraphs(
        DecodeGraphs(
            executor,
            rows,
            Mailbox(num_lines=rows.num_inputs, most_rows=most_rows, device=device),
            policy=CapturePolicy(
                most_rows,
                row_seconds=padding_seconds(num_parameters) * every / decoding.num_processors,
                sizes=lane_sizes(most_rows),
            ),
            recorder=recorders[0],
            most_wanted=_MOST_WANTED,
            for_any_length=True,
        ),
        PromptGraphs(
            executor,
            rows,
            row_seconds=row_seconds(num_parameters),
            most_rows=most_rows,
            full_step=placement.max_step_tokens,
            recorder=recorders[1],
        ),
        recorders,
    )
