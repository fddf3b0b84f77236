"""Where in a file the record of a key begins: a hash table in two flat arrays.

Knows numbers only; the file, and whether a record can be trusted, are `journal.py`'s matter.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import chain

KEY_BYTES = 16
_FIRST_SLOTS = 1 << 10


class KeyTable:
    """A mapping from keys of 16 bytes to offsets, at most 48 bytes an entry, 72 for the moment when it grows.

    It holds half of each key, so whoever reads the record at an offset compares the whole key there.
    """

    def __init__(self) -> None:
        self._count = 0
        self._make_slots(_FIRST_SLOTS)

    def __len__(self) -> int:
        return self._count

    def add(self, key: bytes, offset: int) -> None:
        """Add a key; one whose half is there already stays beside the other."""
        if 3 * (self._count + 1) > 2 * len(self._halves):
            self._grow()
        self._place(_half(key), offset + 1)
        self._count += 1

    def offsets(self, key: bytes) -> Iterator[int]:
        """Where a record of the key may be, in the order in which they were added; usually one or none."""
        half, mask = _half(key), len(self._halves) - 1
        slot = half & mask
        while self._places[slot]:
            if self._halves[slot] == half:
                yield self._places[slot] - 1
            slot = (slot + 1) & mask

    def _make_slots(self, count: int) -> None:
        free = array("Q", [0])
        self._halves = free * count
        self._places = free * count  # offset + 1; 0: the slot is free

    def _place(self, half: int, place: int) -> None:
        mask = len(self._halves) - 1
        slot = half & mask
        while self._places[slot]:
            slot = (slot + 1) & mask
        self._halves[slot] = half
        self._places[slot] = place

    def _grow(self) -> None:
        halves, places = self._halves, self._places
        self._make_slots(2 * len(halves))
        # From a free slot on, round the table: entries of the same half keep their order.
        first = next(slot for slot, place in enumerate(places) if not place)
        for slot in chain(range(first, len(places)), range(first)):
            if places[slot]:
                self._place(halves[slot], places[slot])


def _half(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")
