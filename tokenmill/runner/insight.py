"""What a step shows of its prompts besides their tokens: log-probabilities and hidden states.

Owns which positions of a step's prompts are looked at, and how logits of many of them are read without
being there all at once. Shapes: T tokens of a step, N positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from tokenmill.messages import LogprobOptions, StepPlan
from tokenmill.runner.batch import Rows
from tokenmill.runner.executor import Executor
from tokenmill.sampling.logprobs import TokenLogprobs, token_logprobs

# Logits of so many prompt positions exist at once.
_ROWS_AT_ONCE = {"cuda": 1024, "cpu": 64}


@dataclass(frozen=True, slots=True)
class Wish:
    """Positions of one row's prompt that are to be shown."""

    kind: Literal["logprobs", "hidden_states"]
    row: int  # of the plan
    start: int  # first position whose hidden state is needed
    count: int
    first_token: int  # index of that position's token in the step


@dataclass(frozen=True, slots=True)
class Shown:
    """What was computed for a wish; tensors of the device, or of the host once they were sent."""

    wish: Wish
    logprobs: TokenLogprobs | None
    hidden_ND: torch.Tensor | None


def wishes(rows: Rows, plan: StepPlan) -> list[Wish]:
    """What the rows of a plan that compute their prompt want to be shown of it."""
    found: list[Wish] = []
    firsts = np.cumsum(plan.counts) - plan.counts
    for row in range(plan.num_decodes, len(plan.slots)):
        extras = rows.extras.get(int(plan.slots[row]))
        if extras is None or not extras.reads_prompt:
            continue
        start, end = int(plan.starts[row]), int(plan.starts[row] + plan.counts[row])
        num_prompt = len(extras.prompt_ids)
        spans: list[tuple[Literal["logprobs", "hidden_states"], int, int]] = []
        if extras.logprobs is not None and extras.logprobs.prompt_start < num_prompt:
            # A token's log-probability follows from the position before it.
            spans.append(("logprobs", max(start, extras.logprobs.prompt_start - 1), min(end, num_prompt - 1)))
        if extras.hidden_states == "all":
            spans.append(("hidden_states", start, min(end, num_prompt)))
        found += [
            Wish(kind, row, first, last - first, int(firsts[row]) + first - start)
            for kind, first, last in spans
            if first < last
        ]
    return found


def show(
    executor: Executor, rows: Rows, plan: StepPlan, asked: list[Wish], hidden_ND: torch.Tensor
) -> list[Shown]:
    """Compute what was asked; `hidden_ND` holds the positions of all wishes, one wish after the other."""
    shown = []
    for wish, hidden in zip(asked, hidden_ND.split([wish.count for wish in asked]), strict=True):
        if wish.kind == "hidden_states":
            shown.append(Shown(wish, None, hidden))
            continue
        extras = rows.extras.get(int(plan.slots[wish.row]))
        assert extras is not None
        assert extras.logprobs is not None
        targets = extras.prompt_ids[wish.start + 1 : wish.start + 1 + wish.count].astype(np.int64)
        shown.append(Shown(wish, _logprobs(executor, hidden, rows.to_device(targets), extras.logprobs), None))
    return shown


def _logprobs(
    executor: Executor, hidden_ND: torch.Tensor, targets_N: torch.Tensor, options: LogprobOptions
) -> TokenLogprobs:
    """Of the target after each position, at temperature 1 and without any change of the logits."""
    given_1I = torch.tensor([options.token_ids], dtype=torch.int64, device=hidden_ND.device)
    at_once = _ROWS_AT_ONCE[hidden_ND.device.type]
    parts = []
    for hidden, targets in zip(hidden_ND.split(at_once), targets_N.split(at_once), strict=True):
        ones = torch.ones(len(hidden), dtype=torch.float32, device=hidden.device)
        given = given_1I.expand(len(hidden), -1)
        parts.append(token_logprobs(executor.logits(hidden), ones, targets, given, num_top=options.num_top))
    return concatenated(parts)


def concatenated(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """Rows of several, one after the other; all of the same widths."""
    if len(parts) == 1:
        return parts[0]
    return TokenLogprobs(torch.cat([part.packed_RC for part in parts]), parts[0].num_top)
