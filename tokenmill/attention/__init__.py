"""Attention behind one interface (`base.Backend`); one file per implementation, imported when chosen."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

import torch

from tokenmill.attention.base import AttentionSpec, Backend
from tokenmill.kernels import native

Caches = Sequence[torch.Tensor]
BACKENDS = {
    "native": "tokenmill.attention.native_backend:NativeBackend",
    "torch": "tokenmill.attention.torch_backend:TorchBackend",
    "triton": "tokenmill.attention.triton_backend:TritonBackend",
    # A token has the same bits whatever else a step holds.
    "invariant native": "tokenmill.attention.native_backend:InvariantNativeBackend",
    "invariant triton": "tokenmill.attention.invariant_backend:InvariantBackend",
}


def best_backend(device: torch.device, dtype: torch.dtype) -> str:
    """The fastest backend that runs here."""
    if device.type == "cuda":
        return "triton" if find_spec("triton") else "torch"
    return "native" if native.library(dtype) else "torch"


def create_backend(
    name: str, specs: Sequence[AttentionSpec], key_caches: Caches, value_caches: Caches, page_size: int
) -> Backend:
    """The backend called `name` (a key of `BACKENDS`), over one spec and one pair of caches per layer."""
    module_name, class_name = BACKENDS[name].split(":")
    make = getattr(import_module(module_name), class_name)
    backend: Backend = make(specs, key_caches, value_caches, page_size)
    return backend
