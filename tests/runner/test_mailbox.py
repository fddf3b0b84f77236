"""Letters to captured steps: each step takes its own, and answers there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenmill.config import MOST_STEPS_IN_FLIGHT
from tokenmill.runner.mailbox import Mailbox
from tokenmill.sampling.columns import Draw

pytestmark = pytest.mark.cpu


def make_mailbox() -> Mailbox:
    return Mailbox(num_lines=4, most_rows=6, device=torch.device("cpu"))


def letter(number: int, num_rows: int) -> np.ndarray:
    return np.arange(4 * num_rows, dtype=np.int32).reshape(4, num_rows) + 100 * number


def answer(mailbox: Mailbox, number: int, num_rows: int) -> None:
    tokens = torch.full((num_rows,), number)
    mailbox.answer(Draw(tokens, tokens), torch.arange(num_rows), torch.zeros(6, dtype=torch.int64))


def test_as_many_steps_as_may_be_in_flight_keep_their_letters_and_answers() -> None:
    """Steps of any number of rows, far more of them than there are letters."""
    mailbox, sizes = make_mailbox(), [1, 6, 3]
    for first in range(0, 5 * MOST_STEPS_IN_FLIGHT, MOST_STEPS_IN_FLIGHT):
        numbers = range(first, first + MOST_STEPS_IN_FLIGHT)
        posted = {number: mailbox.post(letter(number, sizes[number % 3])) for number in numbers}
        for number in numbers:
            taken = mailbox.take(sizes[number % 3])
            assert np.array_equal(taken.numpy(), letter(number, sizes[number % 3]))
            answer(mailbox, number, sizes[number % 3])
        for number, tokens in posted.items():
            assert tokens.tolist() == [number] * sizes[number % 3]


def test_a_letter_that_nobody_took_is_void() -> None:
    mailbox = make_mailbox()
    mailbox.post(letter(1, 2))  # its step was not launched
    mailbox.settle()
    tokens = mailbox.post(letter(2, 2))
    assert np.array_equal(mailbox.take(2).numpy(), letter(2, 2))
    answer(mailbox, 9, 2)
    assert tokens.tolist() == [9, 9]
