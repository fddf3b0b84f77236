"""Result dicts in SGLang's shape: what came back of a request, and the dicts and chunks made of it.

Owns the state of one request on its way back and the keys of results. Who waits for them is the client's
matter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

from tokenmill.errors import RowError
from tokenmill.frontend.detokenizer import TextStream, without_stop_token
from tokenmill.frontend.insight import PROMPT_LOGPROBS, HiddenStatesFormat, Shown, ShownPiece, TokenText
from tokenmill.frontend.turns import Turns
from tokenmill.frozen import lightly_frozen
from tokenmill.messages import Finish, Output, Request, RequestTimes

ABORTED = 499  # as web servers note that a client has gone


class ResultList(list[dict[str, Any]]):
    """Results in input order; `results["text"]` is the column of that key, a list in the same order."""

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice, /) -> ResultList: ...
    @overload
    def __getitem__(self, key: str, /) -> list[Any]: ...
    def __getitem__(self, key: SupportsIndex | slice | str, /) -> dict[str, Any] | ResultList | list[Any]:
        if isinstance(key, str):
            return [result[key] for result in self]
        if isinstance(key, slice):
            return ResultList(super().__getitem__(key))
        return super().__getitem__(key)


@dataclass(frozen=True, slots=True)
class FlushResult:
    """Answer of `flush_cache`; true when the cache was emptied."""

    success: bool
    message: str

    def __bool__(self) -> bool:
        return self.success


@lightly_frozen()
class Arrival:
    """An Output and the time (seconds, `time.perf_counter`) it came out of the core."""

    output: Output
    seconds: float
    weight_version: str | None = None  # of the weights in use then; None: it did not come from the core


@lightly_frozen()
class Piece:
    """What one Output added to a request."""

    text: str
    token_ids: list[int]
    shown: ShownPiece


class Row:
    """One request on its way back; only the thread that waits for it may touch it.

    Without `text` nothing is detokenized on the way; the text is made at the end, or never.
    """

    def __init__(self, request: Request, *, name: str, index: int, text: TextStream | None) -> None:
        self.request = request
        self.name = name  # under which the core knows it
        self.index = index
        self.token_ids: list[int] = []
        self.finish: Finish | None = None
        self.cached_tokens = 0
        self.num_retractions = 0
        self.latency_seconds = 0.0
        self.has_text = text is not None
        self.shown = Shown(request)
        self._text = text
        self._text_parts: list[str] = []
        self.times: RequestTimes | None = None  # in the core, once something came back
        self.weight_version: str | None = None  # when the core last said something
        self.submitted_seconds = time.perf_counter()

    def to_core(self) -> Request:
        """The request as the core gets it, under the name by which it knows the row."""
        return self.request.copy(id=self.name, seed=self.request.seed)

    def take(self, arrival: Arrival) -> Piece:
        """Take an Output in; `finish` is set if it was the last, or completed a stop string."""
        output = arrival.output
        text, count, self.finish = (
            ("", len(output.token_ids), output.finish)
            if self._text is None
            else self._text.push(output.token_ids, output.finish)
        )
        shown = self.shown.take(
            output.insight,
            num_arrived=len(output.token_ids),
            num_kept=count,
            is_last=self.finish is not None,
        )
        piece = Piece(text, list(output.token_ids[:count]), shown)
        self.token_ids += piece.token_ids
        self._text_parts.append(text)
        self.cached_tokens = output.cached_tokens
        self.num_retractions = output.num_retractions
        self.times = output.times or self.times
        if arrival.weight_version is not None:
            self.weight_version = arrival.weight_version
        self.latency_seconds = arrival.seconds - self.submitted_seconds
        return piece

    @property
    def shows_more(self) -> bool:
        """Whether the result tells more than tokens."""
        return self.request.logprobs is not None or self.request.hidden_states is not None

    def shown_in(self, piece: ShownPiece, token_ids: list[int], shape: Shape) -> dict[str, Any]:
        """The keys of `meta_info` for what came with these tokens."""
        has_prompt = len(token_ids) == len(self.token_ids)
        return self.shown.meta_info(
            piece,
            token_ids=token_ids,
            has_prompt=has_prompt,
            token_text=shape.token_text,
            hidden_states_format=shape.hidden_states_format,
        )

    @property
    def text(self) -> str:
        """All text so far."""
        self._text_parts = ["".join(self._text_parts)]
        return self._text_parts[0]

    @property
    def ids_with_text(self) -> Sequence[int]:
        """The tokens that the text of the finished request is made of."""
        if self.request.params.no_stop_trim:
            return self.token_ids
        return without_stop_token(self.token_ids, self.finish)


@lightly_frozen(kw_only=True)
class Shape:
    """How the dicts of one call look."""

    single: bool  # one dict; otherwise a list, and chunks say to which result they belong
    has_text: bool  # False without a tokenizer
    cumulative: bool  # chunks repeat everything so far instead of what is new
    weight_version: str  # of rows of which the core said nothing
    has_timings: bool = False  # results say when what happened
    token_text: TokenText | None = None  # the text of one token; None without a tokenizer
    hidden_states_format: HiddenStatesFormat = "list"
    has_errors: bool = False  # results have the key `error`


def make_shown(rows: list[Row], shape: Shape, turns: Turns) -> None:
    """Make of what rows were shown so far what their results will say, giving way to the core's thread.

    The list is used up. Asked for while requests still run, the last result of many need not wait for the
    work of all.
    """
    while rows:
        row = rows.pop()
        row.shown.make_entries(
            row.token_ids,
            shape.token_text,
            is_last=row.finish is not None,
            hidden_states_format=shape.hidden_states_format,
        )
        turns.give_way()


def results_of(rows: Sequence[Row], made: Sequence[dict[str, Any]]) -> ResultList:
    """What a finished call gives, from what `result_of` made of each row."""
    results = ResultList(made)
    if rows and (num_samples := rows[0].request.params.n) > 1:
        _share_prompt_logprobs(results, num_samples=num_samples)
    return results


def result_of(row: Row, text: str, shape: Shape) -> dict[str, Any]:
    """The dict of a finished request, after `make_shown` of it; `text` is its whole text."""
    return _dict(row, text, list(row.token_ids), row.shown.all_meta_info(), shape)


def chunk_of(row: Row, piece: Piece, shape: Shape) -> dict[str, Any]:
    """The next chunk of a stream; it shares nothing with the row or with other chunks."""
    if shape.cumulative:
        shown = row.shown_in(row.shown.all(), row.token_ids, shape)
        chunk = _dict(row, row.text, list(row.token_ids), shown, shape)
    else:
        shown = row.shown_in(piece.shown, piece.token_ids, shape)
        chunk = _dict(row, piece.text, piece.token_ids, shown, shape)
    return chunk if shape.single else {**chunk, "index": row.index}


def _share_prompt_logprobs(results: ResultList, *, num_samples: int) -> None:
    """Give the log-probabilities of a prompt to all its samples; only the first asked the core for them."""
    for index, result in enumerate(results):
        first = results[index - index % num_samples]["meta_info"]
        if result["meta_info"] is not first:
            shared = {key: list(value) for key, value in first.items() if key in PROMPT_LOGPROBS}
            result["meta_info"].update(shared)


def _dict(row: Row, text: str, token_ids: list[int], shown: dict[str, Any], shape: Shape) -> dict[str, Any]:
    result: dict[str, Any] = {"output_ids": token_ids, "meta_info": _meta_info(row, shape) | shown}
    if shape.has_errors:
        result["error"] = None if row.finish is None else error_of(row.finish)
    return {"text": text, **result} if shape.has_text else result


def _meta_info(row: Row, shape: Shape) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "id": row.request.id,
        "finish_reason": None if row.finish is None else finish_reason(row.finish),
        "prompt_tokens": len(row.request.prompt_ids),
        "completion_tokens": len(row.token_ids),
        "cached_tokens": row.cached_tokens,
        "cached_tokens_details": {"device": row.cached_tokens, "host": 0} if row.cached_tokens else None,
        "reasoning_tokens": 0,
        "weight_version": shape.weight_version if row.weight_version is None else row.weight_version,
        "num_retractions": row.num_retractions,
        "response_sent_to_client_ts": time.time(),
        "dp_rank": None,
    }
    if row.finish is not None:
        facts["e2e_latency"] = row.latency_seconds
        if shape.has_timings:
            facts |= timings(row, row.latency_seconds)
    return facts


def timings(row: Row, latency_seconds: float) -> dict[str, float | None]:
    """When what happened to a finished request: points in time in epoch seconds, durations in seconds.

    None where it did not come to that: the request was aborted before, or asked for no token.
    """
    epoch = time.time() - time.perf_counter()
    received, finished = row.submitted_seconds, row.submitted_seconds + latency_seconds
    times = row.times or RequestTimes(received, None, None)
    admitted, first = times.admitted, times.first_token
    num_more = len(row.token_ids) - 1
    decoding = None if first is None else finished - first
    return {
        "request_received_ts": epoch + received,
        "api_server_dispatch_finish_ts": epoch + times.submitted,
        "queue_time": None if admitted is None else admitted - times.submitted,
        "forward_entry_time": None if admitted is None else epoch + admitted,
        "prefill_finished_time": None if first is None else epoch + first,
        "first_token_latency": None if first is None else first - received,
        "request_finished_ts": epoch + finished,
        "decode_throughput": num_more / decoding if num_more > 0 and decoding else None,
    }


def finish_reason(finish: Finish) -> dict[str, Any]:
    """Why a request ended, as results say it."""
    match finish.kind:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": finish.length}
        case "repetition":
            return {"type": "repetition", "period": finish.period, "count": finish.count}
        case "abort":
            return {
                "type": "abort",
                "message": finish.message,
                "status_code": finish.status_code,
                "err_type": finish.error_type,
            }


def error_of(finish: Finish) -> RowError | None:
    """What went wrong with a request that ended so; None if it has its result."""
    if finish.kind != "abort":
        return None
    return RowError(
        type=finish.error_type or "aborted",
        message=finish.message or "the request was aborted",
        status_code=finish.status_code or ABORTED,
    )
