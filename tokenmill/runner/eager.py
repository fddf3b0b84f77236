"""Steps that no graph holds, kernel by kernel; a step for which memory does not suffice runs in parts.

Parts give the tokens of the whole: a step only writes keys and values at positions that it computes, and a
row's last token when it is drawn, so what an attempt left behind is overwritten by the next one. Parts run
in the order of the plan, whose rows read each other's pages only backwards.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from tokenmill.messages import StepPlan
from tokenmill.runner.batch import Rows, SamplingInputs
from tokenmill.runner.executor import Executor
from tokenmill.sampling import mask_stops, sample

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
    logits: torch.Tensor | None  # [Q, V]; None where no row draws


class EagerSteps:
    """Runs steps of one executor, whose rows have been updated with the plan."""

    def __init__(self, executor: Executor, rows: Rows) -> None:
        self._executor = executor
        self._rows = rows
        self._most_tokens = sys.maxsize  # of a part, as far as is known
        self._calm_steps = 0

    def forward(self, plan: StepPlan) -> list[Part]:
        """Queue the step up to the logits, in as many parts as it takes."""
        self._relax()
        parts: list[Part] = []
        rest: StepPlan | None = plan
        while rest is not None:
            piece, after = self._cut(rest)
            part = self._attempt(self._forward, piece, piece)
            if part is not None:
                parts.append(part)
                rest = after
        return parts

    def draw(self, parts: list[Part]) -> torch.Tensor | None:
        """Queue the drawing of the step's tokens (int64, in the order of its rows) and their way to the rows.

        None if no row draws. The list is used up, so that logits are freed as soon as they can be.
        """
        drawn = []
        while parts:
            plan = parts[0].plan
            if parts[0].inputs is None:
                parts.pop(0)
            elif (tokens := self._attempt(self._draw, parts.pop(0), plan)) is not None:
                drawn.append(tokens)
            else:
                parts[:0] = self.forward(plan)
        return (drawn[0] if len(drawn) == 1 else torch.cat(drawn)) if drawn else None

    def _forward(self, plan: StepPlan) -> Part:
        step = self._rows.stage(plan)
        inputs = self._rows.sampling_inputs(plan)
        if (
            inputs is None
        ):  # only keys and values are wanted; a step of no rows at all would be a special case
            first_token = step.token_ids_T.new_zeros(1)
            self._executor.forward(step.token_ids_T, step.layout, needed_N=first_token)
            return Part(plan, None, None)
        hidden_QD = self._executor.forward(step.token_ids_T, step.layout, needed_N=inputs.last_tokens_Q)
        return Part(plan, inputs, self._executor.logits(hidden_QD))

    def _draw(self, part: Part) -> torch.Tensor:
        inputs, logits = part.inputs, part.logits
        assert inputs is not None
        assert logits is not None
        if inputs.masked_stop_ids_QK is not None:
            every_row = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            logits = mask_stops(logits.float(), inputs.masked_stop_ids_QK, every_row)
        tokens = sample(logits, inputs.columns, inputs.needs)
        self._rows.state.last_token_S[inputs.slots_Q] = tokens
        return tokens

    # ── when memory runs out ──────────────────────────────────────────────────────────────────

    def _attempt(self, work: Callable[[_Given], _Made], given: _Given, plan: StepPlan) -> _Made | None:
        """What `work` makes; None if there was no memory for it, and smaller parts are to be tried."""
        num_tokens = int(plan.counts.sum())
        try:
            return work(given)
        except torch.OutOfMemoryError as error:
            if num_tokens == 1:
                raise
            _log.warning("no memory for %d tokens at once, trying half of them: %s", num_tokens, error)
        # Only here, out of the handler, the tensors of the failed attempt are gone.
        self._most_tokens = -(-num_tokens // 2)
        self._calm_steps = 0
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

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
