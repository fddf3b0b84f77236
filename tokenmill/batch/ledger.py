"""Which samples of a job are known, which are on their way, and who waits for them.

Owns that no sample is computed twice: not when the journal has it, and not while another row computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenmill.batch.answers import lasting
from tokenmill.batch.input_record import Record
from tokenmill.batch.journal import Journal
from tokenmill.batch.keys import RowKey


class OpenRow:
    """A row between its reading and its line in the output."""

    __slots__ = ("computing", "key", "num_missing", "num_new", "record", "results", "weight")

    def __init__(self, record: Record, key: RowKey, num_samples: int, weight: int) -> None:
        self.record = record
        self.key = key
        self.weight = weight  # about how many bytes it holds
        self.results: list[dict[str, Any] | None] = [None] * num_samples
        self.num_missing = num_samples
        self.computing: list[int] = []  # numbers of the samples that are run for it
        self.num_new = 0  # samples that no earlier run has left

    def set(self, number: int, result: dict[str, Any]) -> None:
        """A sample is known."""
        self.results[number] = result
        self.num_missing -= 1


class Ledger:
    """The samples of one job. Not thread-safe."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: dict[bytes, list[tuple[OpenRow, int]]] = {}

    def enter(self, row: OpenRow) -> None:
        """Fill in what is known of a row; `computing` then says which samples must be run.

        The rest of what it misses is on its way for other rows, or for other samples of the same.
        """
        for number in range(len(row.results)):
            key = row.key.sample(number)
            kept = self._journal.find(key)
            if kept is not None:
                row.set(number, kept.value)
                row.num_new += kept.is_new
                continue
            row.num_new += 1
            if key in self._waiting:
                self._waiting[key].append((row, number))
            else:
                self._waiting[key] = []
                row.computing.append(number)

    def finish(self, row: OpenRow, results: Sequence[dict[str, Any]]) -> Iterator[OpenRow]:
        """Take the results of the samples that were run for a row; gives all rows that are complete by them.

        What failed is not kept, so that the next run tries it again.
        """
        for number, result in zip(row.computing, results, strict=True):
            key, known = row.key.sample(number), lasting(result)
            if known.get("error") is None:
                self._journal.add(key, known)
            row.set(number, known)
            for other, place in self._waiting.pop(key):
                other.set(place, known)
                if not other.num_missing and other is not row:
                    yield other
        if not row.num_missing:
            yield row
