"""CUDA graphs for steps in which every row decodes. Which sizes there are is decided in `capture.py`.

A graph holds a step up to its hidden states: page-table entries, last tokens, embedding, layers. Its inputs
are the rows' slots, positions and new pages, in a letter (`mailbox.py`); everything else lies in the
persistent rows. A small graph behind it does the rest: logits, draw and the write of the new last tokens, to
the host, too, for one way to draw, or only the logits for a late step. So a new way to draw takes a
millisecond to capture, and one more launch costs a step 0 to 5 microseconds.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field, replace

import torch

from tokenmill.messages import StepPlan
from tokenmill.runner.batch import Rows
from tokenmill.runner.capture import CapturePolicy
from tokenmill.runner.drawing import Sampled, Unsampled, draw_tokens
from tokenmill.runner.executor import Executor
from tokenmill.runner.mailbox import Mailbox
from tokenmill.runner.recorder import PLAIN_DRAW, Graph, Recorder, StepKind, drawing_needs, step_kind
from tokenmill.sampling import SamplingColumns, SamplingNeeds

_log = logging.getLogger("tokenmill")

# So often there may be no time for what is wanted; then it is captured at once, and steps wait. Jobs that are
# short one after the other would have no graph of their own otherwise.
_MOST_PUT_OFF = 3
# What is captured before it is wanted: rows may read any number of keys.
_ANY_ROWS = StepKind()


@dataclass(frozen=True, slots=True)
class Forwarded:
    """B rows up to their hidden states, and what a draw reads of them."""

    hidden_BD: torch.Tensor
    slots_B: torch.Tensor  # int64
    columns: SamplingColumns


@dataclass(slots=True)
class _Captured:
    """A captured step for a fixed number of rows. The tensors are the graph's own."""

    graph: Graph[Forwarded]
    num_rows: int
    # What may come behind it: a draw, by what it has to do, or for late steps the logits alone.
    draws: dict[SamplingNeeds, Graph[Sampled]] = field(default_factory=dict)
    logits: Graph[Unsampled] | None = None

    def end(self, needs: SamplingNeeds | None) -> Graph[Sampled] | Graph[Unsampled] | None:
        """The draw that does what is needed, or (None) the logits; None: it is not captured."""
        return self.logits if needs is None else self.draws.get(needs)


class DecodeGraphs:
    """Replays decode steps. Not thread-safe; owned by one runner."""

    def __init__(
        self,
        executor: Executor,
        rows: Rows,
        mailbox: Mailbox,
        *,
        policy: CapturePolicy,
        recorder: Recorder,
        most_wanted: int = 1,
        for_any_length: bool = False,
    ) -> None:
        """`most_wanted`: captures that are put off at the same time, each until there is time for it.
        `for_any_length`: none is only for rows that read few keys."""
        self._most_wanted = most_wanted
        self._for_any_length = for_any_length
        self._executor = executor
        self._rows = rows
        self._mailbox = mailbox
        self._policy = policy
        self._recorder = recorder
        self._graphs: dict[tuple[int, StepKind], _Captured] = {}
        # To be captured, with a draw, while larger ones serve.
        self._wanted: dict[tuple[int, StepKind], SamplingNeeds] = {}
        self._num_put_off = 0  # since the last capture

    @property
    def wanted_seconds(self) -> float:
        """What `capture_wanted` could take; 0: no graph is wanted."""
        return self._policy.seconds_to_spare if self._wanted else 0.0

    def rehearse_wanted(self) -> None:
        """Let the device load what kernels it lacks of what is wanted; it does so only once all that it runs
        has ended.

        Those of libraries are loaded when they are captured for the first time. One layer has them all.
        """
        if not self._wanted:
            return
        (size, kind), needs = next(iter(self._wanted.items()))
        with contextlib.suppress(torch.OutOfMemoryError):  # the capture itself will tell
            self._capture_draw(self._capture(size, kind, is_rehearsal=True), needs)

    def capture_wanted(self) -> None:
        """Capture the first that a larger graph has stood in for."""
        if self._wanted:
            size, kind = wanted = next(iter(self._wanted))
            self._capture_if_possible(size, kind, self._wanted.pop(wanted))

    def forget_wanted(self) -> None:
        """Want something again only when more padding was computed."""
        self._wanted.clear()
        self._num_put_off += 1

    def are_ready(self, num_rows: int) -> bool:
        """Whether no number of rows up to this one, without special wishes, would wait for a capture, or be
        padded by many rows."""
        return self._policy.are_ready(_ANY_ROWS, num_rows)

    def next_size(self, num_rows: int) -> int | None:
        """What is to be captured next for up to so many rows; None: nothing is, or can be."""
        lacking = self._policy.lacking(_ANY_ROWS, num_rows) if self._policy.may_capture else []
        return lacking[0] if lacking else None

    def capture_size(self, size: int) -> None:
        """Capture a graph of this size for rows without special wishes."""
        self._wanted.pop((size, _ANY_ROWS), None)
        self._capture_if_possible(size, _ANY_ROWS, PLAIN_DRAW)

    def close(self) -> None:
        """Return when no step reads or writes the host's memory any more, which others may get then."""
        self._mailbox.close()

    def replay(self, plan: StepPlan, *, late: bool) -> Sampled | Unsampled | None:
        """Queue a step whose rows all decode, if `late` up to its logits; it may have made more rows.

        What it made is valid until the next replay, and tokens without log-probabilities, which are on the
        host once the step is done, until it is collected. None: there is no graph that is large enough, and
        no memory to capture one.
        """
        needs = None if late else drawing_needs(self._rows, plan)
        kind = step_kind(self._rows, plan)
        if self._for_any_length:
            kind = replace(kind, longest=None)
        captured = self._graph(len(plan.slots), kind, needs)
        end = None if captured is None else captured.end(needs)
        if captured is None or end is None:
            return None
        tokens_B = self._mailbox.post(self._rows.decode_inputs(plan, size=captured.num_rows))
        try:
            captured.graph.replay()
        except Exception:
            self._mailbox.settle()
            raise
        end.replay()
        made = end.made
        return Sampled(tokens_B, None) if isinstance(made, Sampled) and made.logprobs is None else made

    def expect_late(self, num_rows: int, kind: StepKind) -> Unsampled | None:
        """Have a graph for such a late step before it comes; what it will make. None: there is no memory."""
        captured = self._graph(num_rows, kind, None)
        return None if captured is None or captured.logits is None else captured.logits.made

    def _graph(self, num_rows: int, kind: StepKind, needs: SamplingNeeds | None) -> _Captured | None:
        """A graph for at least so many rows, with the end that they need. What the policy wants is captured
        now, unless another serves: then there is time for it at `capture_wanted`, but only until the policy
        wants one again, and none for late steps (no needs): nothing is launched before they are drawn.
        """
        may_put_off = needs is not None and self._num_put_off < _MOST_PUT_OFF
        may_put_off = may_put_off and len(self._wanted) < self._most_wanted
        size = self._policy.choose(num_rows, kind, may_put_off=may_put_off)
        if size is None:  # nothing more can be captured
            size, kind = self._serving(num_rows, kind)
        elif (size, kind) not in self._graphs:
            wanted, (size, kind) = (size, kind), self._serving(num_rows, kind)
            # Where it is of another kind, the policy wants one of this kind at each step.
            is_put_off = kind != wanted[1] and wanted in self._wanted
            if size is not None and needs is not None and (may_put_off or is_put_off):
                self._wanted[wanted] = needs
            else:
                if len(self._wanted) >= self._most_wanted:  # there was no time for them
                    self._wanted.clear()
                self._wanted.pop(wanted, None)
                self._capture_if_possible(*wanted, needs)
                size, kind = self._serving(num_rows, wanted[1])
        if size is None:
            return None
        captured = self._graphs[size, kind]
        if captured.end(needs) is not None or self._add_end(captured, needs):
            return captured
        return self._larger(num_rows, kind, needs)

    def _serving(self, num_rows: int, kind: StepKind) -> tuple[int | None, StepKind]:
        """The smallest graph that there is for so many rows, of their kind or else for any length; None:
        there is none."""
        for each in (kind, replace(kind, longest=None)):
            size = self._policy.serving(num_rows, each)
            if size is not None:
                return size, each
        return None, kind

    def _capture_if_possible(self, size: int, kind: StepKind, needs: SamplingNeeds | None) -> None:
        """Capture a step and its end; without memory for both, neither is kept."""
        self._num_put_off = 0
        try:
            captured = self._capture(size, kind)
        except torch.OutOfMemoryError:
            self._stop(size)
            return
        if self._add_end(captured, needs):
            self._graphs[size, kind] = captured
            self._policy.captured(size, kind, seconds=captured.graph.seconds)  # its end takes next to none

    def _add_end(self, captured: _Captured, needs: SamplingNeeds | None) -> bool:
        """Capture an end; whether there was memory for it."""
        if not self._policy.may_capture:
            return False
        try:
            if needs is None:
                captured.logits = self._capture_logits(captured)
            else:
                captured.draws[needs] = self._capture_draw(captured, needs)
        except torch.OutOfMemoryError:
            self._stop(captured.num_rows)
            return False
        return True

    def _stop(self, size: int) -> None:
        _log.warning("no memory is left to capture %d rows; no more graphs are captured", size)
        self._policy.stop()
        self._wanted.clear()

    def _larger(self, num_rows: int, kind: StepKind, needs: SamplingNeeds | None) -> _Captured | None:
        """Where nothing more can be captured: the smallest graph that will do and has this end."""
        fitting = (
            each
            for (size, its_kind), each in self._graphs.items()
            if size >= num_rows and its_kind == kind and each.end(needs) is not None
        )
        return min(fitting, key=lambda each: each.num_rows, default=None)

    def _capture(self, size: int, kind: StepKind, *, is_rehearsal: bool = False) -> _Captured:
        """Record the step; should it have to run, then on the spare row."""

        def step() -> Forwarded:
            inputs_FB = self._mailbox.take(size)
            return decode_forward(self._executor, self._rows, inputs_FB, kind, is_rehearsal=is_rehearsal)

        try:
            graph = self._recorder.record(
                step,
                f"{size} rows, {kind}" + (", for a rehearsal" if is_rehearsal else ""),
                before_it_runs=lambda: self._mailbox.post(self._rows.blank_inputs(size)),
            )
        finally:
            self._mailbox.settle()
        return _Captured(graph, size)

    def _capture_logits(self, captured: _Captured) -> Graph[Unsampled]:
        return self._recorder.record(
            lambda: decode_logits(self._executor, captured.graph.made),
            f"the logits of {captured.num_rows} rows",
        )

    def _capture_draw(self, captured: _Captured, needs: SamplingNeeds) -> Graph[Sampled]:
        """Record the draw behind a step; no other step waits for its draw now."""

        def forward_the_spare_row() -> None:
            self._mailbox.post(self._rows.blank_inputs(captured.num_rows))
            captured.graph.replay()

        try:
            return self._recorder.record(
                lambda: decode_draw(self._executor, self._rows, captured.graph.made, needs, self._mailbox),
                f"the draw of {captured.num_rows} rows, {needs}",
                before_it_runs=forward_the_spare_row,
            )
        finally:
            self._mailbox.settle()


def decode_forward(
    executor: Executor, rows: Rows, inputs_FB: torch.Tensor, kind: StepKind, *, is_rehearsal: bool = False
) -> Forwarded:
    """The last token of each row, from what `Rows.decode_inputs` says of it."""
    step = rows.read(inputs_FB)
    layout = rows.decode_layout(step, longest=kind.longest, max_pieces=kind.max_pieces)
    columns = SamplingColumns(
        temperatures_R=step.temperature_B,
        top_ks_R=step.top_k_B,
        top_ps_R=step.top_p_B,
        min_ps_R=step.min_p_B,
        seeds_R=step.seed_B,
        positions_R=step.drawn_position_B,
    )
    hidden_BD = executor.forward_for_graph(step.token_id_B, layout, is_rehearsal=is_rehearsal)
    return Forwarded(hidden_BD, step.slot_B, columns)


def decode_logits(executor: Executor, forwarded: Forwarded) -> Unsampled:
    """Up to the logits, in tensors that stay."""
    hidden_BD = forwarded.hidden_BD
    return Unsampled(executor.logits_for_graph(hidden_BD), hidden_BD, forwarded.slots_B, forwarded.columns)


def decode_draw(
    executor: Executor, rows: Rows, forwarded: Forwarded, needs: SamplingNeeds, mailbox: Mailbox
) -> Sampled:
    """One token of each row, which the mailbox has, too."""
    logits_BV = executor.logits_for_graph(forwarded.hidden_BD)
    return draw_tokens(rows, logits_BV, forwarded.slots_B, forwarded.columns, needs, mailbox=mailbox)
