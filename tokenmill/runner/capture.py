"""Which batch sizes get a CUDA graph, and when: a graph may serve smaller batches, at the price of padding.

Decides only; `graphs.py` captures and replays.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Hashable, Sequence

# A first guess of what a capture costs; each capture tells better.
FIRST_CAPTURE_SECONDS = 0.05
# What captures take at most; longer, one had to wait for something that those behind it need not wait for.
LONGEST_CAPTURE_SECONDS = 0.1
# How slowly one that took long is forgotten, by those behind it that took less.
_REMEMBERED = 0.9
# Of a capture that is put off until the device has steps to run meanwhile (see `Loop`), the share that steps
# wait for all the same: the loading of kernels.
_SHARE_WAITED_FOR = 0.3
# So many rows take cuBLAS twice as long as 416 or 480 in the first product of a feed-forward, with 7 to 14
# billion parameters.
_SLOW_SIZE = 448
# Of the steps of a lane, whose rows are some dozen mostly; there are powers of two for more.
_LANE_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
# By so many rows, or to twice as many, any batch may be padded for a while.
_COARSE = 64
# For more rows products are by a library, whose kernels are loaded when they are captured for the first time:
# the device ends all that it runs before. So sizes between powers of two are captured only when wanted.
_MOST_AHEAD = 256
# What a row costs: its products at half the speed of a large GPU, and its share of all the rest. With some
# hundred rows products wait for other things, and one of padding costs less.
_FLOPS_PER_SECOND = 4e14
_MIN_ROW_SECONDS = 1e-6
_SHARE_OF_PADDING = 0.5


def batch_sizes(most: int) -> list[int]:
    """Sizes worth a graph: dense where a padded row costs most of a step's time, sparse above.

    Products of libraries come in steps of eight rows.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 32), *range(512, most, 64)]
    return [size for size in sizes if size < most and size != _SLOW_SIZE] + [most]


def order_of_use(size: int) -> tuple[bool, int, int]:
    """A key that sorts sizes by how much a graph helps a batch of unknown size: first those without which
    one would be padded to more than twice as many; then each halves a gap."""
    factor = size & -size
    is_coarse = factor == size >= _COARSE
    return not is_coarse, -factor, -size


def lane_sizes(most: int) -> list[int]:
    """Sizes worth a graph in a lane: fewer, for rows that decode beside prompts soon become others."""
    doubling = (2**power for power in range(most.bit_length()))
    larger = [size for size in doubling if size > _LANE_SIZES[-1]]
    return [size for size in (*_LANE_SIZES, *larger) if size < most] + [most]


def row_seconds(num_parameters: int) -> float:
    """Roughly what one more row costs a step of a model."""
    return max(_MIN_ROW_SECONDS, 2 * num_parameters / _FLOPS_PER_SECOND)


def padding_seconds(num_parameters: int) -> float:
    """Roughly what one more row of padding costs a step whose rows decode."""
    return _SHARE_OF_PADDING * row_seconds(num_parameters)


class CapturePolicy:
    """Chooses the size of graph for each step, from what was captured so far.

    Time that padding took is added up; when it exceeds what a capture costs, the size at hand is wanted.
    So captures cost no more than the padding before them, and no batch is padded for long. With no graph
    that is large enough, one is captured at the next power of two, so that a batch that grows row by row
    does not stop at every size. Graphs of different `kind` cannot stand in for each other.
    """

    def __init__(self, most: int, *, row_seconds: float, sizes: Sequence[int] | None = None) -> None:
        """`sizes`, ascending up to `most`, are those of `batch_sizes` where none are given."""
        self._sizes = list(sizes or batch_sizes(most))
        self._doubling = [size for size in self._sizes if size & (size - 1) == 0 or size == most]
        ahead = [size for size in self._sizes if size <= _MOST_AHEAD or size in self._doubling]
        self._ahead = sorted(ahead, key=order_of_use)
        self._row_seconds = row_seconds
        self._captured: defaultdict[Hashable, list[int]] = defaultdict(list)  # ascending
        self._padding_seconds = 0.0
        self.may_capture = True  # whether the device has memory for it, as far as is known
        self.capture_seconds = FIRST_CAPTURE_SECONDS  # what a capture takes, by the last one
        self._longest_seconds = 0.0  # of late

    @property
    def seconds_to_spare(self) -> float:
        """For how long the device should have steps to run, so that it does not wait for a capture."""
        return self._longest_seconds or FIRST_CAPTURE_SECONDS

    def choose(self, num_rows: int, kind: Hashable, *, may_put_off: bool = False) -> int | None:
        """The size to use; if it is not captured yet, it is wanted now. None: no graph can be had.

        `may_put_off`: where another graph serves, the capture can come when nothing waits for it.
        """
        exact, best = at_least(self._sizes, num_rows), self.serving(num_rows, kind)
        if best == exact or not self.may_capture:
            return best
        if best is None:
            return at_least(self._doubling, num_rows)
        self._padding_seconds += (best - exact) * self._row_seconds
        share = _SHARE_WAITED_FOR if may_put_off else 1.0
        if self._padding_seconds < share * self.capture_seconds:
            return best
        self._padding_seconds = 0.0
        return exact

    def lacking(self, kind: Hashable, num_rows: int) -> list[int]:
        """Of the sizes that up to so many rows would use those that are not captured, and are worth it before
        they are wanted: that of all rows first, then the most useful ones."""
        captured = set(self._captured[kind])
        most = at_least(self._sizes, min(num_rows, self._sizes[-1]))
        useful = [size for size in self._ahead if size < most]
        return [size for size in (most, *useful) if size not in captured]

    def are_ready(self, kind: Hashable, num_rows: int) -> bool:
        """Whether no number of rows up to this one would wait for a capture, or be padded by many rows."""
        smaller = 0
        for size in self._captured[kind]:
            if size - smaller > max(_COARSE, smaller):
                return False
            if size >= min(num_rows, self._sizes[-1]):
                return True
            smaller = size
        return False

    def serving(self, num_rows: int, kind: Hashable) -> int | None:
        """The smallest captured size for so many rows; None: there is none."""
        captured = self._captured[kind]
        return at_least(captured, num_rows) if captured and captured[-1] >= num_rows else None

    def captured(self, size: int, kind: Hashable, *, seconds: float) -> None:
        """Take note of a graph, and of what it took to capture."""
        bisect.insort(self._captured[kind], size)
        self.capture_seconds = min(seconds, LONGEST_CAPTURE_SECONDS)
        self._longest_seconds = max(self.capture_seconds, _REMEMBERED * self._longest_seconds)

    def stop(self) -> None:
        """Capture no more: the device has no memory for it."""
        self.may_capture = False


def at_least(ascending: Sequence[int], wanted: int) -> int:
    """The first number that is large enough; there must be one."""
    return ascending[bisect.bisect_left(ascending, wanted)]
