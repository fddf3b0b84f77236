"""Attention behind one interface (`base.Backend`); one file per implementation, imported when chosen."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tokenmill.attention.base import AttentionSpec, Backend

BACKENDS = {
    "torch": "tokenmill.attention.torch_backend:TorchBackend",
    "triton": "tokenmill.attention.triton_backend:TritonBackend",
}


def create_backend(
    name: str,
    specs: Sequence[AttentionSpec],
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    page_size: int,
) -> Backend:
    """The backend called `name` (a key of `BACKENDS`), over one spec and one pair of caches per layer."""
    module_name, class_name = BACKENDS[name].split(":")
    backend_class = getattr(import_module(module_name), class_name)
    backend: Backend = backend_class(specs, key_caches, value_caches, page_size)
    return backend
