"""Kernels compile for an H100 or H200 without one: registers suffice, and products use the tensor cores."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.timeout(400)]  # the first one compiles them all

PREFILLS = ("prefill 64 window", "prefill 64", "prefill 96", "prefill 128", "prefill 256")
HOPPERS = ("hopper 64", "hopper 128")  # all their copies are tile copies


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return result


def test_no_loop_spills_a_register(compiled: dict[str, dict[str, Any]]) -> None:
    spills = {name: facts["spills"] for name, facts in compiled.items() if name not in HOPPERS}
    assert spills == dict.fromkeys(spills, 0)


@pytest.mark.parametrize("name", HOPPERS)
def test_warps_of_different_duties_leave_their_tightest_loops_in_registers(
    compiled: dict[str, dict[str, Any]], name: str
) -> None:
    """The loops over tiles that all queries see; the loop over a program's tiles may spill."""
    loops = [loop for loop in compiled[name]["loops"] if loop["exponentials_beside_values"] > 60]
    tightest = sorted(loops, key=lambda loop: loop["instructions"])[:2]  # one of each group
    assert len(tightest) == 2
    assert all(loop["spills"] == 0 and loop["instructions"] < 560 for loop in tightest)


def test_shared_memory_fits(compiled: dict[str, dict[str, Any]]) -> None:
    for name, facts in compiled.items():
        # Two decoding programs to a processor at least, of 228 KiB, less 1 KiB each.
        # The same for the programs of shared segments: as many as `SHARED_PROGRAMS` says.
        limit = 113 * 1024 if name.startswith(("decode", "shared")) else 227 * 1024
        assert facts["shared"] <= limit, name


def test_many_queries_multiply_with_warp_groups(compiled: dict[str, dict[str, Any]]) -> None:
    for name in (*PREFILLS, "shared 64", "shared 128", "shared 256"):
        assert compiled[name]["HGMMA"] > 0, name


def test_shared_segments_multiply_with_whole_groups_of_warps(compiled: dict[str, dict[str, Any]]) -> None:
    for name in ("hopper shared 64", "hopper shared 128"):
        assert compiled[name]["HGMMA"] > 0, name
        assert compiled[name]["HMMA"] == 0, name


def test_what_a_row_reads_alone_ends_behind_what_it_shares(compiled: dict[str, dict[str, Any]]) -> None:
    """Each group of warps of the kernel before waits before it lets this one begin, which waits in its end:
    it does not wait itself for what that one has waited for, and what follows needs both."""
    for name in ("hopper shared 64", "hopper shared 128"):
        assert re.sub("[SE]", "", compiled[name]["order"]) == "WBWB", name
    for name in ("decode 64 own", "decode 128 own"):
        order = compiled[name]["order"]
        assert "B" not in order, name
        assert re.fullmatch("E*(S+WE)+", order), (name, order)


def test_decoding_in_runs_shares_a_processor(compiled: dict[str, dict[str, Any]]) -> None:
    """As many programs as the tiling says have room for their tiles and registers, keys wait for nobody, and
    products take whole groups of warps."""
    for name, programs in (
        ("runs 64", 3),
        ("runs 64, equal", 3),
        ("runs 128", 2),
        ("runs 128, many queries", 2),
        ("runs 128, equal, many queries", 2),
    ):
        fact = compiled[name]
        if "equal" in name:  # of few rows, where the product behind has to find room soon
            assert fact["shared"] <= 48 * 1024, name
        assert programs * (fact["shared"] + 1024) <= 228 * 1024, name
        assert programs * 256 * fact["registers"] <= 65536, name
        assert fact["HGMMA"] > 0, name
        assert fact["HMMA"] == 0, name


def test_pieces_are_put_together_behind_a_wait(compiled: dict[str, dict[str, Any]]) -> None:
    """So is what programs have taken put back: the kernel before may still take something until then."""
    for name in ("join 64", "join 64, few rows", "join 64, one row", "join 128, one row"):
        assert re.fullmatch("BW[SE]+", compiled[name]["order"]), (name, compiled[name]["order"])
        assert compiled[name]["stack"] == 0, name


def test_prefill_copies_its_own_keys_in_tiles(compiled: dict[str, dict[str, Any]]) -> None:
    for name in PREFILLS:
        assert sum(loop["tile_copies"] > 0 for loop in compiled[name]["loops"]) == 1, name


def test_prefill_of_few_queries_lacks_the_loop_that_they_do_not_need(
    compiled: dict[str, dict[str, Any]],
) -> None:
    """A first start waits for this kernel to be compiled."""
    few, many = compiled["prefill 128 few"], compiled["prefill 128"]
    assert len(few["loops"]) == len(many["loops"]) - 1
    assert not any(loop["tile_copies"] or loop["spills"] for loop in few["loops"])


def test_prefill_multiplies_values_while_it_computes_a_softmax(compiled: dict[str, dict[str, Any]]) -> None:
    (own_keys,) = (loop for loop in compiled["prefill 256"]["loops"] if loop["tile_copies"])
    assert own_keys["exponentials_in_flight"] >= 30  # of a thread's 32 scores, and two factors


def test_decode_multiplies_on_tensor_cores(compiled: dict[str, dict[str, Any]]) -> None:
    for name in ("decode 64", "decode 64 own", "decode 128 split", "decode 128 own"):
        assert compiled[name]["HMMA"] > 0, name


def test_keys_and_values_are_fetched_ahead_in_wide_copies(compiled: dict[str, dict[str, Any]]) -> None:
    for name in compiled:
        if not name.startswith(("decode", "shared", "prefill")):
            continue  # the others read no keys, or copy tiles
        assert compiled[name]["wide_copies"] >= 16, name


def test_weights_are_under_way_before_a_kernel_waits(compiled: dict[str, dict[str, Any]]) -> None:
    facts = {name: facts for name, facts in compiled.items() if name.startswith("linear")}
    assert all(fact["lets_next_begin_at_once"] for fact in facts.values())
    for name, fact in facts.items():
        assert fact["early_loads"] >= 4, name
        assert fact["stack"] == 0, name


def test_heads_are_read_and_written_whole(compiled: dict[str, dict[str, Any]]) -> None:
    fact = compiled["rotate and store"]
    assert fact["lets_next_begin_at_once"]
    assert fact["early_loads"] == 4  # the norms' weights


def test_the_first_tiles_of_a_product_are_under_way_before_it_waits(
    compiled: dict[str, dict[str, Any]],
) -> None:
    facts = {name: fact for name, fact in compiled.items() if name.startswith(("product", "heads"))}
    assert len(facts) > 15
    for name, fact in facts.items():
        assert fact["early_tile_copies"] == fact["weight_boxes"], name  # in the loop over stages
        if fact["is_fed"]:  # one warp waits before it copies, the others before they store
            assert fact["order"].count("W") >= 2, name
        if fact["is_half"]:  # another program finds room
            assert 2 * (fact["shared"] + 1024) <= 228 * 1024, name
            assert 2 * 256 * fact["registers"] <= 65_536, name
        assert fact["HGMMA"] > 0, name
        assert fact["stack"] == 0, name


def test_products_of_a_step_begin_before_those_before_have_ended(
    compiled: dict[str, dict[str, Any]],
) -> None:
    """Where the compiler fears for the sums, it lets each product wait for the one before, silently."""
    for name, fact in compiled.items():
        if name.startswith(("product", "heads", "gated product")):
            assert fact["product_waits"] < fact["HGMMA"], name


def test_products_are_stored_sixteen_bytes_at_a_time(compiled: dict[str, dict[str, Any]]) -> None:
    """But for pieces in float32, of which a row of threads stores 32 bytes as they lie, and for squares."""
    facts = {name: fact for name, fact in compiled.items() if name.startswith(("product", "heads"))}
    pieces = ("product output 8B, few rows", "product down 0.5B")
    added = [name for name in facts if name.endswith(", added")]
    assert all(facts[name]["wide_stores"] >= 2 for name in added)
    stored = {name: fact["wide_stores"] / fact["stores"] for name, fact in facts.items() if name not in added}
    assert stored == {name: 0 if name in pieces else 1 for name in stored}


def test_activations_of_tiles_are_rounded_in_pairs(compiled: dict[str, dict[str, Any]]) -> None:
    """Numbers rounded one by one go through the slow unit, which has the exponentials to do."""
    gated = [name for name in compiled if name.startswith(("product gate_up", "gated product"))]
    assert len(gated) > 6
    assert [compiled[name]["single_roundings"] for name in gated] == [0] * len(gated)


def test_a_gated_product_feeds_its_tensor_cores_and_nothing_else(compiled: dict[str, dict[str, Any]]) -> None:
    """The loop of products holds no copy, which another warp sees to, and keeps its sums in registers."""
    for name in ("gated product, wide", "gated product, narrow"):
        fact = compiled[name]
        assert fact["shared"] <= 227 * 1024, name
        assert fact["stack"] == fact["spills"] == fact["HMMA"] == 0, name
        inner, *_ = fact["loops"]
        assert inner["tile_copies"] == 0, name
        assert inner["instructions"] < 100, name
        assert fact["HGMMA"] == 4, name
        # One warp waits before it copies, the others before they store.
        assert fact["order"].count("W") == 2, name
        assert re.search("W[^W]*S", fact["order"]), (name, fact["order"])
