"""Kernels that begin before the one in front of them has ended: the sources, read for what the proof needs.

The proof is in `triton_overlap.py`. How such kernels behave is in `tests/gpu`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

KERNELS = Path(__file__).parents[2] / "tokenmill" / "kernels"
# Functions of ours that load from their first argument.
LOADS = ("tl.load", "_load_bias", "_weight_rows", "_head_weights")


def overlapping_kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(KERNELS.glob("triton_*.py")):
        source = path.read_text(encoding="utf-8")
        if "triton_overlap import" not in source:
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and "OVERLAP" in [
                argument.arg for argument in node.args.args
            ]:
                yield f"{path.stem}.{node.name}", node


OVERLAPPING = dict(overlapping_kernels())


def place_of(call: str, kernel: ast.FunctionDef) -> int:
    """Where the function's own body, outside of any branch or loop, calls `call(OVERLAP)`."""
    (place,) = (
        index for index, statement in enumerate(kernel.body) if ast.unparse(statement) == f"{call}(OVERLAP)"
    )
    return place


def test_the_kernels_of_a_decode_step_overlap() -> None:
    names = {name.partition(".")[2] for name in OVERLAPPING}
    assert names >= {"_linear_kernel", "_rotate_and_store_kernel", "_own_kernel", "_shared_kernel"}
    assert names >= {"_add_rms_norm_kernel", "_gated_silu_kernel", "_read_kernel", "_draw_kernel"}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_every_program_waits_before_it_returns_or_writes(name: str) -> None:
    kernel = OVERLAPPING[name]
    waits = place_of("wait_for_inputs", kernel)
    assert place_of("let_next_begin", kernel) < waits
    for statement in kernel.body[:waits]:
        for node in ast.walk(statement):
            assert not isinstance(node, ast.Return | ast.For | ast.While), ast.unparse(statement)
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("tl.store", "tl.atomic_add"), ast.unparse(statement)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_only_weights_are_read_before_the_wait(name: str) -> None:
    kernel = OVERLAPPING[name]
    pointers = {
        ast.unparse(call.args[0]).partition(" ")[0]
        for statement in kernel.body[: place_of("wait_for_inputs", kernel)]
        for call in ast.walk(statement)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in LOADS
    }
    assert pointers <= {"weight", "second", "scale", "bias", "None", "q_weight"}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_every_launch_passes_the_options(name: str) -> None:
    module, _, kernel = name.partition(".")
    tree = ast.parse((KERNELS / f"{module}.py").read_text(encoding="utf-8"))
    launches = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(f"{kernel}[")
    ]
    assert launches
    for launch in launches:
        spread = [ast.unparse(keyword.value) for keyword in launch.keywords if keyword.arg is None]
        assert any(value == "options" or value.startswith("overlap_options(") for value in spread), name
