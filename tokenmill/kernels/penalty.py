"""Penalties on logits by how often a row has seen each token: the torch reference, the choice of kernel.

Shapes: S slots (persistent rows), R rows of a step, V vocabulary.
"""

from __future__ import annotations

import torch

# Added to the count of a token that the repetition penalty counts although it is not in the output.
IN_PROMPT = 2**30


def penalize(
    logits_RV: torch.Tensor, slots_R: torch.Tensor, penalties_S3: torch.Tensor, counts_SV: torch.Tensor
) -> torch.Tensor:
    """Penalized logits, float32 [R, V]; the given ones are only read.

    `penalties_S3` (float32) are the frequency, presence and repetition penalty of each slot, 0, 0 and 1 for
    none; `counts_SV` (int32) says how often each token is in its output, plus `IN_PROMPT`. With c the count:
    z - frequency * c - (presence if c > 0), and then, if the token was seen, z * repetition for negative z,
    z / repetition for others.
    """
    if logits_RV.is_cuda:
        from tokenmill.kernels import triton_penalty

        return triton_penalty.penalize(logits_RV, slots_R, penalties_S3, counts_SV)
    return penalize_torch(logits_RV, slots_R, penalties_S3, counts_SV)


def penalize_torch(
    logits_RV: torch.Tensor, slots_R: torch.Tensor, penalties_S3: torch.Tensor, counts_SV: torch.Tensor
) -> torch.Tensor:
    """The reference of `penalize`, on any device."""
    seen_RV = counts_SV[slots_R]
    frequency_R1, presence_R1, repetition_R1 = penalties_S3[slots_R].split(1, 1)
    counts_RV = (seen_RV & (IN_PROMPT - 1)).to(torch.float32)
    lowered_RV = logits_RV.float() - frequency_R1 * counts_RV - presence_R1 * (counts_RV > 0)
    scaled_RV = torch.where(lowered_RV < 0, lowered_RV * repetition_R1, lowered_RV / repetition_R1)
    return torch.where(seen_RV > 0, scaled_RV, lowered_RV)
