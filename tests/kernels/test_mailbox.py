"""Letters between host and device by the kernels, against the torch reference."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels import mailbox
from tokenmill.kernels.operands import Letters

pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns one-element arrays into loop bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


def some_letters(num_letters: int, length: int, most_rows: int, turn: int, device: str) -> Letters:
    is_pinned = device == "cuda"
    generator = torch.Generator().manual_seed(length)
    inputs = torch.randint(-1, 10**9, (num_letters, length), dtype=torch.int32, generator=generator)
    answers = torch.full((num_letters, most_rows), 77)
    return Letters(
        inputs.pin_memory() if is_pinned else inputs,
        answers.pin_memory() if is_pinned else answers,
        torch.tensor([turn], device=device),
    )


@pytest.mark.parametrize("turn", [0, 2, 3, 10])
@pytest.mark.parametrize("num_rows", [1, 5, 300, 1500])
def test_letters_are_taken_in_turn(triton_device: str, num_rows: int, turn: int) -> None:
    from tokenmill.kernels import triton_mailbox

    letters = some_letters(3, 4 * 1600, 1600, turn, triton_device)
    for step in range(4):
        inputs_FB = torch.zeros((4, num_rows), dtype=torch.int32, device=triton_device)
        triton_mailbox.take_letter(letters, inputs_FB)
        expected = letters.inputs_NL[(turn + step) % 3, : 4 * num_rows].view(4, num_rows)
        assert torch.equal(inputs_FB.cpu(), expected)
    assert letters.turn_1.item() == turn + 4


@pytest.mark.parametrize("turn", [0, 1, 3, 8])
@pytest.mark.parametrize("num_rows", [1, 7, 256, 700])
def test_answers_are_those_of_the_reference(triton_device: str, num_rows: int, turn: int) -> None:
    """Also before any letter was taken, as where kernels are only compiled."""
    from tokenmill.kernels import triton_mailbox

    told = torch.arange(-2, num_rows - 2)
    tokens = torch.arange(1000, 1000 + num_rows)
    slots = torch.randperm(1000, generator=torch.Generator().manual_seed(turn))[:num_rows]
    ours, theirs = (some_letters(3, 8, 800, turn, device) for device in (triton_device, "cpu"))
    last, expected = torch.zeros(1000, dtype=torch.int64), torch.zeros(1000, dtype=torch.int64)
    last = last.to(triton_device)
    triton_mailbox.answer_letter(
        ours,
        told.to(triton_device),
        tokens_B=tokens.to(triton_device),
        slots_B=slots.to(triton_device),
        last_token_S=last,
    )
    mailbox.answer_letter(theirs, told, tokens_B=tokens, slots_B=slots, last_token_S=expected)
    if triton_device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(ours.answers_NB, theirs.answers_NB)
    assert torch.equal(last.cpu(), expected)
    assert ours.turn_1.item() == turn


def test_the_reference_answers_what_it_took() -> None:
    letters = some_letters(2, 4, 3, 0, "cpu")
    for number in range(3):
        taken = torch.zeros((2, 2), dtype=torch.int32)
        mailbox.take_letter(letters, taken)
        assert taken.flatten().tolist() == letters.inputs_NL[number % 2].tolist()
        mailbox.answer_letter(
            letters,
            torch.tensor([number]),
            tokens_B=torch.tensor([5 + number]),
            slots_B=torch.tensor([1]),
            last_token_S=torch.zeros(2, dtype=torch.int64),
        )
    assert letters.answers_NB.tolist() == [[2, 77, 77], [1, 77, 77]]
