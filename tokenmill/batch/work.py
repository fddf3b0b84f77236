"""The heart of a job: records in, lines out, each row once, holding no more rows than keep the engine full.

Owns the way of a row from its record to its line. Files are opened by `job.py`, and what a sample is known
by is decided in `keys.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from tokenmill.batch.answers import lasting
from tokenmill.batch.commits import Commits
from tokenmill.batch.figures import Figures
from tokenmill.batch.input_record import Record
from tokenmill.batch.keys import Keys, seeded
from tokenmill.batch.ledger import Ledger, OpenRow
from tokenmill.batch.line_file import LineFile
from tokenmill.batch.outputs import OutputFormat
from tokenmill.batch.rows import RowMaker
from tokenmill.errors import RowError
from tokenmill.frontend.failures import failed_result
from tokenmill.frontend.inputs import Job
from tokenmill.frontend.iteration import Entry, Finished, RowRunner
from tokenmill.garbage import collect_if_due, uncollected
from tokenmill.signals import HeldSignals

# Records that are read together: enough to tokenize them in one go.
_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 4 * 2**20
# Rows that wait, for the engine or for a row like them, beyond what the engine itself wants to have.
_MOST_HELD_ROWS = 20_000
_MOST_HELD_BYTES = 256 * 2**20
_PAUSE_SECONDS = 0.005

_Weighed = tuple[Record, int]  # with about how many bytes it holds
_Flight = tuple[OpenRow, list[int]]  # the samples that are run for a row together


class Work:
    """The rows of one job, from `source` to `output`."""

    def __init__(
        self,
        source: Iterable[Record],
        maker: RowMaker,
        form: OutputFormat,
        *,
        runner: RowRunner,
        keys: Keys,
        ledger: Ledger,
        figures: Figures,
        output: LineFile,
        errors: LineFile | None,
        commits: Commits,
        params: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """`params` are the sampling parameters, `options` other keywords of `generate`, of all rows."""
        self._source = source
        self._maker = maker
        self._form = form
        self._runner = runner
        self._keys = keys
        self._ledger = ledger
        self._figures = figures
        self._output = output
        self._errors = errors
        self._commits = commits
        self._params = params
        self._options = options
        self._turns = runner.turns()
        self._flying: dict[int, _Flight] = {}  # by the index of its entry
        self._num_flown = 0
        self._num_held = 0
        self._held_bytes = 0
        self.num_rows = 0

    def run(self) -> None:
        """All rows; returns when each has its line. Raises `JobStopped`, and what ends the engine."""
        finished = cast(Generator[list[Finished]], self._runner.run(self._entries(), fills_up_first=True))
        with contextlib.closing(finished), uncollected():
            for some in finished:
                with HeldSignals():  # what the engine has finished is kept, counted and written
                    for entry, results in some:
                        self._take(entry, results)
                        self._turns.give_way()
                self._commits.check()
                collect_if_due()
        assert not self._num_held, "a row waits for a sample that nobody computes"

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def _entries(self) -> Iterator[list[Entry]]:
        """What must be run, as it is read; rows that are known already get their lines meanwhile."""
        for weighed in _batches(self._source):
            if alone := self._alone():
                yield alone
            read = []
            for each in self._read(weighed):
                read.append(each)
                self._turns.give_way()
            if entries := self._enter_all(read):
                yield entries
            while self._num_held > _MOST_HELD_ROWS or self._held_bytes > _MOST_HELD_BYTES:
                time.sleep(_PAUSE_SECONDS)
                yield self._alone()  # let rows finish before more are read
            self._commits.check()
        while self._ledger.has_waiting:
            time.sleep(_PAUSE_SECONDS)
            yield self._alone()

    def _alone(self) -> list[Entry]:
        """Rows that waited in vain for one like them; they are read once more, and run for themselves."""
        entries = []
        for row, numbers in self._ledger.take_forsaken(_ROWS_AT_ONCE):
            [read] = self._runner.read(
                [self._maker.item(row.record)], sampling_params=self._params, options=self._options
            )
            assert read.job is not None, "a row that was good once is no more"
            entries.append(self._flight(row, read.job, numbers))
        return entries

    def _read(self, weighed: list[_Weighed]) -> Iterator[tuple[_Weighed, Job | RowError]]:
        """Each record with its requests, or with what is wrong with it."""
        items = [self._maker.item(record) for record, _ in weighed]
        good = [item for item in items if not _is_error(item)]
        read = iter(self._runner.read(good, sampling_params=self._params, options=self._options))
        for each, item in zip(weighed, items, strict=True):
            self.num_rows += 1
            if _is_error(item):
                yield each, item  # type: ignore[misc]
            else:
                entry = next(read)
                yield each, entry.job or entry.error  # type: ignore[misc]

    def _enter_all(self, read: Iterable[tuple[_Weighed, Job | RowError]]) -> list[Entry]:
        """What of some rows must be run."""
        entries = []
        with HeldSignals():  # as many lines as are counted
            for each in read:
                if (entry := self._enter(*each)) is not None:
                    entries.append(entry)
                self._turns.give_way()
        return entries

    def _enter(self, weighed: _Weighed, job: Job | RowError) -> Entry | None:
        """What of a row must be run; None if nothing."""
        record, weight = weighed
        if not isinstance(job, Job):
            self._fail(record, job)
            return None
        requests = job.requests
        key = self._keys.of(requests)
        row = OpenRow(record, key, len(requests), weight)
        self._ledger.enter(row)
        self._num_held += 1
        self._held_bytes += row.weight
        if row.computing:
            return self._flight(row, job, row.computing)
        if not row.num_missing:
            if row.num_new:
                self._figures.duplicate(1)
            else:
                self._figures.replayed(1)
            self._let_go(row)
        return None

    def _flight(self, row: OpenRow, job: Job, numbers: list[int]) -> Entry:
        """Some samples of a row, as an entry to be run."""
        self._num_flown += 1
        self._flying[self._num_flown] = (row, [*numbers])
        entry = Entry(self._num_flown, job.with_requests(seeded(job.requests, row.key)), None)
        return entry if len(numbers) == len(job.requests) else entry.only(numbers)

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def _take(self, entry: Entry, results: Sequence[dict[str, Any]]) -> None:
        """A row has run: note its results, and write the lines of all rows that are complete by them."""
        row, numbers = self._flying.pop(entry.index)
        self._figures.finished(results, is_row=numbers[0] == row.computing[0])
        for complete in self._ledger.finish(row, numbers, results):
            if not complete.computing:
                self._figures.duplicate(1)
            self._let_go(complete)

    def _let_go(self, row: OpenRow) -> None:
        """A row is complete: write its line, and forget it."""
        self._num_held -= 1
        self._held_bytes -= row.weight
        self._write(row.record, row.results)  # type: ignore[arg-type]

    def _fail(self, record: Record, error: RowError) -> None:
        """A row that cannot be run."""
        result = failed_result(error, request_id=str(record.index), has_text=True, weight_version="")
        self._figures.finished([result])
        self._write(record, [lasting(result)])

    def _write(self, record: Record, results: Sequence[dict[str, Any]]) -> None:
        if errors := [result["error"] for result in results if result.get("error")]:
            self._figures.failed(record.index, errors)
        line, error_line = self._form.line(record, results)
        if line is not None:
            self._output.add(record.index, line)
        if error_line is not None and self._errors is not None:
            self._errors.add(record.index, error_line)


def _is_error(item: Mapping[str, Any]) -> bool:
    return "status_code" in item


def _batches(source: Iterable[Record]) -> Iterator[list[_Weighed]]:
    """Records in groups, smaller where rows are large."""
    group: list[_Weighed] = []
    num_bytes = 0
    for record in source:
        weight = _weight(record.fields)
        group.append((record, weight))
        num_bytes += weight
        if len(group) >= _ROWS_AT_ONCE or num_bytes > _BYTES_AT_ONCE:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _weight(value: Any) -> int:
    """About how many bytes plain data hold."""
    if isinstance(value, str):
        return 50 + len(value)
    if isinstance(value, dict):
        return 200 + sum(map(_weight, value.values()))
    if isinstance(value, list):
        is_flat = bool(value) and not isinstance(value[0], dict | list | str)
        return 60 + (36 * len(value) if is_flat else sum(map(_weight, value)))
    return 30
