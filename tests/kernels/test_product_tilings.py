"""How products of up to some hundred rows are cut; the kernel is in test_hopper_linear.py and tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.kernels import linear as plain
from tokenmill.kernels import product_tilings
from tokenmill.kernels.product_tilings import ProductTiling

pytestmark = pytest.mark.cpu


def tiling_of(num_rows: int, size: int, num_outputs: int, kind: str) -> ProductTiling | None:
    """On an H100 or H200: of a plain product, of one that may be left in pieces ("split"), or a gated one."""
    return product_tilings.choose_tiling(
        num_rows, size, num_outputs, gated=kind == "gated", may_split=kind == "split", processors=132
    )


@given(
    num_rows=st.integers(2, 256),
    size=st.integers(1, 2000).map(lambda number: 8 * number),
    num_outputs=st.integers(1, 40_000),
    gated=st.booleans(),
    may_split=st.booleans(),
    processors=st.sampled_from([114, 132]),
)
def test_tilings_fit_the_device(
    num_rows: int, size: int, num_outputs: int, gated: bool, may_split: bool, processors: int
) -> None:
    tiling = product_tilings.choose_tiling(
        num_rows, size, num_outputs, gated=gated, may_split=may_split and not gated, processors=processors
    )
    if tiling is None:
        return
    assert 2 * tiling.stages * tiling.inputs * (tiling.rows + tiling.width) <= 196_608
    assert tiling.stages >= 3
    assert tiling.pieces == 1 or (may_split and not gated)
    each = tiling.width // 2 if gated else tiling.width
    programs = tiling.pieces * -(-num_rows // tiling.rows) * -(-num_outputs // each)
    assert programs <= processors or num_rows <= 64  # few rows may take turns
    if tiling.registers is not None:  # leaves room for another program
        assert 2 * tiling.stages * tiling.inputs * (tiling.rows + tiling.width) <= 112_000
        assert 2 * 256 * tiling.registers <= 65_536


@given(
    num_rows=st.integers(2, 256),
    size=st.integers(1, 1500).map(lambda number: 8 * number),
    num_outputs=st.integers(1, 12_000),
    gated=st.booleans(),
    may_split=st.booleans(),
    processors=st.integers(60, 160),
)
def test_the_warm_up_launches_every_tiling(
    num_rows: int, size: int, num_outputs: int, gated: bool, may_split: bool, processors: int
) -> None:
    """Nothing may be left to compile while a step is captured."""
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    from tokenmill.runner.warmup import _TILED

    def chosen(rows: int) -> Any:
        tiling = product_tilings.choose_tiling(
            rows, size, num_outputs, gated=gated, may_split=may_split, processors=processors
        )
        heads = product_tilings.choose_heads_tiling(
            rows, size, num_outputs, head_dim=64, are_whole=gated, processors=processors
        )
        return (
            tiling,
            heads,
            product_tilings.choose_sum_tiling(rows, size, num_outputs, processors=processors),
        )

    assert chosen(num_rows) == chosen(min(rows for rows in _TILED if rows >= num_rows))
    assert max(_TILED) == plain.MOST_TILED_ROWS


def test_products_of_small_models_and_of_few_rows_are_tiled_and_others_are_not() -> None:
    for num_rows in (2, 64, 128, 256):
        assert tiling_of(num_rows, 896, 1152, "plain")  # Qwen2.5-0.5B: queries, keys and values
        assert tiling_of(num_rows, 896, 896, "split")  # its output
        assert tiling_of(num_rows, 4864, 896, "split")  # its last product
        assert tiling_of(num_rows, 1024, 3072, "gated")  # the first of Qwen3-0.6B's feed-forward
        assert (tiling_of(num_rows, 896, 151936, "plain") is not None) == (num_rows <= 64)  # logits


@pytest.mark.parametrize(
    ("size", "num_outputs", "kind", "expected"),
    [
        (4096, 6144, "plain", [1, 1, 1, 0, 0]),  # Llama-3.1-8B: queries, keys and values
        (4096, 4096, "split", [2, 2, 2, 0, 0]),  # its output
        (4096, 14336, "gated", [1, 1, 1, 1, 0]),  # the first product of its feed-forward
        (14336, 4096, "split", [2, 2, 2, 0, 0]),  # the last
        (8960, 1536, "split", [2, 2, 4, 0, 0]),  # that of Qwen2.5-1.5B
        (8192, 2048, "split", [2, 2, 2, 0, 0]),  # of Llama-3.2-1B, of which four pieces would be too many
        (3072, 1024, "split", [4, 4, 4, 2, 2]),  # of Qwen3-0.6B
        (5120, 17408, "gated", [1, 1, 1, 0, 0]),  # Qwen3-14B's first
        (17408, 5120, "split", [1, 1, 1, 0, 0]),  # its last
        (4096, 128256, "plain", [1, 1, 1, 0, 0]),  # logits
    ],
)
def test_large_weights_are_tiled_where_that_was_found_to_be_faster(
    size: int, num_outputs: int, kind: str, expected: list[int]
) -> None:
    """In so many pieces; none: they are not."""
    tilings = [tiling_of(rows, size, num_outputs, kind) for rows in (8, 32, 64, 128, 129)]
    assert [0 if tiling is None else tiling.pieces for tiling in tilings] == expected


@pytest.mark.parametrize(
    ("num_rows", "size", "num_outputs", "expected"),
    [
        (64, 1024, 4096, (64, 64)),  # Qwen3-0.6B: queries, keys and values, 64 tiles
        (128, 1024, 4096, (128, 64)),  # as many, instead of 128
        (256, 1024, 4096, (128, 64)),
        (128, 2048, 3072, (64, 64)),  # Llama-3.2-1B
        (256, 2048, 3072, (128, 64)),
        (256, 2560, 6144, None),  # Qwen3-4B: a large weight
    ],
)
def test_plain_tiles_have_more_rows_where_they_would_be_too_many(
    num_rows: int, size: int, num_outputs: int, expected: tuple[int, int] | None
) -> None:
    tiling = tiling_of(num_rows, size, num_outputs, "plain")
    assert (None if tiling is None else (tiling.rows, tiling.outputs)) == expected


@pytest.mark.parametrize(
    ("num_rows", "size", "num_outputs", "expected"),
    [
        (64, 896, 896, (32, 1)),  # Qwen2.5-0.5B's output: a short sum
        (128, 896, 896, (32, 1)),
        (129, 896, 896, (64, 1)),  # 84 narrow tiles would be too many
        (64, 4864, 896, (32, 4)),  # its last product: 112 programs
        (128, 4864, 896, (64, 4)),
        (256, 4864, 896, (64, 2)),
        (64, 2048, 1024, (32, 1)),  # Qwen3-0.6B's output
        (192, 2048, 1024, (64, 1)),
        (64, 3072, 1024, (64, 4)),  # its last product, of which narrow tiles would be 128 programs
        (192, 3072, 1024, (64, 2)),
        (64, 6912, 1152, (64, 4)),
        (128, 1536, 1536, (64, 1)),  # Qwen2.5-1.5B's output
        (64, 3072, 3072, (64, 1)),  # Llama-3.2-3B's: 48 tiles are enough
    ],
)
def test_sums_are_cut_where_that_keeps_processors_busy(
    num_rows: int, size: int, num_outputs: int, expected: tuple[int, int]
) -> None:
    tiling = tiling_of(num_rows, size, num_outputs, "split")
    assert tiling is not None
    assert (tiling.outputs, tiling.pieces) == expected


@pytest.mark.parametrize(
    ("num_rows", "size", "num_outputs", "expected"),
    [
        (8, 896, 896, True),  # Qwen2.5-0.5B's output
        (256, 896, 896, True),
        (128, 4864, 896, False),  # its last product: a long sum with 56 tiles
        (160, 4864, 896, True),  # 84
        (8, 2048, 1024, True),  # Qwen3-0.6B's output, in four pieces elsewhere
        (32, 2048, 1024, False),  # by 16 programs
        (32, 1536, 1536, True),  # Qwen2.5-1.5B's, by 24
        (64, 3072, 1024, False),  # its last product
        (128, 3072, 1024, True),
        (64, 4096, 4096, False),  # Llama-3.1-8B
        (256, 4096, 4096, False),
    ],
)
def test_sums_are_normalised_by_the_product_behind_them_where_pieces_are_worth_less(
    num_rows: int, size: int, num_outputs: int, expected: bool
) -> None:
    tiling = product_tilings.choose_sum_tiling(num_rows, size, num_outputs, processors=132)
    assert (tiling is not None) == expected
    assert tiling is None or tiling.pieces == 1


@pytest.mark.parametrize(
    ("num_rows", "size", "num_outputs", "norms_of", "expected"),
    [
        (32, 896, 1152, None, None),  # Qwen2.5-0.5B: so few rows gain nothing
        (33, 896, 1152, None, 32),
        (128, 896, 1152, None, 32),
        (129, 896, 1152, None, 64),
        (256, 896, 1152, None, 64),
        (33, 1024, 4096, 128, 128),  # Qwen3-0.6B: 32 whole heads
        (256, 1024, 4096, 128, 128),
        (128, 2048, 3072, None, 64),  # Llama-3.2-1B
        (129, 2048, 3072, None, None),  # 144 tiles
        (64, 2560, 6144, 128, None),  # Qwen3-4B: a large weight
    ],
)
def test_tiles_end_as_heads_where_all_are_computed_at_once(
    num_rows: int, size: int, num_outputs: int, norms_of: int | None, expected: int | None
) -> None:
    tiling = product_tilings.choose_heads_tiling(
        num_rows,
        size,
        num_outputs,
        head_dim=norms_of or 64,
        are_whole=norms_of is not None,
        processors=132,
    )
    assert (None if tiling is None else tiling.outputs) == expected


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "is_half"),
    [
        (2, 8960, True),  # Qwen2.5-1.5B: 140 programs, eight of which would take a turn of their own
        (32, 8960, True),
        (16, 9728, False),  # Qwen3-4B: 152
        (17, 9728, True),
        (32, 9728, True),
        (33, 9728, False),
        (16, 14336, False),  # Llama-3.1-8B: 224
    ],
)
def test_a_few_gated_programs_too_many_run_beside_others(
    num_rows: int, num_outputs: int, is_half: bool
) -> None:
    tiling = tiling_of(num_rows, 2560, num_outputs, "gated")
    assert tiling is not None
    assert (tiling.registers is not None) == is_half


@pytest.mark.parametrize("num_rows", [2, 32, 64])
@pytest.mark.parametrize(
    ("size", "num_outputs", "is_half"),
    [(896, 151936, True), (1024, 151936, True), (4096, 128256, True), (1024, 4096, False)],
)
def test_logits_have_two_programs_beside_each_other(
    num_rows: int, size: int, num_outputs: int, is_half: bool
) -> None:
    """One stores while the other multiplies; where all run at once, none gains."""
    tiling = tiling_of(num_rows, size, num_outputs, "plain")
    assert tiling is not None
    assert (tiling.registers is not None) == is_half


@pytest.mark.parametrize(
    ("num_rows", "size", "num_outputs", "expected"),
    [
        (64, 896, 4864, (64, 128)),  # Qwen2.5-0.5B: 76 tiles
        (128, 896, 4864, (128, 128)),
        (136, 896, 4864, (128, 160)),
        (192, 896, 4864, (128, 160)),
        (208, 896, 4864, (128, 160)),  # twice 61, where it would be twice 76
        (256, 896, 4864, (128, 160)),
        (64, 1536, 8960, (64, 160)),  # Qwen2.5-1.5B: 112 instead of 140
        (128, 2560, 9728, (128, 160)),  # Qwen3-4B: 122 instead of 152
        (256, 2560, 9728, None),
        (256, 1024, 3072, (128, 128)),  # Qwen3-0.6B
    ],
)
def test_gated_tiles_are_as_wide_as_lets_all_be_computed_at_once(
    num_rows: int, size: int, num_outputs: int, expected: tuple[int, int] | None
) -> None:
    tiling = tiling_of(num_rows, size, num_outputs, "gated")
    assert (None if tiling is None else (tiling.rows, tiling.width)) == expected
