"""Numbers that host and device leave each other in host memory, on the GPU; the reference is `mailbox.py`."""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.operands import Letters
from tokenmill.kernels.sizes import ceil_div
from tokenmill.kernels.triton_overlap import let_next_begin, overlap_options, wait_for_inputs

# A letter of 1,024 rows comes over the bus at once; one kernel serves all sizes.
NUMBERS_AT_ONCE = 4096
ROWS_PER_PROGRAM = 256


def take_letter(letters: Letters, inputs: torch.Tensor) -> None:
    """See `mailbox.take_letter`; nothing waits for the device."""
    assert inputs.is_contiguous(), "a letter is copied as it is"
    _take_kernel[(1,)](
        letters.inputs_NL,
        letters.turn_1,
        inputs,
        inputs.numel(),
        letters.inputs_NL.stride(0),
        NUM_LETTERS=len(letters.inputs_NL),
        BLOCK=NUMBERS_AT_ONCE,
        num_warps=8,
        **overlap_options(inputs.device),
    )


def answer_letter(
    letters: Letters,
    told_B: torch.Tensor,
    *,
    tokens_B: torch.Tensor,
    slots_B: torch.Tensor,
    last_token_S: torch.Tensor,
) -> None:
    """See `mailbox.answer_letter`; nothing waits for the device."""
    num_rows = len(told_B)
    _answer_kernel[(ceil_div(num_rows, ROWS_PER_PROGRAM),)](
        letters.answers_NB,
        letters.turn_1,
        told_B,
        tokens_B,
        slots_B,
        last_token_S,
        num_rows,
        letters.answers_NB.stride(0),
        NUM_LETTERS=len(letters.answers_NB),
        BLOCK=ROWS_PER_PROGRAM,
    )


@triton.jit(do_not_specialize=["size", "stride_letter"])
def _take_kernel(
    letters,
    turn,
    inputs,
    size,
    stride_letter,
    NUM_LETTERS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    let_next_begin(OVERLAP)
    wait_for_inputs(OVERLAP)
    now = tl.load(turn)
    letter = letters + (now % NUM_LETTERS) * stride_letter
    for begin in range(0, size, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        keep = places < size
        tl.store(inputs + places, tl.load(letter + places, mask=keep, other=0), mask=keep)
    tl.debug_barrier()  # all threads have read it
    tl.store(turn, now + 1)


@triton.jit(do_not_specialize=["num_rows", "stride_letter"])
def _answer_kernel(
    answers,
    turn,
    told,
    tokens,
    slots,
    last_token,
    num_rows,
    stride_letter,
    NUM_LETTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = rows < num_rows
    answer = answers + (tl.load(turn) + NUM_LETTERS - 1) % NUM_LETTERS * stride_letter
    tl.store(answer + rows, tl.load(told + rows, mask=keep, other=0), mask=keep)
    slot = tl.load(slots + rows, mask=keep, other=0)
    tl.store(last_token + slot, tl.load(tokens + rows, mask=keep, other=0), mask=keep)
