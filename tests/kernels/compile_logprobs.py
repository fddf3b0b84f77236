"""Compile the kernels of log-probabilities for sm_90 without a GPU; prints registers and spills as JSON.

Run as a script, because Triton cannot compile in a process that uses its interpreter.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from tokenmill.kernels import triton_logprobs as logprobs

COMPILED = runpy.run_path(str(Path(__file__).with_name("compile_for_hopper.py")))["compiled"]
ROWS = {"temperatures": "fp32", "maxima": "fp32", "sums": "fp32", "stripes": "fp32"}
SCALARS = {"stride_logits": "i32", "vocab_size": "i32", "num_blocks": "i32"}
GIVEN_SCALARS = {"stride_given_row": "i32", "stride_given_id": "i32", "num_given": "i32"}


def variants() -> dict[str, object]:
    """Name of each variant -> what the assembler made of it."""
    found: dict[str, object] = {}
    for dtype in ("bf16", "fp32"):
        rows = ROWS | {"logits": dtype}
        for has_top in (False, True):
            found[f"summarize {dtype}, {has_top=}"] = COMPILED(
                logprobs._summarize_kernel, rows, SCALARS, {"HAS_TOP": has_top}, num_warps=4
            )
        for num_top, padded in ((0, 1), (5, 8), (32, 32)):
            found[f"pack {dtype}, {num_top=}"] = COMPILED(
                logprobs._pack_kernel,
                rows | {"tokens": "i64", "given_ids": "i64", "packed": "i32"},
                SCALARS | GIVEN_SCALARS,
                {"NUM_TOP": num_top, "TOP_PADDED": padded, "BLOCKS_PADDED": 64, "STRIPES_PADDED": 8192},
                num_warps=8,
            )
    return found


if __name__ == "__main__":
    print(json.dumps(variants()))
