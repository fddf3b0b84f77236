"""The figures of a running job: counts, distributions and a timeline, in memory that does not grow.

Owns what is counted and what the summary says. Showing it is `progress.py`'s matter while the job runs, and
`report.py`'s afterwards.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

_MAX_BUCKETS = 240
_FIRST_BUCKET_SECONDS = 0.25
_COUNT_SECONDS = 0.05  # after which samples are counted, so that they come into the bucket of their time
_MAX_EXAMPLES = 3  # messages kept of each type of error
_LONGEST_EXAMPLE = 500  # characters
_BINS_PER_DECADE = 8

# Columns of the timeline.
_COLUMNS = ("rows", "prompt_tokens", "cached_tokens", "output_tokens", "errors")


class Timeline:
    """Sums over time in at most 240 buckets of equal width; when they are full, pairs of them are merged.

    Its methods take seconds since the start of the job, never going back.
    """

    def __init__(self) -> None:
        self.bucket_seconds = _FIRST_BUCKET_SECONDS
        self._buckets: list[list[float]] = []  # the columns of `_COLUMNS`, then idle and busy seconds

    def at(self, seconds: float) -> list[float]:
        """The bucket of this time, to be added to."""
        index = int(seconds / self.bucket_seconds)
        while index >= _MAX_BUCKETS:
            self._merge()
            index = int(seconds / self.bucket_seconds)
        while index >= len(self._buckets):
            self._buckets.append([0, 0, 0, 0, 0, 0.0, 0.0])
        return self._buckets[index]

    def since(self, seconds: float, column: int) -> float:
        """The sum of a column from about this time on: from the start of its bucket."""
        return sum(bucket[column] for bucket in self._buckets[int(seconds / self.bucket_seconds) :])

    def to_dict(self, *, seconds: float) -> dict[str, Any]:
        """Its columns, up to the end of the job; the last bucket may be cut short by it."""
        self.at(seconds)
        columns = {name: [bucket[i] for bucket in self._buckets] for i, name in enumerate(_COLUMNS)}
        idle = [_share(idle, busy) for *_, idle, busy in self._buckets]
        return {"bucket_seconds": self.bucket_seconds, **columns, "idle_share": idle}

    @property
    def idle_share(self) -> float | None:
        """The share of idle time in all that was watched; None: nothing was."""
        return _share(self.since(0, 5), self.since(0, 6))

    def _merge(self) -> None:
        if len(self._buckets) % 2:
            self._buckets.append([0, 0, 0, 0, 0, 0.0, 0.0])
        pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
        self._buckets = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
        self.bucket_seconds *= 2


class Distribution:
    """How often values were seen, in bins of equal width on a logarithmic scale; zero has a bin of its own.

    Values below the first bin count as zero, and those above the last into the last.
    """

    def __init__(self, lowest: float, decades: int) -> None:
        steps = range(decades * _BINS_PER_DECADE + 1)
        self._edges = [lowest * 10 ** (step / _BINS_PER_DECADE) for step in steps]
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0.0
        self._min = math.inf
        self._max = 0.0

    def add(self, values: Sequence[float]) -> None:
        """More values, each at least 0."""
        edges, counts = self._edges, self._counts
        for value in values:
            counts[bisect_right(edges, value)] += 1
        self._sum += sum(values)
        self._max = max(self._max, max(values, default=0.0))
        self._min = min(self._min, min(values, default=math.inf))

    def to_dict(self) -> dict[str, Any]:
        """Count, mean, extremes, percentiles, and the filled range of bins as [low, high, count]."""
        count = sum(self._counts)
        if not count:
            return {"count": 0, "bins": []}
        filled = [index for index, number in enumerate(self._counts) if number]
        bins = [[*self._bounds(i), self._counts[i]] for i in range(filled[0], filled[-1] + 1)]
        percentiles = {f"p{percent}": self._percentile(percent, count) for percent in (50, 90, 99)}
        extremes = {"mean": self._sum / count, "min": self._min, "max": self._max}
        return {"count": count, **extremes, **percentiles, "bins": bins}

    def _bounds(self, index: int) -> tuple[float, float]:
        low = self._edges[index - 1] if index else 0.0
        return low, self._edges[index] if index < len(self._edges) else max(self._max, low)

    def _percentile(self, percent: int, count: int) -> float:
        """About the value below which so many are: exact to the width of a bin, a third of the value."""
        wanted = count * percent / 100
        seen = 0
        for index, number in enumerate(self._counts):
            if number and seen + number >= wanted:
                low, high = self._bounds(index)
                value = low + (high - low) * (wanted - seen) / number
                return min(max(value, self._min), self._max)
            seen += number
        return self._max


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A job at one moment; tokens are those of the rows that finished in this run."""

    seconds: float  # since the start
    rows_done: int  # computed, replayed and duplicates
    rows_total: int | None  # None: not known yet
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_errors: int
    seconds_left: float | None  # None: nothing to tell it from


# A sample that is not counted yet: tokens of its prompt, how many were cached, those of its output, why it
# ended (None: by an error), and after how many seconds.
_Noted = tuple[int, int, int, str | None, float | None]


class Figures:
    """Counts of a running job. Every method may be called from any thread.

    Samples are noted as they finish, and counted together when somebody looks, or a moment later.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """The job begins now, if `started` does not come later."""
        self._clock = clock
        self._lock = threading.Lock()
        self._plan: Mapping[str, Any] | None = None
        self._rows_total: int | None = None
        self._rows = {"computed": 0, "replayed": 0, "duplicates": 0, "failed": 0}
        self._num_samples = 0
        self._num_errors = 0
        self._noted: list[_Noted] = []
        self._noted_rows = 0
        self._noted_seconds = 0.0  # when the first of them was
        self._tokens = [0, 0, 0]  # prompt, cached, output
        self._finish_reasons: Counter[str] = Counter()
        self._errors: dict[str, dict[str, Any]] = {}
        self._timeline = Timeline()
        self._latency = Distribution(0.001, 8)
        self._prompt_length = Distribution(1, 7)
        self._output_length = Distribution(1, 7)
        self._watched: tuple[float, float] | None = None  # idle and busy seconds, when last told
        self._has_started = False
        self._began = clock()
        self._began_at = datetime.now(UTC)

    # ── what happens ──────────────────────────────────────────────────────────────────────────

    def started(self, *, num_rows: int | None = None, plan: Mapping[str, Any] | None = None) -> None:
        """The clock starts. `num_rows` are those of the input; `plan` is `Plan.to_dict()` of all of them.

        May be called again when more is known; only the first call starts the clock.
        """
        with self._lock:
            if not self._has_started:
                self._began, self._began_at = self._clock(), datetime.now(UTC)
                self._has_started = True
            self._rows_total = num_rows if num_rows is not None else self._rows_total
            self._plan = plan or self._plan

    def replayed(self, count: int) -> None:
        """Rows whose results an earlier run has left."""
        with self._lock:
            self._rows["replayed"] += count

    def duplicate(self, count: int) -> None:
        """Rows that share the result of a row like them."""
        with self._lock:
            self._rows["duplicates"] += count

    def finished(self, results: Sequence[Mapping[str, Any]], *, is_row: bool = True) -> None:
        """One row is done; `results` are its samples computed now, in the shape that the engine gives.

        `is_row` False: more samples of a row that was told of before.
        """
        with self._lock:
            seconds = self._clock() - self._began
            if seconds > self._noted_seconds + _COUNT_SECONDS:
                self._count()
                self._noted_seconds = seconds
            for result in results:
                facts, reason = result["meta_info"], None
                if result.get("error") is None:
                    reason = (facts.get("finish_reason") or {}).get("type", "unknown")
                prompt, cached = facts.get("prompt_tokens") or 0, facts.get("cached_tokens") or 0
                output = facts.get("completion_tokens") or 0
                self._noted.append((prompt, cached, output, reason, facts.get("e2e_latency")))
            self._noted_rows += is_row
            self._rows["computed"] += is_row

    def failed(self, index: int, errors: Sequence[Mapping[str, Any]]) -> None:
        """A row is complete, and has these errors, one for each sample that has one."""
        with self._lock:
            self._rows["failed"] += 1
            for error in errors:
                self._take_error(index, error)

    def _count(self) -> None:
        """Count the samples that were noted; before anything of them is looked at, with the lock held."""
        if not self._noted:
            return
        good = [sample for sample in self._noted if sample[3] is not None]
        self._num_samples += len(self._noted)
        tokens = [sum(column) for column in islice(zip(*self._noted, strict=True), 3)]
        self._tokens = [before + new for before, new in zip(self._tokens, tokens, strict=True)]
        bucket = self._timeline.at(self._noted_seconds)
        for column, number in enumerate((self._noted_rows, *tokens, len(self._noted) - len(good))):
            bucket[column] += number
        prompts, _, outputs, reasons, latencies = zip(*good, strict=True) if good else ((),) * 5
        self._finish_reasons.update(reasons)
        self._prompt_length.add(prompts)
        self._output_length.add(outputs)
        self._latency.add([latency for latency in latencies if latency is not None])
        self._noted, self._noted_rows = [], 0

    def _take_error(self, index: int, error: Mapping[str, Any]) -> None:
        self._num_errors += 1
        kind = self._errors.setdefault(str(error["type"]), {"count": 0, "examples": {}})
        kind["count"] += 1
        message = str(error["message"])
        short = message if len(message) <= _LONGEST_EXAMPLE else f"{message[:_LONGEST_EXAMPLE]}..."
        if len(kind["examples"]) < _MAX_EXAMPLES:
            kind["examples"].setdefault(short, index)

    def watched(self, *, idle_seconds: float, busy_seconds: float) -> None:
        """What the core has measured of its device since it started; one that is replaced begins anew."""
        with self._lock:
            idle_before, busy_before = self._watched or (idle_seconds, busy_seconds)
            if idle_seconds >= idle_before and busy_seconds >= busy_before:
                self._count()
                bucket = self._timeline.at(self._clock() - self._began)
                bucket[5] += idle_seconds - idle_before
                bucket[6] += busy_seconds - busy_before
            self._watched = (idle_seconds, busy_seconds)

    # ── what is known ─────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> Snapshot:
        """The job now."""
        with self._lock:
            self._count()
            seconds = self._clock() - self._began
            return Snapshot(
                seconds=seconds,
                rows_done=self._rows_done,
                rows_total=self._rows_total,
                prompt_tokens=self._tokens[0],
                cached_tokens=self._tokens[1],
                output_tokens=self._tokens[2],
                num_errors=self._num_errors,
                seconds_left=self._seconds_left(seconds),
            )

    @property
    def _rows_done(self) -> int:
        return self._rows["computed"] + self._rows["replayed"] + self._rows["duplicates"]

    def _seconds_left(self, seconds: float) -> float | None:
        """Tokens that are still to be computed, at the rate of the later half of the time until now."""
        if self._rows_total is None or not self._rows["computed"] or seconds <= 0:
            return None
        left = self._tokens_left(self._rows_total)
        for since in (seconds / 2, 0.0):  # in the later half nothing may have finished
            prompt, cached, output = (self._timeline.since(since, column) for column in (1, 2, 3))
            if computed := prompt - cached + output:
                began = since - since % self._timeline.bucket_seconds
                return left * (seconds - began) / computed
        return None if left else 0.0

    def _tokens_left(self, rows_total: int) -> float:
        """Expected tokens to compute: cached ones cost nothing.

        A row is expected to be as long as the mean of those that are done. Where a plan knows the prompts
        and what they may generate at most, that counts instead, and bounds it.
        """
        rows_left = max(0, rows_total - self._rows_done)
        done = self._rows["computed"] + self._rows["duplicates"]
        prompt, cached, output = (tokens / done * rows_left for tokens in self._tokens)
        if self._plan is not None:
            ours = 1 - self._rows["replayed"] / rows_total if rows_total else 0
            if rows_left:
                prompt = max(0.0, self._plan["prompt_tokens"] * ours - self._tokens[0])
            cached = prompt * self._tokens[1] / self._tokens[0] if self._tokens[0] else 0.0
            output = min(output, max(0.0, self._plan["max_output_tokens"] * ours - self._tokens[2]))
        return prompt - cached + output

    def summary(self) -> dict[str, Any]:
        """All figures as plain JSON; docs/batch.md has its keys."""
        with self._lock:
            self._count()
            seconds = self._clock() - self._began
            prompt, cached, output = self._tokens
            per_second = 1 / seconds if seconds > 0 else 0.0
            by_count = sorted(self._errors.items(), key=lambda item: (-item[1]["count"], item[0]))
            return {
                "started": self._began_at.isoformat(timespec="seconds"),
                "seconds": seconds,
                "rows": {"total": self._rows_total, "done": self._rows_done, **self._rows},
                "samples": self._num_samples,
                "tokens": {"prompt": prompt, "cached": cached, "output": output},
                "cached_share": cached / prompt if prompt else 0.0,
                "throughput": {
                    "rows_per_second": self._rows["computed"] * per_second,
                    "prompt_tokens_per_second": prompt * per_second,
                    "output_tokens_per_second": output * per_second,
                },
                "finish_reasons": dict(sorted(self._finish_reasons.items())),
                "errors": [
                    {
                        "type": kind,
                        "count": each["count"],
                        "examples": [
                            f"row {index}: {message}" for message, index in each["examples"].items()
                        ],
                    }
                    for kind, each in by_count
                ],
                "latency_seconds": self._latency.to_dict(),
                "prompt_length": self._prompt_length.to_dict(),
                "output_length": self._output_length.to_dict(),
                "timeline": self._timeline.to_dict(seconds=seconds),
                "idle_share": self._timeline.idle_share,
            }


def _share(idle: float, busy: float) -> float | None:
    return idle / (idle + busy) if idle + busy > 0 else None
