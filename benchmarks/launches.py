"""What a launch costs the host: by Triton, which looks at all operands, and by `kernels/direct_launch.py`.

    python benchmarks/launches.py

Microseconds of a call, with all that the host does for it; the kernels themselves are shorter. "other" is the
call without any launch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

import single_kernels
import torch

from tokenmill.kernels import hopper_decode, hopper_linear, triton_activation, triton_balanced, triton_norm
from tokenmill.kernels.direct_launch import launch
from tokenmill.kernels.launching import replayed
from tokenmill.kernels.linear import linear

ROWS, HIDDEN, INNER = 64, 896, 4864  # of Qwen2.5-0.5B
CALLS, ROUNDS = 200, 15


def by_triton(function: Any, grid: tuple[int, ...], /, *operands: Any, **options: Any) -> None:
    function[grid](*operands, **options)


def nothing(*_: Any, **__: Any) -> None:
    pass


def microseconds(call: Callable[[], object]) -> float:
    """Of the host, for one call: the median of some rounds, between which the device catches up."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - began) / CALLS)
    return 1e6 * statistics.median(times)


def calls() -> dict[str, tuple[list[ModuleType], Callable[[], object]]]:
    """The modules that launch, and the call, by what it is."""
    x, total, wide, down = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((ROWS, HIDDEN), (ROWS, HIDDEN), (ROWS, 2 * INNER), (HIDDEN, INNER))
    )
    weight, inner = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda"), wide[:, :INNER].contiguous()
    attend = single_kernels.decode_calls(ROWS, 1024, (14, 2, 64), in_splits=False)[0]
    return {
        "sum and norm": ([triton_norm], lambda: triton_norm.add_rms_norm(x, total, weight, 1e-6)),
        "activation": ([triton_activation], lambda: triton_activation.gated_silu(wide)),
        "product of tiles": ([hopper_linear], lambda: linear(inner, down, None)),
        "attention, two launches": ([hopper_decode, triton_balanced], attend),
    }


def main() -> None:
    """Print the table."""
    print(f"{'':<26} {'Triton':>8} {'direct':>8} {'other':>8}")
    for title, (modules, call) in calls().items():
        cells = []
        for way in (by_triton, launch, nothing):
            # As in a capture, where products of a few rows are by tiles.
            with ExitStack() as patches, replayed():
                for module in modules:
                    patches.enter_context(mock.patch.object(module, "launch", way))
                call()
                cells.append(microseconds(call))
        print(f"{title:<26}", *(f"{cell:8.1f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
