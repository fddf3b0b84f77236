"""The gated activation: against its formula, and the Triton kernel against the torch reference."""

from __future__ import annotations

import math

import pytest
import torch

from tokenmill.kernels.activation import gated_silu, gated_silu_torch

pytestmark = pytest.mark.cpu


def test_formula() -> None:
    values = [-3.0, -0.5, 0.0, 2.0]
    gate_up = torch.tensor([[*values, 1.0, 2.0, 3.0, -4.0]])
    expected = [gate / (1 + math.exp(-gate)) * up for gate, up in zip(values, (1, 2, 3, -4), strict=True)]
    torch.testing.assert_close(gated_silu(gate_up), torch.tensor([expected]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 2 * 100), (2, 2 * 1500), (2, 2, 2 * 16)])
def test_triton_agrees(triton_device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from tokenmill.kernels import triton_activation

    gate_up = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype).to(triton_device)
    out = triton_activation.gated_silu(gate_up)
    limit = 2 * torch.finfo(dtype).eps  # the activation and the product may each round the other way
    torch.testing.assert_close(out, gated_silu_torch(gate_up), rtol=limit, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_triton_reads_a_strided_view_and_survives_large_numbers(triton_device: str) -> None:
    from tokenmill.kernels import triton_activation

    wide = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(triton_device)
    wide[0, 8], wide[1, 9] = -200.0, 200.0  # exp(200) is infinite in float32
    out = triton_activation.gated_silu(wide[:, 8:40])
    torch.testing.assert_close(out, gated_silu_torch(wide[:, 8:40]))
