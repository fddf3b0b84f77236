"""The ids of requests: those that callers give, numbered where several share one, or random ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tokenmill.errors import InvalidArgument, WrongType
from tokenmill.frontend.failures import RAISED, Faults
from tokenmill.sampling_params import show
from tokenmill.texts import plain_text


def request_ids(rid: Any, count: int, *, single: bool, n: int, faults: Faults = RAISED) -> list[str]:
    """The ids of `count * n` requests: given ones (numbered where several share one), or random ones."""
    if rid is None:
        return _random_ids(count * n)
    if isinstance(rid, list | tuple):
        bases = _listed_ids(rid, count, single=single, faults=faults)
    elif single:
        bases = _or_random(faults.each("rid", [rid], lambda _, each: _common_id(each), None))
    else:
        bases = [f"{_common_id(rid)}_{index}" for index in range(count)]
    ids = bases if n == 1 else [f"{base}_{sample}" for base in bases for sample in range(n)]
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        for place, each in enumerate(ids):
            if each in seen:
                message = f"rid {show(each)} is there twice; every request needs its own id"
                faults.add(place // n, InvalidArgument(message))
            seen.add(each)
    return ids


def is_made_of(other: str, request_id: str) -> bool:
    """Whether an id is this one, or was made of it: `job_0` and `job-a` of `job`, but not `jobs`."""
    if not request_id or not other.startswith(request_id):
        return False
    return not other[len(request_id) :][:1].isalnum()


def _listed_ids(rid: Sequence[Any], count: int, *, single: bool, faults: Faults) -> list[str]:
    if single or len(rid) != count:
        wanted = "a single one; give one string" if single else f"{count}; give one for each prompt"
        raise InvalidArgument(f"rid is a list of {len(rid)}, but the prompts are {wanted}")
    return _or_random(faults.each("rid", rid, _own_id, None))


def _own_id(index: int, rid: Any) -> str | None:
    if rid is not None and not isinstance(rid, str):
        raise WrongType(f"rid[{index}] must be a string, got {show(rid)}")
    if rid == "":
        raise InvalidArgument(f"rid[{index}] is empty; use None for a random id")
    return None if rid is None else plain_text(rid)


def _common_id(rid: Any) -> str:
    if not isinstance(rid, str):
        raise WrongType(f"rid must be a string or a list of strings, got {show(rid)}")
    if not rid:
        raise InvalidArgument("rid is empty; leave it out for a random id")
    return plain_text(rid)


def _or_random(ids: Sequence[str | None]) -> list[str]:
    return [given or drawn for given, drawn in zip(ids, _random_ids(len(ids)), strict=True)]


def _random_ids(count: int) -> list[str]:
    drawn = os.urandom(16 * count).hex()
    return [drawn[start : start + 32] for start in range(0, len(drawn), 32)]
