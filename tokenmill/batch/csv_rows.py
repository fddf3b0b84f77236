"""CSV and TSV as RFC 4180 has them: a header, quoted fields with separators and line ends in them.

The parser is our own: that of the standard library limits the length of fields by a number which is the same
for the whole process, and one faulty row makes it lose its place. Where a row ends is found on bytes, what is
in it on text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path

from tokenmill.batch.input_record import MAX_ROW_BYTES, Record, decoded, faulty, fingerprint_of
from tokenmill.batch.text_lines import DamagedFile, check_encoding, read_lines, too_long
from tokenmill.errors import InvalidArgument
from tokenmill.sampling_params import brief

_LINE_ENDS = (b"\n", b"\r\n", b"\r", b"")


class CsvRows:
    """The rows of a CSV or TSV file below its header; every value is a text."""

    num_rows = None

    def __init__(self, path: Path, *, format: str, delimiter: str) -> None:
        """Raises `InvalidArgument` for a file that cannot be read, or a header that names no columns."""
        self.format = format
        self._path = path
        self._delimiter = delimiter
        check_encoding(path)
        self.columns = self._header()

    def __iter__(self) -> Iterator[Record]:
        index = 0
        try:
            for number, text in self._rows_below_header():
                yield self._record(index, number, text)
                index += 1
        except DamagedFile as error:
            yield faulty(index, None, str(error))

    def fingerprint(self) -> str:
        """See `Source`."""
        return fingerprint_of([self._path], self.format)

    def _rows_below_header(self) -> Iterator[tuple[int, bytes | None]]:
        rows = _logical_rows(self._path, self._delimiter.encode())
        next(rows, None)
        return rows

    def _header(self) -> tuple[str, ...] | None:
        """The names of the columns; None in an empty file."""
        try:
            first = next(_logical_rows(self._path, self._delimiter.encode()), None)
            if first is None:
                return None
            names = self._fields(first[1])
        except (DamagedFile, ValueError) as error:
            raise InvalidArgument(f"the header of {self._path} cannot be read: {error}") from None
        if any(re.search("\r(?!\n)", name) for name in names):
            raise InvalidArgument(
                f"{self._path} ends its lines by carriage returns alone; convert it: tr '\\r' '\\n'"
            )
        seen: set[str] = set()
        for position, name in enumerate(names):
            if not name.strip() or name in seen:
                fault = f"{brief(name)} twice" if name.strip() else "no name"
                raise InvalidArgument(
                    f"the header of {self._path} has {fault} in column {position + 1}; give each column a "
                    "name of its own"
                )
            seen.add(name)
        return tuple(names)

    def _record(self, index: int, number: int, text: bytes | None) -> Record:
        assert self.columns is not None
        try:
            values = self._fields(text)
            if len(values) != len(self.columns):
                raise ValueError(
                    f"the row has {len(values)} fields, but the header has {len(self.columns)}; quote fields "
                    "with separators in them"
                )
        except ValueError as error:
            return faulty(index, number, str(error))
        return Record(index, number, dict(zip(self.columns, values, strict=True)), None)

    def _fields(self, text: bytes | None) -> list[str]:
        """The values of a row; raises ValueError, which tells the fault."""
        if text is None:
            raise ValueError(too_long())
        if (place := text.find(0)) >= 0:
            raise ValueError(f"byte {place + 1} is NUL, which no text has; the file is damaged or binary")
        return parse_row(decoded(text).removesuffix("\n").removesuffix("\r"), self._delimiter)


def parse_row(text: str, delimiter: str) -> list[str]:
    """The values of one row without its line end; raises ValueError for quotes that do not fit."""
    if '"' not in text:
        return text.split(delimiter)
    values: list[str] = []
    position = 0
    while True:
        if text.startswith('"', position):
            end = _closing_quote(text, position + 1)
            values.append(text[position + 1 : end].replace('""', '"'))
            position = end + 1
            if position < len(text) and text[position] != delimiter:
                raise ValueError(
                    f"field {len(values)} goes on behind its closing quote; write quotes inside it twice"
                )
        else:
            end = text.find(delimiter, position)
            end = len(text) if end < 0 else end
            values.append(text[position:end])
            position = end
        if position == len(text):
            return values
        position += 1


def _closing_quote(text: str, start: int) -> int:
    end = text.find('"', start)
    while end >= 0 and text.startswith('""', end):
        end = text.find('"', end + 2)
    if end < 0:
        raise ValueError("a quote is opened that nothing closes at the end of a field; close it")
    return end


def _logical_rows(path: Path, delimiter: bytes) -> Iterator[tuple[int, bytes | None]]:
    """First line's number and bytes of each row that is not blank; None for a row beyond the limit.

    A quote that nothing closes at the end of a field would take the lines behind it into its row: that row is
    its first line, and what follows is read as if it were closed there.
    """
    row: _OpenRow | None = None
    for number, line in read_lines(path):
        if line is None:  # nobody looked for quotes in it; the next line begins a row
            yield number if row is None else row.first, None
            row = None
            continue
        is_open = _is_open_behind(line, delimiter, row is not None)
        if is_open is None and row is not None:
            yield from row.lines(path, number)
            row, is_open = None, _is_open_behind(line, delimiter, False)
        if row is None and not is_open:
            if line.strip(b"\r\n"):
                yield number, line
            continue
        row = row or _OpenRow(number)
        row.add(line)
        if not is_open:
            yield row.first, row.text()
            row = None
    if row is not None:
        yield from row.lines(path)


class _OpenRow:
    """A row of several lines, as far as it is read; of one beyond the limit only where it began."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._size = 0
        self._text = bytearray()

    def add(self, line: bytes) -> None:
        self._size += len(line)
        if self._size <= MAX_ROW_BYTES:
            self._text += line
        else:
            self._text = bytearray()

    def text(self) -> bytes | None:
        return bytes(self._text) if self._size <= MAX_ROW_BYTES else None

    def lines(self, path: Path, end: int | None = None) -> Iterator[tuple[int, bytes | None]]:
        """Its lines, each as a row, up to the line `end`, which has the fault; without it, all to the end.

        Whichever of them opens a quote meets the same end, so that none of them goes on in the next one.
        """
        lines: Iterable[tuple[int, bytes | None]] = enumerate(BytesIO(self._text), self.first)
        if self._size > MAX_ROW_BYTES:
            lines = islice(read_lines(path), self.first - 1, None if end is None else end - 1)
        return ((number, line) for number, line in lines if line is None or line.strip(b"\r\n"))


def _is_open_behind(line: bytes, delimiter: bytes, is_open: bool) -> bool | None:
    """Whether a quoted field is open at the end of a line, given whether one was at its beginning.

    None if a field goes on behind its closing quote.
    """
    position = 0
    while True:
        place = line.find(b'"', position)
        if place < 0:
            return is_open
        position = place + 1
        if is_open and line.startswith(b'"', position):
            position += 1  # a quote inside of the field
        elif is_open:
            if not line.startswith(delimiter, position) and line[position : position + 3] not in _LINE_ENDS:
                return None
            is_open = False
        elif place == 0 or line[place - 1 : place] == delimiter:
            is_open = True
