"""Tells how far a job is while it runs: a live line on a terminal, lines in the log elsewhere.

Owns when and how it is told; what is told comes from `figures.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from tokenmill.batch.figures import Figures, Snapshot
from tokenmill.frontend.progress import standard_error

_log = logging.getLogger("tokenmill.batch")

_QUIET_SECONDS = 2.0  # a job that ends sooner shows nothing
_LINE_SECONDS = 0.5  # between two looks
_PATIENCE_SECONDS = 5.0
_RATE_SECONDS = 15.0  # over which the rates shown are measured
_FIRST_LOG_SECONDS = 10.0
_USUAL_WIDTH = 80
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


class Progress:
    """Shows figures from a thread of its own, from the start of a `with` block to its end."""

    def __init__(
        self,
        figures: Figures,
        *,
        wanted: bool | None = None,
        stream: TextIO | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """`wanted` None: a live line on `stream` (standard error) if it is a terminal, else log lines.

        True: a live line in any case; False: nothing. `look` is called before each look at the figures; it
        may bring them up to date.
        """
        stream = stream or standard_error()
        self._figures = figures
        self._look = look
        self._recent: deque[Snapshot] = deque()
        self._show: _Line | _LogLines | None = None
        if stream is not None and (wanted or (wanted is None and stream.isatty())):
            self._show = _Line(stream)
        elif wanted is None:
            self._show = _LogLines()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokenmill-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        # A paused terminal, or an engine that does not answer, must not hold up the end of the job.
        self._thread.join(_PATIENCE_SECONDS)

    def _run(self) -> None:
        # A terminal that is gone is no reason to end a job.
        with contextlib.suppress(OSError, ValueError):
            while not self._ended.wait(_LINE_SECONDS):
                self._tick(is_last=False)
        with contextlib.suppress(OSError, ValueError):
            self._tick(is_last=True)

    def _tick(self, *, is_last: bool) -> None:
        if self._look is not None:
            self._look()
        now = self._figures.snapshot()
        self._recent.append(now)
        while len(self._recent) > 2 and now.seconds - self._recent[0].seconds > _RATE_SECONDS:
            self._recent.popleft()
        if self._show is None or now.seconds < _QUIET_SECONDS:
            return
        if is_last:
            self._show.last(parts_of(now, None))
        else:
            self._show.update(now, parts_of(now, self._recent[0]))


# ── the line ──────────────────────────────────────────────────────────────────────────────────


def parts_of(now: Snapshot, before: Snapshot | None) -> list[tuple[int, str]]:
    """What there is to say, in order, each with its rank: where room is short, the highest rank goes first.

    Rates are those between the two snapshots. Without `before` the job has ended, and they are its own.
    """
    seconds = now.seconds - (before.seconds if before else 0.0)
    prompt = now.prompt_tokens - (before.prompt_tokens if before else 0)
    output = now.output_tokens - (before.output_tokens if before else 0)
    total = "" if now.rows_total is None else f"/{now.rows_total:,}"
    parts = [(0, f"{now.rows_done:,}{total} rows")]
    if now.num_errors:
        parts.append((1, f"{now.num_errors:,} {'error' if now.num_errors == 1 else 'errors'}"))
    if seconds > 0:
        parts.append((4, f"in {short(prompt / seconds)}/s"))
        parts.append((3, f"out {short(output / seconds)}/s"))
    if now.prompt_tokens:
        parts.append((5, f"cached {now.cached_tokens / now.prompt_tokens:.0%}"))
    if before is None:
        parts.append((2, f"took {clock(now.seconds)}"))
    elif now.seconds_left is not None:
        parts.append((2, f"{clock(now.seconds_left)} left"))
    return parts


def fitted(parts: list[tuple[int, str]], width: int) -> str:
    """The parts as one line of at most `width` characters."""
    kept = list(parts)
    while len(line := "  ".join(text for _, text in kept)) > width and len(kept) > 1:
        kept.remove(max(kept))
    return line[: max(0, width)]


def short(number: float) -> str:
    """A number in a few characters: 950, 1.2k, 34k, 5.6M."""
    for size, unit in _UNITS:
        if number >= size * 0.9995:
            value = number / size
            return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """A time in hours, minutes and seconds: 0:07, 12:30, 3:05:00, or in days."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{seconds / 86_400:.1f} days"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# ── where it is shown ─────────────────────────────────────────────────────────────────────────


class _Line:
    """One line of a terminal, written again and again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._length = 0  # of what stands there

    def update(self, now: Snapshot, parts: list[tuple[int, str]]) -> None:
        del now
        self._write(parts, end="")

    def last(self, parts: list[tuple[int, str]]) -> None:
        """The line stays."""
        self._write(parts, end="\n")

    def _write(self, parts: list[tuple[int, str]], *, end: str) -> None:
        line = fitted(parts, _width_of(self._stream) - 1)  # in its last column a terminal may wrap
        self._stream.write(f"\r{line.ljust(self._length)}{end}")
        self._stream.flush()
        self._length = len(line)


def _width_of(stream: TextIO) -> int:
    """Columns of the terminal now; 80 where there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _USUAL_WIDTH
    except (OSError, ValueError):
        return _USUAL_WIDTH


class _LogLines:
    """Lines of the log: the first after ten seconds, then ever less often, down to one in ten minutes."""

    def __init__(self) -> None:
        self._due = _FIRST_LOG_SECONDS

    def update(self, now: Snapshot, parts: list[tuple[int, str]]) -> None:
        if now.seconds >= self._due:
            self._due = now.seconds + _pause_after(now.seconds)
            self._write("%s", parts)

    def last(self, parts: list[tuple[int, str]]) -> None:
        self._write("the job ended: %s", parts)

    def _write(self, text: str, parts: list[tuple[int, str]]) -> None:
        _log.info(text, ", ".join(part for _, part in parts))


def _pause_after(seconds: float) -> float:
    """Until the next line: as long as the job ran until now, at most a minute; in long jobs a twentieth."""
    return max(_FIRST_LOG_SECONDS, min(seconds, 60.0), min(seconds / 20, 600.0))
