"""CUDA graphs for steps that compute prompts, alone or beside rows that decode.

Launching a step kernel by kernel takes the host longer than the device takes for some thousand tokens of a
small model. A graph has room for a number of tokens, of which the first belong to rows that decode, however
many there are. What is left over is a prompt of the spare row, so that every number in a step is finite.
A short one draws tokens, too. A long one ends before the logits and serves however tokens are drawn; what
draws is a small graph of its own, whose launch a short step would notice. A late one ends there, too, for
graphs that kept the logits of all their rows would fill the memory; it is drawn kernel by kernel. Where
prompts are looked at, it makes the hidden states of all tokens.

Shapes: T tokens of the step, D rows that decode, P rows with prompts, R = D + P rows.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from tokenmill.attention.base import StepLayout
from tokenmill.messages import IntArray, LongArray, StepPlan
from tokenmill.runner.batch import Rows, positions
from tokenmill.runner.capture import FIRST_CAPTURE_SECONDS, LONGEST_CAPTURE_SECONDS, at_least
from tokenmill.runner.executor import Executor
from tokenmill.runner.recorder import (
    PLAIN_DRAW,
    SHORT_KEYS,
    Graph,
    Recorder,
    StepKind,
    drawing_needs,
    step_kind,
)
from tokenmill.sampling import SamplingNeeds, sample

_Made = TypeVar("_Made")
_Ints = TypeVar("_Ints", IntArray, torch.Tensor)
_log = logging.getLogger("tokenmill")

# A graph holds some memory of the device; those of the first shapes stay. So with many of them a short step,
# which may never come again, gets none until it does.
_MOST_GRAPHS, _MANY_GRAPHS = 128, 64
# Steps that take the device longer than the host takes to launch them kernel by kernel need no graph.
_LAUNCH_SECONDS = 0.025
_TOKENS = (
    *(16, 32, 64, *range(96, 320, 32), 320, 384, 480, *range(512, 1024, 64)),  # not 448: see `capture.py`
    *(*range(1024, 2048, 128), *range(2048, 4096, 256), *range(4096, 8193, 512)),
)
_DECODES = (0, 8, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_PROMPTS = (4, 16, 64, 256, 1024)
# A long step has room for many more rows at little cost, so few graphs serve all.
_DECODES_OF_LONG = (0, 256, 1024, 2048, 4096, 8192)
PROMPTS_OF_LONG = (64, 256, 1024)
_LONG_STEP = 1024
# What is captured before it comes: the share of a full step, and whether prompts are long. What is left at
# last fits into some of these.
_CAPTURED_AHEAD = ((1, False), (1, True), (0.5, False), (0.75, False))
# What decides which kernel takes the prompts: one of so many tokens, or a row of which so much more is there.
_LONG_QUERY = 1024
_LONG_PREFIX = 4  # times the tokens of the longest prompt
# A larger graph may serve: so much padding costs less than the launches.
_PADDING_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is made for: room for tokens and rows, and what decides which kernels it launches."""

    tokens: int
    decodes: int
    prompts: int
    long_queries: bool  # whether some prompt has very many tokens in the step
    long_prefixes: bool  # whether much more than its tokens in the step was computed of some prompt before
    kind: StepKind
    needs: SamplingNeeds | None = None  # of the draw that the graph ends with; None: with hidden states
    shows_all: bool = False  # whether it makes the hidden states of all tokens; only without needs

    @property
    def rows(self) -> int:
        return self.decodes + self.prompts

    @property
    def size(self) -> int:
        """What the time of a step grows with."""
        return self.tokens + self.rows

    def holds(self, other: StepShape) -> bool:
        """Whether its graph may run steps of the other shape."""
        return (
            (self.kind, self.needs, self.shows_all) == (other.kind, other.needs, other.shows_all)
            and (self.long_queries, self.long_prefixes) == (other.long_queries, other.long_prefixes)
            and self.tokens >= other.tokens
            and self.decodes >= other.decodes
            and self.prompts >= other.prompts
        )

    @property
    def longest_query(self) -> int:
        """Bound of the tokens of a prompt in the step."""
        return self.tokens if self.long_queries else min(self.tokens, _LONG_QUERY - 1)

    def longest_prompt(self, longest_row: int) -> int:
        """Bound of the tokens of a row with a prompt; no row has more than `longest_row`."""
        return longest_row if self.long_prefixes else _LONG_PREFIX * self.longest_query - 1

    @property
    def num_inputs(self) -> int:
        return 3 * self.tokens + 4 * self.rows + self.prompts + 1


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph[torch.Tensor]
    inputs: torch.Tensor  # int32, as `pack` makes them
    # What draws behind a long step, by what it has to do.
    draws: dict[SamplingNeeds, Graph[torch.Tensor]] = field(default_factory=dict)


class PromptGraphs:
    """Replays steps with prompts that are not too long for it. Not thread-safe; owned by one runner."""

    def __init__(
        self,
        executor: Executor,
        rows: Rows,
        *,
        row_seconds: float,
        most_rows: int,
        full_step: int,
        recorder: Recorder,
    ) -> None:
        """`row_seconds`: roughly what one more token costs a step; `most_rows`: rows that there can be;
        `full_step`: the most tokens of a step."""
        self._executor = executor
        self._rows = rows
        self._recorder = recorder
        self._row_seconds = row_seconds
        self._most_tokens = min(_TOKENS[-1], int(_LAUNCH_SECONDS / row_seconds))
        self._most_rows = most_rows
        self._full_step = full_step
        self._has_memory = True  # for more graphs
        self._capture_seconds = FIRST_CAPTURE_SECONDS  # what a capture takes, by the last one
        self._steps: Counter[StepShape] = Counter()  # launched kernel by kernel
        self._padding_seconds: defaultdict[StepShape, float] = defaultdict(float)  # of steps in larger graphs
        self._graphs: dict[StepShape, _Captured] = {}

    def replay(
        self, plan: StepPlan, *, late: bool = False, shows_all: bool = False
    ) -> tuple[torch.Tensor, LongArray] | None:
        """Queue a step; what it makes of each row (R), and which of these are the rows that draw.

        It makes the tokens that it draws (int64); if `late`, the hidden states of the rows' last tokens
        [R, D], and only then rows may have extras. If also `shows_all`, those of all tokens [T, D], and which
        of these are the last ones of the rows that draw. They are valid until the next replay.
        The rows must be up to date with the plan, page tables included. None: there is no graph for it (yet).
        """
        shape = self._shape(plan, late=late, shows_all=shows_all)
        shape = None if shape is None else self._captured_shape(shape)
        if shape is None:
            return None
        captured, draw = self._graphs[shape], None
        if shape.needs is None and not late:
            draw = self._draw(shape, drawing_needs(self._rows, plan))
            if draw is None:
                if not captured.draws:
                    del self._graphs[shape]  # a larger one may serve
                return None
        inputs = pack(plan, shape, spare_slot=self._rows.spare_slot)
        captured.inputs.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        captured.graph.replay()
        if draw is not None:
            draw.replay()
        made = captured.graph.made if draw is None else draw.made
        places = np.cumsum(plan.counts, dtype=np.int64) - 1 if shows_all else _row_places(plan, shape)
        return made, places[plan.samples]

    @property
    def next_shape(self) -> StepShape | None:
        """What is to be captured next for long steps of prompts alone, before one comes; None: nothing is,
        or can be."""
        if not self._has_memory or self._full_step > self._most_tokens:
            return None
        for share, is_long in _CAPTURED_AHEAD:
            num_tokens = int(share * self._full_step)
            if num_tokens < _LONG_STEP:
                continue
            shape = StepShape(
                tokens=at_least(_TOKENS, num_tokens),
                decodes=0,
                prompts=PROMPTS_OF_LONG[0],
                long_queries=is_long,
                long_prefixes=is_long,
                kind=StepKind(SHORT_KEYS),
            )
            if shape not in self._graphs:
                return shape
        return None

    def capture(self, shape: StepShape) -> None:
        """Capture a step that ends with hidden states, and a draw without special wishes behind it."""
        if self._keep(shape):
            self._draw(shape, PLAIN_DRAW)

    def _shape(self, plan: StepPlan, *, late: bool, shows_all: bool) -> StepShape | None:
        num_tokens, num_prompts = int(plan.counts.sum()), len(plan.slots) - plan.num_decodes
        if num_tokens > self._most_tokens or num_prompts >= _PROMPTS[-1]:
            return None
        tokens = at_least(_TOKENS, num_tokens)
        is_long = tokens >= _LONG_STEP
        decodes = at_least(_DECODES_OF_LONG if is_long else _DECODES, plan.num_decodes)
        prompts = slice(plan.num_decodes, None)
        longest_query = int(plan.counts[prompts].max()) if is_long else tokens
        long_queries = longest_query >= _LONG_QUERY
        longest = int((plan.starts + plan.counts)[prompts].max())
        return StepShape(
            tokens=tokens,
            decodes=min(tokens, self._most_rows, decodes),
            prompts=at_least(PROMPTS_OF_LONG if is_long else _PROMPTS, num_prompts + 1),
            long_queries=long_queries,
            long_prefixes=long_queries or longest >= _LONG_PREFIX * longest_query,
            kind=step_kind(self._rows, plan),
            needs=None if late or is_long else drawing_needs(self._rows, plan),
            shows_all=shows_all,
        )

    def _captured_shape(self, shape: StepShape) -> StepShape | None:
        """A shape that has a graph, with room for all of the given one, which may get its own now."""
        if shape not in self._graphs:
            larger = self._larger(shape)
            if not self._is_due(shape, larger) or len(self._graphs) >= _MOST_GRAPHS:
                return larger
            if not self._keep(shape):
                return larger
        return shape

    def _keep(self, shape: StepShape) -> bool:
        """Capture a step; whether there was memory for it."""
        captured = self._unless_full(lambda: self._capture(shape), shape)
        if captured is None:
            return False
        self._graphs[shape] = captured
        self._capture_seconds = min(captured.graph.seconds, LONGEST_CAPTURE_SECONDS)
        return True

    def _is_due(self, shape: StepShape, larger: StepShape | None) -> bool:
        """Whether a shape that has come now gets a graph of its own. A larger one may serve until the padding
        of the shape's steps has taken as long as a capture."""
        if larger is None:
            self._steps[shape] += 1
            # Capturing a step and replaying it takes no longer than launching it kernel by kernel. But until
            # all kernels are compiled a short step, which may be all that somebody asks for, waits for no
            # more than its own.
            comes_again = self._steps[shape] > 1 or len(self._graphs) < _MANY_GRAPHS
            return shape.tokens >= _LONG_STEP or (self._recorder.is_ready and comes_again)
        self._padding_seconds[shape] += self._padding(shape, larger)
        return self._padding_seconds[shape] >= self._capture_seconds

    def _padding(self, shape: StepShape, larger: StepShape) -> float:
        """Seconds that a step takes longer in a larger graph, roughly."""
        return (larger.size - shape.size) * self._row_seconds

    def _draw(self, shape: StepShape, needs: SamplingNeeds) -> Graph[torch.Tensor] | None:
        """The graph that draws behind a captured step; None: there is no memory for it."""
        captured = self._graphs[shape]
        if needs not in captured.draws:
            draw = self._unless_full(lambda: self._capture_draw(captured, shape, needs), shape)
            if draw is None:
                return None
            captured.draws[needs] = draw
        return captured.draws[needs]

    def _unless_full(self, capture: Callable[[], _Made], shape: StepShape) -> _Made | None:
        """What is captured; None: there is no memory for it, and nothing more is captured."""
        if not self._has_memory:
            return None
        try:
            return capture()
        except torch.OutOfMemoryError:
            _log.warning("no memory is left to capture %s; steps with prompts get no more graphs", shape)
            self._has_memory = False
        return None

    def _larger(self, shape: StepShape) -> StepShape | None:
        """The smallest captured shape with room for another one, where that is not too much of it."""
        fitting = (each for each in self._graphs if each.holds(shape))
        best = min(fitting, key=lambda each: each.size, default=None)
        return None if best is None or self._padding(shape, best) > _PADDING_SECONDS else best

    def _capture(self, shape: StepShape) -> _Captured:
        """Record the step on the spare row."""
        inputs = self._rows.to_device(spare_inputs(shape, self._rows.spare_slot))
        graph = self._recorder.record(
            lambda: prompt_step(self._executor, self._rows, inputs, shape), str(shape)
        )
        return _Captured(graph, inputs)

    def _capture_draw(
        self, captured: _Captured, shape: StepShape, needs: SamplingNeeds
    ) -> Graph[torch.Tensor]:
        """Record the draw behind a step."""
        blank = self._rows.to_device(spare_inputs(shape, self._rows.spare_slot))
        _, rows_R, _ = _views(captured.inputs, shape)
        return self._recorder.record(
            lambda: draw_step(self._executor, self._rows, captured.graph.made, rows_R.to(torch.int64), needs),
            f"the draw of {shape.rows} rows, {needs}",
            before_it_runs=lambda: captured.inputs.copy_(blank),  # those of now have gone on
        )


def pack(plan: StepPlan, shape: StepShape, *, spare_slot: int) -> IntArray:
    """What `prompt_step` reads of a plan that fits into the shape."""
    inputs = spare_inputs(shape, spare_slot)
    tokens_T, rows_R, starts_P = _views(inputs, shape)
    num_tokens, ends = int(plan.counts.sum()), np.cumsum(plan.counts)
    tokens_T[0, :num_tokens] = np.repeat(plan.slots, plan.counts)
    tokens_T[1, :num_tokens] = positions(plan.starts, plan.counts)
    tokens_T[2, : plan.num_decodes] = -1
    tokens_T[2, plan.num_decodes : num_tokens] = plan.token_ids
    places = _row_places(plan, shape)
    rows_R[0, places] = plan.slots
    rows_R[1, places] = plan.starts + plan.counts
    rows_R[2, places] = ends - 1
    rows_R[3, places[plan.samples]] = plan.slots[plan.samples]
    num_prompts = len(plan.slots) - plan.num_decodes
    starts_P[:num_prompts] = (ends - plan.counts)[plan.num_decodes :]
    starts_P[num_prompts] = num_tokens
    rows_R[1, shape.decodes + num_prompts] = max(1, shape.tokens - num_tokens)
    return inputs


def spare_inputs(shape: StepShape, spare_slot: int) -> IntArray:
    """Inputs of a step of the spare row, all of whose tokens are one prompt."""
    inputs = np.zeros(shape.num_inputs, dtype=np.int32)
    tokens_T, rows_R, starts_P = _views(inputs, shape)
    tokens_T[0] = spare_slot
    rows_R[0] = rows_R[3] = spare_slot
    rows_R[1] = 1
    rows_R[1, shape.decodes] = shape.tokens
    rows_R[2, shape.decodes :] = shape.tokens - 1  # of some prompt: one without tokens has no last one
    starts_P[1:] = shape.tokens
    return inputs


def _views(inputs: _Ints, shape: StepShape) -> tuple[_Ints, _Ints, _Ints]:
    """Of each token: slot, position, id or -1 for the row's last one. Of each row: slot, length with this
    step's tokens, its last token in the step, the slot that gets the token drawn. First tokens of prompts.
    """
    end_of_tokens = 3 * shape.tokens
    end_of_rows = end_of_tokens + 4 * shape.rows
    tokens, rows = inputs[:end_of_tokens], inputs[end_of_tokens:end_of_rows]
    return tokens.reshape(3, -1), rows.reshape(4, -1), inputs[end_of_rows:]


def _row_places(plan: StepPlan, shape: StepShape) -> LongArray:
    """Where the plan's rows are among those of the shape."""
    places = np.arange(len(plan.slots))
    places[plan.num_decodes :] += shape.decodes - plan.num_decodes
    return places


def prompt_step(executor: Executor, rows: Rows, inputs: torch.Tensor, shape: StepShape) -> torch.Tensor:
    """One step from what `pack` says of it, on the device; see `PromptGraphs.replay`."""
    state, kind = rows.state, shape.kind
    tokens_T, rows_R, starts_P = _views(inputs, shape)
    slot_T, position_T, given_T = tokens_T.to(torch.int64)
    rows_R = rows_R.to(torch.int64)
    slot_R, length_R, last_R, _ = rows_R
    decodes = torch.arange(shape.decodes, dtype=torch.int32, device=inputs.device)
    longest, shared = rows.decode_bounds(shape.decodes, longest=kind.longest, max_pieces=kind.max_pieces)
    layout = StepLayout(
        positions_T=position_T,
        slot_mapping_T=tuple(
            rows.page_slots(table_SC, slot_T, position_T) for table_SC in state.page_table_GSC
        ),
        page_table_RP=tuple(table_SC[slot_R] for table_SC in state.page_table_GSC),
        query_starts=torch.cat((decodes, starts_P)),
        lengths_R=length_R.to(torch.int32),
        num_decodes=shape.decodes,
        host_query_lengths=[1] * shape.decodes + [shape.longest_query] * shape.prompts,
        host_lengths=[longest] * shape.decodes + [shape.longest_prompt(rows.max_length)] * shape.prompts,
        shared=shared,
    )
    token_id_T = torch.where(given_T < 0, state.last_token_S[slot_T], given_T)
    hidden_ND = executor.forward_for_graph(token_id_T, layout, needed_N=None if shape.shows_all else last_R)
    return hidden_ND if shape.needs is None else draw_step(executor, rows, hidden_ND, rows_R, shape.needs)


def draw_step(
    executor: Executor, rows: Rows, hidden_RD: torch.Tensor, rows_R: torch.Tensor, needs: SamplingNeeds
) -> torch.Tensor:
    """The tokens that follow on the hidden states of rows, int64 [R]; `rows_R`, int64: see `_views`."""
    slot_R, length_R, _, drawing_R = rows_R
    draw = sample(executor.logits_for_graph(hidden_RD), rows.sampling_columns(slot_R, length_R), needs)
    rows.state.last_token_S[drawing_R] = draw.tokens_R
    return draw.told_R
