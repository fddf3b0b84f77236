"""How captured steps get their inputs and give their tokens without a copy: letters in the host's memory.

A captured step cannot be told where its inputs are, but it can take the next of many letters.

Shapes: N letters, F lines and B rows of one, see `kernels.rows.read_rows`.
"""

from __future__ import annotations

import contextlib

import torch

from tokenmill.config import MOST_STEPS_IN_FLIGHT
from tokenmill.kernels.mailbox import answer_letter, take_letter
from tokenmill.kernels.operands import Letters
from tokenmill.messages import IntArray
from tokenmill.sampling.columns import Draw

# Before a letter is written again, its step was collected. A step takes one; where capturing what draws its
# tokens fails at first, the spare row takes one more.
_NUM_LETTERS = 2 * MOST_STEPS_IN_FLIGHT


class Mailbox:
    """Letters to one set of graphs. What is launched takes them in the order in which they were posted."""

    def __init__(self, *, num_lines: int, most_rows: int, device: torch.device) -> None:
        self._device = device
        self._num_lines = num_lines
        self._num_posted = 0
        is_pinned = device.type == "cuda"
        self._letters = Letters(
            torch.zeros((_NUM_LETTERS, num_lines * most_rows), dtype=torch.int32, pin_memory=is_pinned),
            torch.zeros((_NUM_LETTERS, most_rows), dtype=torch.int64, pin_memory=is_pinned),
            torch.zeros(1, dtype=torch.int64, device=device),
        )

    def post(self, inputs_FB: IntArray) -> torch.Tensor:
        """Leave a letter to the step that is launched next; where its tokens (int64 [B]) will be.

        They stay there until the step is collected.
        """
        turn = self._num_posted % _NUM_LETTERS
        self._letters.inputs_NL.numpy()[turn, : inputs_FB.size] = inputs_FB.reshape(-1)
        self._num_posted += 1
        return self._letters.answers_NB[turn, : inputs_FB.shape[1]]

    def settle(self) -> None:
        """Of what was posted so far, nothing is taken by what is launched from now on."""
        self._letters.turn_1.fill_(self._num_posted)

    def close(self) -> None:
        """Return when nothing reads or writes letters any more."""
        if self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # the device is lost, then, and does neither
                torch.cuda.synchronize(self._device)

    def take(self, num_rows: int) -> torch.Tensor:
        """On the device: the next letter, of a step of so many rows (int32 [F, B])."""
        inputs_FB = torch.empty((self._num_lines, num_rows), dtype=torch.int32, device=self._device)
        take_letter(self._letters, inputs_FB)
        return inputs_FB

    def answer(self, draw: Draw, slots_B: torch.Tensor, last_token_S: torch.Tensor) -> None:
        """On the device: answer the letter that was taken last, and keep the tokens."""
        answer_letter(
            self._letters, draw.told_R, tokens_B=draw.tokens_R, slots_B=slots_B, last_token_S=last_token_S
        )
