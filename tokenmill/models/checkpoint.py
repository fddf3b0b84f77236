"""Which tensors a folder of safetensors files holds, and where; nothing is read before it is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tokenmill.errors import InvalidArgument, ModelNotFound
from tokenmill.hub import FETCH_AGAIN, read_json

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MOST_NAMES = 5  # in a message
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class TensorSource(Protocol):
    """Tensors by their names in a checkpoint; `title` says in messages where they are from."""

    title: str

    @property
    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def read(self, name: str) -> torch.Tensor: ...


class GivenTensors:
    """Tensors that a caller gave, on any device."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.title = "what was given"
        self._tensors = tensors

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        """Its dtype, in torch's word."""
        return str(self._tensors[name].dtype).removeprefix("torch.")

    def read(self, name: str) -> torch.Tensor:
        """The tensor itself."""
        return self._tensors[name]


class Checkpoint:
    """An open checkpoint: names, shapes and memory-mapped tensors of all its files."""

    def __init__(self, readers: Sequence[Any], folder: Path) -> None:
        self.title = f"the checkpoint {folder}"
        self._readers = {name: reader for reader in readers for name in reader.keys()}  # noqa: SIM118

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._readers)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from its file's header."""
        return tuple(self._readers[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The stored dtype, in torch's word where torch and the file have the same one."""
        stored = str(self._readers[name].get_slice(name).get_dtype())
        return _DTYPE_NAMES.get(stored, stored)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, mapped into memory: its pages are read when they are touched."""
        tensor: torch.Tensor = self._readers[name].get_tensor(name)
        return tensor


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Open all weight files of a folder.

    Raises `ModelNotFound` if there are none or one of the index lacks, `InvalidArgument` for broken ones.
    """
    with ExitStack() as stack:
        yield Checkpoint([stack.enter_context(_open(path)) for path in weight_files(folder)], folder)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        problem = "it is a folder" if path.is_dir() else error
        raise InvalidArgument(
            f"{path} is not a readable safetensors file ({problem}); {FETCH_AGAIN}"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index, or the single one, or all there are."""
    index = read_json(folder / _INDEX)
    if index is not None:
        return _indexed(folder, index.get("weight_map"))
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    # Mistral puts the same weights once more, in another layout, into files of this name.
    files = [
        path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("consolidated")
    ]
    if not files:
        raise ModelNotFound(
            f"{folder} has no safetensors weights; convert the checkpoint (transformers' save_pretrained "
            "writes them), or use load_format='dummy' for random weights"
        )
    return files


def _indexed(folder: Path, weight_map: Any) -> list[Path]:
    """The files of an index, which has the file's name for each tensor."""
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(
            f"{folder / _INDEX} must have an object 'weight_map' with the name of a file for each tensor; "
            f"{FETCH_AGAIN}, or remove it if all *.safetensors of the folder are the model's"
        )
    files = sorted(set(names))
    missing = [name for name in files if not os.path.isfile(folder / name)]
    if missing:
        dots = f", ... ({len(missing)} in all)" if len(missing) > _MOST_NAMES else ""
        raise ModelNotFound(
            f"{folder} lacks {', '.join(missing[:_MOST_NAMES])}{dots}, which {_INDEX} lists; {FETCH_AGAIN}"
        )
    return [folder / name for name in files]


def stored_dtype(folder: Path) -> str:
    """The dtype of the largest share of a checkpoint's tensors; "float32" for a folder without weights."""
    try:
        with open_checkpoint(folder) as checkpoint:
            dtypes = [checkpoint.dtype(name) for name in sorted(checkpoint.names)]
    except ModelNotFound:
        return "float32"
    return max(set(dtypes), key=dtypes.count) if dtypes else "float32"
