"""Lines of a text file as bytes, plain or compressed by gzip: what JSONL and CSV have in common.

Owns limits, encodings of whole files and damage below the level of lines; what a line means is up to others.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tokenmill.batch.input_record import MAX_ROW_BYTES
from tokenmill.errors import InvalidArgument

_UTF8_MARK = b"\xef\xbb\xbf"
# In this order: the mark of UTF-32 begins with that of UTF-16.
_OTHER_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_GZIP_MARK = b"\x1f\x8b"
_PIECE_BYTES = 2**20  # of a line that is passed over


class DamagedFile(Exception):
    """The rest of a file cannot be read; what came before it can."""


def is_gzip(path: Path) -> bool:
    """Whether the name says that the file is compressed."""
    return path.suffix.lower() == ".gz"


def check_encoding(path: Path) -> None:
    """Raise `InvalidArgument` for a file that cannot be opened or is no UTF-8 as a whole."""
    try:
        with _open(path) as file:
            start = file.read(4)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from None
    for mark, name in _OTHER_MARKS.items():
        if start.startswith(mark):
            raise _wrong_encoding(path, name)
    if start.startswith(_GZIP_MARK):
        remedy = (
            "is compressed twice; do it once"
            if is_gzip(path)
            else (f"is compressed by gzip, but its name does not say so; rename it to {path.name}.gz")
        )
        raise InvalidArgument(f"{path} {remedy}")
    # Without a mark, but three of the first four bytes are zero, or every second one is.
    if len(start) == 4 and start.count(0) == 3 and (start[0] or start[3]):
        raise _wrong_encoding(path, "UTF-32")
    if len(start) == 4 and (start[0], start[2]) != (0, 0) and start[1] == start[3] == 0:
        raise _wrong_encoding(path, "UTF-16")
    if len(start) == 4 and (start[1], start[3]) != (0, 0) and start[0] == start[2] == 0:
        raise _wrong_encoding(path, "UTF-16")


def read_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Number from 1 and bytes of each line, with its line end; None for one beyond `MAX_ROW_BYTES`.

    Raises `DamagedFile` where compressed data ends too early or is broken.
    """
    number = 0
    with _open(path) as file:
        try:
            if file.read(3) != _UTF8_MARK:
                file.seek(0)
            while line := file.readline(MAX_ROW_BYTES + 1):
                number += 1
                if len(line) <= MAX_ROW_BYTES:
                    yield number, line
                else:
                    _pass_over(file, line)
                    yield number, None
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DamagedFile(f"from line {number + 1} on the file cannot be read: {error}") from None


def too_long() -> str:
    """What is told of a row beyond the limit."""
    return f"the row is longer than {MAX_ROW_BYTES} bytes, the most that is read; shorten it"


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if is_gzip(path) else path.open("rb")  # type: ignore[return-value]


def _pass_over(file: IO[bytes], line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = file.readline(_PIECE_BYTES)


def _wrong_encoding(path: Path, name: str) -> InvalidArgument:
    return InvalidArgument(
        f"{path} is written in {name}, but only UTF-8 can be read; convert it: "
        f"iconv -f {name} -t UTF-8 {path.name} > converted{path.suffix}"
    )
