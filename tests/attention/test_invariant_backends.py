"""The backends of the deterministic mode: right answers, and for a token always the same bits.

Bits of the GPU's backend are compared on a GPU (`tests/gpu/test_deterministic_gpu.py`): the interpreter's
products are NumPy's, which choose their order by the shape.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tokenmill.attention import create_backend
from tokenmill.attention.base import AttentionSpec, Backend, StepLayout
from tokenmill.kernels import native
from tokenmill.kernels.operands import HeadNorms
from tokenmill.kernels.rotary import heads_of_product

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns one-element arrays into loop bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
MIXED = [(1, 1), (1, 37), (1, 130), (5, 5), (3, 20), (70, 140)]

needs_native = pytest.mark.skipif(
    native.library(torch.float32) is None, reason="there is no C compiler, so no C kernels"
)


def make(name: str, spec: AttentionSpec, step: SimpleNamespace, page_size: int) -> Backend:
    return create_backend(f"invariant {name}", [spec], [step.key_cache], [step.value_cache], page_size)


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [(7, 1, 64, None), (2, 2, 80, 50), (4, 2, 20, None), (2, 1, 128, 50), (1, 1, 256, None)],
)
def test_mixed_rows_on_a_gpu(
    ragged: SimpleNamespace,
    triton_device: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim, scale=head_dim**-0.5, window=window)
    step = ragged.ragged_step(spec, MIXED, page_size=16, dtype=dtype, seed=heads, device=triton_device)
    backend = make("triton", spec, step, 16)
    backend.plan(step.layout)
    out = backend.run(step.q, step.k, step.v, 0)
    assert ragged.relative_error(out, step.expected) < LIMITS[dtype]


@pytest.mark.parametrize("page_size", [1, 64])
def test_page_sizes(ragged: SimpleNamespace, triton_device: str, page_size: int) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    step = ragged.ragged_step(
        spec, MIXED, page_size=page_size, dtype=torch.float32, seed=2, heads_first=True, device=triton_device
    )
    backend = make("triton", spec, step, page_size)
    backend.plan(step.layout)
    assert ragged.relative_error(backend.run(step.q, step.k, step.v, 0), step.expected) < 1e-6


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, which computes for the interpreter, minds NaN
def test_a_row_of_nan_leaves_its_neighbours_alone(ragged: SimpleNamespace, triton_device: str) -> None:
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    rows = [(70, 70), (70, 90), (70, 70)]
    step = ragged.ragged_step(spec, rows, page_size=16, dtype=torch.float32, seed=3, device=triton_device)
    for tensor in (step.q, step.k, step.v):
        tensor[70:140] = torch.nan
    backend = make("triton", spec, step, 16)
    backend.plan(step.layout)
    out = backend.run(step.q, step.k, step.v, 0)
    assert out[70:140].isnan().all()
    for tokens in (slice(0, 70), slice(140, 210)):
        assert ragged.relative_error(out[tokens], step.expected[tokens]) < 1e-6


@pytest.mark.parametrize("needed", [None, [0, 1, 6, 10]])
def test_a_product_goes_the_same_way_as_its_heads(
    ragged: SimpleNamespace, triton_device: str, needed: list[int] | None
) -> None:
    spec = AttentionSpec(4, 2, 32, scale=0.2)
    rows = [(1, 1), (1, 20), (5, 5), (9, 30)]
    step, twin = (
        ragged.ragged_step(spec, rows, page_size=4, dtype=torch.float32, seed=7, device=triton_device)
        for _ in range(2)
    )
    with torch.device(triton_device):
        rotation = torch.rand(len(step.q), 16).cos(), torch.rand(len(step.q), 16).sin()
        norms = HeadNorms(torch.rand(32), torch.rand(32), 1e-6)
        wanted = None if needed is None else torch.tensor(needed)
    product = torch.cat((step.q, step.k, step.v), dim=1)
    fused, separate = make("triton", spec, step, 4), make("triton", spec, twin, 4)
    fused.plan(step.layout)
    separate.plan(twin.layout)
    out = fused.run_product(product, rotation, norms, 0, wanted)
    expected = separate.run(*heads_of_product(product, rotation, norms, 2), 0)
    torch.testing.assert_close(out, expected if wanted is None else expected[wanted])
    torch.testing.assert_close(step.key_cache, twin.key_cache, equal_nan=True)


def test_padding_among_the_rows_that_decode(ragged: SimpleNamespace, triton_device: str) -> None:
    """As in a graph: rows of padding stand for one token each, and these tokens are those of a prompt."""
    spec = AttentionSpec(2, 1, 64, scale=0.125)
    step = ragged.ragged_step(
        spec, [(1, 20), (5, 5), (3, 40)], page_size=16, dtype=torch.float32, seed=6, device=triton_device
    )
    layout = step.layout
    order = torch.tensor([0, 0, 0, 1, 2], device=triton_device)  # a row, two of padding, two prompts
    layout.page_table_RP = (layout.page_table_RP[0][order],)
    layout.lengths_R = torch.tensor([20, 1, 1, 5, 40], dtype=torch.int32, device=triton_device)
    layout.query_starts = torch.tensor([0, 1, 2, 1, 6, 9], dtype=torch.int32, device=triton_device)
    layout.num_decodes = 3
    layout.host_query_lengths, layout.host_lengths = [1, 1, 1, 5, 3], [20, 1, 1, 5, 40]
    backend = make("triton", spec, step, 16)
    backend.plan(layout)
    assert ragged.relative_error(backend.run(step.q, step.k, step.v, 0), step.expected) < 1e-6


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_in_parts_has_the_bits_of_the_whole_on_a_cpu(
    ragged: SimpleNamespace, dtype: torch.dtype
) -> None:
    """A prompt that is long enough for the products of torch, where the mode is off."""
    spec = AttentionSpec(4, 2, 64, scale=0.125)
    whole, parts = (
        ragged.ragged_step(spec, [(400, 400)], page_size=16, dtype=dtype, seed=5) for _ in range(2)
    )
    backend = make("native", spec, whole, 16)
    backend.plan(whole.layout)
    expected = backend.run(whole.q, whole.k, whole.v, 0)
    assert ragged.relative_error(expected, whole.expected) < LIMITS[dtype]
    backend = make("native", spec, parts, 16)
    for begin, end in ((0, 299), (299, 300), (300, 400)):
        backend.plan(part_of(parts.layout, begin, end))
        out = backend.run(parts.q[begin:end], parts.k[begin:end], parts.v[begin:end], 0)
        assert torch.equal(out, expected[begin:end])


def part_of(layout: StepLayout, begin: int, end: int) -> StepLayout:
    """The step of tokens [begin, end) of a layout of one prompt."""
    count = end - begin
    return StepLayout(
        positions_T=layout.positions_T[begin:end],
        slot_mapping_T=tuple(slots[begin:end] for slots in layout.slot_mapping_T),
        page_table_RP=layout.page_table_RP,
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        lengths_R=torch.tensor([end], dtype=torch.int32),
        num_decodes=int(count == 1),
        host_query_lengths=[count],
        host_lengths=[end],
    )
