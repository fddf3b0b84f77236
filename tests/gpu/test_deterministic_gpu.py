"""`enable_deterministic_inference` on a GPU: products, attention and whole rows have the same bits beside any
others, in 16 bits too."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenmill as sgl
from tokenmill.attention import create_backend
from tokenmill.attention.base import AttentionSpec, StepLayout
from tokenmill.kernels import triton_invariant
from tokenmill.kernels.linear import linear_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
HEADS = [(14, 2, 64), (16, 8, 128), (8, 4, 256), (12, 12, 80)]


def load(path: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / path)))


@pytest.fixture(scope="module")
def ragged() -> SimpleNamespace:
    return load("attention/ragged.py")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(896, 1152), (1024, 6144), (4864, 896), (1001, 333)])
def test_a_row_of_a_product(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (
        torch.randn(count, inputs, generator=generator, device="cuda").to(dtype) for count in (3000, outputs)
    )
    bias = weight[:, 0].contiguous()
    together = triton_invariant.product(x, weight, bias)
    expected = linear_torch(x.double(), weight.double(), bias.double())
    assert (together.double() - expected).norm() < LIMITS[dtype] * expected.norm()
    for begin, end in ((0, 1), (77, 78), (10, 70), (500, 1013), (2999, 3000)):
        assert torch.equal(triton_invariant.product(x[begin:end], weight, bias), together[begin:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("window", [None, 100])
def test_a_token_of_a_prompt(
    ragged: SimpleNamespace, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    """All at once beside other rows, in parts, and token by token: every bit is the same."""
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5, window=window)
    rows = [(700, 700), (1, 900), (40, 300)]
    whole, parts = (
        ragged.ragged_step(spec, rows, page_size=16, dtype=dtype, seed=4, device="cuda") for _ in range(2)
    )
    backend = create_backend("invariant triton", [spec], [whole.key_cache], [whole.value_cache], 16)
    backend.plan(whole.layout)
    expected = backend.run(whole.q, whole.k, whole.v, 0)
    assert ragged.relative_error(expected, whole.expected) < LIMITS[dtype]
    first = 1  # the row that decodes comes first
    backend = create_backend("invariant triton", [spec], [parts.key_cache], [parts.value_cache], 16)
    for begin, end in ((0, 333), (333, 690), *((token, token + 1) for token in range(690, 700))):
        backend.plan(part_of(parts.layout, begin, end, row=1, first=first))
        tokens = slice(first + begin, first + end)
        out = backend.run(parts.q[tokens], parts.k[tokens], parts.v[tokens], 0)
        assert torch.equal(out, expected[tokens])


def part_of(layout: StepLayout, begin: int, end: int, *, row: int, first: int) -> StepLayout:
    """The step of a row's tokens [begin, end), of a layout in which its prompt starts with token `first`."""
    count, tokens = end - begin, slice(first + begin, first + end)
    return StepLayout(
        positions_T=layout.positions_T[tokens],
        slot_mapping_T=tuple(slots[tokens] for slots in layout.slot_mapping_T),
        page_table_RP=tuple(table[row : row + 1] for table in layout.page_table_RP),
        query_starts=torch.tensor([0, count], dtype=torch.int32, device="cuda"),
        lengths_R=torch.tensor([end], dtype=torch.int32, device="cuda"),
        num_decodes=int(count == 1),
        host_query_lengths=[count],
        host_lengths=[end],
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("family", "dtype", "settings"),
    [("qwen2", "bfloat16", {}), ("mistral", "float16", {"sliding_window": 24})],
    ids=["qwen2", "mistral"],
)
def test_random_rows_under_pressure(
    make_model: Callable[..., Path], family: str, dtype: str, settings: dict[str, Any], seed: int
) -> None:
    folder = make_model(family, head_dim=64, max_position_embeddings=1024, **settings)
    load("test_deterministic.py").assert_calls_are_equal(folder, "cuda", dtype, seed)


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "bfloat16"), ("llama", "float16")])
def test_rows_have_the_same_bits_on_every_way(
    make_model: Callable[..., Path], tmp_path: Path, family: str, dtype: str
) -> None:
    """As on a CPU, jobs too, and with and without graphs."""
    plain = load("test_deterministic.py")
    common = {
        "model_path": str(make_model(family, **plain.WIDE, **plain.LONG)),
        "device": "cuda",
        "dtype": dtype,
        "enable_deterministic_inference": True,
        "max_total_tokens": 20_000,
    }
    with sgl.Engine(**common) as engine:
        whole = plain.outputs_of_jobs(engine, tmp_path, "whole", [])
        assert plain.outputs_of_jobs(engine, tmp_path, "parts", [1, 3, 6]) == whole
        expected = plain.numbers_of(engine, 8)
        for _ in range(2):  # from the cache, and by graphs that were captured before
            assert plain.numbers_of(engine, 8) == expected
        assert plain.numbers_of(engine, 1) == expected
    more: dict[str, Any]
    for more, size in (
        ({"disable_cuda_graph": True, "disable_radix_cache": True}, 5),
        ({"chunked_prefill_size": 48, "max_running_requests": 4}, 8),
        ({"max_total_tokens": 500}, 8),
    ):
        with sgl.Engine(**common | more) as engine:
            assert plain.numbers_of(engine, size) == expected
