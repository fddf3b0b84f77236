"""Reading a graph by the driver's functions and launching its kernels again, with a driver that is made up
and keeps to the structures of CUDA's headers."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tokenmill.kernels.graph_nodes import CapturedGraph, GraphNode

pytestmark = pytest.mark.unit

KERNEL, COPY, FILL = 0, 1, 2
OVERLAPPING = 0x1_0001  # from a port of its own, of a type of its own
STREAM = 77


@dataclass
class Node:
    kind: int = KERNEL
    before: tuple[int, ...] = ()
    edge: int = 0
    function: int = 11
    arguments: tuple[bytes, ...] = ()
    is_packed: bool = False
    attributes: dict[int, bytes] = field(default_factory=dict)
    dimensions: tuple[int, ...] = (5, 4, 3, 128, 2, 1)
    shared_bytes: int = 999


class Driver:
    """Fills what it is given, as the real one does."""

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.nodes = nodes
        self.last: list[int] = [max(nodes, default=0)]
        self.error = 0
        self.launched: list[Node] = []
        self.filled: list[tuple[str, int, int, int, int]] = []
        self._kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cuMemset"):
            return lambda at, value, count, stream: self.filled.append(
                (name, at.value, value.value, count.value, stream.value)
            )
        raise AttributeError(name)

    def cuStreamGetCaptureInfo_v3(self, stream: Any, status: Any, *found: Any) -> int:
        assert stream.value == STREAM
        _, _, nodes, _, count = (each._obj for each in found)
        array = (c_void_p * 4)(*self.last)
        self._kept.append(array)
        status._obj.value, count.value = 1, len(self.last)
        ctypes.pointer(nodes)[0] = ctypes.cast(array, type(nodes))
        return self.error

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.nodes[node.value].kind
        return self.error

    def cuGraphNodeGetDependencies_v2(self, node: Any, nodes: Any, edges: Any, count: Any) -> int:
        before = self.nodes[node.value].before
        for at, each in enumerate(before[: len(nodes)]):
            nodes[at], edges[at] = each, self.nodes[node.value].edge
        count._obj.value = len(before)
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:
        found, params = self.nodes[node.value], params._obj
        params.function, params.shared_bytes = found.function, found.shared_bytes
        params.dimensions[:] = found.dimensions
        blocks = [ctypes.create_string_buffer(each, len(each)) for each in found.arguments]
        self._kept.append(blocks)
        places = [ctypes.addressof(block) for block in blocks]
        if found.is_packed:
            size = ctypes.c_size_t(len(found.arguments[0]))
            self._kept.append(size)
            params.packed = (c_void_p * 5)(1, places[0], 2, ctypes.addressof(size), 0)
        elif places:
            params.arguments = (c_void_p * len(places))(*places)
        return 0

    def cuGraphKernelNodeGetAttribute(self, node: Any, name: Any, value: Any) -> int:
        found = self.nodes[node.value].attributes.get(name.value)
        ctypes.memmove(value._obj, (found or b"").ljust(64, b"\0"), 64)
        return 0

    def cuFuncGetParamInfo(self, function: Any, at: Any, offset: Any, size: Any) -> int:
        like = next(node for node in self.nodes.values() if node.function == function.value)
        if at.value >= len(like.arguments):
            return 1
        size._obj.value = len(like.arguments[at.value])
        return 0

    def cuGraphMemsetNodeGetParams(self, node: Any, params: Any) -> int:
        params = params._obj
        params.address, params.value, params.element_size, params.width, params.height = (
            *(0x5000, 7, 4, 30),
            1 if self.nodes[node.value].shared_bytes == 999 else 2,
        )
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, packed: Any) -> int:
        config = config._obj
        assert config.stream == STREAM
        attributes = {
            config.attributes[at].name: bytes(config.attributes[at].value).rstrip(b"\0")
            for at in range(config.num_attributes)
        }
        if packed is None:
            like = next(node for node in self.nodes.values() if node.function == function.value)
            found = tuple(
                ctypes.string_at(arguments[at], len(each)) for at, each in enumerate(like.arguments)
            )
        else:
            assert arguments is None
            assert (packed[0], packed[2], packed[4]) == (1, 2, None)
            found = (ctypes.string_at(packed[1], ctypes.c_size_t.from_address(packed[3]).value),)
        self.launched.append(
            Node(
                function=function.value,
                arguments=found,
                is_packed=packed is not None,
                attributes=attributes,
                dimensions=tuple(config.dimensions),
                shared_bytes=config.shared_bytes,
            )
        )
        return self.error


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.kernels.graph_nodes._SIZES", {})


def graph_of(driver: Any) -> CapturedGraph:
    return CapturedGraph(driver, STREAM, 2**30)


ARGUMENTS = (b"\1", b"\2\0\0\7", bytes(range(8)), bytes(range(12)), bytes(range(128)))
CLUSTER = b"\2\0\0\0\1\0\0\0\3"  # whole numbers; the fake driver leaves zeros at the end out


def line() -> dict[int, Node]:
    """The first is not ours; kernels, one of them packed, and a fill."""
    return {
        1: Node(COPY, function=0),
        2: Node(before=(1,), arguments=ARGUMENTS, attributes={4: CLUSTER, 2: b"\1"}),
        3: Node(FILL, before=(2,), function=0),
        4: Node(before=(3,), edge=OVERLAPPING, function=12, arguments=(bytes(range(40)),), is_packed=True),
    }


def test_a_line_of_kernels_is_read() -> None:
    driver = Driver(line())
    graph = graph_of(driver)
    assert graph.last == 4
    found = graph.nodes_between(1, 4, most=3)
    assert found is not None
    assert [node.node for node in found] == [2, 3, 4]
    assert [node.edge for node in found] == [0, 0, OVERLAPPING]
    assert [node.sizes for node in found] == [(1, 4, 8, 12, 128), (), (40,)]
    assert [node.is_packed for node in found] == [False, False, True]
    padded = b"".join(each + bytes(-len(each) % 8) for each in ARGUMENTS)
    assert found[0].words.tobytes() == padded
    assert found[1].words.tolist() == [0x5000]
    assert found[2].words.tobytes() == bytes(range(40))

    driver.nodes[2].attributes = {4: CLUSTER}
    again = graph.nodes_between(1, 2, most=3)
    assert again is not None
    assert again[0].launch != found[0].launch


def test_kernels_are_launched_as_they_are_with_other_arguments() -> None:
    driver = Driver(line())
    graph = graph_of(driver)
    found = graph.nodes_between(1, 4, most=3)
    assert found is not None
    for node in found:
        words = node.words.copy()
        words[-1] = 0x0807_0605_0403_0201
        graph.form(node).launch(words)
    whole = bytes(range(120)) + bytes(range(1, 9))
    assert driver.launched[0] == Node(arguments=(*ARGUMENTS[:-1], whole), attributes={4: CLUSTER, 2: b"\1"})
    assert driver.launched[1] == Node(
        function=12,
        arguments=(bytes(range(32)) + bytes(range(1, 9)),),
        is_packed=True,
        attributes={6: b"\1"},  # it may begin before the one before it has ended
    )
    assert driver.filled == [("cuMemsetD32Async", 0x0807_0605_0403_0201, 7, 30, STREAM)]


def test_a_form_may_be_launched_again_and_again() -> None:
    driver = Driver(line())
    graph = graph_of(driver)
    found = graph.nodes_between(1, 2, most=3)
    assert found is not None
    form = graph.form(found[0])
    for number in range(3):
        form.launch(found[0].words + np.uint64(number))
    assert [node.arguments[1][0] for node in driver.launched] == [2, 3, 4]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({3: Node(COPY, before=(2,), function=0)}, id="something else between them"),
        pytest.param({3: Node(FILL, before=(2,), function=0, shared_bytes=1)}, id="a fill of several lines"),
        pytest.param({4: Node(before=(3, 2), arguments=ARGUMENTS)}, id="behind two"),
        pytest.param({3: Node(FILL, function=0)}, id="behind none"),
        pytest.param({2: Node(before=(1,))}, id="no arguments"),
    ],
)
def test_what_is_no_line_of_kernels_is_not_read(change: dict[int, Node]) -> None:
    assert graph_of(Driver(line() | change)).nodes_between(1, 4, most=3) is None


def test_too_many_kernels_are_not_read() -> None:
    assert graph_of(Driver(line())).nodes_between(1, 4, most=2) is None


@pytest.mark.parametrize("last", [[], [3, 4]])
def test_a_fork_has_no_last_node(last: list[int]) -> None:
    driver = Driver(line())
    driver.last = last
    assert graph_of(driver).last is None


def test_errors_of_the_driver_are_told() -> None:
    driver = Driver(line())
    graph = graph_of(driver)
    found = graph.nodes_between(1, 2, most=3)
    assert found is not None
    driver.error = 719
    node: GraphNode = found[0]
    for call in (
        lambda: graph.last,
        lambda: graph.nodes_between(1, 4, most=3),
        lambda: graph.form(node).launch(node.words),
    ):
        with pytest.raises(RuntimeError, match="719"):
            call()
