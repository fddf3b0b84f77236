"""What a pile of requests will take, told before it runs: tokens, cache hits, time and memory.

Owns `Plan` and how it comes about. How fast the engine is, is the matter of `speed.py`; what prompts share,
that of `prefixes.py`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument, reading
from tokenmill.frontend.client import Client
from tokenmill.frontend.failures import Faults
from tokenmill.frontend.inputs import InputReader, Job
from tokenmill.frontend.prefixes import cached_tokens
from tokenmill.frontend.prompts import Prompts, read_prompts
from tokenmill.frontend.speed import Speed, forecast, measure
from tokenmill.messages import EngineFacts, LongArray, Request
from tokenmill.queue_order import (
    LENGTH_WINDOW,
    PREFIX_WINDOW,
    along_prefixes,
    by_length,
    can_run_at_once,
    short_tail_window,
)
from tokenmill.sampling_params import SamplingParams, check_real

# Of a longer pile so many rows are looked at, in runs of neighbours, because neighbours share prefixes.
SAMPLE_ROWS = 8192
SAMPLE_RUN = 512
_WINDOWS = {"lpm": PREFIX_WINDOW, "lof": LENGTH_WINDOW}
_MOST_PLAYED = 200_000  # requests whose steps are played through


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a pile of rows will take. All token counts are of all rows, and of all samples of each."""

    rows: int
    requests: int  # a row with `n` samples is `n` of them
    invalid_rows: int  # that cannot run
    duplicate_rows: int  # that share the result of a row like them, and need no requests
    sampled_rows: int | None  # rows that were looked at to guess the rest; None: all were
    prompt_tokens: int
    cached_tokens: int  # of the prompt tokens, those that the prefix cache will serve
    max_output_tokens: int  # what the rows may generate
    output_tokens: int  # what they are expected to generate
    seconds: float
    running_rows: int  # at once, at most
    peak_tokens: int  # in the key/value pool at once, at most
    pool_tokens: int  # that the key/value pool holds
    cache_bytes: int  # of the pool
    weight_bytes: int
    speed: Speed  # as it was measured

    @property
    def cached_share(self) -> float:
        """The share of the prompt tokens that the prefix cache will serve."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and `cached_share`, as plain JSON."""
        return {**dataclasses.asdict(self), "cached_share": self.cached_share}

    def __str__(self) -> str:
        guessed = "" if self.sampled_rows is None else f" (guessed from {self.sampled_rows:,} of them)"
        without = [(self.invalid_rows, "cannot run"), (self.duplicate_rows, "are like others")]
        apart = "".join(f", {count:,} of them {what}" for count, what in without if count)
        is_bound = self.output_tokens == self.max_output_tokens
        limit = "if none ends early" if is_bound else f"of at most {self.max_output_tokens:,}"
        return "\n".join(
            [
                f"rows           {self.rows:,}{apart}{guessed}",
                f"prompt tokens  {self.prompt_tokens:,}, {self.cached_share:.0%} of them from the cache",
                f"output tokens  {self.output_tokens:,}, {limit}",
                f"time           {_spoken(self.seconds)}, with up to {self.running_rows:,} rows at once",
                f"memory         {self.peak_tokens:,} of {self.pool_tokens:,} tokens in the pool of "
                f"{self.cache_bytes / 2**30:.2f} GiB, beside {self.weight_bytes / 2**30:.2f} GiB of weights",
            ]
        )


class Planner:
    """Plans for one engine. May be used from any thread."""

    def __init__(self, config: EngineConfig, client: Client, reader: InputReader) -> None:
        """`reader` should be one of its own, so that planning draws no seed that a request would draw."""
        self._config = config
        self._client = client
        self._reader = reader
        self._speed: Speed | None = None
        self._lock = threading.Lock()

    def plan(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        mean_output_tokens: Any = None,
        **options: Any,
    ) -> Plan:
        """See `Engine.plan`. Of more than 8,192 rows a sample is looked at."""
        if options.get("session_params") is not None:
            raise InvalidArgument(
                "session_params: a plan knows no sessions; give it the whole conversation as the prompt"
            )
        faults = Faults.of(options)
        with reading("input_ids" if prompt is None else "prompt"):
            prompts = read_prompts(prompt, input_ids, "input_ids", faults)
        given = {**options, "sampling_params": sampling_params}
        chosen = _chosen(prompts, given)
        began = time.perf_counter()
        if chosen is None:
            job = self._reader.read(
                prompt, sampling_params, input_ids, options=options, faults=Faults.of(options)
            )
        else:
            job = self._read_sample(prompts, given, chosen, faults)
        num_read = len(prompts) if chosen is None else len(chosen)
        num_invalid = len(job.errors) * num_read // max(1, len(job.requests))
        return self.plan_requests(
            [request for index, request in enumerate(job.requests) if index not in job.errors],
            rows=len(prompts),
            invalid_rows=round(num_invalid * len(prompts) / max(1, num_read)),
            sampled_rows=None if chosen is None else num_read,
            mean_output_tokens=mean_output_tokens,
            reading_seconds=time.perf_counter() - began,
        )

    def _read_sample(
        self, prompts: Prompts, given: Mapping[str, Any], chosen: Sequence[int], faults: Faults
    ) -> Job:
        """As the reader reads all rows, of which `faults` are known."""
        options = {name: _picked(value, chosen, len(prompts)) for name, value in given.items()}
        places = {row: place for place, row in enumerate(chosen) if row in faults.found}
        return self._reader.read(
            [prompts.texts[row] for row in chosen] if prompts.texts else None,
            options.pop("sampling_params"),
            [prompts.id_rows[row] for row in chosen] if prompts.id_rows else None,
            options=options,
            faults=Faults(returned=faults.returned, found={places[row]: faults.found[row] for row in places}),
        )

    def plan_requests(
        self,
        requests: Sequence[Request],
        *,
        rows: int,
        invalid_rows: int = 0,
        duplicate_rows: int = 0,
        sampled_rows: int | None = None,
        mean_output_tokens: Any = None,
        reading_seconds: float = 0.0,
    ) -> Plan:
        """The plan for `rows` rows, of which these are the requests, or those of a sample of the rows.

        `invalid_rows` and `duplicate_rows` of all have no requests. `reading_seconds` is what reading these
        took.
        """
        if mean_output_tokens is not None:
            mean_output_tokens = check_real("mean_output_tokens", mean_output_tokens, minimum=0)
        facts, speed = self._client.facts, self.speed()
        ordered = _in_order(requests, self._config, facts)
        seen = self._columns(ordered, mean_output_tokens)
        count = round(len(ordered) * rows / sampled_rows) if sampled_rows else len(ordered)
        columns = _stretched(seen, min(count, max(_MOST_PLAYED, len(ordered))))
        scale = count / len(columns.prompts) if count else 1.0
        whole = forecast(
            speed, facts, prompts=columns.prompts, cached=columns.cached, outputs=columns.outputs
        )
        read = reading_seconds * (count / len(ordered) if ordered else 1.0)
        return Plan(
            rows=rows,
            requests=count,
            invalid_rows=invalid_rows,
            duplicate_rows=duplicate_rows,
            sampled_rows=sampled_rows,
            prompt_tokens=round(int(columns.prompts.sum()) * scale),
            cached_tokens=round(int(columns.cached.sum()) * scale),
            max_output_tokens=round(int(columns.bounds.sum()) * scale),
            output_tokens=round(int(columns.outputs.sum()) * scale),
            seconds=whole.seconds * scale + read,
            running_rows=whole.peak_rows,
            peak_tokens=whole.peak_tokens,
            pool_tokens=facts.max_total_num_tokens,
            cache_bytes=facts.cache_bytes,
            weight_bytes=facts.weight_bytes,
            speed=speed,
        )

    def speed(self) -> Speed:
        """How fast the engine is; measured once."""
        with self._lock:
            if self._speed is None:
                self._speed = measure(self._run, self._client.facts)
            return self._speed

    def _run(self, rows: int, prompt_tokens: int, new_tokens: int) -> None:
        """Run prompts that nobody else has, in a namespace that nobody else is in."""
        draw = np.random.default_rng()
        ids = draw.integers(self._client.facts.vocab_size, size=(rows, prompt_tokens), dtype=np.int32)
        # With a seed, none is drawn: those of later requests stay what they would have been.
        params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True, sampling_seed=0)
        salt = f"planning {draw.bytes(8).hex()}"
        job = self._reader.read(input_ids=list(ids), sampling_params=params, options={"cache_salt": salt})
        call = self._client.prepare(job, stream=False)
        call.is_watched = False
        self._client.run(call)

    def _columns(self, requests: Sequence[Request], mean_output_tokens: float | None) -> _Columns:
        facts = self._client.facts
        bounds = np.array([request.max_new_tokens for request in requests], dtype=np.int64)
        is_open = np.array([not request.params.ignore_eos for request in requests], dtype=np.bool_)
        outputs = bounds
        if mean_output_tokens is not None:
            fewest = np.array([request.params.min_new_tokens for request in requests], dtype=np.int64)
            usual = np.minimum(bounds, np.maximum(fewest, mean_output_tokens))
            # Whole numbers, each rounded so that their sum is right.
            whole = np.diff(np.rint(np.cumsum(usual)), prepend=0).astype(np.int64)
            outputs = np.where(is_open, whole, bounds)
        prompts = np.array([len(request.prompt_ids) for request in requests], dtype=np.int64)
        if self._config.disable_radix_cache:
            cached = np.zeros_like(prompts)
        else:
            cached = cached_tokens(
                requests, page_size=facts.page_size, pool_tokens=facts.max_total_num_tokens
            )
        return _Columns(prompts, cached, bounds, outputs)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Token counts of requests, in the order in which they will start; [requests] each."""

    prompts: LongArray
    cached: LongArray
    bounds: LongArray  # of new tokens
    outputs: LongArray  # new tokens that are expected


def sample_of(num_rows: int) -> list[int] | None:
    """Which rows of a long pile to look at: runs of neighbours, spread evenly. None: all of them."""
    if num_rows <= SAMPLE_ROWS:
        return None
    starts = np.linspace(0, num_rows - SAMPLE_RUN, SAMPLE_ROWS // SAMPLE_RUN, dtype=np.int64)
    return [row for start in starts.tolist() for row in range(start, start + SAMPLE_RUN)]


def _chosen(prompts: Prompts, given: Mapping[str, Any]) -> list[int] | None:
    """Which rows to look at; None: all of them, also where an argument may be for another number of rows.

    That is an error as a rule, and found before any row is tokenized.
    """
    count = len(prompts)
    is_odd = any(_is_odd(name, value, count) for name, value in given.items())
    return None if prompts.single or is_odd else sample_of(count)


def _is_odd(name: str, value: Any, count: int) -> bool:
    """Whether a value is neither one for all rows nor a list with one for each, as far as is easily seen."""
    has_ids = name == "token_ids_logprob"  # one list of ids for all, or a list for each, and arrays, too
    if isinstance(value, list | tuple):
        return len(value) != count and not (has_ids and all(isinstance(each, int) for each in value))
    return has_ids and value is not None


def _picked(value: Any, chosen: Sequence[int], count: int) -> Any:
    """The chosen items of a list with one for each row; anything else as it is."""
    is_for_rows = isinstance(value, list | tuple) and len(value) == count
    return [value[row] for row in chosen] if is_for_rows else value


def _in_order(requests: Sequence[Request], config: EngineConfig, facts: EngineFacts) -> list[Request]:
    """The requests in about the order in which the core will start them, as its policies have it."""
    policy, max_rows = config.schedule_policy, facts.max_running_requests
    if policy is None and not config.enable_priority_scheduling:
        window = short_tail_window(max_rows)
    elif policy in _WINDOWS:
        window = _WINDOWS[policy]
    else:
        return list(requests)

    def goes_by_length(waiting: Sequence[Request]) -> bool:
        if policy is not None:
            return policy == "lof"
        return config.disable_radix_cache or can_run_at_once(
            waiting,
            max_rows=max_rows,
            num_pages=facts.max_total_num_tokens // facts.page_size,
            page_size=facts.page_size,
        )

    ordered: list[Request] = []
    for first in range(0, len(requests), window):
        waiting = requests[first : first + window]
        if goes_by_length(waiting):
            places = by_length(waiting)
        else:
            places = along_prefixes(waiting, cached=[0] * len(waiting), page_size=facts.page_size)
        ordered += [waiting[place] for place in places]
    return ordered


def _stretched(seen: _Columns, count: int) -> _Columns:
    """Columns for `count` requests, of which these were seen: the others are like them.

    Prefixes that were met late are likely known by then, so the others find as much in the cache as the last
    quarter did.
    """
    num_seen = len(seen.prompts)
    if count <= num_seen:
        return seen
    late = slice(num_seen * 3 // 4, None)
    share = seen.cached[late].sum() / seen.prompts[late].sum()
    prompts, bounds, outputs = (np.resize(c, count) for c in (seen.prompts, seen.bounds, seen.outputs))
    cached = (prompts * share).astype(np.int64)
    cached[:num_seen] = seen.cached
    return _Columns(prompts, cached, bounds, outputs)


def _spoken(seconds: float) -> str:
    """A time for people: two digits, in the unit that fits."""
    for size, unit in ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"about {seconds / size:.2g} {unit}"
    return f"about {seconds:.2g} seconds"
