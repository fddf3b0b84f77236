"""What sources give: one record for each row of a file, readable or not.

Owns the shape of a record and how a fault of one is told. Files are read by `sources.py` and the modules
beside it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from tokenmill.errors import InvalidArgument, RowError
from tokenmill.frozen import lightly_frozen

# A row longer than this is told as a fault and passed over, so that one row cannot fill the memory.
MAX_ROW_BYTES = 256 * 2**20
_SAMPLE_BYTES = 64 * 1024  # of a file's beginning and end, in its fingerprint


@lightly_frozen()
class Record:
    """One row of a source: its fields, or why it has none."""

    index: int  # among the rows, from 0; blank lines are no rows
    line: int | None  # in the file, from 1: the one it begins in; None where a format has no lines
    fields: dict[str, Any] | None
    error: RowError | None

    @property
    def place(self) -> str:
        """How messages name the row."""
        return f"row {self.index}" if self.line is None else f"line {self.line}"


class Source(Protocol):
    """The rows of a file or folder: read one after the other, each time from the start."""

    @property
    def format(self) -> str: ...
    @property
    def columns(self) -> tuple[str, ...] | None:
        """The names that all rows have; None: each row has its own."""
        ...

    @property
    def num_rows(self) -> int | None:
        """None: only counting tells."""
        ...

    def __iter__(self) -> Iterator[Record]: ...
    def fingerprint(self) -> str:
        """A word that changes when the file is written; made without reading all of it."""
        ...


def bad_parameters(message: str) -> RowError:
    """The error of a row whose caller gave something that cannot be served."""
    return RowError(type="bad_parameters", message=str(InvalidArgument(message)), status_code=400)


def faulty(index: int, line: int | None, fault: str) -> Record:
    """A record of a row that cannot be read."""
    place = f"row {index}" if line is None else f"line {line}"
    return Record(index, line, None, bad_parameters(f"{place}: {fault}"))


def decoded(text: bytes) -> str:
    """The text; raises ValueError, which names the first byte that is no UTF-8, counted from 1."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start + 1} (0x{text[error.start]:02x}) is no UTF-8; save the file as UTF-8"
        ) from None


def fingerprint_of(paths: list[Path], format: str) -> str:
    """Format, sizes, times and both ends of files as one word."""
    digest = hashlib.sha256(format.encode())
    for path in paths:
        facts = path.stat()
        digest.update(f"/{facts.st_size}/{facts.st_mtime_ns}/".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, facts.st_size - _SAMPLE_BYTES), os.SEEK_SET)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
