"""How the keys of decoding rows are cut into runs, against a list of tiles made one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

TILE = 16


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=14),
    programs=st.integers(1, 6),
    short=st.integers(0, 3),
)
def test_runs_of_any_rows(triton_device: str, lengths: list[int], programs: int, short: int) -> None:
    """Every tile is in one run, a row in several runs is put together once, and runs of a kind are equal."""
    from tokenmill.kernels import triton_balanced
    from tokenmill.kernels.runs import RunShape

    shape = RunShape(TILE, programs, programs * (1 + short), for_hopper=short > 0)
    rows = torch.tensor(lengths, dtype=torch.int32, device=triton_device)
    runs = triton_balanced.plan_runs(rows, shape, longest=max(lengths))
    cuts = runs.cuts_P.tolist()
    num_tiles = sum(-(-length // TILE) for length in lengths)
    assert len(cuts) == shape.num_runs + 1
    assert (cuts[0], cuts[-1]) == (0, num_tiles)
    sizes = [end - begin for begin, end in pairwise(cuts)]
    are_few = num_tiles < triton_balanced.FEWEST_TILES * programs
    num_long = -(-num_tiles // -(-num_tiles // programs)) if are_few else programs
    long, later = sizes[:programs], sizes[programs:]
    assert max(long[:num_long]) - min(long[:num_long]) <= 1
    assert not any(long[num_long:]), "few tiles leave no more pieces than need be"
    filled = [size for size in later if size]
    assert later == filled + [0] * (len(later) - len(filled)), "a program ends at the first empty run"
    if short and not are_few:
        assert filled
        assert max(filled) - min(filled) <= 1
        assert max(filled) <= max(long)
    else:
        assert not filled

    listed = runs.tiles_3N[:, :num_tiles].T.tolist()
    assert sorted(listed) == sorted(
        [row, first, length] for row, length in enumerate(lengths) for first in range(0, length, TILE)
    )
    run_of_tile = [run for run, size in enumerate(sizes) for _ in range(size)]
    expected = []
    for row in range(len(lengths)):
        its_runs = [run for run, (owner, *_) in zip(run_of_tile, listed, strict=True) if owner == row]
        if its_runs[0] != its_runs[-1]:
            expected.append([row, its_runs[0], its_runs[-1]])
    joins = runs.joins_3J.T.tolist()
    assert len(joins) <= min(len(lengths), shape.num_runs)
    assert sorted(join for join in joins if join[1] != join[2]) == expected
    assert runs.taken_1.tolist() == [0]


@pytest.mark.parametrize("programs", [8, 33, 49, 66, 99, 132, 198, 264, 396])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("tiles", [8, 10_000], ids=["short rows", "long rows"])
def test_rows_between_powers_of_two_want_no_kernels_of_their_own(
    programs: int, head_dim: int, tiles: int
) -> None:
    """At the start those for powers of two are compiled: others would stop a run for a second."""
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    from tokenmill.kernels import triton_balanced
    from tokenmill.kernels.runs import RunShape

    def tiling(num_rows: int, tiles: int = tiles) -> triton_balanced.JoinTiling:
        num_programs = min(programs, num_rows * tiles)  # as `choose_shape` does
        shape = RunShape(64, num_programs, num_programs, for_hopper=True)
        return triton_balanced.join_tiling(shape, num_rows, head_dim)

    # Of short rows those for one row are compiled, and those for as many as may run.
    compiled = {tiling(2**power, tiles=10_000) for power in range(10)} | {tiling(1), tiling(512)}
    assert {tiling(num_rows) for num_rows in range(1, 513)} <= compiled
    for num_rows in range(1, 513):
        # A row may begin and end within runs.
        most = min(programs // num_rows, tiles) + 2
        assert tiling(num_rows).pieces >= min(most, triton_balanced.MOST_PIECES)
