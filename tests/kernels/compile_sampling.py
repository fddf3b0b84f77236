"""Compile the sampling kernels for sm_90 without a GPU; prints registers and spills as JSON.

Run as a script, because Triton cannot compile in a process that uses its interpreter.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from tokenmill.kernels import triton_sampling as sampling

COMPILED = runpy.run_path(str(Path(__file__).with_name("compile_for_hopper.py")))["compiled"]
ROWS = {"logits": "", "temperatures": "fp32", "top_ks": "i32", "block_maxima": "fp32"}
LIMITS = {"top_ps": "fp32", "min_ps": "fp32", "seeds": "i64", "positions": "i64"}
LIMITS |= {"tokens": "i64", "told": "i64"}
SCALARS = {"stride_logits": "i32", "vocab_size": "i32", "num_blocks": "i32"}


def variants() -> dict[str, object]:
    """Name of each variant -> what the assembler made of it."""
    rows = ROWS | {"logits": "bf16"}
    facts = {"block_facts": "i64"}
    found: dict[str, object] = {}
    for filters in (False, True):
        found[f"read, filters={filters}"] = COMPILED(
            sampling._read_kernel,
            rows | facts | {"stripe_maxima": "fp32"},
            SCALARS,
            {"FILTERS": filters},
            num_warps=4,
        )
    found["draw"] = COMPILED(
        sampling._draw_kernel,
        rows | LIMITS | facts,
        SCALARS,
        {"FILTERS": True, "BLOCKS_PADDED": 64},
        num_warps=8,
    )
    for dtype, shift in (("bf16", 16), ("fp32", 0)):
        found[f"draw filtered, {dtype}"] = COMPILED(
            sampling._draw_filtered_kernel,
            rows | LIMITS | {"logits": dtype, "block_sums": "i64", "stripe_maxima": "fp32", "listed": "i32"},
            SCALARS,
            {"BLOCKS_PADDED": 64, "STRIPES_PADDED": 4096, "SHIFT": shift},
            num_warps=8,
        )
    return found


if __name__ == "__main__":
    print(json.dumps(variants()))
