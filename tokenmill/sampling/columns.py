"""What a draw needs besides the logits, as columns. Holds data only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Told instead of a token: some logit of the row is NaN; every logit is -inf.
NOT_A_NUMBER = -1
NOTHING_ALLOWED = -2


@dataclass(frozen=True, slots=True)
class Draw:
    """What was drawn for R rows: what the device goes on with, and what the host is told."""

    tokens_R: torch.Tensor  # int64, an id of the vocabulary in every row
    told_R: torch.Tensor  # int64, the same; NOT_A_NUMBER or NOTHING_ALLOWED where no token can be drawn


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Parameters of R rows that draw a token; all tensors are on the logits' device.

    A row whose temperature is 0 or whose top_k is 1 is greedy and ignores the rest.
    """

    temperatures_R: torch.Tensor  # float32, 0 = greedy
    top_ks_R: torch.Tensor  # int32, -1 = whole vocabulary
    top_ps_R: torch.Tensor  # float32, 1 = off
    min_ps_R: torch.Tensor  # float32, 0 = off
    seeds_R: torch.Tensor  # int64, the bits of an unsigned 64-bit seed
    positions_R: torch.Tensor  # int64, index in its sequence of the token to be drawn


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """What the host knows of the rows, so that nothing must be read back from the device."""

    random: bool  # some row is not greedy
    filters: bool  # some random row uses top_k, top_p or min_p
    penalties: bool = False  # some row has penalties
    num_biases: int = 0  # room for biases that a row can have; 0: no row has any
    num_top: int | None = (
        None  # likeliest tokens to tell the log-probabilities of; None: not even of the drawn
    )
    num_given: int = 0  # room for token ids that a row wants the log-probabilities of
