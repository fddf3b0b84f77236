"""The pipeline in miniature: packing, network, optimizer, and that what is exported is what was trained."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tools.tiny import export
from tools.tiny.network import Network, document_mask
from tools.tiny.optimizer import Optimizer, learning_factor, orthogonalize
from tools.tiny.packing import RowPacker, rows
from tools.tiny.recipe import RECIPES
from tools.tiny.train import tensors

pytestmark = pytest.mark.cpu

RECIPE = RECIPES["miniature"]


def test_rows_keep_documents_whole_and_apart() -> None:
    packer = RowPacker(10, pad_id=99)
    documents = [[(number, number % 2)] * length for number, length in enumerate([4, 7, 6, 3, 10, 2] * 5, 1)]
    closed = [row for row in map(packer.add, documents) if row is not None]
    assert closed
    for ids, numbers, learnt in (row[:, 0] for row in closed):
        for token, group in itertools.groupby(
            zip(ids, numbers, learnt, strict=True), key=lambda item: item[0]
        ):
            items = list(group)
            if token == 99:
                assert {(number, is_learnt) for _, number, is_learnt in items} == {(0, 0)}
            else:
                assert len(items) == len(documents[token - 1])
                assert {is_learnt for _, _, is_learnt in items} == {token % 2}
                assert len({number for _, number, _ in items}) == 1


def test_targets_are_the_next_learnt_tokens_of_the_same_document() -> None:
    import numpy as np

    packed = np.array([[[5, 6, 7, 8, 9, 3]], [[1, 1, 1, 2, 2, 0]], [[1, 0, 1, 1, 1, 0]]], np.int16)
    ids, targets, documents = tensors(packed, torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 7, 8, 9]]
    assert targets.tolist() == [[-100, 7, -100, 9, -100]]
    assert documents.tolist() == [[1, 1, 1, 2, 2]]


def test_documents_of_a_row_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    network = Network(RECIPE.shape)
    first, second = torch.randint(0, 100, (2, 1, 12))
    numbers = torch.tensor([[1] * 12 + [2] * 12])
    packed = network(torch.cat((first, second), dim=1), document_mask(numbers))
    alone = network(second, document_mask(torch.ones(1, 12, dtype=torch.int)))
    torch.testing.assert_close(packed[:, 12:], alone, rtol=1e-4, atol=1e-5)


def test_exported_network_gives_the_same_logits_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    network = Network(RECIPE.shape)
    for parameter in network.parameters():
        # Biases and norms away from their start, all values exact in bfloat16, as exporting rounds.
        parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    export.save(network, RECIPE.shape, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, RECIPE.shape.vocab_size, (2, 40))
    with torch.no_grad():
        ours = network(ids, document_mask(torch.ones_like(ids)))
        torch.testing.assert_close(ours, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_few_steps_lower_the_loss() -> None:
    torch.manual_seed(0)
    network = Network(RECIPE.shape)
    optimizer = Optimizer(network, RECIPE)
    packed = next(rows(RECIPE, 0))
    ids, targets, documents = tensors(packed, torch.device("cpu"))
    losses = []
    for _ in range(8):
        loss = network.loss(ids, targets, document_mask(documents))
        loss.backward()
        optimizer.step(1.0)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 32, 8)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(shape, generator=generator)
    values = torch.linalg.svdvals(orthogonalize(matrices).float())
    assert values.max() < 1.4
    assert values.median() > 0.6


def test_learning_rate_rises_stays_and_falls_to_zero() -> None:
    factors = [learning_factor(progress / 100, RECIPE) for progress in range(101)]
    assert factors[0] == 0
    assert factors[10] == 1
    assert factors[100] == 0
    assert sorted(factors[40:], reverse=True) == factors[40:]
