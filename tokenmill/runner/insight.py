"""What a step shows of its prompts besides their tokens: log-probabilities and hidden states.

Owns which positions of a step's prompts are looked at, and how logits of many of them are read without
being there all at once. Shapes: T tokens of a step, N positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from tokenmill.messages import LongArray, RowExtras, StepPlan
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


def tokens_of(asked: list[Wish]) -> LongArray:
    """Which tokens of the step the wishes need, one wish after the other."""
    return np.concatenate([np.arange(wish.count) + wish.first_token for wish in asked])


def show(
    executor: Executor, rows: Rows, plan: StepPlan, asked: list[Wish], hidden_ND: torch.Tensor
) -> list[Shown]:
    """Compute what was asked; `hidden_ND` holds the positions of all wishes, one wish after the other."""
    hidden = dict(zip(asked, hidden_ND.split([wish.count for wish in asked]), strict=True))
    shown = [Shown(wish, None, hidden[wish]) for wish in asked if wish.kind == "hidden_states"]
    # Prompts of which the same is asked go through the head together: many are short.
    alike: dict[tuple[int, tuple[int, ...]], list[Wish]] = {}
    for wish in asked:
        if wish.kind == "logprobs":
            options = _extras(rows, plan, wish).logprobs
            assert options is not None
            alike.setdefault((options.num_top, options.token_ids), []).append(wish)
    for (num_top, token_ids), group in alike.items():
        targets = np.concatenate([_targets(_extras(rows, plan, wish), wish) for wish in group])
        found = _logprobs(
            executor,
            hidden_ND if len(group) == len(asked) else torch.cat([hidden[wish] for wish in group]),
            rows.to_device(targets),
            rows.to_device(np.array([token_ids], dtype=np.int64)),
            num_top,
        )
        pieces = found.packed_RC.split([wish.count for wish in group])
        shown += [
            Shown(wish, TokenLogprobs(packed, found.num_top), None)
            for wish, packed in zip(group, pieces, strict=True)
        ]
    return shown


def _extras(rows: Rows, plan: StepPlan, wish: Wish) -> RowExtras:
    extras = rows.extras.get(int(plan.slots[wish.row]))
    assert extras is not None, "who has none wishes nothing"
    return extras


def _targets(extras: RowExtras, wish: Wish) -> LongArray:
    """The tokens after the positions of the wish."""
    return extras.prompt_ids[wish.start + 1 : wish.start + 1 + wish.count].astype(np.int64)


def _logprobs(
    executor: Executor,
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    given_1I: torch.Tensor,
    num_top: int,
) -> TokenLogprobs:
    """Of the target after each position, at temperature 1 and without any change of the logits."""
    at_once = _ROWS_AT_ONCE[hidden_ND.device.type]
    parts = []
    for hidden, targets in zip(hidden_ND.split(at_once), targets_N.split(at_once), strict=True):
        ones = torch.ones(len(hidden), dtype=torch.float32, device=hidden.device)
        given = given_1I.expand(len(hidden), -1)
        parts.append(token_logprobs(executor.logits(hidden), ones, targets, given, num_top=num_top))
    return concatenated(parts)


def concatenated(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """Rows of several, one after the other; all of the same widths."""
    if len(parts) == 1:
        return parts[0]
    return TokenLogprobs(torch.cat([part.packed_RC for part in parts]), parts[0].num_top)
