"""Layers that are added to a graph instead of launched, on a device that is made up: its memory is a table
from addresses to numbers, and a graph a list of kernels that a replay runs on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tokenmill.kernels import repeated_layers
from tokenmill.kernels.graph_nodes import GraphNode
from tokenmill.kernels.linear import Addend
from tokenmill.kernels.repeated_layers import RepeatedLayers, State

pytestmark = pytest.mark.unit

# Each kernel's last argument is the address that it writes to.
KERNELS: dict[int, Callable[..., float]] = {
    1: lambda residual, x, weight: residual + 3 * x * weight,
    2: lambda x, weight: x * weight + 1,
    3: lambda x: 2 * x,
    4: lambda x, y: x - 0.5 * y,
    5: lambda x, number: x + number,
}
SPARE, NOBODY = torch.empty(1), [torch.empty(1) for _ in range(9)]
NUMBERS = (64, 2**40 + 5)  # that all layers have alike


class MadeGraph:
    """What stands in for a captured one."""

    stream, memory_bytes = 7, 2**40

    def __init__(self) -> None:
        self.kernels: dict[int, GraphNode] = {}
        self.num_added = 0
        self.has_fork = False
        self.read_error: Exception | None = None
        self.add_error: Exception | None = None
        self.spoil: Callable[[GraphNode], GraphNode] = lambda kernel: kernel

    @property
    def last(self) -> int | None:
        return None if self.has_fork else max(self.kernels, default=0)

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], int]]:
        return [(kernel.launch, kernel.edge) for kernel in self.kernels.values()]

    def launch(self, kernel: int, *operands: torch.Tensor | int, edge: int = 0) -> None:
        words = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in operands]
        self._append(GraphNode(0, 0, edge, np.array(words, dtype=np.uint64), (kernel, 7)))

    def nodes_between(self, first: int, last: int, *, most: int) -> list[GraphNode] | None:
        if self.read_error is not None:
            raise self.read_error
        found = [kernel for node, kernel in self.kernels.items() if first < node <= last]
        return found if len(found) <= most else None

    def form(self, like: GraphNode) -> Any:
        return Form(self, like)

    def _append(self, kernel: GraphNode) -> None:
        node = max(self.kernels, default=0) + 1
        self.kernels[node] = replace(kernel, node=node, behind=node - 1)

    def replay(self, memory: dict[int, float]) -> None:
        for kernel in self.kernels.values():
            *read, written = kernel.words.tolist()
            numbers = [memory.get(word, word) for word in read]
            assert all(word in memory for word in read if word > 2**41), "nobody has written that"
            memory[written] = KERNELS[kernel.launch[0]](*numbers)


@dataclass
class Form:
    graph: MadeGraph
    like: GraphNode

    def launch(self, words: Any) -> None:
        if self.graph.add_error is not None:
            raise self.graph.add_error
        self.graph._append(self.graph.spoil(replace(self.like, words=words.copy())))
        self.graph.num_added += 1


class Model:
    """Layers with two weights and a cache each; odd ones among them by `odd`."""

    def __init__(self, graph: MadeGraph, count: int, odd: Callable[[MadeGraph, int], None]) -> None:
        self.graph = graph
        self.tensors = [[torch.empty(4) for _ in range(3)] for _ in range(count)]
        self.odd = odd
        self.in_place = False
        self.num_launched = 0

    def memory(self, first: torch.Tensor) -> dict[int, float]:
        memory = {first.data_ptr(): 0.25}
        for layer, (up, down, _) in enumerate(self.tensors):
            memory[up.data_ptr()], memory[down.data_ptr()] = 0.5 + layer / 8, 1.0 - layer / 16
            memory[up[2:].data_ptr()] = layer / 4
        return memory

    def layer(self, layer: int, state: State) -> State:
        hidden, residual = state
        up, down, cache = self.tensors[layer]
        self.num_launched += 1
        launch = self.graph.launch
        early = torch.empty(1000)  # written before the input is read, and read after it
        launch(3, up[2:], early)
        total = residual
        if isinstance(hidden, Addend):
            total = residual if self.in_place else torch.empty(5)
            launch(1, residual, hidden.x_NI, hidden.weight_OI, total)
        first = torch.empty(1000)
        launch(2, total, up, first[7:], edge=9)
        launch(3, first[7:].view(331, 3)[:, :2], cache)
        first.zero_()  # nothing that a kernel does, but an operation that takes no memory
        del first  # what comes next would have its memory, if nobody held it
        (wide,) = torch._foreach_neg([torch.empty(1000)])
        launch(3, cache, wide)
        for number in NUMBERS:
            launch(5, cache, number, wide)
        self.odd(self.graph, layer)
        narrow = wide.new_empty(1000)[500:]
        launch(4, wide, cache, wide)
        launch(4, wide, early, narrow)
        return Addend(narrow, down, None), total

    def as_output(self, layer: int, hidden: Any) -> Addend:
        return replace(hidden, weight_OI=self.tensors[layer][1])


def nothing(graph: MadeGraph, layer: int) -> None:
    pass


def outcome(model: Model, *, repeated: bool) -> tuple[float, float, set[float]]:
    """Output and residual of the last layer, and all that the caches hold."""
    first = torch.empty(5)
    state: State = (first, first)
    if repeated:
        graph: Any = model.graph
        state = RepeatedLayers(graph, model.tensors).run(state, model.layer, model.as_output)
    else:
        for layer in range(len(model.tensors)):
            state = model.layer(layer, state)
    hidden, residual = state
    assert isinstance(hidden, Addend)
    assert hidden.weight_OI is model.tensors[-1][1]
    memory = model.memory(first)
    model.graph.replay(memory)
    caches = {memory[cache.data_ptr()] for _, _, cache in model.tensors}
    return memory[hidden.x_NI.data_ptr()], memory[residual.data_ptr()], caches


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RepeatedLayers, "_refused", set())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("count", range(1, 12))
def test_what_is_added_computes_what_is_launched(count: int, in_place: bool) -> None:
    made, launched = Model(MadeGraph(), count, nothing), Model(MadeGraph(), count, nothing)
    made.in_place = launched.in_place = in_place
    assert outcome(made, repeated=True) == outcome(launched, repeated=False)
    assert made.num_launched == min(count, 3)
    assert made.graph.num_added == 9 * max(0, count - 3)
    assert made.graph.shapes == launched.graph.shapes


def another_number_in_each(graph: MadeGraph, layer: int) -> None:
    graph.launch(5, 1, layer, SPARE)


def other_kernels_by_turns(graph: MadeGraph, layer: int) -> None:
    graph.launch(5 if layer % 2 else 4, 1, 1, SPARE)


def more_and_more_kernels(graph: MadeGraph, layer: int) -> None:
    for _ in range(layer):
        graph.launch(3, 1, SPARE)


def too_many_kernels(graph: MadeGraph, layer: int) -> None:
    for _ in range(50):
        graph.launch(3, 1, SPARE)


def other_edges(graph: MadeGraph, layer: int) -> None:
    graph.launch(3, 1, SPARE, edge=layer)


def memory_of_nobody(graph: MadeGraph, layer: int) -> None:
    graph.launch(3, 1, NOBODY[layer])


@pytest.mark.parametrize(
    "odd",
    [
        another_number_in_each,
        other_kernels_by_turns,
        more_and_more_kernels,
        too_many_kernels,
        other_edges,
        memory_of_nobody,
    ],
)
def test_layers_that_are_not_alike_are_launched(odd: Callable[[MadeGraph, int], None]) -> None:
    made, launched = Model(MadeGraph(), 9, odd), Model(MadeGraph(), 9, odd)
    assert outcome(made, repeated=True) == outcome(launched, repeated=False)
    assert (made.num_launched, made.graph.num_added) == (9, 0)


def test_layers_may_become_alike() -> None:
    def odd(graph: MadeGraph, layer: int) -> None:
        if layer < 2:
            graph.launch(3, 1, SPARE)

    made, launched = Model(MadeGraph(), 9, odd), Model(MadeGraph(), 9, odd)
    assert outcome(made, repeated=True) == outcome(launched, repeated=False)
    assert made.num_launched == 4


@pytest.mark.parametrize("trouble", ["fork", "reading"])
def test_what_cannot_be_looked_at_is_launched(trouble: str) -> None:
    made, launched = Model(MadeGraph(), 9, nothing), Model(MadeGraph(), 9, nothing)
    made.graph.has_fork = trouble == "fork"
    made.graph.read_error = RuntimeError("for the test") if trouble == "reading" else None
    assert outcome(made, repeated=True) == outcome(launched, repeated=False)
    assert made.num_launched == 9


def test_where_nothing_is_added_layers_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Model(MadeGraph(), 9, nothing)
    made.graph.add_error = RuntimeError("for the test")
    monkeypatch.setattr(repeated_layers.CapturedGraph, "current", lambda: made.graph)
    assert RepeatedLayers.begun(lambda: made.tensors) is not None
    others = [[torch.empty(size) for _ in range(3)] for size in (8, 8, 9)]
    assert RepeatedLayers.begun(lambda: others) is None
    assert RepeatedLayers.begun(lambda: [*made.tensors, []]) is None
    odd = [[torch.empty(4)[1:] for _ in range(3)] for _ in range(9)]
    assert RepeatedLayers.begun(lambda: odd) is None  # kernels of some layers may be others
    with pytest.raises(RuntimeError, match="for the test"):
        outcome(made, repeated=True)
    assert RepeatedLayers.begun(lambda: made.tensors) is None


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda kernel: replace(kernel, edge=kernel.edge + 1), id="edge"),
        pytest.param(lambda kernel: replace(kernel, words=kernel.words + np.uint64(8)), id="arguments"),
        pytest.param(lambda kernel: replace(kernel, launch=(3, 8)), id="blocks"),
    ],
)
def test_what_the_driver_launches_is_looked_at(spoil: Callable[[GraphNode], GraphNode]) -> None:
    made = Model(MadeGraph(), 9, nothing)
    made.graph.spoil = spoil
    with pytest.raises(RuntimeError, match="other ones"):
        outcome(made, repeated=True)
    assert RepeatedLayers._refused == {made.graph.stream}


def test_memory_that_was_taken_unseen_may_be_used_for_something_else() -> None:
    """Within an operation, say, which gave it back: the next layer's output is there."""
    x, y, z, unseen, weight = (torch.empty(100) for _ in range(5))
    spans = [repeated_layers._span(each) for each in (x, y, z, unseen, weight)]
    graph: Any = MadeGraph()
    layers = RepeatedLayers(graph, [[weight]] * 3)

    def launched(layer: int, came: int, went: int) -> repeated_layers._Launched:
        starts = [start for start, _ in spans]
        words = np.array([starts[came], starts[3], starts[went]], dtype=np.uint64)
        kernel = GraphNode(1, 0, 0, words, (1,))
        state = (x, x)
        return repeated_layers._Launched(layer, [kernel], [spans[came]] * 2, [spans[went]], state, [])

    assert layers._repeats(launched(1, 0, 1), launched(2, 1, 2))
    assert not layers._repeats(launched(1, 0, 1), launched(2, 1, 3))


def test_layers_that_take_much_memory_are_launched() -> None:
    """Twice a layer's would be held."""
    taken = 4 * (5 + 5 * 1000)
    for spare, num_launched in ((-1, 9), (0, 3)):
        made, launched = Model(MadeGraph(), 9, nothing), Model(MadeGraph(), 9, nothing)
        made.graph.memory_bytes = 100 * 2 * taken + spare
        assert outcome(made, repeated=True) == outcome(launched, repeated=False)
        assert made.num_launched == num_launched


def test_what_a_layer_took_is_held() -> None:
    graph: Any = MadeGraph()
    model = Model(graph, 3, nothing)
    state = model.layer(0, (torch.empty(5), torch.empty(5)))
    launched = RepeatedLayers(graph, model.tensors)._launched(1, state, model.layer)
    assert [start for start, _ in launched.taken] == [
        repeated_layers._address(each) for each in launched.held
    ]
    assert launched.num_bytes == 4 * (5 + 5 * 1000)


def test_what_is_held_is_not_looked_at_by_a_compiler() -> None:
    """Torch's takes some seconds to import, which the first capture would wait for."""
    code = (
        "import sys, torch\n"
        "from tokenmill.kernels.repeated_layers import _Holding\n"
        "with _Holding() as holding:\n"
        "    torch.zeros(3) + 1\n"
        "assert len(holding.tensors) == 2\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
