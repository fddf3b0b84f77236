"""Who watches requests come and go: figures for Prometheus, and a log line for each. Nobody, by default."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill import logs
from tokenmill.config import EngineConfig
from tokenmill.frontend.outputs import Row, finish_reason, timings
from tokenmill.metrics import Finished, Metrics
from tokenmill.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.frontend.tokenizer import Tokenizer

# Levels of `log_requests_level`: each shows what the ones before it show.
PARAMETERS, SHORT_CONTENT, FULL_CONTENT = 1, 2, 3
_MOST_CHARACTERS = 2048
_MOST_IDS = 256


class Observer(Protocol):
    """Told of each request, by the thread that submits it or waits for it."""

    def received(self, row: Row) -> None: ...
    def finished(self, row: Row) -> None: ...


class Observers:
    """Those that the configuration asks for, told by one thread at a time.

    The garbage collector may give requests up, in the middle of whatever a thread does here: that thread
    tells of them when it is done.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._lock = threading.Lock()
        self._given_up: deque[Row] = deque()

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
            with self.alone():
                for row in rows:
                    for observer in self._observers:
                        observer.received(row)

    def finished(self, row: Row) -> None:
        """A request ended."""
        if self._observers:
            with self.alone():
                self._tell_end(row)

    def given_up(self, rows: Iterable[Row]) -> None:
        """Requests ended because nobody waits for them any more. Waits for no lock."""
        if self._observers:
            self._given_up.extend(rows)
            self._tell_of_given_up()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which nobody is told anything, such as one that reads the figures."""
        with self._lock:
            yield
        self._tell_of_given_up()

    def _tell_of_given_up(self) -> None:
        while self._given_up and self._lock.acquire(blocking=False):
            try:
                while self._given_up:
                    self._tell_end(self._given_up.popleft())
            finally:
                self._lock.release()

    def _tell_end(self, row: Row) -> None:
        for observer in self._observers:
            observer.finished(row)


class _Figures:
    """Feeds the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def received(self, row: Row) -> None:
        """Only what ended is counted."""

    def finished(self, row: Row) -> None:
        """Count it."""
        assert row.finish is not None
        times = timings(row)
        throughput = times["decode_throughput"]
        self._metrics.finished(
            Finished(
                prompt_tokens=len(row.request.prompt_ids),
                cached_tokens=row.cached_tokens,
                generated_tokens=len(row.token_ids),
                aborted=row.finish.kind == "abort",
                queue_time=times["queue_time"],
                time_to_first_token=times["first_token_latency"],
                time_between_tokens=1 / throughput if throughput else None,
                latency=row.latency_seconds,
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

    def finished(self, row: Row) -> None:
        """Say how it ended."""
        assert row.finish is not None
        facts: dict[str, Any] = {
            "rid": row.request.id,
            "finish_reason": finish_reason(row.finish),
            "completion_tokens": len(row.token_ids),
            "cached_tokens": row.cached_tokens,
            "e2e_latency": round(row.latency_seconds, 4),
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
