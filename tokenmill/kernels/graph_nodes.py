"""What is in a CUDA graph while it is captured: reading it, and launching its kernels with other arguments.

By functions of the CUDA driver (12.4 and newer; "Graph Management" and "Execution Control" in its API), which
have no Python form that is as quick: PyTorch shows no nodes, and NVIDIA's bindings make objects of all they
return.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint64]

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_BUFFER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE
# CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .._CLUSTER_DIMENSION and .._CLUSTER_SCHEDULING_POLICY_PREFERENCE. Others
# are of the stream, or tell how a kernel begins, as its edge does, or only make it quicker on later devices.
_ATTRIBUTES = (2, 4, 5)
_OVERLAPS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_NORMAL_EDGE = 0
_WORD = 8  # bytes
_FILLS = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}
_FUNCTIONS = (
    "cuFuncGetParamInfo",
    "cuGraphKernelNodeGetAttribute",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphMemsetNodeGetParams",
    "cuGraphNodeGetDependencies_v2",
    "cuGraphNodeGetType",
    "cuKernelGetParamInfo",
    "cuLaunchKernelEx",
    "cuStreamGetCaptureInfo_v3",
    *_FILLS.values(),
)


class _Kind(IntEnum):
    """CUgraphNodeType"""

    KERNEL = 0
    FILL = 2


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


class _FillParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS"""

    _fields_ = (
        ("address", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_size", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute"""

    _fields_ = (("name", c_uint64), ("value", c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("dimensions", c_uint * 6),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("num_attributes", c_uint),
    )


class KernelLaunch(NamedTuple):
    """How a kernel is launched, but for its arguments."""

    function: int | None  # a handle in one context,
    kernel: int | None  # and one in any
    context: int | None
    dimensions: tuple[int, ...]  # of the grid, and of a block
    shared_bytes: int
    attributes: tuple[tuple[int, tuple[int, ...]], ...]  # those that are not zero


class Fill(NamedTuple):
    """With what memory is filled."""

    element_size: int  # bytes
    value: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A kernel in a graph, or memory that is filled."""

    node: int
    behind: int  # the node that it comes after
    edge: int  # how (CUgraphEdgeData): whether it may begin before that one has ended
    words: Words  # its arguments one after the other, each filled up to whole words of eight bytes
    launch: KernelLaunch | Fill
    sizes: tuple[int, ...] = ()  # of the arguments of a kernel, in bytes
    is_packed: bool = False  # whether it was given all of them as one


class KernelForm:
    """Launches a kernel of a graph with other arguments."""

    def __init__(self, graph: CapturedGraph, like: GraphNode, how: KernelLaunch) -> None:
        self._graph = graph
        self._words = (c_uint64 * len(like.words))()
        self._view = np.ctypeslib.as_array(self._words)
        self._function = c_void_p(how.function or how.kernel)
        overlaps = () if like.edge == _NORMAL_EDGE else ((_OVERLAPS, (1,)),)
        attributes = [_Attribute(name, (c_uint * 16)(*value)) for name, value in how.attributes + overlaps]
        self._attributes = (_Attribute * max(1, len(attributes)))(*attributes)
        dimensions = (c_uint * 6)(*how.dimensions)
        self._config = _LaunchConfig(
            dimensions, how.shared_bytes, graph.stream, self._attributes, len(attributes)
        )
        address, places = ctypes.addressof(self._words), []
        for size in like.sizes:
            places.append(address)
            address += _WORD * _num_words(size)
        self._arguments = self._packed = None
        if like.is_packed:
            self._size = c_size_t(like.sizes[0])
            self._packed = (c_void_p * 5)(_BUFFER, places[0], _BUFFER_SIZE, ctypes.addressof(self._size), 0)
        else:
            self._arguments = (c_void_p * max(1, len(places)))(*places)

    def launch(self, words: Words) -> None:
        """Behind what was launched last."""
        self._view[:] = words
        self._graph.call(
            "cuLaunchKernelEx", byref(self._config), self._function, self._arguments, self._packed
        )


class FillForm:
    """Fills memory as a node of a graph does."""

    def __init__(self, graph: CapturedGraph, fill: Fill) -> None:
        self._graph = graph
        self._fill = fill

    def launch(self, words: Words) -> None:
        """See `KernelForm.launch`."""
        fill, address, stream = self._fill, c_uint64(int(words[0])), c_void_p(self._graph.stream)
        self._graph.call(
            _FILLS[fill.element_size], address, c_uint(fill.value), c_size_t(fill.num_elements), stream
        )


class CapturedGraph:
    """The graph that the current stream is captured into. All raise RuntimeError where the driver refuses."""

    def __init__(self, driver: ctypes.CDLL, stream: int, memory_bytes: int) -> None:
        self._driver = driver
        self.stream = stream
        self.memory_bytes = memory_bytes  # of the device

    @classmethod
    def current(cls) -> Self | None:
        """Of a CUDA stream. None: it is not captured, or the driver lacks what this needs."""
        if not torch.cuda.is_current_stream_capturing():
            return None
        driver = _driver()
        if driver is None:
            return None
        memory_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return cls(driver, torch.cuda.current_stream().cuda_stream, memory_bytes)

    @property
    def last(self) -> int | None:
        """The node that the next one comes after; None: there are several, or none."""
        status, number, graph = c_int(), c_uint64(), c_void_p()
        nodes, edges, count = POINTER(c_void_p)(), POINTER(c_uint64)(), c_size_t()
        found = (status, number, graph, nodes, edges, count)
        self.call("cuStreamGetCaptureInfo_v3", c_void_p(self.stream), *(byref(each) for each in found))
        return nodes[0] if status.value == _CAPTURING and count.value == 1 else None

    def nodes_between(self, first: int, last: int, *, most: int) -> list[GraphNode] | None:
        """Those behind one node up to another, the oldest first; None: something else is there, too, they do
        not form a line, or are more than `most`."""
        found: list[GraphNode] = []
        while last != first:
            node = self._read(last) if len(found) < most else None
            if node is None:
                return None
            found.append(node)
            last = node.behind
        return found[::-1]

    def form(self, like: GraphNode) -> KernelForm | FillForm:
        """What launches again what a node does."""
        how = like.launch
        return FillForm(self, how) if isinstance(how, Fill) else KernelForm(self, like, how)

    def call(self, name: str, *arguments: Any) -> None:
        """A function of the driver."""
        error = getattr(self._driver, name)(*arguments)
        if error:
            raise RuntimeError(f"{name} failed with CUDA error {error}")

    def _read(self, node: int) -> GraphNode | None:
        kind = c_int()
        self.call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        before = self._before(node)
        if before is None:
            return None
        match kind.value:
            case _Kind.KERNEL:
                return self._read_kernel(node, before)
            case _Kind.FILL:
                return self._read_fill(node, before)
        return None

    def _read_kernel(self, node: int, before: tuple[int, int]) -> GraphNode | None:
        params = _KernelParams()
        self.call("cuGraphKernelNodeGetParams_v2", c_void_p(node), byref(params))
        if params.arguments:  # they belong to the node
            sizes = self._argument_sizes(params)
            arguments = [ctypes.string_at(params.arguments[at], size) for at, size in enumerate(sizes)]
        else:
            arguments = [_packed(params)] if params.packed else []
            sizes = tuple(len(each) for each in arguments)
        if not sizes:
            return None
        blob = b"".join(each.ljust(_WORD * _num_words(len(each)), b"\0") for each in arguments)
        handles = (params.function, params.kernel, params.context)
        dimensions = tuple(params.dimensions)
        launch = KernelLaunch(*handles, dimensions, params.shared_bytes, self._attributes(node))
        words: Words = np.frombuffer(blob, dtype=np.uint64)
        return GraphNode(node, *before, words, launch, sizes, not params.arguments)

    def _read_fill(self, node: int, before: tuple[int, int]) -> GraphNode | None:
        fill = _FillParams()
        self.call("cuGraphMemsetNodeGetParams", c_void_p(node), byref(fill))
        if fill.height != 1:
            return None
        how = Fill(fill.element_size, fill.value, fill.width)
        return GraphNode(node, *before, np.array([fill.address], dtype=np.uint64), how)

    def _attributes(self, node: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        found = []
        for name in _ATTRIBUTES:
            value = (c_uint * 16)()
            self.call("cuGraphKernelNodeGetAttribute", c_void_p(node), c_int(name), byref(value))
            if any(value):
                found.append((name, tuple(value)))
        return tuple(found)

    def _before(self, node: int) -> tuple[int, int] | None:
        """The one node that another comes after, and how; None: there is not just one."""
        nodes, edges, count = (c_void_p * 2)(), (c_uint64 * 2)(), c_size_t(2)
        self.call("cuGraphNodeGetDependencies_v2", c_void_p(node), nodes, edges, byref(count))
        return (nodes[0] or 0, edges[0]) if count.value == 1 else None

    def _argument_sizes(self, params: Any) -> tuple[int, ...]:
        handle = params.function or params.kernel
        known = _SIZES.get(handle)
        if known is None:
            name = "cuFuncGetParamInfo" if params.function else "cuKernelGetParamInfo"
            known = _SIZES[handle] = tuple(self._sizes_by(name, handle))
        return known

    def _sizes_by(self, name: str, handle: int) -> list[int]:
        sizes: list[int] = []
        offset, size, get = c_size_t(), c_size_t(), getattr(self._driver, name)
        while not (error := get(c_void_p(handle), c_size_t(len(sizes)), byref(offset), byref(size))):
            sizes.append(size.value)
        if error != _INVALID_VALUE:  # which tells that there are no more
            raise RuntimeError(f"{name} failed with CUDA error {error}")
        return sizes


# Of the arguments of each kernel, by its handle: whoever has loaded one keeps it until the process ends.
_SIZES: dict[int, tuple[int, ...]] = {}


def _packed(params: Any) -> bytes:
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
    """None: it is not there, or lacks something. Its functions return at once while a stream is captured, and
    some hundred are called, so the interpreter is not let go of: another thread would have it for a while."""
    if torch.version.cuda is None:
        return None
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if all(hasattr(driver, name) for name in _FUNCTIONS) else None
