"""Who watches requests come and go: figures for Prometheus, and a log line for each. Nobody, by default."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill import logs
from tokenmill.config import EngineConfig
from tokenmill.frontend.outputs import ABORTED, Row, finish_reason, timings
from tokenmill.frozen import lightly_frozen
from tokenmill.messages import Finish
from tokenmill.metrics import Finished, Metrics
from tokenmill.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.frontend.tokenizer import Tokenizer

# Levels of `log_requests_level`: each shows what the ones before it show.
PARAMETERS, SHORT_CONTENT, FULL_CONTENT = 1, 2, 3
_MOST_CHARACTERS = 2048
_MOST_IDS = 256


_GIVEN_UP = Finish(
    "abort", message="nobody waited for it any more", status_code=ABORTED, error_type="aborted"
)


@lightly_frozen()
class Ended:
    """A request that ended, how, and how long after it was submitted."""

    row: Row
    finish: Finish
    latency_seconds: float


class Observer(Protocol):
    """Told of each request, by any thread, but by one at a time."""

    def received(self, row: Row) -> None: ...
    def ended(self, ended: Ended) -> None: ...


class Observers:
    """Those that the configuration asks for. Each request that was received ends for them once.

    What happened is noted first, and told when nobody else is at it: whoever is told may hold a lock, and in
    the middle of that the same thread may run a signal's handler, or the garbage collector, which gives
    requests up.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._open: dict[str, Row] = {}  # received and not ended, by their names
        self._news: deque[Row | Ended] = deque()
        self._telling = threading.Lock()

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer | None, metrics: Metrics | None) -> Observers:
        """The observers of an engine with these arguments."""
        observers: list[Observer] = []
        if metrics is not None:
            observers.append(_Figures(metrics))
        if config.log_requests:
            observers.append(_RequestLog(config.log_requests_level, tokenizer))
        return cls(observers)

    def received(self, rows: Iterable[Row]) -> None:
        """Requests were submitted."""
        if self._observers:
            for row in rows:
                self._open[row.name] = row
                self._news.append(row)
            self.tell()

    def finished(self, row: Row) -> None:
        """A request has its result."""
        if self._observers:
            assert row.finish is not None
            self._end(row, row.finish, row.latency_seconds)
            self.tell()

    def given_up(self, rows: Iterable[Row]) -> None:
        """Nobody waits for these requests any more, which may have ended. Only notes it: see `tell`."""
        if self._observers:
            for row in rows:
                self._end(row, _GIVEN_UP, time.perf_counter() - row.submitted_seconds)

    def tell(self) -> None:
        """Tell what was noted, unless that is going on; then it is told there. Waits for nobody."""
        while self._news and self._telling.acquire(blocking=False):
            try:
                while self._news:
                    news = self._news.popleft()
                    for observer in self._observers:
                        if isinstance(news, Ended):
                            observer.ended(news)
                        else:
                            observer.received(news)
            finally:
                self._telling.release()

    def _end(self, row: Row, finish: Finish, latency_seconds: float) -> None:
        if self._open.pop(row.name, None) is not None:  # by one thread only
            self._news.append(Ended(row, finish, latency_seconds))


class _Figures:
    """Feeds the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def received(self, row: Row) -> None:
        """Only what ended is counted."""

    def ended(self, ended: Ended) -> None:
        """Count it."""
        row, times = ended.row, timings(ended.row, ended.latency_seconds)
        throughput = times["decode_throughput"]
        self._metrics.finished(
            Finished(
                prompt_tokens=len(row.request.prompt_ids),
                cached_tokens=row.cached_tokens,
                generated_tokens=len(row.token_ids),
                aborted=ended.finish.kind == "abort",
                queue_time=times["queue_time"],
                time_to_first_token=times["first_token_latency"],
                time_between_tokens=1 / throughput if throughput else None,
                latency=ended.latency_seconds,
            )
        )


class _RequestLog:
    """One line when a request is submitted and one when it ended, in the logger `tokenmill.requests`.

    That logger shows them whatever `log_level` is; where the program has set up no logging at all, on
    standard error.
    """

    def __init__(self, level: int, tokenizer: Tokenizer | None) -> None:
        self._level = level
        self._tokenizer = tokenizer
        self._log = logging.getLogger("tokenmill.requests")
        self._log.setLevel(logging.INFO)
        logs.show()

    def received(self, row: Row) -> None:
        """Say what was asked for."""
        request = row.request
        facts: dict[str, Any] = {"rid": request.id, "prompt_tokens": len(request.prompt_ids)}
        if self._level >= PARAMETERS:
            facts["sampling_params"] = _given(request.params)
        if self._level >= SHORT_CONTENT:
            facts["input_ids"] = self._ids(request.prompt_ids.tolist())
        self._say("received", facts)

    def ended(self, ended: Ended) -> None:
        """Say how it ended."""
        row = ended.row
        facts: dict[str, Any] = {
            "rid": row.request.id,
            "finish_reason": finish_reason(ended.finish),
            "completion_tokens": len(row.token_ids),
            "cached_tokens": row.cached_tokens,
            "e2e_latency": round(ended.latency_seconds, 4),
        }
        if self._level >= SHORT_CONTENT:
            facts["output_ids"] = self._ids(row.token_ids)
            facts["text"] = self._short(self._text(row))
        self._say("finished", facts)

    def _say(self, event: str, facts: dict[str, Any]) -> None:
        self._log.info("%s: %s", event, ", ".join(f"{name}={value!r}" for name, value in facts.items()))

    def _text(self, row: Row) -> str | None:
        if row.has_text or self._tokenizer is None:
            return row.text if row.has_text else None
        return self._tokenizer.texts([(row.request, row.ids_with_text)])[0]

    def _short(self, text: str | None) -> str | None:
        if text is None or self._level >= FULL_CONTENT or len(text) <= _MOST_CHARACTERS:
            return text
        return f"{text[:_MOST_CHARACTERS]}... ({len(text)} characters)"

    def _ids(self, ids: list[int]) -> list[Any]:
        if self._level >= FULL_CONTENT or len(ids) <= _MOST_IDS:
            return ids
        return [*ids[:_MOST_IDS], f"... ({len(ids)} ids)"]


def _given(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that differ from their defaults."""
    default = SamplingParams()
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}
