"""Embedding, norm, MLP and attention against the plain formulas in float64."""

from __future__ import annotations

import torch
from torch import nn

from tokenmill.attention.base import AttentionSpec, StepLayout
from tokenmill.layers.attention import Attention, NormedAttention
from tokenmill.layers.embedding import Embedding
from tokenmill.layers.mlp import GatedMLP
from tokenmill.layers.norm import RMSNorm

FLOAT = torch.float32


def randomize(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(generator=generator)


def test_embedding_looks_rows_up() -> None:
    layer = Embedding(7, 3, dtype=FLOAT)
    randomize(layer)
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(layer(torch.tensor([6, 0, 6], dtype=dtype)), layer.weight[[6, 0, 6]])


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


def test_gated_mlp() -> None:
    layer = GatedMLP(8, 12, bias=True, dtype=FLOAT)
    randomize(layer)
    x = torch.randn(5, 8)
    weights = {name: parameter.double() for name, parameter in layer.named_parameters()}
    gate, up = (
        x.double() @ weights["gate_up_proj.weight"][rows].T + weights["gate_up_proj.bias"][rows]
        for rows in (slice(0, 12), slice(12, 24))
    )
    inner = gate / (1 + torch.exp(-gate)) * up
    expected = inner @ weights["down_proj.weight"].T + weights["down_proj.bias"]
    assert torch.allclose(layer(x).double(), expected, rtol=1e-4, atol=1e-4)


class FirstKey:
    """A backend that attends to nothing: it hands the keys of each group's head back as output."""

    def plan(self, layout: StepLayout) -> None:
        raise AssertionError("a module does not plan")

    def run(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int) -> torch.Tensor:
        self.seen = q_THD, k_TKD, v_TKD, layer
        return k_TKD.repeat_interleave(q_THD.shape[1] // k_TKD.shape[1], dim=1)


def test_attention_projects_and_rotates() -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=6, scale=1.0)
    layer = Attention(spec, 8, layer=3, qkv_bias=True, output_bias=False, dtype=FLOAT)
    randomize(layer)
    backend, x = FirstKey(), torch.randn(5, 8)
    quarter_turn = torch.zeros(5, 3), torch.ones(5, 3)  # cosine 0, sine 1: (a, b) -> (-b, a)
    output = layer(x, quarter_turn, backend)
    q, k, v, number = backend.seen
    assert number == 3
    projected = layer.qkv_proj(x)
    for turned, plain in ((q, projected[:, :24].view(5, 4, 6)), (k, projected[:, 24:36].view(5, 2, 6))):
        assert torch.allclose(turned, torch.cat([-plain[..., 3:], plain[..., :3]], dim=-1))
    assert torch.equal(v, projected[:, 36:].view(5, 2, 6))
    assert torch.allclose(output, layer.o_proj(k.repeat_interleave(2, dim=1).reshape(5, 24)))


def test_normed_attention_normalises_each_head_of_queries_and_keys() -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=6, scale=1.0)
    layer = NormedAttention(spec, 8, layer=0, qkv_bias=False, output_bias=False, epsilon=0.1, dtype=FLOAT)
    randomize(layer)
    x = torch.randn(5, 8)
    q, k, v = layer.project(x)
    projected = layer.qkv_proj(x).view(5, 8, 6)
    assert torch.equal(v, projected[:, 6:])
    for normed, plain, norm in ((q, projected[:, :4], layer.q_norm), (k, projected[:, 4:6], layer.k_norm)):
        expected = plain / torch.sqrt((plain**2).mean(-1, keepdim=True) + 0.1) * norm.weight
        assert torch.allclose(normed, expected, atol=1e-5)
