"""The kernels in a CUDA graph while it is captured: reading them, and adding some that nobody launches.

By functions of the CUDA driver (12.4 and newer; "Graph Management" in its API), which have no Python form
that is as quick: PyTorch shows no nodes, and NVIDIA's bindings make objects of all they return.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint64]

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_SET = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES
_BUFFER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE
_WORD = 8  # bytes
_FUNCTIONS = (
    "cuFuncGetParamInfo",
    "cuGraphAddDependencies_v2",
    "cuGraphAddKernelNode_v2",
    "cuGraphKernelNodeCopyAttributes",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphNodeGetDependencies_v2",
    "cuGraphNodeGetType",
    "cuKernelGetParamInfo",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamUpdateCaptureDependencies_v2",
)


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = (
        ("function", c_void_p),
        ("dimensions", c_uint * 6),  # of the grid, and of a block
        ("shared_bytes", c_uint),
        ("arguments", POINTER(c_void_p)),
        ("packed", POINTER(c_void_p)),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


@dataclass(frozen=True, slots=True)
class KernelNode:
    """A kernel in a graph, as the driver tells it."""

    node: int
    behind: int  # the node that it comes after
    edge: int  # how (CUgraphEdgeData): whether it may begin before that one has ended
    launch: tuple[int, ...]  # which kernel, in how many blocks and threads, with how much shared memory
    sizes: tuple[int, ...]  # of its arguments, in bytes
    is_packed: bool  # whether it was given all of them as one
    words: Words  # its arguments one after the other, each filled up to whole words of eight bytes


class KernelForm:
    """Adds kernels that differ from one in a graph in their arguments alone."""

    def __init__(self, graph: CapturedGraph, like: KernelNode) -> None:
        self._graph = graph
        self._like = like
        self._words = (c_uint64 * len(like.words))()
        self._view = np.ctypeslib.as_array(self._words)
        self._params = graph.params_of(like.node)
        address, places = ctypes.addressof(self._words), []
        for size in like.sizes:
            places.append(address)
            address += _WORD * _num_words(size)
        if like.is_packed:
            self._size = c_size_t(like.sizes[0])
            self._places = (c_void_p * 5)(_BUFFER, places[0], _BUFFER_SIZE, ctypes.addressof(self._size), 0)
            self._params.packed = self._places
        else:
            self._places = (c_void_p * max(1, len(places)))(*places)
            self._params.arguments = self._places

    def add(self, words: Words) -> int:
        """A node with these arguments, behind none yet."""
        self._view[:] = words
        return self._graph.add_node(self._params, self._like.node)


class CapturedGraph:
    """The graph that the current stream is captured into."""

    def __init__(self, driver: ctypes.CDLL, stream: int, graph: int) -> None:
        self._driver = driver
        self._stream = stream
        self._graph = graph
        self._sizes: dict[int, tuple[int, ...]] = {}  # of the arguments of each function

    @classmethod
    def current(cls) -> Self | None:
        """Of a CUDA stream. None: it is not captured, or the driver lacks what this needs.

        All of these raise RuntimeError where the driver refuses something.
        """
        if not torch.cuda.is_current_stream_capturing():
            return None
        driver = _driver()
        if driver is None:
            return None
        stream = torch.cuda.current_stream().cuda_stream
        status, graph, _ = _capture_info(driver, stream)
        return cls(driver, stream, graph) if status == _CAPTURING else None

    @property
    def last(self) -> int | None:
        """The node that the next one comes after; None: there are several, or none."""
        _, _, nodes = _capture_info(self._driver, self._stream)
        return nodes[0] if len(nodes) == 1 else None

    def kernels_since(self, first: int, last: int, *, most: int) -> list[KernelNode] | None:
        """Those behind one node up to another, the oldest first; None: something else is there, too, they do
        not form a line, or are more than `most`."""
        found: list[KernelNode] = []
        while last != first:
            kernel = self._kernel(last) if len(found) < most else None
            if kernel is None:
                return None
            found.append(kernel)
            last = kernel.behind
        return found[::-1]

    def _kernel(self, node: int) -> KernelNode | None:
        kind = c_int()
        self._call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        before = self._before(node)
        if kind.value != _KERNEL or before is None:
            return None
        params = self.params_of(node)
        if params.arguments:
            sizes = self._argument_sizes(params)
            arguments = [ctypes.string_at(params.arguments[at], size) for at, size in enumerate(sizes)]
        else:
            arguments = [_packed(params)] if params.packed else []
            sizes = tuple(len(each) for each in arguments)
        blob = b"".join(each.ljust(_WORD * _num_words(len(each)), b"\0") for each in arguments)
        handles = (params.function or 0, params.kernel or 0, params.context or 0)
        launch = (*handles, *params.dimensions, params.shared_bytes)
        words: Words = np.frombuffer(blob, dtype=np.uint64)
        return KernelNode(node, *before, launch, sizes, not params.arguments, words)

    def _before(self, node: int) -> tuple[int, int] | None:
        """The one node that another comes after, and how; None: there is not just one."""
        nodes, edges, count = (c_void_p * 2)(), (c_uint64 * 2)(), c_size_t(2)
        self._call("cuGraphNodeGetDependencies_v2", c_void_p(node), nodes, edges, byref(count))
        return (nodes[0] or 0, edges[0]) if count.value == 1 else None

    def params_of(self, node: int) -> _KernelParams:
        """How a kernel is launched; its arguments belong to the node."""
        params = _KernelParams()
        self._call("cuGraphKernelNodeGetParams_v2", c_void_p(node), byref(params))
        return params

    def _argument_sizes(self, params: _KernelParams) -> tuple[int, ...]:
        handle = params.function or params.kernel
        known = self._sizes.get(handle)
        if known is None:
            name = "cuFuncGetParamInfo" if params.function else "cuKernelGetParamInfo"
            known = self._sizes[handle] = tuple(self._sizes_by(name, handle))
        return known

    def _sizes_by(self, name: str, handle: int) -> list[int]:
        sizes: list[int] = []
        offset, size, get = c_size_t(), c_size_t(), getattr(self._driver, name)
        while not (error := get(c_void_p(handle), c_size_t(len(sizes)), byref(offset), byref(size))):
            sizes.append(size.value)
        if error != _INVALID_VALUE:  # which tells that there are no more
            raise RuntimeError(f"{name} failed with CUDA error {error}")
        return sizes

    def form(self, like: KernelNode) -> KernelForm:
        """For kernels like one that is there."""
        return KernelForm(self, like)

    def add_node(self, params: _KernelParams, like: int) -> int:
        """A kernel with the attributes of another node, behind none yet."""
        node = c_void_p()
        self._call(
            "cuGraphAddKernelNode_v2", byref(node), c_void_p(self._graph), None, c_size_t(0), byref(params)
        )
        self._call("cuGraphKernelNodeCopyAttributes", node, c_void_p(like))
        assert node.value is not None
        return node.value

    def append(self, nodes: Sequence[int], edges: Sequence[int]) -> None:
        """Let these nodes come one after the other behind the last one, each as its edge says; what is
        launched next comes behind them."""
        before = self.last
        assert before is not None, "nodes come behind one"
        count, data = len(nodes), (c_uint64 * len(edges))(*edges)
        first, second = (c_void_p * count)(before, *nodes[:-1]), (c_void_p * count)(*nodes)
        self._call("cuGraphAddDependencies_v2", c_void_p(self._graph), first, second, data, c_size_t(count))
        last = (c_void_p * 1)(nodes[-1])
        self._call(
            "cuStreamUpdateCaptureDependencies_v2",
            c_void_p(self._stream),
            last,
            None,
            c_size_t(1),
            c_uint(_SET),
        )

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            raise RuntimeError(f"{name} failed with CUDA error {error}")


def _capture_info(driver: ctypes.CDLL, stream: int) -> tuple[int, int, list[int]]:
    """Whether a stream is captured, into which graph, and behind which nodes the next one comes."""
    status, number, graph = c_int(), c_uint64(), c_void_p()
    nodes, edges, count = POINTER(c_void_p)(), POINTER(c_uint64)(), c_size_t()
    error = driver.cuStreamGetCaptureInfo_v3(
        c_void_p(stream),
        byref(status),
        byref(number),
        byref(graph),
        byref(nodes),
        byref(edges),
        byref(count),
    )
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo_v3 failed with CUDA error {error}")
    return status.value, graph.value or 0, [nodes[at] or 0 for at in range(count.value)]


def _packed(params: _KernelParams) -> bytes:
    """Arguments that were given as one."""
    found, at = {}, 0
    while name := params.packed[at]:
        found[name] = params.packed[at + 1]
        at += 2
    size = c_size_t.from_address(found[_BUFFER_SIZE]).value
    return ctypes.string_at(found[_BUFFER], size)


def _num_words(size: int) -> int:
    return -(-size // _WORD)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """None: it is not there, or lacks something."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if all(hasattr(driver, name) for name in _FUNCTIONS) else None
