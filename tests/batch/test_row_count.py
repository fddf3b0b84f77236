"""How many rows a file has, where only reading tells."""

from __future__ import annotations

import gzip
import threading
from pathlib import Path

import pytest

from tokenmill.batch.figures import Figures
from tokenmill.batch.row_count import RowCount
from tokenmill.batch.sources import open_source

pytestmark = pytest.mark.unit

LINES = b'{"prompt": "a"}\n\n{"prompt": "b"}\n  \r\nno json\n[1]\n{"prompt": "\xff"}\n\n{"prompt": "c"}'


def counted(path: Path) -> int | None:
    figures = Figures()
    count = RowCount(open_source(path), figures)
    with count:
        if count._thread is not None:
            count._thread.join(10)
    return figures.snapshot().rows_total


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("empty.jsonl", b""),
        ("blank.jsonl", b"\n\n \n"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("cut.jsonl.gz", gzip.compress(LINES * 1000, mtime=0)[:-20]),
        ("a.csv", b'prompt,x\n"two\nlines",1\nb,2\n\nc,3\n'),
    ],
)
def test_as_many_rows_are_counted_as_are_read(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert counted(path) == sum(1 for _ in open_source(path))


def test_a_job_that_ends_does_not_wait_for_the_count(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"{}\n" * 10_000)
    source = open_source(path)
    figures = Figures()
    with RowCount(source, figures) as count:
        count._ended.set()
    assert figures.snapshot().rows_total in (None, 10_000)
    assert not [each for each in threading.enumerate() if each.name == "tokenmill-count"]
