"""Programmatic dependent launch: a kernel begins while the one before it still runs, and waits.

Each program of such a kernel calls `let_next_begin`, reads what no kernel writes (weights), calls
`wait_for_inputs`, and only then touches what other kernels read or write. As at least one program waits
before it ends, a kernel that is complete proves that all kernels before it are; plainly launched kernels can
stand anywhere between. A kernel may do without waiting first only right behind one that lets it begin after
its own wait, or not before it ends: what that one has waited for is there (`triton_decode._own_kernel`).
"""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

ENABLED = True
# Of a kernel that could begin early, but had better not.
NO_OVERLAP = {"OVERLAP": False, "launch_pdl": False}


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Arguments for launching a kernel that has a parameter OVERLAP and passes it to the functions below."""
    overlap = ENABLED and device.type == "cuda" and is_hopper_or_later(device)
    return {"OVERLAP": overlap, "launch_pdl": overlap}


@cache
def is_hopper_or_later(device: torch.device) -> bool:
    """Whether it is a GPU of NVIDIA's, of compute capability 9 or more."""
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
