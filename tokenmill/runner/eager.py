"""Steps that no graph holds, kernel by kernel; a step that fails, or lacks memory, runs in parts.

Parts give the tokens of the whole: a step only writes keys and values at positions that it computes, and a
row's last token when it is drawn, so what an attempt left behind is overwritten by the next one. Parts run
in the order of the plan, whose rows read each other's pages only backwards. Halves of halves lead to the
row that makes a step fail; it ends alone (`quarantine.py`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from tokenmill.messages import Failure, LongArray, StepPlan, TokenMasks
from tokenmill.runner.batch import Rows, SamplingInputs
from tokenmill.runner.drawing import Sampled, Unsampled, draw_tokens
from tokenmill.runner.executor import Executor
from tokenmill.runner.insight import Shown, Wish, show, tokens_of, wishes
from tokenmill.runner.processors import HostChanges
from tokenmill.runner.quarantine import Quarantine, select
from tokenmill.sampling import SamplingNeeds

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")

_log = logging.getLogger("tokenmill")
# After so many steps without want of memory, larger parts are tried again.
_STEPS_UNTIL_LARGER = 64


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a step up to their logits; the tokens are not drawn yet."""

    plan: StepPlan
    inputs: SamplingInputs | None
    made: Unsampled | None  # None where no row draws
    shown: list[Shown]  # of prompts


@dataclass(frozen=True, slots=True)
class DrawnPart:
    """The same with tokens drawn, and what else the rows asked to see."""

    plan: StepPlan
    sampled: Sampled | None
    hidden_QD: torch.Tensor | None  # of the rows that draw; None where none shows it
    shown: list[Shown]
    failures: dict[int, Failure]  # by slot
    places: LongArray | slice | None = None  # which of the rows that were drawn are the plan's; None: all

    @property
    def has_extras(self) -> bool:
        """Whether there is more than tokens and their log-probabilities."""
        return self.hidden_QD is not None or bool(self.shown) or bool(self.failures)


class EagerSteps:
    """Runs steps of one executor, whose rows have been updated with the plan."""

    def __init__(self, executor: Executor, rows: Rows, quarantine: Quarantine) -> None:
        self._executor = executor
        self._rows = rows
        self._quarantine = quarantine
        self._most_tokens = sys.maxsize  # of a part, as far as is known
        self._calm_steps = 0

    @property
    def lack_memory(self) -> bool:
        """Whether steps run in parts because a whole one found no memory lately."""
        return self._most_tokens < sys.maxsize

    def forward(self, plan: StepPlan) -> list[Part]:
        """Queue the step up to the logits, in as many parts as it takes, without the rows that fail."""
        self._relax()
        most_tokens = self._most_tokens
        parts: list[Part] = []
        waiting: list[StepPlan] = [plan]  # the first last
        while waiting:
            piece = self._quarantine.readable(waiting.pop())
            if piece is None:
                continue
            piece, rest = self._cut(piece)
            waiting += [] if rest is None else [rest]
            made = self._attempt(self._forward, piece, piece, most_tokens=most_tokens)
            if isinstance(made, Part):
                parts.append(made)
            else:
                waiting += reversed(made)
        return parts

    def draw(self, parts: list[Part], plan: StepPlan, masks: TokenMasks | None) -> list[DrawnPart]:
        """Queue the drawing of the plan's tokens and their way to the rows; one result for each part.

        The list is used up, so that logits are freed as soon as they can be.
        """
        needs = self._rows.sampling_needs(plan.slots[plan.samples])
        most_tokens = self._most_tokens
        drawn: list[DrawnPart] = []
        while parts:
            part = parts.pop(0)
            made = self._attempt(
                lambda part: self._draw(part, needs, masks),
                part,
                part.plan,
                most_tokens=most_tokens,
                is_drawing=True,
            )
            if isinstance(made, DrawnPart):
                drawn.append(made)
            else:
                del part  # and with it the logits
                parts[:0] = [again for piece in made for again in self.forward(piece)]
        return drawn

    def _forward(self, plan: StepPlan) -> Part:
        step = self._rows.stage(plan)
        inputs = self._rows.sampling_inputs(plan)
        asked = wishes(self._rows, plan)
        needed = [] if inputs is None else [inputs.last_tokens_Q]
        needed += [self._rows.to_device(tokens_of(asked))] if asked else []
        # With nothing needed only keys and values are wanted; no rows at all would be a special case.
        needed_N = torch.cat(needed) if needed else step.token_ids_T.new_zeros(1)
        hidden_ND = self._executor.forward(step.token_ids_T, step.layout, needed_N=needed_N)
        return self.part(plan, inputs, asked, hidden_ND)

    def part(
        self, plan: StepPlan, inputs: SamplingInputs | None, asked: list[Wish], hidden_ND: torch.Tensor
    ) -> Part:
        """A step whose hidden states are there: those of the rows that draw, then those of the wishes."""
        num_drawing = 0 if inputs is None else len(inputs.slots_Q)
        shown = show(self._executor, self._rows, plan, asked, hidden_ND[num_drawing:]) if asked else []
        if inputs is None:
            return Part(plan, None, None, shown)
        hidden_QD = hidden_ND[:num_drawing]
        made = Unsampled(self._executor.logits(hidden_QD), hidden_QD, inputs.slots_Q, inputs.columns)
        return Part(plan, inputs, made, shown)

    def _draw(self, part: Part, needs: SamplingNeeds, masks: TokenMasks | None) -> DrawnPart:
        if part.inputs is None or part.made is None:
            return DrawnPart(part.plan, None, None, part.shown, {})
        inputs, slots = part.inputs, part.plan.slots[part.plan.samples]
        failures = self._rows.extras.failures(slots)
        changes = HostChanges(
            self._rows,
            slots,
            masks=masks,
            masked_stop_ids_QK=inputs.masked_stop_ids_QK,
            failures=failures,
        )
        sampled = draw_tokens(self._rows, part.made.logits_QV, inputs.slots_Q, inputs.columns, needs, changes)
        hidden = part.made.hidden_QD if self._rows.extras.show_hidden(slots) else None
        return DrawnPart(part.plan, sampled, hidden, part.shown, failures)

    # ── when a step fails ─────────────────────────────────────────────────────────────────────

    def _attempt(
        self,
        work: Callable[[_Given], _Made],
        given: _Given,
        plan: StepPlan,
        *,
        most_tokens: int,
        is_drawing: bool = False,
    ) -> _Made | list[StepPlan]:
        """What `work` makes. If it fails, what is to be tried instead: nothing if the only row failed.

        Every failure makes parts smaller or rows fewer, so there is an end to it.
        """
        try:
            return work(given)
        except Exception as error:
            failure = self._quarantine.judge(error)
        # Only here, out of the handler, the tensors of the failed attempt are gone.
        if failure.error_type == "out_of_memory":
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            num_tokens = int(plan.counts.sum())
            if num_tokens > 1:
                _log.warning("no memory for %d tokens at once, trying half of them", num_tokens)
                self._most_tokens = -(-num_tokens // 2)
                self._calm_steps = 0
                return [plan]
            self._most_tokens = most_tokens  # smaller parts did not help
        elif len(plan.slots) > 1:
            rows, middle = np.arange(len(plan.slots)), len(plan.slots) // 2
            return [select(plan, rows[:middle]), select(plan, rows[middle:])]
        end = int(plan.starts[0] + plan.counts[0])
        # A draw comes after keys and values; its row must not go on, yet others may read what it wrote.
        self._quarantine.fail(plan, failure, first_lost=end - 1 if is_drawing else int(plan.starts[0]))
        return []

    def _cut(self, plan: StepPlan) -> tuple[StepPlan, StepPlan | None]:
        """As much of a plan as fits, and the rest."""
        return split(plan, self._most_tokens) if plan.counts.sum() > self._most_tokens else (plan, None)

    def _relax(self) -> None:
        """Double the limit when it has held for a while: others may have given memory back."""
        self._calm_steps += 1
        if self._calm_steps == _STEPS_UNTIL_LARGER:
            self._calm_steps = 0
            self._most_tokens = min(2 * self._most_tokens, sys.maxsize)


def split(plan: StepPlan, num_tokens: int) -> tuple[StepPlan, StepPlan]:
    """The first tokens of a plan, and the rest; a row that lies in both draws in the rest only.

    The parts are for `Rows.stage`: what `Rows.update` writes is not divided.
    """
    ends = np.cumsum(plan.counts)
    assert 0 < num_tokens < ends[-1]
    last = int(np.searchsorted(ends, num_tokens))  # row of the last token of the first part
    left = int(ends[last]) - num_tokens  # tokens of that row for the rest
    counts, samples = plan.counts[: last + 1].copy(), plan.samples[: last + 1].copy()
    counts[-1] -= left
    samples[-1] &= left == 0
    num_ids = max(0, num_tokens - plan.num_decodes)
    first = replace(
        plan,
        slots=plan.slots[: last + 1],
        starts=plan.starts[: last + 1],
        counts=counts,
        samples=samples,
        num_decodes=min(plan.num_decodes, last + 1),
        token_ids=plan.token_ids[:num_ids],
    )
    rest = last if left else last + 1
    starts, counts = plan.starts[rest:].copy(), plan.counts[rest:].copy()
    if left:
        starts[0] += counts[0] - left
        counts[0] = left
    second = replace(
        plan,
        slots=plan.slots[rest:],
        starts=starts,
        counts=counts,
        samples=plan.samples[rest:],
        num_decodes=max(0, plan.num_decodes - rest),
        token_ids=plan.token_ids[num_ids:],
    )
    return first, second
