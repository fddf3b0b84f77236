"""The output of a running job: lines of rows as they finish, and in the order of the input at the end.

Owns the file, where the line of each row is in it, and that a reader never sees less than before, nor half a
line, but for the end of one of many megabytes while it is written, and of the last one where the process is
killed in that moment: the system cuts a write where a page of memory ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tokenmill.batch.journal import append, disk_of, is_in_place, sync_folder
from tokenmill.errors import JobStopped

_ROWS_MORE = 1024  # for which there is room at once


class FileFacts(NamedTuple):
    """What tells a file from another one that has come in its place."""

    device: int
    inode: int
    size: int
    written_ns: int


class LineFile:
    """Lines by row, in a file that only grows; 12 bytes of memory for each row.

    One thread adds while another takes and writes.

    What is there already stays until the new file has become as large: a job that goes on first writes once
    more what it had.
    """

    def __init__(self, path: Path, *, output: Path | None = None) -> None:
        """Begin the file beside `path`, or at `path` if nothing is there yet. Raises `JobStopped`.

        `output` is what messages name, if the file is only a part of its making.
        """
        self.path = path
        self._shown = output or path
        self._working_path = path
        self._before: FileFacts | None = None
        if path.exists():
            with path.open("rb") as before:
                _take_lock(before, self._shown)  # the job that writes it has it until its end
            self._before = facts_of(path)
            self._working_path = beside(path, "partial")
        self._file = _opened(self._working_path)
        _take_lock(self._file, self._shown)
        os.ftruncate(self._file.fileno(), 0)
        self._end = 0
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._next_start = 0
        self._starts = array("Q")  # of the line of each row, plus 1; 0: it has none
        self._lengths = array("I")

    @property
    def num_waiting_bytes(self) -> int:
        """How much the next commit writes."""
        return self._next_start - self._end

    def replace_foreign(self) -> None:
        """What is there gives way at once; other links to it stay. Before anything is written."""
        if self._working_path != self.path:  # else it has been removed meanwhile
            replace_whole(self.path, lambda empty: empty.touch())
            self._before = facts_of(self.path)

    def add(self, index: int, line: bytes) -> None:
        """The line of a row, with its line end; in the file with the next `write`."""
        if index >= len(self._starts):
            missing = index + _ROWS_MORE - len(self._starts)
            self._starts.extend(array("Q", bytes(8 * missing)))
            self._lengths.extend(array("I", bytes(4 * missing)))
        self._starts[index] = self._next_start + 1
        self._lengths[index] = len(line)
        with self._lock:
            self._next_start += len(line)
            self._waiting.append(line)

    def take(self) -> list[bytes]:
        """The lines added since last time, for `write`."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken

    def write(self, lines: list[bytes]) -> None:
        """Append whole lines, or, with `JobStopped`, none of them."""
        data = b"".join(lines)
        if not data:
            return
        self._check_whole()
        append(self._file, data, end=self._end, path=self._working_path)
        self._end += len(data)
        size_before = 0 if self._before is None else self._before.size
        if self._working_path != self.path and self._end >= size_before:
            _take_place(self._working_path, self.path)
            self._working_path = self.path

    def in_order(self) -> Iterator[bytes]:
        """The lines that were written, in the order of their rows. Raises `JobStopped`."""
        self._check_whole()
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            for start, length in zip(self._starts, self._lengths, strict=True):
                if start:
                    lines.seek(start - 1)
                    yield lines.read(length)

    def _check_whole(self) -> None:
        """Raise if somebody else has made the file shorter or longer: rows would be lost, or torn.

        The same where another file is in its place now, or none: that one is not to be replaced.
        """
        if os.fstat(self._file.fileno()).st_size != self._end or not self._is_in_place():
            raise changed_by_others(self._shown)

    def _is_in_place(self) -> bool:
        """Whether at the path there is what this job has found or put there."""
        if self._working_path == self.path:
            return is_in_place(self._file, self.path)
        return facts_of(self.path) == self._before

    def finish(self) -> None:
        """Put the lines in the order of their rows; all are written. Raises `JobStopped`."""
        replace_whole(self.path, self._write_ordered)
        self.close()

    def close(self) -> None:
        """End the file as it is; what has not taken its place is removed. May be called twice."""
        self._file.close()
        if self._working_path != self.path:
            self._working_path.unlink(missing_ok=True)

    def _write_ordered(self, target: Path) -> None:
        with target.open("wb") as ordered:
            ordered.writelines(self.in_order())
        self._check_whole()  # which takes its time for many rows


def facts_of(path: Path) -> FileFacts | None:
    """The facts of what is at the path; None where nothing is. Raises `JobStopped`."""
    with disk_of(path):
        try:
            facts = path.stat()
        except FileNotFoundError:
            return None
    return FileFacts(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)


def changed_by_others(output: Path) -> JobStopped:
    """What to tell of an output that is no longer what the job has found or made there."""
    return JobStopped(
        f"the output {str(output)!r} was changed by somebody else while the job ran, or removed or replaced; "
        "move away what is there if it is of use, and start the same job again: the journal has what was "
        "finished"
    )


def replace_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file, and put it at `path` once it is on the disk. Raises `JobStopped`."""
    target = beside(path, "ordered")
    target.unlink(missing_ok=True)  # of a job that was killed, perhaps somebody else's
    try:
        with disk_of(target):
            write(target)
            with target.open("rb") as file:
                os.fsync(file.fileno())
        _take_place(target, path)
    finally:
        target.unlink(missing_ok=True)


def _take_place(new: Path, path: Path) -> None:
    with disk_of(path):
        with contextlib.suppress(FileNotFoundError):  # who may read it was decided by whoever made it
            new.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(new, path)
        sync_folder(path)


def beside(path: Path, stage: str) -> Path:
    """Where a file grows until it takes the place of the one that is there."""
    return path.with_name(f"{path.name}.tokenmill-{stage}")


def _opened(path: Path) -> BinaryIO:
    with disk_of(path):
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    return os.fdopen(number, "rb")


def _take_lock(file: BinaryIO, path: Path) -> None:
    """The kernel lets go of the lock with the file or the process. Where there are no locks, do without."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise JobStopped(
            f"the output {str(path)!r} is being written by another job; wait until it ends, or give this one "
            "its own output"
        ) from None
    except OSError:
        return
