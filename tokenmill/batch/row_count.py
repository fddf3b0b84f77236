"""Counts the rows of a source beside the job, where only reading tells: for the time that is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from tokenmill.batch.figures import Figures
from tokenmill.batch.input_record import Source
from tokenmill.batch.json_lines import JsonLines

_LOOK_EVERY = 1024  # rows between two looks whether the job has ended


class RowCount:
    """Tells the figures how many rows a source has, from a thread of its own, within a `with` block."""

    def __init__(self, source: Source, figures: Figures) -> None:
        self._source = source
        self._figures = figures
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if source.num_rows is None:
            self._thread = threading.Thread(target=self._run, name="tokenmill-count", daemon=True)

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        count = 0
        try:
            for _ in _rows(self._source):
                count += 1
                if count % _LOOK_EVERY == 0 and self._ended.is_set():
                    return
        except OSError:
            return  # the job, which reads the same file, tells of it
        self._figures.started(num_rows=count)


def _rows(source: Source) -> Iterator[Any]:
    """Something for each row; where that is quicker, without reading what it says."""
    return source.skim() if isinstance(source, JsonLines) else iter(source)
