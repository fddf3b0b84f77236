"""An output in columns, CSV or Parquet: lines of results while the job runs, the file itself at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenmill.batch.input_record import Record, Source
from tokenmill.batch.line_file import LineFile, beside, changed_by_others, facts_of, replace_whole
from tokenmill.batch.outputs import Result, RowOutput
from tokenmill.batch.tables import check_writable, write_table
from tokenmill.errors import JobStopped

_encode = json.JSONEncoder(separators=(",", ":")).encode


class TableOutput:
    """Keeps results as lines, and makes a table of them and of the records, whose types lines would lose."""

    def __init__(self, path: Path, rows: RowOutput, source: Source, *, format: str) -> None:
        """Raises `InvalidArgument` without the library of the format."""
        check_writable(format)
        self._path = path
        self._rows = rows
        self._source = source
        self._format = format
        self._source_before = source.fingerprint()
        self._before = facts_of(path)
        self.lines_path = beside(path, "rows")

    def line(self, record: Record, results: Sequence[Result]) -> tuple[bytes | None, bytes | None]:
        """See `OutputFormat`; what is in the line is for `write`."""
        return _encode(results).encode() + b"\n", None

    def write(self, lines: LineFile) -> None:
        """Make the table; `lines` has one line for each record.

        Raises `JobStopped`, also where the records are no longer those that the lines were made of, or the
        output is no longer the file that was there.
        """

        def rows() -> Iterator[dict[str, Any]]:
            for record, line in zip(self._source, lines.in_order(), strict=True):
                yield self._rows.row(record, json.loads(line))

        def write(target: Path) -> None:
            try:
                write_table(target, rows, format=self._format, columns=self._source.columns or ())
            except Exception:
                self._check_source()  # which explains whatever went wrong
                raise
            self._check_source()
            if facts_of(self._path) != self._before:
                raise changed_by_others(self._path)

        replace_whole(self._path, write)
        lines.close()
        self.lines_path.unlink(missing_ok=True)

    def _check_source(self) -> None:
        try:
            is_same = self._source.fingerprint() == self._source_before
        except OSError:
            is_same = False
        if not is_same:
            raise JobStopped(
                f"the input changed while the job ran, so {str(self._path)!r} cannot be made of it. What was "
                "finished is kept; start the same job again, and it goes on"
            )
