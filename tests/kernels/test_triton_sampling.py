"""The sampling kernels against the torch path, which has tests of its own; tiny, as the interpreter is slow.

Real sizes are in `tests/gpu/test_sampling_gpu.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenmill.sampling import SamplingColumns, SamplingNeeds, torch_draw
from tokenmill.sampling import columns as told_words

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns one-element arrays into loop bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def infinities_allowed() -> Iterator[None]:
    """The interpreter computes with NumPy, which would warn of the overflows to -inf that are meant."""
    with np.errstate(all="ignore"):
        yield


def columns(device: str, rows: list[tuple[float, int, float, float]], position: int = 0) -> SamplingColumns:
    temperatures, top_ks, top_ps, min_ps = zip(*rows, strict=True)
    return SamplingColumns(
        temperatures_R=torch.tensor(temperatures, dtype=torch.float32, device=device),
        top_ks_R=torch.tensor(top_ks, dtype=torch.int32, device=device),
        top_ps_R=torch.tensor(top_ps, dtype=torch.float32, device=device),
        min_ps_R=torch.tensor(min_ps, dtype=torch.float32, device=device),
        seeds_R=torch.arange(len(rows), device=device) * 0x123456789ABCDEF - 4,
        positions_R=torch.full((len(rows),), position, device=device),
    )


def assert_equal_draws(logits_RV: torch.Tensor, chosen: SamplingColumns, *, filters: bool) -> None:
    from tokenmill.kernels import triton_sampling

    expected = torch_draw.sample(logits_RV, chosen, SamplingNeeds(random=True, filters=filters))
    tokens_R, told_R = triton_sampling.sample(logits_RV, chosen, filters=filters)
    assert told_R.tolist() == expected.told_R.tolist()
    assert bool(((tokens_R >= 0) & (tokens_R < logits_RV.shape[1])).all())
    assert tokens_R[told_R >= 0].tolist() == told_R[told_R >= 0].tolist()


def test_random_numbers_are_those_of_the_torch_generator(triton_device: str) -> None:
    """A flat distribution over many tokens shows the number itself."""
    logits_RV = torch.zeros((4, 9_000), device=triton_device)
    for position in (7, 2**33 + 5):
        assert_equal_draws(
            logits_RV, columns(triton_device, [(1.0, -1, 1.0, 0.0)] * 4, position), filters=False
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 77, 9001])
def test_whole_vocabulary(triton_device: str, vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits_RV = (torch.randn((8, vocab_size), generator=generator) * 3).to(triton_device, dtype)
    logits_RV[5, vocab_size // 2 :] = -torch.inf
    logits_RV[6] = 0.5
    temperatures = (1.0, 0.3, 2.0, 0.0, 1e-30, 0.7, 1.0, 0.0)
    rows = [(temperature, -1, 1.0, 0.0) for temperature in temperatures]
    for position in range(2):
        assert_equal_draws(logits_RV, columns(triton_device, rows, position), filters=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_filters(triton_device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    rows = [
        (1.0, 5, 1.0, 0.0),
        (0.8, -1, 0.9, 0.0),
        (1.3, -1, 1.0, 0.1),
        (1.0, 40, 0.95, 0.02),
        (1.0, -1, 1.0, 0.0),
    ]
    logits_RV = (torch.randn((len(rows), 333), generator=generator) * 3).to(triton_device, dtype)
    logits_RV[1] = logits_RV[1].round()  # ties
    assert_equal_draws(logits_RV, columns(triton_device, rows), filters=True)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("spread", (1.0, 300, 1.0, 0.0)),
        ("spread", (1.0, -1, 0.5, 0.0)),
        ("ties", (1.0, 700, 1.0, 0.0)),
        ("ties", (1.0, -1, 0.6, 0.0)),
    ],
)
def test_survivors_beyond_the_first_guess(
    triton_device: str, name: str, row: tuple[float, int, float, float]
) -> None:
    """A hundred stripes, all with survivors: more of them are listed than a program sees at once."""
    logits_RV = torch.randn((1, 6400), generator=torch.Generator().manual_seed(1))
    logits_RV = (logits_RV if name == "spread" else logits_RV.round()).to(triton_device, torch.bfloat16)
    assert_equal_draws(logits_RV, columns(triton_device, [row]), filters=True)


def test_rows_with_nan_and_infinity(triton_device: str) -> None:
    rows = [
        (1.0, 5, 1.0, 0.0),
        (1.0, -1, 0.9, 0.1),
        (0.0, -1, 1.0, 0.0),
        (1.0, -1, 1.0, 0.0),
        (1.0, 3, 0.9, 0.0),
    ]
    logits_RV = torch.zeros((5, 50), device=triton_device)
    logits_RV[0] = torch.nan
    logits_RV[1] = -torch.inf
    logits_RV[2, 0] = torch.nan
    logits_RV[3, 30] = torch.inf
    logits_RV[4, [20, 40]] = torch.inf
    chosen = columns(triton_device, rows)
    for turn, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.bfloat16)):
        # Each kind of row is drawn in several ways.
        assert_equal_draws(logits_RV.roll(turn, 0).to(dtype), chosen, filters=True)


def test_a_row_does_not_see_its_neighbours_nor_their_filters(triton_device: str) -> None:
    from tokenmill.kernels import triton_sampling

    generator = torch.Generator().manual_seed(9)
    logits_RV = torch.randn((3, 5000), generator=generator).to(triton_device)
    rows = columns(triton_device, [(1.0, -1, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (0.0, -1, 1.0, 0.0)])
    _, together = triton_sampling.sample(logits_RV, rows, filters=True)
    alone = columns(triton_device, [(1.0, -1, 1.0, 0.0)])
    assert triton_sampling.sample(logits_RV[:1], alone, filters=False)[1].tolist() == together[:1].tolist()


def test_rows_of_a_wider_tensor(triton_device: str) -> None:
    wide = torch.randn((6, 200), generator=torch.Generator().manual_seed(2)).to(triton_device)
    assert_equal_draws(
        wide[::2, 20:120],
        columns(triton_device, [(1.0, -1, 1.0, 0.0), (0.0, -1, 1.0, 0.0), (1.0, 4, 1.0, 0.0)]),
        filters=True,
    )


def test_both_paths_cut_the_vocabulary_alike(triton_device: str) -> None:
    """Equal draws need equal blocks: the constants stand in two files, as kernels import nothing of ours."""
    from tokenmill.kernels import triton_sampling

    assert triton_sampling.BLOCK.value == torch_draw.BLOCK
    assert triton_sampling.STRIPE.value == torch_draw.STRIPE
    assert triton_sampling._WEIGHT_ONE.value == 2.0**torch_draw.WEIGHT_BITS
    assert triton_sampling.NOT_A_NUMBER.value == told_words.NOT_A_NUMBER
    assert triton_sampling.NOTHING_ALLOWED.value == told_words.NOTHING_ALLOWED


def test_kernels_compile_for_a_gpu_without_spills() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_sampling.py")
    finished = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False
    )
    assert finished.returncode == 0, finished.stderr
    variants = json.loads(finished.stdout)
    assert len(variants) == 5
    for name, facts in variants.items():
        assert facts["spills"] == 0, (name, facts)
        assert name.startswith("draw filtered") or facts["registers"] <= 96, (
            name,
            facts,
        )  # enough rows per processor
