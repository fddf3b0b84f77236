"""Embedding, norm, MLP and attention against the plain formulas in float64."""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.attention.base import AttentionSpec, StepLayout
from tokenmill.kernels.linear import computed
from tokenmill.kernels.operands import HeadNorms
from tokenmill.layers.attention import Attention, NormedAttention
from tokenmill.layers.embedding import Embedding
from tokenmill.layers.mlp import GatedMLP
from tokenmill.layers.norm import RMSNorm
from tokenmill.layers.rotary import RopeSpec, Rotary, Rotation

FLOAT = torch.float32


def randomize(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(generator=generator)


def test_embedding_looks_vectors_and_rotations_up() -> None:
    rope = RopeSpec({"rope_type": "default", "rope_theta": 100.0}, 4, 8)
    rotary = Rotary(rope, num_positions=9, dtype=FLOAT, device=torch.device("cpu"))
    layer = Embedding(7, 3, dtype=FLOAT)
    randomize(layer)
    positions = torch.tensor([8, 1, 8])
    for dtype in (torch.int32, torch.int64):
        vectors, (cosines, sines) = layer(torch.tensor([6, 0, 6], dtype=dtype), positions, rotary)
        assert torch.equal(vectors, layer.weight[[6, 0, 6]])
        assert torch.equal(torch.cat((cosines, sines), dim=1), rotary.cosines_and_sines_PW[positions])


def test_norm() -> None:
    layer = RMSNorm(16, epsilon=0.5, dtype=FLOAT)
    randomize(layer)
    x, residual = torch.randn(5, 16), torch.randn(5, 16)

    def expected(y: torch.Tensor) -> torch.Tensor:
        y = y.double()
        return y / torch.sqrt((y * y).mean(-1, keepdim=True) + 0.5) * layer.weight.double()

    assert torch.allclose(layer(x).double(), expected(x), atol=1e-5)
    normed, total = layer.add(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.allclose(normed.double(), expected(total), atol=1e-5)


def normed(norm: RMSNorm, total: torch.Tensor) -> torch.Tensor:
    """In float64."""
    wide = total.double()
    return wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + norm.epsilon) * norm.weight.double()


def test_gated_mlp() -> None:
    layer, norm = GatedMLP(8, 12, bias=True, dtype=FLOAT), RMSNorm(8, epsilon=0.1, dtype=FLOAT)
    randomize(layer)
    randomize(norm)
    x, residual = torch.randn(5, 8), torch.randn(5, 8)
    weights = {name: parameter.double() for name, parameter in layer.named_parameters()}
    gate, up = (
        normed(norm, x + residual) @ weights["gate_up_proj.weight"][rows].T
        + weights["gate_up_proj.bias"][rows]
        for rows in (slice(0, 12), slice(12, 24))
    )
    inner = gate / (1 + torch.exp(-gate)) * up
    expected = inner @ weights["down_proj.weight"].T + weights["down_proj.bias"]
    output, total = layer(x, residual, norm)
    assert torch.equal(total, x + residual)
    assert torch.allclose(computed(output).double(), expected, rtol=1e-4, atol=1e-4)


class FirstKey:
    """A backend that attends to nothing: it hands the keys of each group's head on as they came."""

    def plan(self, layout: StepLayout) -> None:
        raise AssertionError("a module does not plan")

    def run(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int) -> torch.Tensor:
        raise AssertionError("a module leaves the rotation to the backend")

    def run_product(
        self,
        product_TSD: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        layer: int,
        needed_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert needed_N is None
        self.seen = product_TSD, rotation, norms, layer
        return product_TSD[:, 4:6].repeat_interleave(2, dim=1)

    def decoding(self, rotation: Rotation, norms: HeadNorms | None, layer: int) -> None:
        """Leave it to `run_product`."""


def test_attention_stands_between_two_products() -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=6, scale=1.0)
    layer = Attention(spec, 8, layer=3, qkv_bias=True, output_bias=False, dtype=FLOAT)
    norm = RMSNorm(8, epsilon=0.1, dtype=FLOAT)
    randomize(layer)
    randomize(norm)
    backend, x, residual = FirstKey(), torch.randn(5, 8), torch.randn(5, 8)
    rotation = torch.zeros(5, 3), torch.ones(5, 3)
    output, total = layer(x, residual, norm, rotation, backend)
    product, seen_rotation, head_norms, number = backend.seen
    assert (seen_rotation, head_norms, number) == (rotation, None, 3)
    assert torch.equal(total, x + residual)
    expected = layer.qkv_proj(norm(total)).view(5, 8, 6)
    assert torch.allclose(product, expected, atol=1e-5)
    attended = expected[:, 4:6].repeat_interleave(2, dim=1).reshape(5, 24)
    assert torch.allclose(computed(output), layer.o_proj(attended), atol=1e-4)


def test_normed_attention_hands_its_norms_on() -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=6, scale=1.0)
    layer = NormedAttention(spec, 8, layer=0, qkv_bias=False, output_bias=False, epsilon=0.1, dtype=FLOAT)
    norms = layer.head_norms()
    assert norms.query_D is layer.q_norm.weight
    assert norms.key_D is layer.k_norm.weight
    assert norms.epsilon == 0.1
