"""Dataclasses of which several are made for every row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Class = TypeVar("Class")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def lightly_frozen(*, eq: bool = True, kw_only: bool = False) -> Callable[[type[Class]], type[Class]]:
    """A frozen dataclass with slots, but only the type checker says so; with `eq` it has no hash.

    Those that Python itself holds frozen take five times as long to be made, and twice as long to be pickled.
    """
    return dataclass(slots=True, eq=eq, kw_only=kw_only)
