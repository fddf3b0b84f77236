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

# Failures by what a row asks for, which a row like it shares; all others are those of one run.
_OF_CONTENT = {"bad_parameters", "too_long", "bad_grammar"}


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
        self._num_waiting = 0
        self._forsaken: dict[int, tuple[OpenRow, list[int]]] = {}  # by the index of the row

    @property
    def has_waiting(self) -> bool:
        """Whether a row waits for a sample that another one computes, or must compute it itself now."""
        return bool(self._num_waiting or self._forsaken)

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
                self._num_waiting += 1
            else:
                self._waiting[key] = []
                row.computing.append(number)

    def finish(
        self, row: OpenRow, numbers: Sequence[int], results: Sequence[dict[str, Any]]
    ) -> Iterator[OpenRow]:
        """Take the results of samples that were run for a row; gives all rows that are complete by them.

        What failed is not kept, so that the next run tries it again. A time limit that ran out for one row
        says nothing of those that wait for it: they are forsaken.
        """
        for number, result in zip(numbers, results, strict=True):
            key, known = row.key.sample(number), lasting(result)
            error = known.get("error")
            if error is None:
                self._journal.add(key, known)
            row.set(number, known)
            waiting = self._waiting.pop(key, [])  # none of a forsaken row, unless one came after it
            self._num_waiting -= len(waiting)
            for other, place in waiting:
                if error is None or other is row or error["type"] in _OF_CONTENT:
                    other.set(place, known)
                    if not other.num_missing and other is not row:
                        yield other
                else:
                    self._forsaken.setdefault(other.record.index, (other, []))[1].append(place)
        if not row.num_missing:
            yield row

    def take_forsaken(self, most: int) -> list[tuple[OpenRow, list[int]]]:
        """Some rows with the samples that they waited for in vain, and that must be run for themselves."""
        taken = [self._forsaken.pop(index) for index in list(self._forsaken)[:most]]
        for row, numbers in taken:
            row.computing += numbers
        return taken
