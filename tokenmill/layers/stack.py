"""Layers one behind the other, of which a captured step need not run all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tokenmill.kernels.repeated_layers import RepeatedLayers, State
from tokenmill.layers.linear import Hidden


def run_layers(
    count: int,
    state: State,
    run: Callable[[int, State], State],
    *,
    as_output: Callable[[int, Hidden], Hidden],
    own_tensors: Callable[[], Sequence[Sequence[torch.Tensor]]] | None,
) -> State:
    """Output and residual of the last of so many layers, each of which `run` computes.

    `own_tensors` gives of each layer its weights, keys and values, in the same order, if all layers are alike
    and on a GPU: where the step is captured, those that repeat others are not run, then (see
    `kernels/repeated_layers.py`). `as_output` knows a layer's output from another layer's in whose memory it
    is.
    """
    repeated = None if own_tensors is None else RepeatedLayers.begun(own_tensors)
    if repeated is not None:
        return repeated.run(state, run, as_output)
    for at in range(count):
        state = run(at, state)
    return state
