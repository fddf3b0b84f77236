"""Angles computed by hand, and the promise that a rotation depends on the position alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokenmill.layers.rotary import RopeSpec, Rotary, inverse_frequencies

CPU = torch.device("cpu")


def make_spec(rope_type: str, *, theta: float = 100.0, max_positions: int = 8, **more: Any) -> RopeSpec:
    return RopeSpec({"rope_type": rope_type, "rope_theta": theta} | more, 4, max_positions)


def table(
    spec: RopeSpec, length: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    rotary = Rotary(spec, num_positions=length, dtype=dtype, device=CPU)
    cosines, sines = rotary.halves(rotary.cosines_and_sines_PW)
    return cosines, sines


def test_plain_angles() -> None:
    """Four dimensions, base 100: frequencies 1 and 1/10."""
    cosines, sines = table(make_spec("default"), 5)
    expected = [[p * 1.0, p * 0.1] for p in range(5)]
    assert torch.allclose(cosines, torch.tensor([[math.cos(a) for a in row] for row in expected]))
    assert torch.allclose(sines, torch.tensor([[math.sin(a) for a in row] for row in expected]))


def test_linear_scaling_divides_the_position() -> None:
    cosines, _ = table(make_spec("linear", factor=2.0), 5)
    plain, _ = table(make_spec("default"), 3)
    assert torch.allclose(cosines[::2], plain)


def test_dynamic_frequencies_of_each_position() -> None:
    """Up to the original length the plain ones; then the base grows with the length so far."""
    frequencies, factor = inverse_frequencies(make_spec("dynamic", factor=2.0), torch.arange(12))
    assert factor == 1.0
    assert torch.allclose(frequencies[:8], torch.tensor([1.0, 0.1]).expand(8, 2))
    for position in range(8, 12):
        base = 100.0 * (2.0 * (position + 1) / 8 - 1.0) ** 2  # exponent 4 / (4 - 2)
        assert torch.allclose(frequencies[position], torch.tensor([1.0, base**-0.5]))


def test_longrope_changes_factors_at_the_original_length() -> None:
    spec = make_spec(
        "longrope",
        short_factor=[1.0, 2.0],
        long_factor=[4.0, 8.0],
        original_max_position_embeddings=4,
        factor=2.0,
    )
    frequencies, factor = inverse_frequencies(spec, torch.arange(8))
    assert torch.allclose(frequencies[:4], torch.tensor([1.0, 0.1 / 2]).expand(4, 2))
    assert torch.allclose(frequencies[4:], torch.tensor([1.0 / 4, 0.1 / 8]).expand(4, 2))
    assert factor == pytest.approx(math.sqrt(1 + math.log(2) / math.log(4)))
    cosines, _ = table(spec, 8)
    assert cosines[0].tolist() == pytest.approx([factor, factor])


def test_a_shorter_table_has_the_same_rows() -> None:
    for spec in (make_spec("dynamic", factor=2.0), make_spec("yarn", factor=4.0)):
        short, long = table(spec, 10), table(spec, 40)
        assert torch.equal(short[0], long[0][:10])
        assert torch.equal(short[1], long[1][:10])


def test_rounding_comes_last() -> None:
    """Cosines are computed in float32, whatever the model's dtype."""
    exact, _ = table(make_spec("default"), 3000)
    rounded, _ = table(make_spec("default"), 3000, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, exact.to(torch.bfloat16))
