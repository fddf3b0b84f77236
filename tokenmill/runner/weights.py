"""The weights of a model after the start: replaced in place, read by name, moved to the host and back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument, told
from tokenmill.hub import resolve
from tokenmill.models import Model, ModelSpec, read_spec
from tokenmill.models.checkpoint import GivenTensors, open_checkpoint
from tokenmill.models.loader import open_slots, update_weights

# What may differ between two checkpoints of one model. Whether the embedding is tied, tensors tell better.
_NOT_COMPARED = ("dtype", "eos_token_ids", "num_stored_layers", "tied_embeddings")
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


class Weights:
    """The weights of one runner's model. Nothing may run while one of the methods does."""

    def __init__(self, model: Model, spec: ModelSpec, config: EngineConfig) -> None:
        self._model = model
        self._spec = spec
        self._config = config
        # As they were loaded; each is another tensor whenever it is packed anew.
        self.num_parameters = sum(weight.numel() for weight in model.parameters())
        self.num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []  # a weight, and where its numbers are

    @torch.inference_mode()
    def update_from_disk(self, *, model_path: str) -> None:
        """Load the weights of another checkpoint of the same model, a folder or a hub id.

        Raises `InvalidArgument`, with nothing changed, where that does not fit.
        """
        folder = resolve(model_path, revision=None, download_dir=self._config.download_dir)
        self._check_configuration(folder)
        with open_checkpoint(folder) as checkpoint:
            update_weights(self._model, self._spec, checkpoint, partial=False)

    @torch.inference_mode()
    def update_from_tensor(self, *, named_tensors: Sequence[tuple[str, Any]]) -> None:
        """Load some tensors by their names in a checkpoint; raises as `update_from_disk`."""
        given = {name: _tensor(name, value) for name, value in named_tensors}
        update_weights(self._model, self._spec, GivenTensors(given), partial=True)

    @torch.inference_mode()
    def read(self, *, tensor_name: str, truncate_size: int) -> list[Any] | None:
        """The first rows of a tensor, by its name in checkpoints, as numbers; None: there is none."""
        with open_slots(self._model, [tensor_name]) as (slots, _):
            slot = slots.get(tensor_name)
            if slot is None and tensor_name == _HEAD:  # it is the embedding
                slot = slots.get(_EMBEDDING)
            if slot is None:
                return None
            values: list[Any] = slot[:truncate_size].float().tolist()
        return values

    def release(self) -> None:
        """Move the weights from the GPU to the host's memory. On a CPU they are there already."""
        for weight in self._model.parameters():
            if weight.device.type != "cpu":
                self._on_host.append((weight, weight.detach().cpu()))
                weight.untyped_storage().resize_(0)

    @torch.inference_mode()
    def restore(self) -> None:
        """Move them back, to other addresses. May be called again after torch.OutOfMemoryError."""
        while self._on_host:
            weight, values = self._on_host[-1]
            weight.untyped_storage().resize_(values.numel() * values.element_size())
            weight.copy_(values)
            self._on_host.pop()

    def _check_configuration(self, folder: Path) -> None:
        """A folder may hold weights only; where it says what they are for, it must be this model."""
        if not os.path.lexists(folder / "config.json"):
            return
        config = self._config
        spec = read_spec(
            folder,
            overrides=config.json_model_override_args,
            context_length=config.context_length,
            trust_remote_code=config.trust_remote_code,
        )
        for field in dataclasses.fields(spec):
            theirs, ours = getattr(spec, field.name), getattr(self._spec, field.name)
            if field.name not in _NOT_COMPARED and theirs != ours:
                raise InvalidArgument(
                    f"{folder} is another model: its {field.name} is {theirs!r}, that of the loaded one "
                    f"{ours!r}; make a new engine for it"
                )


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        if not isinstance(value, list | tuple) and not hasattr(value, "shape"):
            raise TypeError(f"it is of type {type(value).__name__}")
        if hasattr(value, "full_tensor"):
            raise TypeError("it is spread over processes; give its full_tensor()")
        tensor = torch.as_tensor(value).detach().as_subclass(torch.Tensor)
        if type(tensor) is not torch.Tensor:
            raise TypeError(f"it is a {type(tensor).__name__}, which holds no numbers of its own")
    except BaseException as error:  # an object that only looks like a tensor may raise anything
        raise InvalidArgument(f"{name} is not a tensor: {told(error)}") from None
    if tensor.layout == torch.strided and (tensor.is_meta or _is_freed(tensor)):
        raise InvalidArgument(f"{name} has no numbers: it is on the device 'meta', or its memory was freed")
    return tensor


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether the storage ends before the tensor does."""
    if not tensor.numel():
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_items = tensor.storage_offset() + last + 1
    return num_items * tensor.element_size() > tensor.untyped_storage().nbytes()
