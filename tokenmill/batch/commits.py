"""Brings to the disk what a job has finished, from threads of its own.

Owns when, and in which order: a line never stands in an output before the journal has its row.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
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

    One thread alone writes, so that an interrupt, which ends whatever its thread is at, tears nothing, and
    another one waits for the disk, which may take seconds.
    """

    def __init__(self, journal: Journal, outputs: Sequence[LineFile]) -> None:
        self._journal = journal
        self._outputs = outputs
        self._failure: Exception | None = None
        self._has_ended = threading.Event()
        self._wake = threading.Event()
        self._threads: list[_Thread] = []

    def check(self) -> None:
        """After every row: raise `JobStopped` if the disk takes no more, and let no memory fill meanwhile."""
        while self._num_waiting_bytes > _MOST_WAITING_BYTES and self._failure is None:
            self._wake.set()
            time.sleep(_PAUSE_SECONDS)
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        try:
            for work in (self._commit_often, self._sync_often):
                thread = _Thread(work)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # the system has no more threads, or an interrupt
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupt = self._end()
        if interrupt is not None:
            raise interrupt
        if error is None and self._failure is not None:
            raise self._failure

    @property
    def _num_waiting_bytes(self) -> int:
        return self._journal.num_waiting_bytes + sum(output.num_waiting_bytes for output in self._outputs)

    def _end(self) -> BaseException | None:
        """Wait until all is on the disk; an interrupt meanwhile is returned, for nothing is safe before."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._has_ended.set()
                self._wake.set()
                for thread in self._threads:
                    thread.wait()
                return interrupt
            except BaseException as late:  # Ctrl-C, or what a handler of the caller's raises
                interrupt = late

    def _commit_often(self) -> None:
        is_last = False
        while not is_last and self._failure is None:
            self._wake.wait(_COMMIT_SECONDS)
            self._wake.clear()
            is_last = self._has_ended.is_set()
            try:
                self._commit()
                if is_last:
                    self._journal.sync()
            except Exception as failure:  # for whoever adds the next row
                self._failure = failure

    def _sync_often(self) -> None:
        while not self._has_ended.wait(_SYNC_SECONDS) and self._failure is None:
            try:
                self._journal.sync()
            except Exception as failure:
                self._failure = failure

    def _commit(self) -> None:
        taken = [(output, output.take()) for output in self._outputs]
        self._journal.commit()
        for output, lines in taken:
            output.write(lines)


class _Thread(threading.Thread):
    """One that can be waited for through interrupts, by which a join takes it for ended (Python 3.11)."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="tokenmill-commits", daemon=True)
        self._work = work
        self._has_ended = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self._has_ended.set()

    def wait(self) -> None:
        """Until it has ended."""
        self._has_ended.wait()
        self.join()
