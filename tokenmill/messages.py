"""What travels through the two doors: frontend <-> core, and core <-> runner.

Everything here is plain data without torch, so that it can cross a thread or a process alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from operator import attrgetter
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenmill.frozen import lightly_frozen
from tokenmill.sampling_params import SamplingParams

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


# ── frontend <-> core ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Which log-probabilities a request wants, beside those of its output tokens."""

    prompt_start: int  # first prompt position of which one is wanted; the prompt's length: none
    num_top: int  # likeliest alternatives at each position
    token_ids: tuple[int, ...]  # ids scored at each position
    with_text: bool = False  # whether the caller wants to read the tokens; for the frontend


GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must follow: the text of a schema, pattern, grammar or tag."""

    kind: GrammarKind
    text: str


@lightly_frozen(eq=False)
class Request:
    """One sequence to complete, fully validated and resolved by the frontend."""

    id: str
    prompt_ids: IntArray
    params: SamplingParams
    # Resolved numbers; `params` keeps what the user wrote.
    max_new_tokens: int
    seed: int  # unsigned 64 bit
    stop_ids: tuple[int, ...]  # token ids that end the request
    # 0: one Output at the end. k > 0: an Output with the first token, then as soon as k unreported tokens
    # are there.
    report_interval: int
    priority: int | None = None  # as its caller wrote it; what it means is up to the engine's arguments
    timeout_seconds: float | None = None  # from submission; then the request is aborted
    cache_namespace: bytes = b""  # requests share prefixes with others of their namespace only
    logprobs: LogprobOptions | None = None
    hidden_states: Literal["last", "all"] | None = None
    grammar: Grammar | None = None
    # A logit processor: a callable (logits, parameters of each row) -> logits; the same object for requests
    # that share it (`logit_processors.py`). Must be picklable where the core runs in a process.
    processor: Any = None
    # Output tokens that were reported already, by a core that died: the request goes on behind them, and
    # nothing of its prompt is shown again.
    output_ids: tuple[int, ...] = ()
    # Token ids that cannot be drawn while fewer than `params.min_new_tokens` are out.
    held_ids: tuple[int, ...] = ()
    rid: str = ""  # what its caller calls it, for its logit processor; `id` may be another in the core

    @property
    def most_cached(self) -> int:
        """Most tokens of the prompt that may be cached: of the others something is shown or drawn."""
        if self.hidden_states == "all":
            return 0
        # A token's log-probability follows from the position before it.
        first = len(self.prompt_ids) if self.logprobs is None else self.logprobs.prompt_start
        return max(0, min(first, len(self.prompt_ids)) - 1)

    def copy(self, *, id: str, seed: int) -> Request:
        """The same with another id and seed; `dataclasses.replace` takes several times as long."""
        _, prompt_ids, params, max_new_tokens, _, *rest = _values(self)
        return Request(id, prompt_ids, params, max_new_tokens, seed, *rest)


_values = attrgetter(*(each.name for each in fields(Request)))


FinishKind = Literal["stop", "length", "repetition", "abort"]
CANCELLED = "The request was aborted by its caller."


@lightly_frozen()
class Finish:
    """Why a request ended: a token id or string matched, a length was reached, it went round in circles, or
    it was aborted.

    An abort with a `status_code` is a failure of the request itself: 400 for what its caller gave, 408 for a
    timeout, 500 for what broke inside, 503 for a full queue. Its `error_type` is a word of `errors.py`.
    """

    kind: FinishKind
    matched: int | str | None = None
    length: int | None = None
    period: int | None = None  # tokens of the cycle that was repeated,
    count: int | None = None  # and how often it stood there
    message: str | None = None
    status_code: int | None = None
    error_type: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Log-probabilities of N positions, as columns: of the token, of K alternatives, of I given ids."""

    token_N: FloatArray  # NaN where there is none: the first token of a prompt
    top_NK: FloatArray  # best first
    top_ids_NK: IntArray
    given_NI: FloatArray

    def at(self, places: slice | LongArray) -> Logprobs:
        """Some of the positions."""
        return Logprobs(
            self.token_N[places], self.top_NK[places], self.top_ids_NK[places], self.given_NI[places]
        )

    @classmethod
    def joined(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """The positions of several, at least one, all of the same widths."""
        return cls(
            np.concatenate([part.token_N for part in parts]),
            np.concatenate([part.top_NK for part in parts]),
            np.concatenate([part.top_ids_NK for part in parts]),
            np.concatenate([part.given_NI for part in parts]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Insight:
    """What a request asked to see of its computation, since its last Output."""

    prompt_logprobs: Logprobs | None = None  # of all wanted positions, once, with the first Output
    logprobs: Logprobs | None = None  # of the Output's tokens, or of `next_token`
    next_token: int | None = None  # drawn for what is shown of it only, where no token is wanted
    # [tokens, hidden]; the first Output's begin with the prompt's positions. Where only the last is wanted:
    # one with the last Output, or those of all tokens where the text may end the output at any of them.
    hidden_states: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request came to the core, entered its first step, and had its first token drawn.

    Seconds of `time.perf_counter`, which all processes of a machine share; None: it did not come to that.
    """

    submitted: float
    admitted: float | None
    first_token: float | None


@lightly_frozen()
class Output:
    """Tokens of one request since its last Output; the last one has `finish` set."""

    request_id: str
    token_ids: Sequence[int]
    finish: Finish | None
    cached_tokens: int
    num_retractions: int
    insight: Insight | None = None
    times: RequestTimes | None = None  # with the first Output of a request only


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the core found out at start: the resolved numbers that the frontend validates against."""

    architecture: str
    device: str
    device_name: str
    dtype: str
    attention_backend: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_parameters: int
    context_length: int
    # Longest sequence (prompt and output) that the page pool can hold: at most `context_length`.
    max_sequence_tokens: int
    max_total_num_tokens: int  # tokens in the page pool
    page_size: int
    max_running_requests: int
    max_step_tokens: int  # tokens computed in one step: the chunk size
    steps_in_flight: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    cache_bytes: int
    load_seconds: float
    has_lanes: bool = False  # whether prompts may be computed beside rows that decode; see `Lane`


# "none": it sleeps, or has an interpreter of its own; "soon": it waits for a step, or computes one itself;
# "now": a device waits for it.
Need = Literal["none", "soon", "now"]


# Called with the answer of a call, by the thread that delivers Outputs, between those before and after it.
AnswerSink = Callable[[Any], object]


class Core(Protocol):
    """The frontend's door to the core. Thread-safe; every method returns at once except `call`."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def need(self) -> Need:
        """How much a thread of the core needs this process's interpreter."""
        ...

    def submit(self, requests: Sequence[Request]) -> None: ...
    def cancel(self, request_ids: Sequence[str]) -> None: ...
    def call(self, name: str, *, answered: AnswerSink | None = None, **arguments: Any) -> Any: ...
    def close(self) -> None: ...


# Called from the core's thread with the Outputs of one step, or with the error that ended the loop.
Sink = Callable[[Sequence[Output]], None]
DeathSink = Callable[[BaseException], None]


# ── core <-> runner ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class RowExtras:
    """What a row needs beyond a draw from the distribution of its logits. Most rows need nothing of it."""

    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    prompt_ids: IntArray
    output_ids: IntArray  # drawn in earlier runs of the request
    penalize_prompt: bool  # whether the repetition penalty takes prompt tokens for output
    logprobs: LogprobOptions | None
    hidden_states: Literal["last", "all"] | None
    # Whether log-probabilities and hidden states of the prompt are still wanted, as the two say.
    reads_prompt: bool
    is_masked: bool  # whether it draws only when `sample` was given its mask
    processor: Any  # see `Request.processor`
    processor_params: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class RowStarts:
    """Columns for rows that a request enters in this step: `N` rows, written before anything else."""

    slots: IntArray  # [N] row of the persistent state
    prompt_lengths: IntArray  # [N] tokens that are not output, for `min_new_tokens`
    temperatures: FloatArray  # [N] 0 means greedy
    top_ks: IntArray  # [N] -1 means the whole vocabulary
    top_ps: FloatArray  # [N]
    min_ps: FloatArray  # [N]
    seeds: NDArray[np.uint64]  # [N]
    min_new_tokens: IntArray  # [N]
    held_ids: tuple[tuple[int, ...], ...]  # [N] ids masked while fewer than `min_new_tokens` are out
    extras: tuple[RowExtras | None, ...] = ()  # [N]; empty: no row has any


class Lane(Enum):
    """Which multiprocessors of a device compute a step.

    Steps of one lane run in the order of their launch. Prompts have those of `PROMPTS` for themselves, at the
    same time as steps of rows that decode run on those of `DECODES`; a step of `WHOLE` has all of them, and
    runs behind everything that was launched before.
    """

    WHOLE = "whole"
    DECODES = "decodes"
    PROMPTS = "prompts"


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step as columns of integers: `R` rows, `T` prompt tokens, `P` page-table entries.

    Rows that decode (one token, known only to the device) come first, then rows that prefill.
    A row is a persistent place on the device (`slot`); it holds last token, page table, parameters.
    """

    slots: IntArray  # [R]
    starts: IntArray  # [R] position of the first token computed in this step
    counts: IntArray  # [R] tokens computed in this step
    samples: BoolArray  # [R] whether the row draws a token at the end of this step
    num_decodes: int  # rows [0, num_decodes) read their token from the device
    token_ids: IntArray  # [T] ids of the other rows, one row after the other
    page_slots: IntArray  # [P] page-table entries written before the step: row,
    page_groups: IntArray  # [P] page group,
    page_columns: IntArray  # [P] position in the row's table,
    page_ids: IntArray  # [P] page
    new_rows: RowStarts | None = None
    lane: Lane = Lane.WHOLE
    awaits_prompts: bool = False  # in `Lane.DECODES`: it runs behind the prompts launched before, too


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """Which tokens M rows of a step may draw: bit i of word w stands for token 32 * w + i.

    Nobody may write to the bits until the step is collected: the device may read them in their place.
    """

    slots: IntArray  # [M]
    bits: IntArray  # [M, ceil(vocabulary / 32)]; tokens past the last word are not allowed


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a row gave no token and has to end; the last two as in `Finish`."""

    message: str
    error_type: str = "internal"
    status_code: int = 500


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one step produced, in the order of its plan's rows."""

    token_ids: IntArray  # [R] token drawn; below 0 where the row did not sample, or failed
    logprobs: Logprobs | None = None  # of the tokens drawn, [rows that sample]; None: no row wants them
    # (row, prompt position of the first, log-probabilities of the positions this step found out)
    prompt_logprobs: tuple[tuple[int, int, Logprobs], ...] = ()
    # (row, position of the first, final hidden states [tokens, hidden])
    hidden_states: tuple[tuple[int, int, FloatArray], ...] = ()
    failures: tuple[tuple[int, Failure], ...] = ()  # (row, what went wrong); its token is void
    # Rows that were not computed, because a row that failed left out keys and values that they read.
    postponed: tuple[int, ...] = ()
    # Pages of the first group that this step did not write although it should have. Whoever reads one of
    # them is to be computed anew; the rows that do so in steps already launched come back as postponed.
    lost_pages: tuple[int, ...] = ()


class Runner(Protocol):
    """The core's door to the mill. Steps come back from `collect` in the order of `launch`, those of
    `Lane.PROMPTS` apart from the others."""

    facts: EngineFacts

    @property
    def preparation_seconds(self) -> float:
        """What `prepare` could take; 0: there is nothing to prepare. Steps do not have to wait for it."""

    def rehearse(self) -> None:
        """Do that part of `prepare` for which the device may have to end all steps in flight."""

    def prepare(self) -> None:
        """Make later steps faster. The device needs steps to run meanwhile."""

    def put_off(self) -> None:
        """There is not to be a `prepare` now. What later steps would gain by is wanted again by these."""

    def prepare_more(self, num_rows: int) -> bool:
        """Make steps with up to so many rows faster before they come, while the host has nothing else to do,
        for some hundredths of a second at most. Whether it did, so that there may be more to do."""

    def launch(self, plan: StepPlan) -> None: ...
    def sample(self, masks: TokenMasks | None) -> None: ...
    def collect(self, lane: Lane = Lane.WHOLE) -> StepResult:
        """Wait for the oldest step of that lane; those of `WHOLE` and `DECODES` count as one."""

    def part(self, num_rows: int) -> bool:
        """Whether steps can be launched in lanes of their own now, with up to so many rows that decode; asked
        only if `facts.has_lanes`. What they lack may be there some time later, also by `prepare_more`."""

    def has_prompts(self) -> bool:
        """Whether the oldest step of `Lane.PROMPTS` is done; there must be one."""

    def call(self, name: str, **arguments: Any) -> Any: ...
    def close(self) -> None: ...
