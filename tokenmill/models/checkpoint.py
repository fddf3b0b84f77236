"""Which tensors a folder of safetensors files holds, and where; nothing is read before it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tokenmill.errors import InvalidArgument, ModelNotFound

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
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
    """Open all weight files of a folder; `ModelNotFound` if there are none, or one of the index lacks."""
    with ExitStack() as stack:
        readers = []
        for path in weight_files(folder):
            try:
                readers.append(stack.enter_context(safe_open(path, framework="pt", device="cpu")))
            except SafetensorError as error:
                raise InvalidArgument(
                    f"{path} is not a readable safetensors file ({error}): the download may be incomplete, "
                    "or the file a Git LFS pointer"
                ) from error
        yield Checkpoint(readers, folder)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index, or the single one, or all there are."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise ModelNotFound(f"{folder} lacks {', '.join(missing)}, which {_INDEX} lists")
        return files
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


def stored_dtype(folder: Path) -> str:
    """The dtype of the largest share of a checkpoint's tensors; "float32" for a folder without weights."""
    try:
        with open_checkpoint(folder) as checkpoint:
            dtypes = [checkpoint.dtype(name) for name in sorted(checkpoint.names)]
    except ModelNotFound:
        return "float32"
    return max(set(dtypes), key=dtypes.count) if dtypes else "float32"
