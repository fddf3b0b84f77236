"""From logits to tokens: penalties, masks, biases, processors, draw, log-probabilities, in this order.

The same function draws in captured steps and outside of them; what only the host knows comes in `Changes`.
Shapes: Q rows that draw, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.runner.batch import Rows
from tokenmill.runner.mailbox import Mailbox
from tokenmill.sampling import SamplingColumns, SamplingNeeds, sample
from tokenmill.sampling.logprobs import TokenLogprobs, token_logprobs


class Changes:
    """What the host does to logits before a draw; this one does nothing."""

    def mask(self, logits_QV: torch.Tensor) -> torch.Tensor:
        """Logits without the tokens that are not allowed; may work in place."""
        return logits_QV

    def process(self, logits_QV: torch.Tensor) -> torch.Tensor:
        """Logits as the rows' processors want them; may work in place."""
        return logits_QV


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of Q rows, and their log-probabilities where some row wants them."""

    # int64; int32 where they came to the host with their log-probabilities. They may be there already: see
    # `DecodeGraphs.replay`. Below 0: see `sampling.Draw`.
    tokens_Q: torch.Tensor
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Unsampled:
    """A step up to its logits, and what the draw will read of its rows."""

    logits_QV: torch.Tensor
    hidden_QD: torch.Tensor
    slots_Q: torch.Tensor  # int64
    columns: SamplingColumns


NO_CHANGES = Changes()


def draw_tokens(
    rows: Rows,
    logits_QV: torch.Tensor,
    slots_Q: torch.Tensor,
    columns: SamplingColumns,
    needs: SamplingNeeds,
    changes: Changes = NO_CHANGES,
    mailbox: Mailbox | None = None,
) -> Sampled:
    """Draw a token for each row, which becomes its last token; `logits_QV` may be overwritten.

    With a mailbox, of which these rows took a letter, it is answered.
    """
    adjustments = rows.extras.adjustments
    if needs.penalties:
        logits_QV = adjustments.penalize(logits_QV, slots_Q)
    logits_QV = changes.mask(logits_QV)
    if needs.num_biases:
        logits_QV = adjustments.add_biases(logits_QV, slots_Q, needs.num_biases)
    logits_QV = changes.process(logits_QV)
    draw = sample(logits_QV, columns, needs)
    logprobs = None
    if needs.num_top is not None:
        logprobs = token_logprobs(
            logits_QV,
            rows.extras.logprob_temperatures(columns),
            draw.told_R,
            rows.extras.given_ids(slots_Q, needs.num_given),
            num_top=needs.num_top,
        )
    if needs.penalties:
        adjustments.count(draw.tokens_R, slots_Q)
    if mailbox is None:
        rows.state.last_token_S[slots_Q] = draw.tokens_R
    else:
        mailbox.answer(draw, slots_Q, rows.state.last_token_S)
    return Sampled(draw.told_R, logprobs)
