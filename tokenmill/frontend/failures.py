"""Rows that fail alone: what their errors are as plain data, and the results that stand in their slots."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tokenmill.errors import EngineClosed, InvalidArgument, RequestFailed, RowError, TokenmillError, told
from tokenmill.frontend.outputs import Arrival, Row, Shape, result_of
from tokenmill.messages import Finish, Output, Request
from tokenmill.sampling_params import SamplingParams

_UNAVAILABLE = 503


def row_error(error: BaseException) -> RowError:
    """An exception as plain data; what is not one of ours is `internal`."""
    message = str(error) if isinstance(error, TokenmillError) else told(error)
    if isinstance(error, InvalidArgument | RequestFailed):
        return RowError(type=error.error_type, message=message, status_code=error.status_code)
    if isinstance(error, EngineClosed):
        return RowError(type="aborted", message=message, status_code=_UNAVAILABLE)
    return RowError(type="internal", message=message, status_code=500)


def failure(name: str, error: RowError) -> Arrival:
    """The end of a request that the frontend itself gives up, as if the core had sent it."""
    finish = Finish(
        "abort", message=error["message"], status_code=error["status_code"], error_type=error["type"]
    )
    return Arrival(Output(name, (), finish, cached_tokens=0, num_retractions=0), time.perf_counter())


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
    row.take(failure(request_id, error))
    shape = Shape(
        single=True, has_text=has_text, cumulative=False, weight_version=weight_version, has_errors=True
    )
    return result_of(row, "", shape)
