"""Weights into a model: from safetensors files straight into the stacked parameters, or random ones.

Each tensor is checked against the model before the first byte is copied; nothing exists twice in memory.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import nn
from tqdm import tqdm

from tokenmill.errors import InvalidArgument
from tokenmill.layers.linear import can_pack, pack_children, pack_linears, parents, unpack_children
from tokenmill.layers.norm import RMSNorm
from tokenmill.models.checkpoint import Checkpoint, GivenTensors, TensorSource, open_checkpoint
from tokenmill.models.model import Model
from tokenmill.models.registry import model_class
from tokenmill.models.spec import ModelSpec

_log = logging.getLogger("tokenmill")

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
# Frequencies that old checkpoints stored; they follow from the configuration.
_DERIVED = re.compile(r"\brotary_emb\.inv_freq$")
# What SGLang stacks into one parameter, as rows below each other in this order.
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_DUMMY_SEED = 0
_DUMMY_DEVIATION = 0.02
_PROGRESS_DELAY_SECONDS = 2.0


def load_model(
    folder: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    progress: bool = False,
) -> Model:
    """A model ready to run on `device`, its weights cast to `dtype`.

    `load_format` is "auto" or "safetensors" (the folder's files) or "dummy" (small random weights, the
    same every time on a kind of device; no file is read). `progress` shows a bar on standard error when
    loading takes long. Raises `ModelNotFound` without weights, `InvalidArgument` where they do not fit.
    """
    packs = can_pack(dtype, device)
    if load_format == "dummy":
        network = _build(spec, dtype=dtype, device=device)
        _fill_randomly(network)
        if packs:
            pack_linears(network)
        return cast(Model, network)
    with open_checkpoint(folder) as checkpoint:
        spec = _with_own_head(spec, checkpoint)
        _check_before_building(checkpoint, spec, dtype=dtype)
        network = _build(spec, dtype=dtype, device=device)
        slots = dict(cast(Model, network).weight_slots())
        filled = _Packing(network, slots).filled if packs else None
        _fill(slots, checkpoint, progress=progress, filled=filled)
    return cast(Model, network)


def build_model(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> Model:
    """A model whose weights are whatever the memory held."""
    return cast(Model, _build(spec, dtype=dtype, device=device))


def _build(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    network: nn.Module = model_class(spec.architecture)(spec, dtype=dtype, device=device)
    return network


def _with_own_head(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """Untie the output layer where the checkpoint, despite its configuration, has one of its own."""
    if not spec.tied_embeddings or not {_EMBEDDING, _HEAD} <= checkpoint.names:
        return spec
    comparable = {checkpoint.dtype(_EMBEDDING), checkpoint.dtype(_HEAD)} <= set(_FLOATS)
    if comparable and torch.equal(checkpoint.read(_EMBEDDING), checkpoint.read(_HEAD)):
        return spec
    _log.warning(
        "tie_word_embeddings is true, but %s differs from the embedding in the checkpoint; it is used", _HEAD
    )
    return dataclasses.replace(spec, tied_embeddings=False)


# ── from files ────────────────────────────────────────────────────────────────────────────────


class _Packing:
    """Packs the linears below each module as soon as their tensors are there.

    A packed weight may be half as large as what it is made of: packed as a whole at the end, a model would
    need twice its memory for a moment.
    """

    def __init__(self, network: nn.Module, names: Iterable[str]) -> None:
        self._network = network
        self._missing = Counter(map(_parent, names))

    def filled(self, name: str) -> None:
        """A tensor is there."""
        parent = _parent(name)
        self._missing[parent] -= 1
        if not self._missing[parent]:
            pack_children(self._network.get_submodule(parent))


def _parent(name: str) -> str:
    """The module below which the module of a tensor hangs."""
    return ".".join(name.removeprefix("model.").split(".")[:-2])


def _fill(
    slots: dict[str, torch.Tensor],
    source: TensorSource,
    *,
    progress: bool,
    filled: Callable[[str], None] | None = None,
) -> None:
    """Copy a tensor to each slot. Each is let go of before `filled` is called with its name."""
    # A class of its own, because tqdm's would start a thread that watches all bars and outlives them.
    bar_class = type("ProgressBar", (tqdm,), {"monitor_interval": 0})
    with bar_class(
        desc="loading weights",
        total=sum(slot.numel() * slot.element_size() for slot in slots.values()),
        unit="B",
        unit_scale=True,
        delay=_PROGRESS_DELAY_SECONDS,
        disable=not progress,
        file=sys.stderr,
    ) as bar:
        for name in list(slots):
            slot = slots.pop(name)
            slot.copy_(source.read(name))
            bar.update(slot.numel() * slot.element_size())
            del slot
            if filled is not None:
                filled(name)


def _check_before_building(source: TensorSource, spec: ModelSpec, *, dtype: torch.dtype) -> None:
    """As `_check`, while no memory is taken: a wrong number in a configuration may ask for far too much."""
    short = dataclasses.replace(spec, context_length=1)  # tables over positions are no weights
    blueprint = build_model(short, dtype=dtype, device=torch.device("meta"))
    _check(blueprint.weight_slots(), source, spec)


def _check(slots: Mapping[str, torch.Tensor], source: TensorSource, spec: ModelSpec) -> None:
    """Raise `InvalidArgument` unless the source has what belongs into the slots, and nothing else."""
    _check_names(slots, source, spec)
    _check_tensors(slots, source)


def _check_names(slots: Mapping[str, torch.Tensor], source: TensorSource, spec: ModelSpec) -> None:
    missing = slots.keys() - source.names
    if missing:
        remedy = ' (json_model_override_args={"tie_word_embeddings": true}?)' if missing == {_HEAD} else ""
        raise InvalidArgument(f"{source.title} lacks {_listed(missing)}{remedy}")
    unexpected = [name for name in source.names - slots.keys() if not _is_tolerated(name, spec=spec)]
    if unexpected:
        raise InvalidArgument(
            f"{source.title} has {_listed(unexpected)}, which a "
            f"{spec.architecture} with this configuration does not have"
        )


def _is_tolerated(name: str, *, spec: ModelSpec) -> bool:
    """Whether a tensor that no parameter takes may be left out without changing the model."""
    if name == _HEAD:
        return spec.tied_embeddings
    layer = _LAYER.match(name)
    if layer is not None and spec.num_layers <= int(layer[1]) < spec.num_stored_layers:
        return True  # the user asked for fewer layers
    return _DERIVED.search(name) is not None


def _check_tensors(slots: Mapping[str, torch.Tensor], source: TensorSource) -> None:
    for name, slot in slots.items():
        shape, dtype = source.shape(name), source.dtype(name)
        if shape != tuple(slot.shape):
            raise InvalidArgument(
                f"{name} in {source.title} has shape {list(shape)}, but the "
                f"configuration needs {list(slot.shape)}"
            )
        if dtype not in _FLOATS:
            raise InvalidArgument(
                f"{name} in {source.title} is stored as {dtype}; quantized weights "
                f"are not supported yet, only {', '.join(_FLOATS)}"
            )


def _listed(names: Iterable[str], *, limit: int = 5) -> str:
    """The first few names, and how many there are in all."""
    ordered = sorted(names)
    dots = ", ..." if len(ordered) > limit else ""
    return f"{len(ordered)} tensor{'s' if len(ordered) > 1 else ''} ({', '.join(ordered[:limit])}{dots})"


# ── after the start ───────────────────────────────────────────────────────────────────────────


@contextmanager
def open_slots(
    model: Model, names: Iterable[str] | None = None
) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    """Where the tensors of these names (None: all) lie, to be read or copied into inside the block, and
    whether they were packed for a CPU: they are unpacked meanwhile.

    Names that the model does not have are not in the result. Whoever packs some of it again in the block
    clears the dict before.
    """
    network = cast(nn.Module, model)
    opened = parents(network) if names is None else _parents(network, names)
    packed = [parent for parent in opened if unpack_children(parent)]
    try:
        yield dict(model.weight_slots()), bool(packed)
    finally:
        for parent in packed:
            pack_children(parent)


def update_weights(model: Model, spec: ModelSpec, source: TensorSource, *, partial: bool) -> None:
    """Replace weights in place; the addresses stay, so graphs that were captured go on working.

    `partial`: the source need not have all of them, and may have some under the names of SGLang's stacked
    parameters (`qkv_proj`, `gate_up_proj`). Raises `InvalidArgument`, with nothing changed, where a tensor
    is missing, unknown, or does not fit.
    """
    with open_slots(model, source.names if partial else None) as (slots, is_packed):
        source = _unstacked(source, slots) if partial else source
        spec = dataclasses.replace(spec, tied_embeddings=_HEAD not in slots)
        wanted = {name: slot for name, slot in slots.items() if not partial or name in source.names}
        _check(wanted, source, spec)
        _check_tie(slots, source)
        slots.clear()
        filled = _Packing(cast(nn.Module, model), wanted).filled if is_packed else None
        _fill(wanted, source, progress=False, filled=filled)


def _unstacked(source: TensorSource, slots: Mapping[str, torch.Tensor]) -> TensorSource:
    """The same tensors by the names of checkpoints."""
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(source.names):
        parts = _parts(name, source, slots)
        if tensors.keys() & parts.keys():
            raise InvalidArgument(f"{source.title} has {name}, and it again as a part of another tensor")
        tensors |= parts
    return GivenTensors(tensors)


def _parts(name: str, source: TensorSource, slots: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor; or what it is made of, where it has the name of a stacked parameter."""
    tensor = source.read(name)
    module, _, kind = name.rpartition(".")
    parent, _, projection = module.rpartition(".")
    names = [f"{parent}.{part}.{kind}" for part in _STACKED.get(projection, ())]
    if not names or not slots.keys() >= set(names):
        return {name: tensor}
    rows = [len(slots[part]) for part in names]
    if tensor.shape[:1] != (sum(rows),):
        raise InvalidArgument(
            f"{name} in {source.title} has shape {list(tensor.shape)}, but needs {sum(rows)} rows: those of "
            f"{', '.join(names)}"
        )
    return dict(zip(names, tensor.split(rows), strict=True))


def _parents(network: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """The modules below which the projections of these tensors hang."""
    modules = dict(network.named_modules())
    paths = {_parent(name) for name in names}
    return [modules[path] for path in paths if path in modules]


def _check_tie(slots: Mapping[str, torch.Tensor], source: TensorSource) -> None:
    """An output layer that this model shares with its embedding can have no weights of its own."""
    if _HEAD in slots or _HEAD not in source.names:
        return
    embedding = source.read(_EMBEDDING) if _EMBEDDING in source.names else slots[_EMBEDDING]
    fits = source.dtype(_HEAD) in _FLOATS and source.shape(_HEAD) == tuple(embedding.shape)
    if not fits or not torch.equal(source.read(_HEAD).to(embedding), embedding):
        raise InvalidArgument(
            f"{_HEAD} in {source.title} differs from the embedding, but this model was loaded with both "
            "tied; make a new engine for it"
        )


# ── without files ─────────────────────────────────────────────────────────────────────────────


def _fill_randomly(network: nn.Module) -> None:
    """Norms of one, everything else normal and small, drawn on the device in the order of the modules."""
    generator: torch.Generator | None = None
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
                continue
            if generator is None:
                generator = torch.Generator(parameter.device).manual_seed(_DUMMY_SEED)
            parameter.normal_(0.0, _DUMMY_DEVIATION, generator=generator)
