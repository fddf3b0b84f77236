"""Numbers that host and device leave each other in host memory: the torch reference, the choice of kernels.

A copy between two graphs costs the device some 10 microseconds, for it changes from copying to computing and
back; a kernel of the graph that reads or writes the host's memory costs 2.

Shapes: N letters, L numbers of one, B rows of a step, S slots (persistent rows).
"""

from __future__ import annotations

import torch

from tokenmill.kernels.operands import Letters


def take_letter(letters: Letters, inputs: torch.Tensor) -> None:
    """Copy the first numbers of the next letter to `inputs` (int32, contiguous); it counts as taken."""
    if inputs.is_cuda:
        from tokenmill.kernels import triton_mailbox

        triton_mailbox.take_letter(letters, inputs)
        return
    now = int(letters.turn_1) % len(letters.inputs_NL)
    inputs.view(-1).copy_(letters.inputs_NL[now, : inputs.numel()])
    letters.turn_1.add_(1)


def answer_letter(
    letters: Letters,
    told_B: torch.Tensor,
    *,
    tokens_B: torch.Tensor,
    slots_B: torch.Tensor,
    last_token_S: torch.Tensor,
) -> None:
    """Write what the host is told (int64) beside the letter that was taken last, the tokens to their slots.

    Slots (int64) may stand there more than once; which of their tokens stays is not defined.
    """
    if told_B.is_cuda:
        from tokenmill.kernels import triton_mailbox

        triton_mailbox.answer_letter(
            letters, told_B, tokens_B=tokens_B, slots_B=slots_B, last_token_S=last_token_S
        )
        return
    now = (int(letters.turn_1) - 1) % len(letters.answers_NB)
    letters.answers_NB[now, : len(told_B)] = told_B
    last_token_S[slots_B] = tokens_B
