"""The floors of `benchmarks/floors.py`: against sums written out by hand, and how results are found."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.unit

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TOY = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 32,
}
# Of the toy: one layer's products, those of keys and values among them, and the head.
LAYER = 8 * 16 + 2 * 8 * 8 + 16 * 8 + 3 * 8 * 16
KEYS_AND_VALUES = 2 * 8 * 8
HEAD = 8 * 32
WEIGHT_BYTES = 2 * (2 * LAYER + HEAD)
TOKEN_BYTES = 2 * 2 * 2 * 2 * 4


@pytest.fixture
def floors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with speeds of one, so that a floor is a number of bytes."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("floors")
    monkeypatch.setattr(module, "READ", 1.0)
    monkeypatch.setattr(module, "COPY", 1.0)
    monkeypatch.setattr(module, "FLOPS", 1e30)
    return module


def request(floors: Any, prompt: list[int], num_out: int) -> Any:
    return floors.workloads.Request(prompt, num_out)


def test_bytes_of_two_requests_with_a_shared_prefix(floors: Any) -> None:
    """Prompts of 3 and 4 tokens, two of them shared; 2 and 3 tokens out."""
    floor = floors.floor_of(
        floors.shape_of(TOY),
        [request(floors, [1, 2, 3], 2), request(floors, [1, 2, 4, 5], 3)],
    )
    assert floor.prefill == WEIGHT_BYTES + TOKEN_BYTES * (2 + 1 + 2)
    assert floor.products == 2 * WEIGHT_BYTES
    # First step: 4 and 5 keys, two of them once; second step: the longer request alone, 6 keys.
    assert floor.attention == TOKEN_BYTES * ((2 + 2 + 3) + 6)
    assert floor.total == floor.prefill + floor.products + floor.attention


def test_operations_where_arithmetic_is_slow(floors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "FLOPS", 1e-6)
    floor = floors.floor_of(floors.shape_of(TOY), [request(floors, [1, 2, 3], 2)])
    # The last layer's queries, attention and feed-forward run for the sampled token only.
    products = 2 * (3 * (LAYER + KEYS_AND_VALUES) + LAYER - KEYS_AND_VALUES + HEAD)
    pairs = (1 + 2 + 3) + 3
    assert floor.prefill == pytest.approx(1e6 * (products + 4 * 16 * pairs))
    assert floor.products == pytest.approx(1e6 * 2 * (2 * LAYER + HEAD))
    assert floor.attention == pytest.approx(1e6 * 4 * 16 * 2 * 4)


def test_equal_prompts_still_compute_their_last_token(floors: Any) -> None:
    same = [request(floors, [1, 2, 3], 1), request(floors, [1, 2, 3], 1)]
    assert floors.shared_tokens(same) == 2
    assert floors.shared_tokens(same[:1]) == 0


def test_sweep_is_that_of_the_harness(floors: Any) -> None:
    """The harness makes its requests on the way: catch them there."""
    seen = []

    class Engine:
        def generate(self, requests: list[Any]) -> list[Any]:
            seen.append(floors.workloads.digest(requests))
            return [floors.workloads.Result([0] * r.max_new_tokens) for r in requests]

        def flush(self) -> None:
            pass

    floors.workloads.run_sweep(Engine())
    assert [floors.workloads.digest(sweep) for sweep in floors.sweep_requests()] == seen[::2]


def test_best_run_of_the_newest_file(floors: Any, tmp_path: Path) -> None:
    def write(name: str, *records: dict[str, Any]) -> Path:
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
        return path

    def record(date: str, seconds: float, **more: Any) -> dict[str, Any]:
        return {"date": date, "model": "some/Qwen3-0.6B", "digest": "d", "seconds": seconds, **more}

    new = write(
        "a", record("2026-12-02", 5.0), record("2026-12-02", 4.0), record("2026-12-02", 9, digest="e")
    )
    old = write("b", record("2026-12-01", 1.0), record("2026-12-01", 2.0, digest="f", tpot_ms=3.0))
    files = floors.read_results([new, write("empty"), old])
    assert floors.best(files, "Qwen3-0.6B", kind="seconds", digest="d") == 4.0
    assert floors.best(files, "Qwen3-0.6B", kind="tpot_ms", digest="f") == pytest.approx(0.003)
    assert floors.best(files, "Qwen3-0.6B", kind="seconds", digest="g") is None
    assert floors.best(files, "Qwen3-14B", kind="seconds", digest="d") is None
    assert floors.best(files, "Qwen3-0.6B", kind="seconds", workload="w6") is None


def test_table_has_every_workload_and_model(floors: Any) -> None:
    lines = list(floors.table([]))
    assert len({line.count("|") for line in lines}) == 1
    for start in ("W1", "W2", "W3", "W4", "W6", "W7"):
        for model in floors.ORDER:
            assert any(line.startswith(f"| {start}") and f"| {model} |" in line for line in lines)
