"""The journal's records as bytes: how one is written, and how all good ones are found again in a file.

    mark 4 | length of the body 4 | key 16 | checksum of key and body 8 | checksum of these 32 bytes 4 | body

Whatever stands between two good records is damage and is stepped over: the mark tells where the next one may
begin, the checksums whether it does. The mark is no UTF-8, so that no text can hold it.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from tokenmill.batch.key_table import KEY_BYTES

MARK = b"\xf7\xffTR"
_CHECKED = struct.Struct(f"<4sI{KEY_BYTES}s8s")
_HEAD = struct.Struct(f"{_CHECKED.format}I")
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """A good record of a file."""

    offset: int
    end: int  # offset of the first byte after it
    key: bytes


def packed(key: bytes, body: bytes) -> bytes:
    """A whole record; its body may have up to 4 GiB."""
    head = _CHECKED.pack(MARK, len(body), key, _checksum(key, body))
    return head + zlib.crc32(head).to_bytes(4, "little") + body


def read_at(file: BinaryIO, offset: int) -> tuple[bytes, bytes] | None:
    """Key and body of the record that begins at `offset`; None if no good one does."""
    file.seek(offset)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MARK):
        return None
    _, length, key, checksum, head_checksum = _HEAD.unpack(head)
    if zlib.crc32(head[: _CHECKED.size]) != head_checksum:
        return None
    body = file.read(length)
    return (key, body) if len(body) == length and _checksum(key, body) == checksum else None


def find_all(file: BinaryIO, start: int) -> Iterator[Found]:
    """All good records from `start` on, in order; what lies between them is damaged."""
    offset: int | None = start
    while offset is not None:
        record = read_at(file, offset)
        if record is None:
            offset = _next_mark(file, offset + 1)
        else:
            key, body = record
            found = Found(offset, offset + _HEAD.size + len(body), key)
            yield found
            offset = found.end


def _next_mark(file: BinaryIO, start: int) -> int | None:
    """Where the next mark begins, at `start` or later; None: nowhere."""
    file.seek(start)
    block = file.read(_BLOCK_BYTES)
    while len(block) >= len(MARK):
        place = block.find(MARK)
        if place >= 0:
            return start + place
        kept = len(MARK) - 1  # the mark may lie across two blocks
        start += len(block) - kept
        more = file.read(_BLOCK_BYTES)
        block = block[-kept:] + more if more else b""
    return None


def _checksum(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(key + body, digest_size=8).digest()
