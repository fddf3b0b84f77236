"""Recorded calls of C kernels do again what they did, on what lies in their tensors now."""

from __future__ import annotations

import threading

import pytest
import torch

from tokenmill.kernels import native
from tokenmill.kernels.activation import gated_silu, gated_silu_torch
from tokenmill.kernels.lookup import look_up, look_up_torch
from tokenmill.kernels.norm import add_rms_norm, rms_norm
from tokenmill.kernels.tape import NotRecordable, TapeMemory, recorded, recording

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(native.library(torch.float32) is None, reason="there is no C compiler"),
]


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Some operations that follow each other, with views between."""
    normed, total = add_rms_norm(x, torch.zeros_like(x), weight, 1e-6)
    _, rest = add_rms_norm(normed, total, weight, 1e-6)[0].view(len(x), 4, -1).split([2, 2], dim=1)
    return gated_silu(rms_norm(rest, weight[:16], 1e-6).flatten(1))


def test_a_replay_computes_from_new_inputs() -> None:
    weight, x = torch.randn(64), torch.randn(2, 64)
    kept = x.clone()
    with torch.inference_mode():
        with recording(TapeMemory()) as tape:
            made = block(x, weight)
        assert torch.equal(made, block(kept, weight)), "the recorded pass computes, too"
        other = torch.randn(2, 64)
        x.copy_(other)
        tape.replay()
        assert torch.equal(made, block(other, weight))
        tape.replay()
        assert torch.equal(made, block(other, weight))


def test_what_torch_computes_cannot_be_recorded() -> None:
    x, weight = torch.randn(2, 64), torch.ones(64)
    for inference in (True, False):
        with torch.inference_mode(inference):
            with pytest.raises(NotRecordable, match="add"), recording(TapeMemory()):
                rms_norm(x, weight, 1e-6) + 1
            assert recorded() is None
            assert (rms_norm(x, weight, 1e-6) + 1).shape == x.shape


def test_other_threads_are_not_recorded() -> None:
    x, weight = torch.randn(2, 64), torch.ones(64)
    with recording(TapeMemory()) as tape:
        thread = threading.Thread(target=lambda: rms_norm(x, weight, 1e-6) + 1)
        thread.start()
        thread.join()
        made = gated_silu(x)
    made.zero_()
    tape.replay()
    assert torch.allclose(made, gated_silu_torch(x), atol=1e-6)
    assert len(tape) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_table(dtype: torch.dtype) -> None:
    table, ids = torch.randn(9, 5).to(dtype), torch.tensor([8, 0, 3, 3])
    assert torch.equal(look_up(table, ids), look_up_torch(table, ids))
    assert torch.equal(look_up(table, ids.int()), look_up_torch(table, ids))
    assert look_up(table, ids[:0]).shape == (0, 5)
    assert look_up(table, torch.tensor([-1, 2, 9, 2**40])).isnan().all(dim=1).tolist() == [
        True,
        False,
        True,
        True,
    ]


def test_memory_is_given_again_when_nobody_has_the_tensor() -> None:
    memory = TapeMemory()
    first = memory.like(torch.empty(4, 100))
    assert memory.owns(first)
    assert not memory.owns(torch.empty(4, 100))
    view = first.view(-1)[1:]
    del first
    second = memory.like(torch.empty(4, 100))
    assert memory.num_bytes == 3200, "a view still has the first"
    address = view.data_ptr() - 4
    del view
    third = memory.like(torch.empty(399))
    assert third.data_ptr() == address
    assert memory.num_bytes == 3200
    assert memory.like(torch.empty(2)).data_ptr() not in (second.data_ptr(), address)


def test_tapes_share_their_memory() -> None:
    """Two recorded steps compute in the same place, one after the other."""
    memory, weight = TapeMemory(), torch.randn(64)
    inputs = [torch.randn(2, 64), torch.randn(2, 64)]
    steps = []
    for x in inputs:
        with recording(memory) as tape:
            steps.append((tape, block(x, weight)))
        if x is inputs[0]:
            taken = memory.num_bytes
    assert memory.num_bytes < 2 * taken
    for _ in range(2):
        for x, (tape, made) in zip(inputs, steps, strict=True):
            x.normal_()
            tape.replay()
            assert torch.equal(made, block(x, weight))
