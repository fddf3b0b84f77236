"""Sampling parameters as they were read, and what was read of a batch before."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.messages import Grammar
from tokenmill.sampling_params import SamplingParams

_PLAIN_TYPES = frozenset({bool, int, float, str, type(None)})


@dataclass(frozen=True, slots=True)
class Settings:
    """Sampling parameters of one prompt, with what follows from them and the model."""

    params: SamplingParams
    is_length_explicit: bool
    stop_ids: tuple[int, ...]
    held_ids: tuple[int, ...]  # held back until `min_new_tokens` are out
    report_interval: int
    grammar: Grammar | None


class KnownSettings:
    """The parameters of a batch: equal ones are read once, and those that differ in their length alone from
    others are not checked again."""

    def __init__(self, read: Callable[[int, Any], Settings]) -> None:
        """`read` takes the place of parameters in the batch, and them."""
        self._read = read
        self._known: dict[Hashable, Settings] = {}
        self._of_any_length: dict[Hashable, Settings] = {}

    def settings(self, index: int, params: Any) -> Settings:
        """What `read` says of them, or said of others that are alike."""
        key = content_of(params)
        if key not in self._known:
            self._known[key] = self._made(index, params)
        return self._known[key]

    def _made(self, index: int, params: Any) -> Settings:
        length = _plain_length(params)
        if length is None:
            return self._read(index, params)
        others = content_of({name: value for name, value in params.items() if name != "max_new_tokens"})
        like = self._of_any_length.get(others)
        if like is not None and length >= like.params.min_new_tokens:
            return replace(like, params=like.params.with_length(length))
        like = self._of_any_length[others] = self._read(index, params)
        return like


def _plain_length(params: Any) -> int | None:
    """`max_new_tokens` of a plain dict that has it as a number that is allowed; None: to be checked."""
    if type(params) is not dict:
        return None
    length = params.get("max_new_tokens")
    return length if type(length) is int and length >= 0 else None


def content_of(params: Any) -> Hashable:
    """Equal for sampling parameters that say the same; cheap, so it looks into plain dicts only.

    What a dict holds must live as long as the key: of lists, schemas and the like it is their identity.
    """
    if type(params) is not dict:
        return id(params)
    types = tuple(map(type, params.values()))  # True and 1.0 are equal to 1, but not the same as it
    if _PLAIN_TYPES.issuperset(types):
        return tuple(params.items()), types
    shown = [value if type(value) in _PLAIN_TYPES else id(value) for value in params.values()]
    return tuple(zip(params, shown, strict=True)), types
