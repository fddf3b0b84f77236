"""How fast an engine is: measured with a few tiny batches, and what follows for many requests.

Owns the model of time: a step costs what its prompt tokens, its decoding rows and the keys they read cost. It
knows nothing of texts, and asks no more of the engine than to run batches.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tokenmill.messages import EngineFacts, FloatArray, LongArray

# Run(rows, tokens of each prompt, new tokens of each) -> nothing; returns when all are done.
Run = Callable[[int, int, int], None]

_SECONDS = 2.0  # what measuring may take, about
_SHORT_PROMPT = 4
_FEW_TOKENS = 2
_MOST_TOKENS = 18
_SOME_ROWS = 8  # tried beside one and all
_PROMPT_FACTOR = 4  # between the numbers of prompts
_PROMPT_LENGTH = 256
_MOST_PROMPTS = 16
_MORE_RUNS = 4
_MOST_READING_ROWS = 64
_READING_RUNS = 7  # of the prompts that are read: five, and what writing some tokens adds


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of the parts of a step, as they were measured."""

    prompt_seconds: float  # of a prompt token
    row_seconds: float  # of taking a row in and handing its result out
    # Of a step in which so many rows write one token each; between and beyond them it is a straight line.
    decode_rows: tuple[int, ...]
    decode_seconds: tuple[float, ...]
    context_seconds: float  # of a token in the cache that a row reads when it writes one

    def step_seconds(self, rows: FloatArray) -> FloatArray:
        """[any] Seconds of steps with so many decoding rows."""
        known, seconds = self.decode_rows, self.decode_seconds
        inside = np.interp(rows, known, seconds)
        if len(known) < 2:
            return np.asarray(inside * np.maximum(rows / known[0], 1.0))
        slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
        return np.asarray(inside + np.maximum(slope, 0.0) * np.maximum(rows - known[-1], 0))


def measure(run: Run, facts: EngineFacts) -> Speed:
    """Time an engine that does nothing else. Takes about two seconds, and a small part of the pool."""
    watch = _Watch(run, facts.max_sequence_tokens)
    room = facts.max_total_num_tokens // 4
    most_rows = max(1, min(facts.max_running_requests, room // (_SHORT_PROMPT + _MOST_TOKENS)))
    watch.time(1, _SHORT_PROMPT, _FEW_TOKENS)  # what is new the first time is not measured
    found = {1: watch.decode(1)}
    for rows in sorted({min(_SOME_ROWS, most_rows), most_rows} - {1}, reverse=True):
        # All rows at once say most. Where one is slow already, fewer have to do.
        is_quick = found[1][1] * rows**0.5 * _MOST_TOKENS < 2 * _SECONDS
        if is_quick or (len(found) == 1 and rows == _SOME_ROWS):
            found[rows] = watch.decode(rows)
    rows_tried = sorted(found)
    steps = np.maximum.accumulate([found[rows][1] for rows in rows_tried]).tolist()
    speed = Speed(0.0, 0.0, tuple(rows_tried), tuple(steps), 0.0)
    prompt_seconds, context_seconds = watch.prompts(facts, most_rows, room, speed)
    most = rows_tried[-1]
    admitted = (found[most][0] - found[1][0]) / max(1, most - 1) - _SHORT_PROMPT * prompt_seconds
    return dataclasses.replace(
        speed,
        prompt_seconds=prompt_seconds,
        row_seconds=max(0.0, admitted),
        context_seconds=context_seconds,
    )


class _Watch:
    """Times batches, and knows how much time is left for more."""

    def __init__(self, run: Run, longest: int) -> None:
        """`longest`: tokens that a sequence may have; batches of longer ones have less."""
        self._run = run
        self._longest = longest
        self._began = time.perf_counter()

    def has_time_for(self, seconds: float) -> bool:
        """Whether so much more fits into all the time."""
        return time.perf_counter() - self._began + seconds < _SECONDS

    def time(self, rows: int, prompt: int, new: int) -> float:
        """Seconds of one batch."""
        prompt = min(prompt, max(1, self._longest - new))
        began = time.perf_counter()
        self._run(rows, prompt, min(new, self._longest - prompt))
        return time.perf_counter() - began

    def best(self, rows: int, prompt: int, new: int) -> float:
        """Seconds of a batch, the better of two if there is time: whatever disturbs only adds."""
        first = self.time(rows, prompt, new)
        return min(first, self.time(rows, prompt, new)) if self.has_time_for(2 * first) else first

    def decode(self, rows: int) -> tuple[float, float]:
        """Seconds of all but the steps that decode, and of one of those: many tokens take more than few."""
        few = self.best(rows, _SHORT_PROMPT, _FEW_TOKENS)
        more = int(np.clip(0.1 * _FEW_TOKENS / max(few, 1e-6), 6, _MOST_TOKENS - _FEW_TOKENS))
        many = self.best(rows, _SHORT_PROMPT, _FEW_TOKENS + more)
        step = max((many - few) / more, 1e-6)
        return max(0.0, few - (_FEW_TOKENS - 1) * step), step

    def prompts(self, facts: EngineFacts, most_rows: int, room: int, speed: Speed) -> tuple[float, float]:
        """Seconds of a prompt token, and of a cached token that is read, from long prompts.

        As many as fill a step, if there is time: small steps do not show how fast large ones are.
        """
        length = max(_SHORT_PROMPT + 1, min(_PROMPT_LENGTH, facts.max_sequence_tokens // 2, room))
        most = min(_MOST_PROMPTS, most_rows, room // length, max(1, facts.max_step_tokens // length))
        count, seconds = 1, self.best(1, length, 1)
        while count < most and self.has_time_for(2 * _PROMPT_FACTOR * seconds):
            count = min(count * _PROMPT_FACTOR, most)
            seconds = self.best(count, length, 1)
        if self.has_time_for(_MORE_RUNS * 2 * seconds):  # a step that comes often is launched at once
            seconds = min(seconds, *(self.time(count, length, 1) for _ in range(_MORE_RUNS)))
        prompt_seconds = seconds / (count * length)
        return prompt_seconds, self._reading(facts, most_rows, room, speed, prompt_seconds)

    def _reading(
        self, facts: EngineFacts, most_rows: int, room: int, speed: Speed, prompt_seconds: float
    ) -> float:
        """Seconds of a cached token that is read; 0 if there is no time to find out.

        A token is read in some nanoseconds, and what a step takes varies by more than a few thousand of them:
        the prompts are as many and as long as there is time for.
        """
        left = _SECONDS - (time.perf_counter() - self._began)
        num_tokens = min(room // 4, int(left / (_READING_RUNS * prompt_seconds)))
        rows = max(1, min(most_rows, num_tokens // _PROMPT_LENGTH, _MOST_READING_ROWS))
        length = min(num_tokens // rows, facts.max_sequence_tokens - _MOST_TOKENS)
        if length <= _SHORT_PROMPT:
            return 0.0
        new = _MOST_TOKENS - _FEW_TOKENS
        # What is new, a step to be captured for one, can come in any of them; the best has none of it.
        written = self.time(rows, length, 1 + new)
        begun = min(self.time(rows, length, 1) for _ in range(2))
        written = min(written, *(self.time(rows, length, 1 + new) for _ in range(2)))
        step = (written - begun) / new
        reading = step - float(speed.step_seconds(np.array([rows]))[0])
        return max(0.0, reading / (rows * length))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What running requests will take."""

    seconds: float
    peak_rows: int  # that run at once at most
    peak_tokens: int  # in the pool at most; what is only remembered is not counted


def forecast(
    speed: Speed, facts: EngineFacts, *, prompts: LongArray, cached: LongArray, outputs: LongArray
) -> Forecast:
    """Play through the steps of requests in this order: their prompt, cached and new tokens, [requests]."""
    if not len(prompts):
        return Forecast(0.0, 0, 0)
    computed, steps = prompts - cached, np.maximum(outputs - 1, 0)
    num_rows = _rows_that_fit(facts, computed, steps)
    starts, ends = _play(computed, steps, num_rows, facts.max_step_tokens)
    times, [rows] = _running(starts, ends, np.ones_like(steps)[None])
    decoding = float(np.sum(np.diff(times) * np.where(rows[:-1] > 0, speed.step_seconds(rows[:-1]), 0.0)))
    read = float(np.sum(steps * (prompts + steps / 2)))
    seconds = (
        decoding
        + speed.prompt_seconds * float(computed.sum())
        + speed.row_seconds * len(prompts)
        + speed.context_seconds * read
    )
    if not steps.all():  # a row without steps that decode is there for the one of its prompt, too
        starts, ends = _play(computed, np.maximum(steps, 1), num_rows, facts.max_step_tokens)
    grows = (steps > 0).astype(np.int64)
    # A row holds what was computed of its prompt, and one token more with every step that decodes.
    amounts = np.stack([np.ones_like(steps), grows, computed - grows * starts])
    times, [rows, growing, begun] = _running(starts, ends, amounts)
    held = begun + growing * times
    grown = held[:-1] + growing[:-1] * np.diff(times)  # at the end of each stretch
    peak = min(facts.max_total_num_tokens, int(max(grown.max(initial=0), held.max(initial=0))))
    return Forecast(seconds, int(rows.max(initial=0)), max(peak, int(computed.max())))


def _running(starts: LongArray, ends: LongArray, amounts: LongArray) -> tuple[LongArray, LongArray]:
    """When requests start or end, and from then on the sums of amounts [amounts, requests] of what runs."""
    times = np.concatenate([ends, starts])
    order = np.argsort(times, kind="stable")  # who ends makes room first
    return times[order], np.cumsum(np.concatenate([-amounts, amounts], axis=1)[:, order], axis=1)


def _rows_that_fit(facts: EngineFacts, computed: LongArray, steps: LongArray) -> int:
    """How many rows run at once: as many as are allowed, or as the pool holds of rows of their mean size."""
    weights = steps + 1.0
    size = float(np.sum(weights * (computed + steps / 2)) / np.sum(weights)) + facts.page_size / 2
    return max(1, min(facts.max_running_requests, int(facts.max_total_num_tokens / size)))


def _play(
    computed: LongArray, steps: LongArray, num_rows: int, max_step_tokens: int
) -> tuple[LongArray, LongArray]:
    """The step in which each request starts to decode, and the one in which it ends.

    It starts when a row is free, and when the prompts before it have been computed.
    """
    mean_rows = min(num_rows, len(steps))
    budget = max(1, max_step_tokens - mean_rows)
    earliest = (np.cumsum(computed) // budget).tolist()
    free = [0] * num_rows
    starts = []
    for needed, length in zip(earliest, steps.tolist(), strict=True):
        start = max(free[0], needed)
        starts.append(start)
        heapq.heapreplace(free, start + length)
    started = np.array(starts, dtype=np.int64)
    return started, started + steps
