"""Packed products agree with plain ones; stacked projections find their places."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tokenmill.kernels import narrow
from tokenmill.layers.linear import (
    Linear,
    PackedLinear,
    TiedLinear,
    can_pack,
    pack_linears,
    unpack_children,
)

CPU = torch.device("cpu")


def make(inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> Linear:
    layer = Linear(inputs, outputs, bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(inputs + outputs)
    for parameter in layer.parameters():
        parameter.normal_(generator=generator)
    return layer


def skip_unless_packable(dtype: torch.dtype) -> None:
    if not can_pack(dtype, CPU):
        pytest.skip(f"this machine does not pack {dtype}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(384, 640), (64, 128), (17, 33), (1, 1)])
def test_packed_equals_plain(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
    skip_unless_packable(dtype)
    plain = make(inputs, outputs, bias=bias, dtype=dtype)
    packed = PackedLinear(plain)
    for rows in (0, 1, 2, 7, 16, 65):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
        exact = x.double() @ plain.weight.double().T
        if plain.bias is not None:
            exact += plain.bias.double()
        assert packed(x).dtype == dtype
        unit = torch.finfo(dtype).eps * max(float(exact.abs().max()), 1.0) if rows else 0.0
        slack = 8 * unit if dtype == torch.float32 else unit
        assert torch.allclose(packed(x).double(), exact, rtol=0, atol=slack)
        assert torch.allclose(plain(x).double(), exact, rtol=0, atol=slack)


def test_packing_replaces_linears_wherever_they_are() -> None:
    skip_unless_packable(torch.float32)
    inner = make(8, 8, bias=True, dtype=torch.float32)
    owner = make(8, 5, bias=False, dtype=torch.float32)
    model = nn.ModuleDict({"list": nn.ModuleList([inner]), "tied": TiedLinear(owner.weight), "owner": owner})
    x = torch.randn(3, 8)
    expected = inner(x), owner(x)
    count = sum(parameter.numel() for parameter in model.parameters())
    pack_linears(model)
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 3
    assert torch.allclose(model.get_submodule("list.0")(x), expected[0], atol=1e-5)
    assert torch.allclose(model["tied"](x), expected[1], atol=1e-5)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(384, 640), (17, 33), (1, 1)])
def test_unpacking_gives_every_number_back(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    skip_unless_packable(dtype)
    plain = make(inputs, outputs, bias=True, dtype=dtype)
    plain.parts = {"a": 1, "b": outputs - 1}
    table = nn.Parameter(torch.randn(5, inputs).to(dtype), requires_grad=False)
    model = nn.ModuleDict({"plain": plain, "tied": TiedLinear(table)})
    weight, bias = plain.weight.clone(), plain.bias
    pack_linears(model)
    assert unpack_children(model)
    assert not unpack_children(model)
    assert torch.equal(model["plain"].weight, weight)
    assert model["plain"].bias is bias
    assert [name for name, _, _ in model["plain"].slots()] == ["a", "b", "a", "b"]
    assert model["tied"].weight is table


@pytest.mark.skipif(not narrow.has_kernel(torch.float32), reason="this machine has no kernel for it")
def test_numbers_of_bfloat16_take_half_of_the_bytes() -> None:
    plain = make(48, 33, bias=True, dtype=torch.float32)
    plain.weight.copy_(plain.weight.bfloat16())
    weight, x = plain.weight.clone(), torch.randn(5, 48)
    expected = plain(x)
    model = nn.ModuleDict({"plain": plain, "tied": TiedLinear(nn.Parameter(weight, requires_grad=False))})
    pack_linears(model)
    parameter = model["plain"].weight
    assert (parameter.numel(), parameter.nbytes) == (weight.numel(), weight.nbytes // 2)
    torch.testing.assert_close(model["plain"](x), expected)
    torch.testing.assert_close(model["tied"](x), x @ weight.T)
    assert unpack_children(model)
    assert torch.equal(model["plain"].weight, weight)
    model["plain"].weight[2, 3] = 1 / 3  # no bfloat16: from here on all bits are kept
    changed = model["plain"].weight.clone()
    pack_linears(model)
    assert model["plain"].weight.nbytes == weight.nbytes
    assert unpack_children(model)
    assert torch.equal(model["plain"].weight, changed)


def test_only_what_gains_is_packed() -> None:
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.float32, torch.device("cuda"))


def test_a_tied_layer_follows_its_owner() -> None:
    owner = make(8, 5, bias=False, dtype=torch.float32)
    tied = TiedLinear(owner.weight)
    x = torch.randn(3, 8)
    assert torch.equal(tied(x), owner(x))
    owner.weight.mul_(2)
    assert torch.equal(tied(x), owner(x))
    assert list(tied.parameters()) == []


def test_parts_are_views_one_below_the_other() -> None:
    layer = Linear(4, 6, bias=True, dtype=torch.float32, parts={"q": 3, "k": 1, "v": 2})
    assert layer.bias is not None
    for number, (_, _, view) in enumerate(layer.slots()):
        view.fill_(number)
    assert layer.weight[:, 0].tolist() == [0, 0, 0, 1, 2, 2]
    assert layer.bias.tolist() == [3, 3, 3, 4, 5, 5]
    assert [(part, kind) for part, kind, _ in layer.slots()][:3] == [
        ("q", "weight"),
        ("k", "weight"),
        ("v", "weight"),
    ]


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="no bfloat16 in oneDNN here")
def test_a_row_is_the_same_beside_any_others() -> None:
    """Bit for bit; the numbers differ so much in size that any other order of the sum would show."""
    plain = Linear(1024, 384, bias=False, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(5)

    def wild(*shape: int) -> torch.Tensor:
        sizes = torch.randint(-6, 7, shape, generator=random)
        return (torch.randn(shape, generator=random) * torch.exp2(sizes.float())).bfloat16()

    plain.weight.copy_(wild(384, 1024))
    packed = PackedLinear(plain)
    rows = wild(200, 1024)
    together = packed(rows)
    for start, stop in ((0, 1), (3, 18), (7, 43), (64, 128), (30, 130)):
        assert torch.equal(packed(rows[start:stop]), together[start:stop]), (start, stop)
