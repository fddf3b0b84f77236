"""What requests were shown, made into results piece by piece, against one tuple after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.frontend import insight
from tokenmill.frontend.insight import Shown
from tokenmill.messages import Insight, LogprobOptions, Logprobs, Request

pytestmark = pytest.mark.unit

MakeRequest = Callable[..., Request]


def random_logprobs(count: int, num_top: int, num_given: int) -> Logprobs:
    rng = np.random.default_rng(count)
    return Logprobs(
        -rng.random(count, dtype=np.float32),
        -rng.random((count, num_top), dtype=np.float32),
        rng.integers(0, 99, (count, num_top)).astype(np.int32),
        -rng.random((count, num_given), dtype=np.float32),
    )


def one_by_one(logprobs: Logprobs, ids: list[int], options: LogprobOptions, text: Any) -> dict[str, Any]:
    def entry(value: Any, token: Any) -> tuple[float, int, str | None]:
        return float(value), int(token), text(int(token)) if options.with_text else None

    rows = range(len(ids))
    tops, top_ids, given = logprobs.top_NK, logprobs.top_ids_NK, logprobs.given_NI
    expected: dict[str, Any] = {
        "output_token_logprobs": [entry(logprobs.token_N[row], ids[row]) for row in rows],
        "output_token_logprobs_length": len(ids),
    }
    if options.num_top:
        expected["output_top_logprobs"] = [list(map(entry, tops[row], top_ids[row])) for row in rows]
    if options.token_ids:
        expected["output_token_ids_logprobs"] = [
            list(map(entry, given[row], options.token_ids)) for row in rows
        ]
    return expected


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 90), max_size=6),
    num_top=st.integers(0, 3),
    token_ids=st.sampled_from([(), (5,), (7, 7, 1)]),
    with_text=st.booleans(),
    num_cut=st.integers(0, 3),
    at_once=st.sampled_from([1, 50, 2048]),
)
def test_pieces_make_the_whole(
    make_request: MakeRequest,
    sizes: list[int],
    num_top: int,
    token_ids: tuple[int, ...],
    with_text: bool,
    num_cut: int,
    at_once: int,
) -> None:
    """Some are made on the way, the rest at the end; a stop in the text cuts the last."""
    options = LogprobOptions(3, num_top, token_ids, with_text)
    shown = Shown(replace(make_request([1, 2, 3]), logprobs=options))
    num_cut = min(num_cut, sizes[-1] if sizes else 0)
    ids, logprobs = list(range(sum(sizes))), random_logprobs(sum(sizes), num_top, len(token_ids))
    kept = len(ids) - num_cut
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(insight, "_TUPLES_AT_ONCE", at_once)
        patch.setattr(insight, "_TUPLES_WITH_TEXT_AT_ONCE", at_once)
        start = 0
        for number, size in enumerate(sizes):
            cut = num_cut if number == len(sizes) - 1 else 0
            part = Insight(logprobs=logprobs.at(slice(start, start + size)))
            shown.take(part, num_arrived=size, num_kept=size - cut, is_last=cut > 0)
            start += size
            shown.make_entries(ids[: start - cut], str, is_last=False)
        shown.make_entries(ids[:kept], str, is_last=True)
        found = shown.all_meta_info()
    expected = one_by_one(logprobs.at(slice(0, kept)), ids[:kept], options, str)
    assert {key: found[key] for key in expected} == expected


def test_nothing_was_shown(make_request: MakeRequest) -> None:
    """A request that was aborted in the queue."""
    shown = Shown(replace(make_request([1]), logprobs=LogprobOptions(0, 2, (4,))))
    shown.make_entries([], None, is_last=True)
    found = shown.all_meta_info()
    assert found["output_token_logprobs"] == found["output_top_logprobs"] == found["input_top_logprobs"] == []
    assert found["output_token_logprobs_length"] == 0


def test_a_token_drawn_for_its_log_probability_only(make_request: MakeRequest) -> None:
    shown = Shown(replace(make_request([1]), logprobs=LogprobOptions(1, 0, ())))
    insight = Insight(logprobs=random_logprobs(1, 0, 0), next_token=42)
    shown.take(insight, num_arrived=0, num_kept=0, is_last=True)
    shown.make_entries([], None, is_last=True)
    [(value, token, text)] = shown.all_meta_info()["output_token_logprobs"]
    assert (token, text) == (42, None)
    assert value < 0
