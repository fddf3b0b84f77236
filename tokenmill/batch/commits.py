"""Brings to the disk what a job has finished, from a thread of its own.

Owns when, and in which order: a line never stands in an output before the journal has its row.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tokenmill.batch.journal import Journal
from tokenmill.batch.line_file import LineFile

_COMMIT_SECONDS = 0.1  # what a killed process loses at most,
_SYNC_SECONDS = 0.5  # and what a machine without power does
# With more waiting, whoever adds rows waits, too.
_MOST_WAITING_BYTES = 32 * 2**20
_PAUSE_SECONDS = 0.005


class Commits:
    """Commits a journal and its outputs from the start of a `with` block to its end, and once more there.

    No other thread writes, so that an interrupt, which ends whatever its thread is at, tears nothing.
    """

    def __init__(self, journal: Journal, outputs: Sequence[LineFile]) -> None:
        self._journal = journal
        self._outputs = outputs
        self._failure: Exception | None = None
        self._has_ended = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokenmill-commits", daemon=True)

    def check(self) -> None:
        """After every row: raise `JobStopped` if the disk takes no more, and let no memory fill meanwhile."""
        while self._num_waiting_bytes > _MOST_WAITING_BYTES and self._failure is None:
            self._wake.set()
            time.sleep(_PAUSE_SECONDS)
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended = True
        self._wake.set()
        self._thread.join()
        if error is None and self._failure is not None:
            raise self._failure

    @property
    def _num_waiting_bytes(self) -> int:
        return self._journal.num_waiting_bytes + sum(output.num_waiting_bytes for output in self._outputs)

    def _run(self) -> None:
        is_last = False
        synced = time.monotonic()
        while not is_last and self._failure is None:
            self._wake.wait(_COMMIT_SECONDS)
            self._wake.clear()
            is_last = self._has_ended
            try:
                self._commit()
                if is_last or time.monotonic() > synced + _SYNC_SECONDS:
                    self._journal.sync()
                    synced = time.monotonic()
            except Exception as failure:  # for whoever adds the next row
                self._failure = failure

    def _commit(self) -> None:
        taken = [(output, output.take()) for output in self._outputs]
        self._journal.commit()
        for output, lines in taken:
            output.write(lines)
