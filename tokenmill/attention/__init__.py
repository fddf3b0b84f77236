"""Attention behind one interface (`base.Backend`); one file per implementation, imported when chosen."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

import torch

from tokenmill.attention.base import AttentionSpec, Backend
from tokenmill.kernels import native

BACKENDS = {
    "native": "tokenmill.attention.native_backend:NativeBackend",
    "torch": "tokenmill.attention.torch_backend:TorchBackend",
    "triton": "tokenmill.attention.triton_backend:TritonBackend",
}


def best_backend(device: torch.device, dtype: torch.dtype) -> str:
    """The fastest backend that runs here."""
    if device.type == "cuda":
        return "triton" if find_spec("triton") else "torch"
    return "native" if native.library(dtype) else "torch"


def create_backend(
    name: str,
    specs: Sequence[AttentionSpec],
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    page_size: int,
) -> Backend:
    """The backend called `name` (a key of `BACKENDS`), over one spec and one pair of caches per layer."""
    module_name, class_name = BACKENDS[name].split(":")
    backend: Backend = getattr(import_module(module_name), class_name)(
        specs, key_caches, value_caches, page_size
    )
    return backend
