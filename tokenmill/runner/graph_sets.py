"""The graphs of a runner: of steps that have the whole device, and of those in lanes beside each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.messages import Lane
from tokenmill.runner.batch import Rows
from tokenmill.runner.capture import CapturePolicy, lane_sizes, row_seconds
from tokenmill.runner.executor import Executor
from tokenmill.runner.graphs import DecodeGraphs
from tokenmill.runner.hardware import Placement
from tokenmill.runner.lanes import Lanes
from tokenmill.runner.mailbox import Mailbox
from tokenmill.runner.masked_draws import MaskedDraws
from tokenmill.runner.prompt_graphs import PromptGraphs
from tokenmill.runner.recorder import Recorder

if TYPE_CHECKING:
    from tokenmill.kernels.compilation import ParallelCompilation  # needs Triton

# Of a lane: what steps there lack is captured when rows that decode have the whole device again.
_MOST_WANTED = 16


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


@dataclass(frozen=True, slots=True)
class Graphs(StepGraphs):
    """With what draws under masks, which is done with the whole device only."""

    draws: MaskedDraws


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
    most_rows, seconds = placement.max_running_requests, row_seconds(num_parameters)
    return Graphs(
        DecodeGraphs(
            executor,
            rows,
            Mailbox(num_lines=rows.num_inputs, most_rows=most_rows, device=placement.device),
            policy=CapturePolicy(most_rows, row_seconds=seconds),
            recorder=recorder,
        ),
        PromptGraphs(executor, rows, row_seconds=seconds, most_rows=most_rows, recorder=recorder),
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
    every, seconds = decoding.num_processors + prompting.num_processors, row_seconds(num_parameters)
    recorders = tuple(Recorder(device, None, stream=part.stream) for part in (decoding, prompting))
    return StepGraphs(
        DecodeGraphs(
            executor,
            rows,
            Mailbox(num_lines=rows.num_inputs, most_rows=most_rows, device=device),
            policy=CapturePolicy(
                most_rows,
                row_seconds=seconds * every / decoding.num_processors,
                sizes=lane_sizes(most_rows),
            ),
            recorder=recorders[0],
            most_wanted=_MOST_WANTED,
        ),
        PromptGraphs(
            executor,
            rows,
            row_seconds=seconds,
            most_rows=most_rows,
            recorder=recorders[1],
        ),
        recorders,
    )
