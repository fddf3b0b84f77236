"""What a job will take, told before it runs, and how that compares with what it took.

Owns which rows of a source are looked at, and the file that keeps a plan until the job has run. Tokens, time
and memory are the matter of `frontend/planning.py`.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.batch.input_record import Record, Source
from tokenmill.batch.rows import RowMaker
from tokenmill.frontend.iteration import RowRunner
from tokenmill.frontend.planning import SAMPLE_ROWS, Plan
from tokenmill.messages import Request

if TYPE_CHECKING:
    from tokenmill.batch.keys import Keys
    from tokenmill.engine import Engine

# Neighbours are looked at together, because they share prefixes; large rows make small groups.
_GROUP_ROWS = 256
_GROUP_CHARACTERS = 4 * 2**20
_MOST_GROUPS = SAMPLE_ROWS // _GROUP_ROWS


def plan_job(
    source: Source,
    maker: RowMaker,
    engine: Engine,
    *,
    sampling_params: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    keys: Keys | None = None,
) -> Plan:
    """What answering every row of the source would take, if none was answered before. Runs nothing of it.

    The source is read once; of more than 8,192 rows, groups of neighbours are looked at and the others taken
    to be like them. `sampling_params` and `options` are of all rows; with `keys`, rows that ask for the same
    count once.
    """
    sample = _sample(source)
    began = time.perf_counter()
    read = _Reading(maker, engine.open_rows(), sampling_params, options, keys)
    for group in sample.groups:
        read.add(group)
    return engine.planner.plan_requests(
        read.requests,
        rows=sample.num_rows,
        invalid_rows=sample.of_all(read.num_invalid),
        duplicate_rows=sample.of_all(read.num_duplicates),
        sampled_rows=None if sample.is_all else sample.num_seen,
        reading_seconds=time.perf_counter() - began,
    )


class _Reading:
    """The requests of records, with what else is found while they are read."""

    def __init__(
        self,
        maker: RowMaker,
        runner: RowRunner,
        sampling_params: Mapping[str, Any] | None,
        options: Mapping[str, Any] | None,
        keys: Keys | None,
    ) -> None:
        self._maker = maker
        self._runner = runner
        self._params = sampling_params
        self._options = options
        self._keys = keys
        self._known: set[bytes] = set()
        self.requests: list[Request] = []
        self.num_invalid = 0
        self.num_duplicates = 0

    def add(self, records: list[Record]) -> None:
        """Read some more."""
        items = [self._maker.item(record) for record in records]
        good = [item for item in items if "status_code" not in item]
        self.num_invalid += len(items) - len(good)
        for entry in self._runner.read(good, sampling_params=self._params, options=self._options):
            if entry.job is None:
                self.num_invalid += 1
            elif new := self._new(entry.job.requests):
                self.requests += new
            else:
                self.num_duplicates += 1

    def _new(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Those of a row that no row before it asks for; of samples that draw nothing, one."""
        if self._keys is None:
            return requests
        key = self._keys.of(requests)
        new = []
        for number, request in enumerate(requests):
            sample = key.sample(number)
            if sample not in self._known:
                self._known.add(sample)
                new.append(request)
        return new


# ── which rows ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Sample:
    """Groups of neighbouring records, in their order."""

    groups: list[list[Record]]
    num_rows: int  # of the whole source

    @property
    def num_seen(self) -> int:
        return sum(map(len, self.groups))

    @property
    def is_all(self) -> bool:
        return self.num_seen == self.num_rows

    def of_all(self, count: int) -> int:
        """How many there are in the whole source, if `count` are in the sample."""
        return round(count * self.num_rows / self.num_seen) if self.num_seen else 0


def _sample(source: Source) -> _Sample:
    """At most 32 groups of a source; each has the same chance, and the same source gives the same ones."""
    draw = random.Random(0)
    kept: list[tuple[int, list[Record]]] = []
    num_rows = 0
    for number, group in enumerate(_groups(source)):
        num_rows += len(group)
        if number < _MOST_GROUPS:
            kept.append((number, group))
        elif (place := draw.randrange(number + 1)) < _MOST_GROUPS:
            kept[place] = (number, group)
    return _Sample([group for _, group in sorted(kept, key=lambda each: each[0])], num_rows)


def _groups(source: Source) -> Iterator[list[Record]]:
    group: list[Record] = []
    num_characters = 0
    for record in source:
        group.append(record)
        num_characters += len(str(record.fields))
        if len(group) == _GROUP_ROWS or num_characters > _GROUP_CHARACTERS:
            yield group
            group, num_characters = [], 0
    if group:
        yield group


# ── before and after ──────────────────────────────────────────────────────────────────────────


def subject_of(source: Source, asked: Mapping[str, Any]) -> str:
    """What a plan is about as one word: the source as it is, and what is asked of its rows."""
    return hashlib.sha256(repr((source.fingerprint(), asked)).encode(errors="replace")).hexdigest()[:32]


# The figures of a plan that are compared with those of the run.
_COMPARED = ("rows", "prompt_tokens", "cached_share", "output_tokens", "seconds")


def save_plan(plan: Plan, subject: str, path: Path) -> None:
    """Keep the plan for when the job has run. Raises OSError."""
    path.write_text(json.dumps({"subject": subject, "plan": plan.to_dict()}), encoding="utf-8")


def saved_plan(subject: str, path: Path) -> dict[str, Any] | None:
    """The plan that was made of the same; None if there is none that can be read."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        plan = saved["plan"]
        is_same = saved["subject"] == subject
    except (OSError, ValueError, TypeError, KeyError):
        return None
    is_whole = isinstance(plan, dict) and all(type(plan.get(name)) in (int, float) for name in _COMPARED)
    return plan if is_same and is_whole else None


def predicted_and_actual(plan: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """A plan beside what the job took: two dicts with the same keys.

    Where rows were replayed, this run did a part of the work only, and `actual` is empty.
    """
    tokens = summary["tokens"]
    actual = {
        "rows": summary["rows"]["done"],
        "prompt_tokens": tokens["prompt"],
        "cached_share": summary["cached_share"],
        "output_tokens": tokens["output"],
        "seconds": summary["seconds"],
    }
    is_whole = not summary["rows"]["replayed"]
    return {"predicted": {name: plan[name] for name in _COMPARED}, "actual": actual if is_whole else {}}
