"""Shared prefixes in decoding on Hopper against attention in float64; `gluon_on_cpu.py` runs the kernel."""

from __future__ import annotations

import dataclasses
import random
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
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


@pytest.fixture(scope="module")
def forests() -> SimpleNamespace:
    folder = Path(__file__).parents[1] / "attention"
    return SimpleNamespace(**runpy.run_path(str(folder / "forests.py")))


@pytest.fixture
def hopper(load_on_cpu: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`hopper_shared.py` on the CPU; all shared segments go there, to three programs."""
    from tokenmill.kernels import triton_decode

    module: Any = load_on_cpu("hopper_shared")
    monkeypatch.setattr("tokenmill.kernels.hopper_shared", module, raising=False)
    monkeypatch.setitem(sys.modules, "tokenmill.kernels.hopper_shared", module)
    monkeypatch.setattr(triton_decode, "_is_shared_for_hopper", lambda keys, values, group: True)
    for place in (module, triton_decode):
        monkeypatch.setattr(place, "num_processors", lambda device: 3)
    return module


def answers(step: Any, spec: AttentionSpec, page_size: int) -> list[torch.Tensor]:
    """Of two layers over the same caches: segments that are new, and those of the layer before."""
    backend = create_backend("triton", [spec] * 2, [step.key_cache] * 2, [step.value_cache] * 2, page_size)
    backend.plan(step.layout)
    return [backend.run(step.q, step.k, step.v, layer) for layer in range(2)]


@pytest.mark.parametrize("seed", range(8))
def test_random_forests(
    forests: SimpleNamespace,
    ragged: SimpleNamespace,
    hopper: Any,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    draw = random.Random(seed)
    heads, kv_heads = draw.choice(((4, 1), (7, 1), (2, 2), (12, 1)))
    head_dim, page_size = draw.choice((64, 128)), draw.choice((16, 32))
    tiling = hopper.SharedTiling(draw.choice((64, 128)), draw.randint(2, 4))
    monkeypatch.setattr(hopper, "hopper_tiling", lambda _: tiling)
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5)
    rows = forests.random_forest(draw, draw.choice((2, 7, 20)), 300 // page_size)
    rows += [max(rows, key=len) or [0]] * 2  # some have something in common
    step = forests.forest_step(
        spec,
        rows,
        costs=forests.eager_costs(
            spec, torch.float32, page_size=page_size, shortest_split=64, programs=draw.choice((3, 20))
        ),
        page_size=page_size,
        dtype=torch.float32,
        seed=seed,
        padding=draw.choice((0, 2)),
    )
    assert step.layout.shared is not None
    for out in answers(step, spec, page_size):
        assert ragged.relative_error(out, step.expected) < 1e-6


def test_more_rows_than_an_item_holds(
    forests: SimpleNamespace, ragged: SimpleNamespace, hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eighteen rows of seven heads to an item, of which two pairs stay empty, a prefix that ends within a
    tile, and one program whose groups take turns for all items of an odd number of tiles."""
    monkeypatch.setattr(hopper, "hopper_tiling", lambda _: hopper.SharedTiling(64, 2))
    monkeypatch.setattr(hopper, "num_processors", lambda _: 1)
    spec = AttentionSpec(7, 1, 64, scale=0.125)
    rows = [[*range(11), *([100 + row] * (row % 2))] for row in range(40)]
    step = forests.forest_step(
        spec,
        rows,
        costs=forests.eager_costs(spec, torch.float32, page_size=16, programs=1),
        page_size=16,
        dtype=torch.float32,
        seed=1,
    )
    assert int(step.layout.shared.num_items) == 3
    for out in answers(step, spec, 16):
        assert ragged.relative_error(out, step.expected) < 1e-6


def test_shared_keys_wait_for_no_kernel_but_in_the_first_layer_without_a_window(
    forests: SimpleNamespace, hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait, and only then let a kernel begin that does not wait for what they have waited for."""
    events: list[tuple[int, str]] = []  # of which warps, and what
    copy_tokens = hopper.copy_tokens

    def note(event: str) -> None:
        events.append((threading.get_ident(), event))

    def copied(*arguments: Any) -> None:
        note("copy")
        copy_tokens(*arguments)

    monkeypatch.setattr(hopper, "copy_tokens", copied)
    monkeypatch.setattr(hopper, "wait_for_inputs", lambda _: note("wait"))
    monkeypatch.setattr(hopper, "let_next_begin", lambda _: note("let begin"))
    monkeypatch.setattr(hopper, "num_processors", lambda _: 1)
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    rows = [[*range(8), 20], [*range(8), 21]]
    step = forests.forest_step(
        spec,
        rows,
        costs=forests.eager_costs(spec, torch.float32, page_size=16),
        page_size=16,
        dtype=torch.float32,
        seed=0,
    )
    specs = [dataclasses.replace(spec, window=20), spec, spec]
    backend = create_backend("triton", specs, [step.key_cache] * 3, [step.value_cache] * 3, 16)
    backend.plan(step.layout)
    backend.run(step.q, step.k, step.v, 0)
    assert events == []
    for layer, expected in ((1, ["wait", "copy"]), (2, ["copy"])):
        events.clear()
        backend.run(step.q, step.k, step.v, layer)
        (feeding,) = {thread for thread, event in events if event == "copy"}
        of_threads = {thread: [event for other, event in events if other == thread] for thread, _ in events}
        assert of_threads.pop(feeding) == expected
        assert [*of_threads.values()] == [["wait", "let begin"]] * 2
