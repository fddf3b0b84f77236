"""Layers of a captured step that get into its graph without being run by Python.

The kernels of one layer are those of another but for addresses: of weights, keys and values, and of what the
layer computes on its way. Launching one takes the host 0.1 ms, nearly all of it Python, and a capture is some
hundred launches; where nothing is to be found out, the driver takes a tenth of that. So when a layer has
turned out to be the one before with these addresses exchanged, the kernels of all later ones are launched by
exchanging them again.

What a layer puts out is read by the next one. So these write to the memory of the two that were compared, by
turns; nothing in it is used twice within one of these, as it otherwise would be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmill.kernels.graph_nodes import CapturedGraph, GraphNode, Words
from tokenmill.kernels.linear import Addend, Hidden

_log = logging.getLogger("tokenmill")

# Triton compiles other code for addresses that are no multiples of this.
_ALIGNMENT = 16
# What a layer launches at most; it is some ten.
_MOST_KERNELS = 40
# Layers that are followed before giving up.
_MOST_LAUNCHED = 5
# Of the device's memory, what two layers may take; more is left to others.
_SHARE_OF_MEMORY = 0.01

# What goes from layer to layer: output and residual.
State = tuple[Hidden, torch.Tensor]
# The first address, and the first behind.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A layer that Python has run."""

    layer: int
    kernels: list[GraphNode]  # none if they cannot be told
    inputs: list[Span]  # the memory that it reads of the layer before
    taken: list[Span]  # the memory that it took, in order
    state: State  # what it put out
    held: list[torch.Tensor]  # keep that memory

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in self.taken)


class RepeatedLayers:
    """The layers of a step, while the current stream is captured."""

    _refused: ClassVar[set[int]] = set()  # streams into which the driver has launched nothing

    def __init__(self, graph: CapturedGraph, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        self._graph = graph
        self._tensors = tensors
        starts = [[tensor.data_ptr() for tensor in own] for own in tensors]
        self._own_starts: Words = np.array(starts, dtype=np.uint64)  # [layers, tensors]

    @classmethod
    def begun(cls, tensors: Callable[[], Sequence[Sequence[torch.Tensor]]]) -> Self | None:
        """`tensors`: of each layer its weights, keys and values, in the same order. None: nothing is
        captured, the driver is too old or has refused before, or not all layers can be alike."""
        graph = CapturedGraph.current()
        if graph is None or graph.stream in cls._refused:
            return None
        own = tensors()
        if any(_forms(each) != _forms(own[0]) for each in own):
            return None
        layers = cls(graph, own)
        return None if (layers._own_starts % _ALIGNMENT).any() else layers

    def run(
        self,
        state: State,
        launch: Callable[[int, State], State],
        as_output: Callable[[int, Hidden], Hidden],
    ) -> State:
        """What the last one puts out. `launch` runs a layer by Python. `as_output` knows a layer's output
        from another layer's whose memory it is in."""
        count, before, is_followed = len(self._tensors), None, True
        for layer in range(count):
            if layer == 0 or not is_followed:
                state = launch(layer, state)
                continue
            launched = self._launched(layer, state, launch)
            state = launched.state
            if before is not None and layer + 1 < count and self._repeats(before, launched):
                self._add(before, launched)
                hidden, residual_TD = (before if (count - layer) % 2 == 0 else launched).state
                return as_output(count - 1, hidden), residual_TD
            is_followed = self._is_followed(launched)
            before = launched if is_followed else None
        return state

    def _launched(self, layer: int, state: State, launch: Callable[[int, State], State]) -> _Launched:
        first, inputs = self._last(), _spans(state)
        with _Holding() as holding:
            state = launch(layer, state)
        kernels = self._kernels_between(first, self._last())
        taken = [_span(tensor) for tensor in holding.tensors]
        return _Launched(layer, kernels, inputs, taken, state, holding.tensors)

    def _is_followed(self, launched: _Launched) -> bool:
        """Whether the next layer may turn out to be this one again."""
        most_bytes = _SHARE_OF_MEMORY * self._graph.memory_bytes
        is_small = 2 * launched.num_bytes <= most_bytes
        return bool(launched.kernels) and is_small and launched.layer + 1 < _MOST_LAUNCHED

    def _last(self) -> int | None:
        try:
            return self._graph.last
        except Exception as error:
            _log.debug("a graph cannot be looked at: %s", error)
        return None

    def _kernels_between(self, first: int | None, last: int | None) -> list[GraphNode]:
        """Those launched behind a node up to another; none where they cannot be told."""
        if first is None or last is None:
            return []
        try:
            return self._graph.nodes_between(first, last, most=_MOST_KERNELS) or []
        except Exception as error:
            _log.debug("the kernels of a layer cannot be told: %s", error)
        return []

    def _repeats(self, before: _Launched, launched: _Launched) -> bool:
        """Whether a layer is the one before with other addresses."""
        kernels = before.kernels
        if not kernels or len(kernels) != len(launched.kernels) or len(before.taken) != len(launched.taken):
            return False
        starts = self._starts(launched.layer, launched.inputs, launched.taken)
        for one, other in zip(kernels, launched.kernels, strict=True):
            addresses = self._addresses(one, before)
            if _how(one) != _how(other):
                return False
            if not np.array_equal(addresses.exchanged(one.words, starts), other.words):
                return False
            # What took memory unseen and gave it back: later layers may have something else there.
            if _are_within(np.delete(one.words, addresses.places), launched.taken).any():
                return False
        return True

    def _add(self, before: _Launched, launched: _Launched) -> None:
        """All layers behind these two. If that fails the capture is void, and the next one does without."""
        try:
            self._launch_rest(before, launched)
        except Exception as error:
            self._refused.add(self._graph.stream)
            raise RuntimeError(f"layers cannot be launched by the driver: {error}") from error

    def _launch_rest(self, before: _Launched, launched: _Launched) -> None:
        forms = [(self._graph.form(kernel), self._addresses(kernel, before)) for kernel in before.kernels]
        last, first = self._graph.last, launched.layer + 1
        for layer in range(first, len(self._tensors)):
            earlier, later = (launched, before) if (layer - before.layer) % 2 == 0 else (before, launched)
            starts = self._starts(layer, _spans(earlier.state), later.taken)
            words = [
                addresses.exchanged(kernel.words, starts)
                for (_, addresses), kernel in zip(forms, before.kernels, strict=True)
            ]
            for (form, _), arguments in zip(forms, words, strict=True):
                form.launch(arguments)
            if layer == first and not self._are_launched(last, before.kernels, words):
                raise RuntimeError("they would be other ones")

    def _are_launched(self, last: int | None, like: list[GraphNode], words: list[Words]) -> bool:
        """Whether the kernels behind a node are those of a layer with these arguments."""
        found = self._kernels_between(last, self._graph.last)
        return len(found) == len(like) and all(
            _how(one) == _how(other) and np.array_equal(one.words, arguments)
            for one, other, arguments in zip(found, like, words, strict=True)
        )

    def _addresses(self, kernel: GraphNode, of: _Launched) -> _Addresses:
        spans = [*map(_extent, self._own(of.layer)), *of.inputs, *of.taken]
        places, memories = np.nonzero(_are_within(kernel.words, spans))
        starts = np.array([start for start, _ in spans], dtype=np.uint64)
        return _Addresses(places, memories, kernel.words[places] - starts[memories])

    def _starts(self, layer: int, inputs: Sequence[Span], taken: Sequence[Span]) -> Words:
        others = np.array([start for start, _ in (*inputs, *taken)], dtype=np.uint64)
        return np.concatenate((self._own_starts[layer - 1 : layer + 1].reshape(-1), others))

    def _own(self, layer: int) -> list[torch.Tensor]:
        """Of the layer before, too: its last product is left to the next norm."""
        return [*self._tensors[layer - 1], *self._tensors[layer]]


@dataclass(frozen=True, slots=True)
class _Addresses:
    """Which arguments of a kernel are addresses, of which memory, and how far in it."""

    places: Any  # int64 [A]
    memories: Any  # int64 [A]
    offsets: Words  # [A], bytes

    def exchanged(self, words: Words, starts: Words) -> Words:
        """The arguments with memory that starts elsewhere."""
        exchanged = words.copy()
        exchanged[self.places] = starts[self.memories] + self.offsets
        return exchanged


def _are_within(words: Words, spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """[words, spans]"""
    starts, ends = np.array(spans, dtype=np.uint64).reshape(-1, 2).T
    within: npt.NDArray[np.bool_] = (words[:, None] >= starts) & (words[:, None] < ends)
    return within


def _forms(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


def _how(kernel: GraphNode) -> tuple[Any, ...]:
    """All of a kernel but its arguments."""
    return kernel.launch, kernel.sizes, kernel.is_packed, kernel.edge


class _Holding(TorchDispatchMode):
    """Keeps what takes memory within, so that none is given twice."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To be skipped by torch's compiler, which nobody uses here, it would be imported: for some seconds.
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: dict[str, Any] | None = None
    ) -> Any:
        made = function(*arguments, **(options or {}))
        given = {_address(each) for each in _tensors_in(arguments)}
        self.tensors += [each for each in _tensors_in((made,)) if _address(each) not in given]
        return made


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors_in(value)
    return found


def _address(tensor: torch.Tensor) -> int:
    """Where its memory begins."""
    return tensor.untyped_storage().data_ptr()


def _spans(state: State) -> list[Span]:
    hidden, residual_TD = state
    x_TF = hidden.x_NI if isinstance(hidden, Addend) else hidden
    return [_span(x_TF), _span(residual_TD)]


def _extent(tensor: torch.Tensor) -> Span:
    """The memory of a tensor without gaps."""
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def _span(tensor: torch.Tensor) -> Span:
    """All of the memory that it lies in."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()
