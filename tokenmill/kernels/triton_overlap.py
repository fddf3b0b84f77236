"""Programmatic dependent launch: a kernel begins while the one before it still runs, and waits.

Each program of such a kernel calls `let_next_begin`, reads what no kernel writes (weights), calls
`wait_for_inputs`, and only then touches what other kernels read or write.

Why that is enough. The wait is for the kernel before alone: for its end, and for its writes to be visible.
But in that one, too, every program has waited, also one that finds nothing to do and returns (a test reads
the sources for that), so that its end proves the end of the kernel before it, and so on, back to a kernel
that was launched plainly. Such a kernel begins when everything before it is complete, and need call nothing.
So behind the wait all earlier kernels are complete: nothing that they write is read too early, and nothing
that they read, nor memory that they used and gave back, is overwritten too early. In front of the wait none
of them need be complete, not even the first of the step.

A waiting program takes no room from those it waits for: it begins when all of them have begun.
"""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

ENABLED = True


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Arguments for launching a kernel that has a parameter OVERLAP and passes it to the functions below."""
    overlap = ENABLED and device.type == "cuda" and _is_hopper_or_later(device)
    return {"OVERLAP": overlap, "launch_pdl": overlap}


@cache
def _is_hopper_or_later(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """Once every program of this kernel has said so, the next kernel may begin."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait until every kernel before this one is complete and its writes are visible."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
