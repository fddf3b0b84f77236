"""Log-probabilities of tokens that are not reported yet, of all requests that want them.

A step's are written for all rows at once, as columns, because a Python object for each token would cost more
than the step. Who runs, and when a request is reported, is the scheduler's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tokenmill.messages import LogprobOptions, Logprobs, LongArray

# Positions of one request that are gathered before they are put aside, and most numbers for all requests.
_WINDOW = 128
_MOST_NUMBERS = 1 << 23
_NO_INDEX = -1


class LogprobLine:
    """Those of one request. It takes room in a ledger from its first token on until it is closed."""

    def __init__(self, options: LogprobOptions) -> None:
        self.num_top = options.num_top
        self.num_given = len(options.token_ids)
        self.index = _NO_INDEX  # in the ledger, whose matter this is
        self.ledger: LogprobLedger | None = None
        self._parts: list[Logprobs] = []  # put aside

    def put_aside(self, part: Logprobs) -> None:
        """Keep positions that follow those put aside before; they may be wider than the request wants."""
        self._parts.append(
            Logprobs(
                part.token_N.copy(),
                part.top_NK[:, : self.num_top].copy(),
                part.top_ids_NK[:, : self.num_top].copy(),
                part.given_NI[:, : self.num_given].copy(),
            )
        )

    def take(self) -> Logprobs:
        """All that were not taken yet, as wide as the request wants them."""
        if self.ledger is not None:
            self.ledger.put_aside(self)
        parts, self._parts = self._parts, []
        if len(parts) == 1:
            return parts[0]
        return Logprobs.joined(parts) if parts else _empty((0,), self.num_top, self.num_given)

    def close(self) -> None:
        """Give the room back; nothing is written for the request any more."""
        if self.ledger is not None:
            self.ledger.release(self)


class Owner(Protocol):
    """Whose token a step drew."""

    @property
    def logprob_line(self) -> LogprobLine | None:
        """Where its log-probabilities go; None: nobody wants them, or not any more."""
        ...


class LogprobLedger:
    """A window of recent positions for each line: shapes [lines, window] and [lines, window, width].

    Windows are as wide as the widest step so far, and shorter where that is very wide.
    """

    def __init__(self) -> None:
        self._lines: list[LogprobLine | None] = []  # by index; None: free
        self._free: list[int] = []
        self._allocate(num_lines=0, num_top=0, num_given=0)
        self._owners: Sequence[Owner] | None = None  # of the newest step, while nobody of them is gone
        self._rows: LongArray | slice = slice(0)  # which rows of the step are written,
        self._places: LongArray = np.zeros(0, dtype=np.int64)  # and to which lines

    def add(self, owners: Sequence[Owner], logprobs: Logprobs) -> None:
        """Write a step's, one position for each owner. Quick while `owners` is the same object."""
        if owners is not self._owners:
            self._place(owners)
        num_top, num_given = logprobs.top_NK.shape[1], logprobs.given_NI.shape[1]
        if self._is_too_small(num_top, num_given):
            self._grow(num_top, num_given)
        rows, places = self._rows, self._places
        counts = self._counts[places]
        recent = self._recent
        recent.token_N[places, counts] = logprobs.token_N[rows]
        if num_top:
            recent.top_NK[:, :, :num_top][places, counts] = logprobs.top_NK[rows]
            recent.top_ids_NK[:, :, :num_top][places, counts] = logprobs.top_ids_NK[rows]
        if num_given:
            recent.given_NI[:, :, :num_given][places, counts] = logprobs.given_NI[rows]
        counts += 1
        self._counts[places] = counts
        for place in places[counts == self._window].tolist():
            self._put_aside(place)

    def put_aside(self, line: LogprobLine) -> None:
        """Hand a line what is in its window."""
        assert self._lines[line.index] is line
        self._put_aside(line.index)

    def release(self, line: LogprobLine) -> None:
        """Forget a line and what is in its window."""
        assert self._lines[line.index] is line
        self._lines[line.index] = None
        self._free.append(line.index)
        line.ledger, line.index = None, _NO_INDEX
        self._owners = None
        if len(self._free) == len(self._lines):  # the next may be narrower
            self._lines, self._free = [], []
            self._allocate(num_lines=0, num_top=0, num_given=0)

    def _place(self, owners: Sequence[Owner]) -> None:
        lines = [owner.logprob_line for owner in owners]
        wanted = [line for line in lines if line is not None]
        for line in wanted:
            if line.ledger is None:
                self._enter(line)
        everybody = len(wanted) == len(lines)
        rows = np.array([row for row, line in enumerate(lines) if line is not None], dtype=np.int64)
        self._rows = slice(None) if everybody else rows
        self._places = np.array([line.index for line in wanted], dtype=np.int64)
        self._owners = owners

    def _enter(self, line: LogprobLine) -> None:
        if self._free:
            line.index = self._free.pop()
            self._lines[line.index] = line
        else:
            line.index = len(self._lines)
            self._lines.append(line)
        line.ledger = self
        if line.index < len(self._counts):
            self._counts[line.index] = 0

    def _is_too_small(self, num_top: int, num_given: int) -> bool:
        recent = self._recent
        return (
            len(self._lines) > len(self._counts)
            or num_top > recent.top_NK.shape[2]
            or num_given > recent.given_NI.shape[2]
        )

    def _grow(self, num_top: int, num_given: int) -> None:
        """Begin with larger windows; what is in the old ones is put aside."""
        for place in np.flatnonzero(self._counts).tolist():
            if self._lines[place] is not None:
                self._put_aside(place)
        recent = self._recent
        num_lines, num_known = len(self._lines), len(self._counts)
        self._allocate(
            num_lines=num_known if num_lines <= num_known else max(num_lines, 2 * num_known),
            num_top=max(num_top, recent.top_NK.shape[2]),
            num_given=max(num_given, recent.given_NI.shape[2]),
        )

    def _allocate(self, *, num_lines: int, num_top: int, num_given: int) -> None:
        width = 1 + 2 * num_top + num_given
        self._window = max(1, min(_WINDOW, _MOST_NUMBERS // (max(1, num_lines) * width)))
        self._recent = _empty((num_lines, self._window), num_top, num_given)
        self._counts: LongArray = np.zeros(num_lines, dtype=np.int64)  # positions in each window

    def _put_aside(self, place: int) -> None:
        line, count, recent = self._lines[place], int(self._counts[place]), self._recent
        assert line is not None
        if count:
            line.put_aside(
                Logprobs(
                    recent.token_N[place, :count],
                    recent.top_NK[place, :count],
                    recent.top_ids_NK[place, :count],
                    recent.given_NI[place, :count],
                )
            )
            self._counts[place] = 0


def _empty(shape: tuple[int, ...], num_top: int, num_given: int) -> Logprobs:
    """Room for positions in this shape."""
    return Logprobs(
        token_N=np.empty(shape, dtype=np.float32),
        top_NK=np.empty((*shape, num_top), dtype=np.float32),
        top_ids_NK=np.empty((*shape, num_top), dtype=np.int32),
        given_NI=np.empty((*shape, num_given), dtype=np.float32),
    )
