"""Decode attention in runs for Hopper against attention in float64; `gluon_on_cpu.py` runs the kernel."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tokenmill.attention import create_backend
from tokenmill.attention.base import AttentionSpec

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns one-element arrays into loop bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.fixture
def hopper(load_on_cpu: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`hopper_decode.py` on the CPU; every step of rows of one query goes there."""
    from tokenmill.kernels import triton_balanced

    module = load_on_cpu("hopper_decode")
    monkeypatch.setattr("tokenmill.kernels.hopper_decode", module, raising=False)
    monkeypatch.setitem(sys.modules, "tokenmill.kernels.hopper_decode", module)
    monkeypatch.setattr(triton_balanced, "_is_for_hopper", lambda q, rows: True)
    monkeypatch.setattr(triton_balanced, "FEWEST_TILES", 1)  # here rows are few and short
    monkeypatch.setattr(triton_balanced, "FEWEST_ROWS", 0)
    return module


def decode(hopper: Any, step: Any, spec: AttentionSpec, page_size: int) -> list[torch.Tensor]:
    """The answers of two layers over the same caches: runs that are new, and those of the layer before."""
    backend = create_backend("triton", [spec] * 2, [step.key_cache] * 2, [step.value_cache] * 2, page_size)
    backend.plan(step.layout)
    return [backend.run(step.q, step.k, step.v, layer) for layer in range(2)]


@pytest.mark.parametrize("seed", range(10))
def test_random_rows(
    ragged: SimpleNamespace, hopper: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Programs run one after the other here, so the first one takes all short runs, if there are any."""
    from tokenmill.kernels import triton_balanced

    draw = random.Random(seed)
    heads, kv_heads = draw.choice(((4, 1), (7, 1), (2, 2), (12, 1)))
    head_dim, page_size = draw.choice((64, 128)), draw.choice((16, 32))
    rows = [(1, draw.choice((1, 16, 64, 65, draw.randint(1, 400)))) for _ in range(draw.randint(1, 6))]
    tiling = hopper.DecodeTiling(draw.choice((64, 128)), draw.randint(1, 3), 96)
    monkeypatch.setattr(hopper, "decode_tiling", lambda _: tiling)
    monkeypatch.setattr(hopper, "STAGES", draw.randint(2, 4))
    monkeypatch.setattr(hopper, "STAGES_OF_FEW", draw.randint(1, 4))
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5)
    step = ragged.ragged_step(
        spec,
        rows,
        page_size=page_size,
        dtype=torch.float32,
        seed=seed,
        heads_first=draw.random() < 0.3,
        device="cpu",
    )
    monkeypatch.setattr(triton_balanced, "FEWEST_ROWS", draw.choice((0, 1, 1000)))
    for out in decode(hopper, step, spec, page_size):
        assert ragged.relative_error(out, step.expected) < 1e-6


def test_short_runs_go_to_whoever_asks(
    ragged: SimpleNamespace, hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them once; where rows have few tiles there are none, and nobody asks."""
    from tokenmill.kernels import triton_balanced

    given: list[int] = []
    atomic_add = hopper.gl.atomic_add

    def noted(taken: Any, value: int, sem: str) -> Any:
        before = atomic_add(taken, value, sem)
        given.append(int(before))
        return before

    monkeypatch.setattr(hopper.gl, "atomic_add", noted)
    monkeypatch.setattr(hopper, "decode_tiling", lambda _: hopper.DecodeTiling(64, 3, 96))
    monkeypatch.setattr(triton_balanced, "num_processors", lambda _: 1)
    monkeypatch.setattr(triton_balanced, "LONG_SHARE", 0.5)
    spec = AttentionSpec(4, 1, 64, scale=0.125)
    step = ragged.ragged_step(
        spec, [(1, 700), (1, 90), (1, 500)], page_size=16, dtype=torch.float32, seed=1, device="cpu"
    )
    for fewest, expected in ((1, [0, 1, 2, 3, 4, 5, 6, 7, 8] * 2), (10, [])):
        monkeypatch.setattr(triton_balanced, "FEWEST_TILES", fewest)
        given.clear()
        for out in decode(hopper, step, spec, 16):
            assert ragged.relative_error(out, step.expected) < 1e-6
        assert given == expected  # six short runs, and the last time each of three programs asks


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_of_nan_stays_alone(ragged: SimpleNamespace, hopper: Any) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    rows = [(1, 70), (1, 90), (1, 40), (1, 5)]
    step = ragged.ragged_step(spec, rows, page_size=16, dtype=torch.float32, seed=3, device="cpu")
    step.q[1] = torch.nan
    others = torch.tensor([0, 2, 3])
    for out in decode(hopper, step, spec, 16):
        assert out[1].isnan().all()
        assert ragged.relative_error(out[others], step.expected[others]) < 1e-6


def test_a_row_s_newest_key_waits_for_the_kernel_that_stores_it(
    ragged: SimpleNamespace, hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is copied before the wait are whole tiles in front of a row's last one, and only of runs that were
    used before."""
    events: list[tuple[int, str]] = []  # of which warps, and what
    copy_tokens = hopper.copy_tokens

    def note(event: str) -> None:
        events.append((threading.get_ident(), event))

    def copied(step: Any, *arguments: Any) -> None:
        start, length = int(arguments[6]), int(arguments[7])
        note("old" if start + 64 < length else "new")
        copy_tokens(step, *arguments)

    monkeypatch.setattr(hopper, "copy_tokens", copied)
    monkeypatch.setattr(hopper, "wait_for_inputs", lambda _: note("wait"))
    monkeypatch.setattr(hopper, "decode_tiling", lambda _: hopper.DecodeTiling(64, 1, 96))
    monkeypatch.setattr("tokenmill.kernels.triton_balanced.num_processors", lambda _: 1)
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    step = ragged.ragged_step(spec, [(1, 150)], page_size=16, dtype=torch.float32, seed=0, device="cpu")
    backend = create_backend("triton", [spec] * 2, [step.key_cache] * 2, [step.value_cache] * 2, 16)
    backend.plan(step.layout)
    for layer, expected in ((0, ["wait", "old", "old", "wait", "new"]), (1, ["old", "old", "wait", "new"])):
        events.clear()
        backend.run(step.q, step.k, step.v, layer)
        (feeding,) = {thread for thread, event in events if event != "wait"}
        assert [event for thread, event in events if thread == feeding] == expected


@pytest.mark.parametrize(
    ("num_rows", "kv_heads", "longest", "programs"),
    [(1, 8, 512, 8), (1, 8, 513, 9), (2, 8, 100, 4), (1, 1, 4000, 63), (1, 8, 40000, 49), (3, 2, 5000, 198)],
)
def test_no_more_programs_than_tiles(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, kv_heads: int, longest: int, programs: int
) -> None:
    """They would take room from the kernels before. All rows go by runs, a short one alone, too."""
    shape = runs_on_132_processors(monkeypatch, num_rows, kv_heads, longest)
    assert (shape.num_programs, shape.num_runs) == (programs, programs)


def test_few_rows_have_equal_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """There would be too many pieces of each: fewer rows than 0.6 for each program of a key head."""
    for kv_heads, programs in ((2, 198), (8, 49)):
        for num_rows, runs in ((16, programs), (119, 3 * programs)):
            shape = runs_on_132_processors(monkeypatch, num_rows, kv_heads, 1000)
            assert (shape.num_programs, shape.num_runs) == (programs, runs)


def runs_on_132_processors(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, kv_heads: int, longest: int
) -> Any:
    """What is chosen for heads of 64, two for each key head."""
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    from tokenmill.kernels import triton_balanced
    from tokenmill.kernels.triton_attention import PagedRows

    monkeypatch.setattr(triton_balanced, "_is_for_hopper", lambda q, rows: True)
    monkeypatch.setattr(triton_balanced, "num_processors", lambda _: 132)
    cache = torch.zeros(1, 16, kv_heads, 64)
    rows = PagedRows(
        cache, cache, torch.zeros(num_rows, 1, dtype=torch.int32), torch.ones(num_rows, dtype=torch.int32)
    )
    return triton_balanced.choose_shape(torch.zeros(num_rows, 2 * kv_heads, 64), rows, longest)
