"""Rows that fail alone: how their faults are found, what they are as plain data, what stands in their slots.

Owns the meaning of `on_error`. A fault that is not of one row alone is raised by whoever finds it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tokenmill.errors import (
    EngineClosed,
    Interrupted,
    InvalidArgument,
    RequestFailed,
    RowError,
    TokenmillError,
    reading,
    request_error,
    told,
)
from tokenmill.frontend.outputs import ABORTED, Arrival, ResultList, Row, Shape, error_of, result_of
from tokenmill.messages import Finish, Output, Request
from tokenmill.sampling_params import SamplingParams, show
from tokenmill.texts import plain_text

# Why a row has no result, or only the beginning of one, when its call was interrupted.
INTERRUPTED = RowError(type="aborted", message="the call was interrupted", status_code=ABORTED)
_UNAVAILABLE = 503
_TIMED_OUT = 408

logger = logging.getLogger("tokenmill")
Item = TypeVar("Item")
Value = TypeVar("Value")


def returns_errors(on_error: Any) -> bool:
    """Whether what fails is told in the results ("return") instead of raised ("raise")."""
    with reading("on_error"):
        word = plain_text(on_error) if isinstance(on_error, str) else ""
    if word not in ("return", "raise"):
        raise InvalidArgument(f"on_error must be one of 'return', 'raise', got {show(on_error)}")
    return word == "return"


class Faults:
    """What is wrong with single rows of a call, found while they are read. The first fault of a row counts.

    Unless faults are `returned`, the first of any row is raised. Reading goes on with a row at fault, with
    something in place of what could not be read, so that the rows behind it keep their seeds.
    """

    def __init__(self, *, returned: bool = False, found: Mapping[int, RowError] | None = None) -> None:
        self.returned = returned
        self.found: dict[int, RowError] = dict(found or {})

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Faults:
        """As the keyword `on_error` of a call asks for; without it they are raised."""
        on_error = options.get("on_error")
        return cls(returned=on_error is not None and returns_errors(on_error))

    def add(self, index: int, error: InvalidArgument) -> None:
        """Note a fault of a row, or raise it."""
        if not self.returned:
            raise error
        self.found.setdefault(index, row_error(error))

    def each(
        self, name: str, items: Sequence[Item], read: Callable[[int, Item], Value], default: Value
    ) -> list[Value]:
        """`read(index, item)` for the item of each row; `default` where it fails. `name` is the argument."""
        if not self.returned:
            return [read(index, item) for index, item in enumerate(items)]
        values = []
        guard = reading(name)
        for index, item in enumerate(items):
            try:
                with guard:
                    values.append(read(index, item))
            except InvalidArgument as error:
                self.add(index, error)
                values.append(default)
        return values

    def together(
        self, name: str, items: Sequence[Item], read: Callable[[list[Item]], Sequence[Value]], default: Value
    ) -> list[Value]:
        """As `each`, for what is read in one go; row by row only where that fails. Skips rows at fault."""
        sound = [item for index, item in enumerate(items) if index not in self.found]
        try:
            with reading(name):
                values = iter(read(sound) if sound else ())
        except InvalidArgument:
            if not self.returned:
                raise
            return self.each(
                name, items, lambda index, item: default if index in self.found else read([item])[0], default
            )
        return [default if index in self.found else next(values) for index in range(len(items))]


# The first fault of any row is raised: what a call gets that does not ask for anything else.
RAISED = Faults()


def row_error(error: BaseException) -> RowError:
    """An exception as plain data; what is not one of ours is `internal`."""
    message = str(error) if isinstance(error, TokenmillError) else told(error)
    if isinstance(error, InvalidArgument | RequestFailed):
        return RowError(type=error.error_type, message=message, status_code=error.status_code)
    if isinstance(error, EngineClosed):
        return RowError(type="aborted", message=message, status_code=_UNAVAILABLE)
    return RowError(type="internal", message=message, status_code=500)


def failure(row: Row, error: RowError) -> tuple[Row, Arrival]:
    """The end of a row that the frontend itself gives up, as if the core had sent it."""
    finish = Finish(
        "abort", message=error["message"], status_code=error["status_code"], error_type=error["type"]
    )
    output = Output(row.name, (), finish, row.cached_tokens, row.num_retractions)
    return row, Arrival(output, time.perf_counter())


def interrupted(rows: Sequence[Row], results: ResultList, *, returned: bool) -> ResultList:
    """What a call gives that was interrupted: all that is there, `returned` or with an `Interrupted`."""
    for row, result in zip(rows, results, strict=True):
        result["error"] = None if row.finish is None else error_of(row.finish)
    num_finished = sum(result["error"] is None for result in results)
    message = f"interrupted when {num_finished} of {len(results)} rows had finished"
    if not returned:
        raise Interrupted(message, results=results)
    logger.warning("%s; what is there is returned", message)
    return results


def failed_result(error: RowError, *, request_id: str, has_text: bool, weight_version: str) -> dict[str, Any]:
    """The result of a row that never ran; without a tokenizer (`has_text` False) it has no `text`."""
    request = Request(
        id=request_id,
        prompt_ids=np.empty(0, np.int32),
        params=SamplingParams(),
        max_new_tokens=0,
        seed=0,
        stop_ids=(),
        report_interval=0,
    )
    row = Row(request, name=request_id, index=0, text=None)
    _, arrival = failure(row, error)
    row.take(arrival)
    shape = Shape(
        single=True, has_text=has_text, cumulative=False, weight_version=weight_version, has_errors=True
    )
    return result_of(row, "", shape)


def taken_ids(rows: Sequence[Row], *, returned: bool) -> Mapping[int, RowError]:
    """The faults of rows whose ids others have in flight."""
    faults = Faults(returned=returned)
    for row in rows:
        message = (
            f"rid {row.request.id!r} is in flight already; give every request its own rid, or leave rid out"
        )
        faults.add(row.index, InvalidArgument(message))
    return faults.found


def raise_if_failed(row: Row, finish: Finish) -> None:
    """Raise for a request that failed by itself; one that ran out of time or was aborted has an answer."""
    if finish.status_code is not None and finish.status_code != _TIMED_OUT:
        raise request_error(
            f"request {row.index} ({row.request.id}): {finish.message}",
            error_type=finish.error_type or "internal",
            status_code=finish.status_code,
        )
