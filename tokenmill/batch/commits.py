"""Brings to the disk what a job has finished, twice a second, from a thread of its own.

Owns when, and in which order: a line never stands in an output before the journal has its row.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tokenmill.batch.journal import Journal
from tokenmill.batch.line_file import LineFile

_SECONDS = 0.5
# With more waiting, the one who added it commits at once.
_MOST_WAITING_BYTES = 32 * 2**20


class Commits:
    """Commits a journal and its outputs from the start of a `with` block to its end, and once more there."""

    def __init__(self, journal: Journal, outputs: Sequence[LineFile]) -> None:
        self._journal = journal
        self._outputs = outputs
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokenmill-commits", daemon=True)

    def check(self) -> None:
        """After every row: raise `JobStopped` if the disk takes no more, and let no memory fill meanwhile."""
        if self._failure is not None:
            raise self._failure
        waiting = self._journal.num_waiting_bytes + sum(each.num_waiting_bytes for each in self._outputs)
        if waiting > _MOST_WAITING_BYTES:
            self.commit()

    def commit(self) -> None:
        """Bring everything to the disk now. Raises `JobStopped`; then nothing more is written, ever."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                taken = [(output, output.take()) for output in self._outputs]
                self._journal.commit()
                for output, lines in taken:
                    output.write(lines)
            except BaseException as error:
                self._failure = error
                raise

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._failure is None:
            self.commit()
        elif error is None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._ended.wait(_SECONDS):
                self.commit()
        except BaseException:
            pass  # whoever adds the next row gets it from `check`
