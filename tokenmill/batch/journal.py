"""The journal of a batch job: every finished sample, kept on disk the moment it is known.

Owns the file: who may write it, what of it is good, and how it grows without ever losing what was there. What
a key stands for is `keys.py`'s matter, what results mean the job's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tokenmill.batch.json_text import prepared
from tokenmill.batch.key_table import KeyTable
from tokenmill.batch.records import find_all, packed, read_at
from tokenmill.errors import InvalidArgument, JobStopped

_HEADER_BYTES = 64
_TITLE = b"tokenmill journal 1 "
_BLOCK_BYTES = 2**20
# Larger bodies are compressed; smaller ones are not worth the time.
_LARGE_BYTES = 4096
_FASTEST = 1
_sync = getattr(os, "fdatasync", os.fsync)  # not on every system
_encode = prepared(json.JSONEncoder(ensure_ascii=False, separators=(",", ":")))


@dataclass(frozen=True, slots=True)
class Kept:
    """A value of the journal."""

    value: dict[str, Any]
    is_new: bool  # whether it came since the journal was opened


class Journal:
    """A file of finished samples by key: append-only, checked, and locked against other processes.

    Thread-safe: one thread adds and finds while another commits.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open or create the file, cut off what a crash left half written, and learn where each key is.

        Raises `JobStopped` if another process has it open, `InvalidArgument` if it cannot be had or is no
        journal; a file that is none is never changed.
        """
        self.path = Path(path)
        # Bytes that could not be read as records: inside, left where they are; at the end, cut off.
        self.damaged_bytes = 0
        self.cut_bytes = 0
        self._file = _opened(self.path)
        self._lock = threading.Lock()
        self._table = KeyTable()
        self._num_waiting_bytes = 0
        self._pending: dict[bytes, bytes] = {}  # not given to the disk yet
        self._writing: dict[bytes, bytes] = {}  # just being written
        try:
            _take_lock(self._file, self.path)
            _check_in_place(self._file, self.path)
            self._first_new = self._end = self._recover()
            self._write_header()
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        """How many records it holds."""
        with self._lock:
            return len(self._table) + len(self._writing) + len(self._pending)

    @property
    def num_waiting_bytes(self) -> int:
        """About how much the next commit writes."""
        return self._num_waiting_bytes

    def find(self, key: bytes) -> Kept | None:
        """What was added under the key, in this process or an earlier one."""
        with self._lock:
            body = self._pending.get(key) or self._writing.get(key)
            if body is not None:
                return Kept(_unpacked(body), is_new=True)
            for offset in self._table.offsets(key):
                record = read_at(self._file, offset)
                if record is not None and record[0] == key:
                    return Kept(_unpacked(record[1]), is_new=offset >= self._first_new)
        return None

    def add(self, key: bytes, value: Mapping[str, Any]) -> None:
        """Keep a value of plain JSON; on disk with the next `commit`."""
        body = _encode(value).encode("utf-8", "surrogatepass")
        if len(body) > _LARGE_BYTES:
            body = b"z" + zlib.compress(body, _FASTEST)
        with self._lock:
            self._pending[key] = body
            self._num_waiting_bytes += len(body)

    def commit(self) -> None:
        """Write what was added; raises `JobStopped` if not all of it has room. For one thread.

        From now on it outlives the process; the machine, with the next `sync`.
        """
        with self._lock:
            self._writing, self._pending = self._pending, {}
            self._num_waiting_bytes = 0
        if not self._writing:
            return
        records = [packed(key, body) for key, body in self._writing.items()]
        try:
            append(self._file, b"".join(records), end=self._end, path=self.path)
        except JobStopped:
            for record in records:  # some may have room
                append(self._file, record, end=self._end, path=self.path)
                self._end += len(record)
            raise
        with self._lock:
            for key, record in zip(self._writing, records, strict=True):
                self._table.add(key, self._end)
                self._end += len(record)
            self._writing = {}

    def sync(self) -> None:
        """Bring to the disk what was written. Raises `JobStopped`, also if the file is no longer there."""
        with disk_of(self.path):
            _sync(self._file.fileno())
        if not is_in_place(self._file, self.path):
            raise JobStopped(
                f"the journal {str(self.path)!r} was removed or replaced while the job ran, so that nothing "
                "that is finished could be found again; put it back, or start anew with overwrite=True "
                "(--overwrite)"
            )

    def close(self) -> None:
        """Let others have the file. What was not committed is not kept."""
        self._file.close()

    def _recover(self) -> int:
        """Fill the table from the file; returns where the next record goes."""
        size = os.fstat(self._file.fileno()).st_size
        self._file.seek(0)
        header = self._file.read(_HEADER_BYTES)
        end = _HEADER_BYTES
        for found in find_all(self._file, _HEADER_BYTES):
            self.damaged_bytes += found.offset - end
            self._table.add(found.key, found.offset)
            end = found.end
        if not (header.startswith(_TITLE) or len(self._table) or self._is_blank()):
            raise InvalidArgument(
                f"journal: {str(self.path)!r} is a file, but no journal of this version of tokenmill; move "
                "it away, or name another one"
            )
        if size > end:
            self.cut_bytes = size - end
            os.ftruncate(self._file.fileno(), end)
        return end

    def _is_blank(self) -> bool:
        """Whether the file begins as a title does, or has nothing but zeros: what a power loss may leave."""
        self._file.seek(0)
        header = self._file.read(_HEADER_BYTES).rstrip(b"\0")
        if header:
            return _TITLE.startswith(header)
        while data := self._file.read(_BLOCK_BYTES):
            if data.strip(b"\0"):
                return False
        return True

    def _write_header(self) -> None:
        """Say whose file it is, and who has it open: read by those that are refused."""
        header = _TITLE + b"pid %d" % os.getpid()
        header = header.ljust(_HEADER_BYTES - 1) + b"\n"
        with disk_of(self.path):
            os.pwrite(self._file.fileno(), header, 0)
            os.fsync(self._file.fileno())
            sync_folder(self.path)


def append(file: BinaryIO, data: bytes, *, end: int, path: Path) -> None:
    """Write all of `data` at `end`, the end of the file, or, with `JobStopped`, leave the file as it was."""
    with disk_of(path):
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(file.fileno(), memoryview(data)[written:], end + written)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), end)
            raise


def sync_folder(path: Path) -> None:
    """Make sure that a new name of a file survives a loss of power."""
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except PermissionError:  # a folder that may be written, but not be read
        return
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def disk_of(path: Path) -> Iterator[None]:
    """A block whose OSErrors are a disk that does not take what it should."""
    try:
        yield
    except OSError as error:
        raise _stopped_by(error, path) from error


def _stopped_by(error: OSError, path: Path) -> JobStopped:
    """What to tell of a disk that does not take what it should."""
    try:
        room = os.statvfs(path.parent)
        free = f"{room.f_bavail * room.f_frsize / 2**20:,.1f} MiB are free there"
    except FileNotFoundError:
        return JobStopped(f"{str(path)!r} cannot be written: its folder was removed, with what was in it")
    except OSError:
        free = "its folder cannot be looked at"
    return JobStopped(
        f"{str(path)!r} cannot be written: {error.strerror or error} ({free}). What was finished is kept; "
        "make room and start the same job again, and it goes on"
    )


def _opened(path: Path) -> BinaryIO:
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InvalidArgument(
            f"journal: {str(path)!r} cannot be opened ({error.strerror}); name a file in a folder that is "
            "there and can be written"
        ) from error
    return os.fdopen(number, "rb")  # what is written goes past its buffer, and only behind what it has read


def _take_lock(file: BinaryIO, path: Path) -> None:
    """The kernel lets go of the lock with the file or the process, whatever becomes of it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = file.read(_HEADER_BYTES).removeprefix(_TITLE).decode("ascii", "replace").strip()
        raise JobStopped(
            f"the journal {str(path)!r} is in use by another job ({holder or 'which has just begun'}); wait "
            "until it ends, or give this one its own output and journal"
        ) from None
    except OSError as error:
        raise JobStopped(
            f"the journal {str(path)!r} cannot be locked ({error.strerror}), so nobody could tell whether "
            "another job writes it; name one on a local disk"
        ) from error


def _check_in_place(file: BinaryIO, path: Path) -> None:
    """A job that ends before it has done anything takes its journal away, perhaps from under this one."""
    if not is_in_place(file, path):
        raise JobStopped(
            f"the journal {str(path)!r} was removed by another job just now; start this one again"
        )


def is_in_place(file: BinaryIO, path: Path) -> bool:
    """Whether the open file is still what is at the path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a disk that is away for a moment tells nothing
        return True


def _unpacked(body: bytes) -> dict[str, Any]:
    plain = zlib.decompress(body[1:]) if body.startswith(b"z") else body
    value: dict[str, Any] = json.loads(plain.decode("utf-8", "surrogatepass"))
    return value
