"""Figures of an engine for Prometheus, in a registry of its own; fed by the frontend, read as text.

The library prometheus_client comes with the extra `metrics`, and is imported only by an engine that wants
figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import InvalidArgument

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0)
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
_GAUGES = {
    "running": ("num_running_requests", "Requests that hold a row of the batch"),
    "waiting": ("num_waiting_requests", "Requests in the queue"),
    "used_tokens": ("num_used_tokens", "Tokens of the key/value pool that running requests hold"),
    "cached_tokens": ("num_cached_tokens", "Tokens of the key/value pool kept for prefixes to come"),
    "last_gen_throughput": ("gen_throughput", "Tokens generated per second, over the last steps with work"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What is told of a request that ended. Times are seconds; None: it did not come to that."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    aborted: bool
    queue_time: float | None
    time_to_first_token: float | None
    time_between_tokens: float | None  # the mean of the request
    latency: float


class Metrics:
    """Counters, gauges and histograms of one engine. Every method may be called from any thread."""

    def __init__(self, model_name: str) -> None:
        """Raises `InvalidArgument` where prometheus_client is not installed."""
        try:
            import prometheus_client
        except ImportError as error:
            raise InvalidArgument(
                "enable_metrics=True needs prometheus_client; install the extra: "
                "pip install 'tokenmill[metrics]'"
            ) from error
        self._library = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        self._model_name = model_name
        self._requests = self._counter("num_requests", "Requests that ended")
        self._aborted = self._counter("num_aborted_requests", "Requests that ended before they were complete")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._cached = self._counter("cached_tokens", "Tokens of prompts that the prefix cache had")
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._queue = self._histogram("queue_time_seconds", "Time until the first step of a request")
        self._first = self._histogram("time_to_first_token_seconds", "Time until a request's first token")
        self._between = self._histogram(
            "inter_token_latency_seconds", "Mean time between two tokens of a request", _SHORT_SECONDS
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "Time until the end of a request")
        self._gauges = {key: self._gauge(name, help) for key, (name, help) in _GAUGES.items()}

    def finished(self, facts: Finished) -> None:
        """Count a request that ended."""
        self._requests.inc()
        if facts.aborted:
            self._aborted.inc()
        self._prompt.inc(facts.prompt_tokens)
        self._cached.inc(facts.cached_tokens)
        self._generated.inc(facts.generated_tokens)
        self._latency.observe(facts.latency)
        for histogram, seconds in (
            (self._queue, facts.queue_time),
            (self._first, facts.time_to_first_token),
            (self._between, facts.time_between_tokens),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def text(self, state: Mapping[str, float]) -> str:
        """All figures in Prometheus' text format; `state` has those of the moment (keys of `_GAUGES`)."""
        for key, gauge in self._gauges.items():
            gauge.set(state[key])
        return self._library.generate_latest(self._registry).decode()

    def _counter(self, name: str, help: str) -> Any:
        return self._library.Counter(*self._named(name, help), registry=self._registry).labels(
            self._model_name
        )

    def _gauge(self, name: str, help: str) -> Any:
        return self._library.Gauge(*self._named(name, help), registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...] = _SECONDS) -> Any:
        histogram = self._library.Histogram(
            *self._named(name, help), registry=self._registry, buckets=buckets
        )
        return histogram.labels(self._model_name)

    def _named(self, name: str, help: str) -> tuple[str, str, list[str]]:
        return f"tokenmill:{name}", help, ["model_name"]
