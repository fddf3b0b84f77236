"""The guard against outputs that go round in circles, against its definition and in a whole engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as sgl
from tokenmill.core.repetition import MAX_PERIOD, MIN_TOKENS, RepetitionGuard
from tokenmill.core.request import RequestState
from tokenmill.messages import Finish

pytestmark = pytest.mark.cpu


def whole_copies(tokens: list[int], period: int) -> int:
    """How often the last `period` tokens stand at the end, one after the other."""
    cycle, count = tokens[len(tokens) - period :], 0
    while (count + 1) * period <= len(tokens):
        end = len(tokens) - count * period
        if tokens[end - period : end] != cycle:
            break
        count += 1
    return count


def first_end(tokens: list[int], most: int, min_new_tokens: int = 0) -> tuple[int, int, int] | None:
    """(tokens of the output, period, count) where the definition ends it."""
    for end in range(max(1, min_new_tokens), len(tokens) + 1):
        for period in range(1, min(MAX_PERIOD, end // most) + 1):
            count = whole_copies(tokens[:end], period)
            if count >= most and count * period >= MIN_TOKENS:
                return end, period, count
    return None


def guarded_end(tokens: list[int], most: int, min_new_tokens: int = 0) -> tuple[int, int, int] | None:
    guard = RepetitionGuard(most, min_new_tokens=min_new_tokens)
    for index, token in enumerate(tokens):
        if finish := guard.push(token):
            assert finish.kind == "repetition"
            assert finish.period is not None
            assert finish.count is not None
            return index + 1, finish.period, finish.count
    return None


outputs = st.builds(
    lambda parts: [token for cycle, count, tail in parts for token in cycle * count + tail],
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), max_size=7),
            st.integers(0, 9),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=4,
    ),
)


@settings(max_examples=300, deadline=None)
@given(tokens=outputs, most=st.integers(2, 6), min_new_tokens=st.sampled_from([0, 0, 30]))
def test_the_guard_fires_where_its_definition_says(tokens: list[int], most: int, min_new_tokens: int) -> None:
    assert guarded_end(tokens, most, min_new_tokens) == first_end(tokens, most, min_new_tokens)


@pytest.mark.parametrize("period", [1, 2, 15, 16, 17, MAX_PERIOD])
def test_cycles_of_every_length_up_to_the_longest(period: int) -> None:
    cycle = list(range(period))
    count = max(3, -(-MIN_TOKENS // period))
    tokens = [*range(1000, 1300), *cycle * 20]
    assert guarded_end(tokens, 3) == (300 + count * period, period, count)


def test_a_cycle_that_is_too_long_and_a_line_of_dashes_are_left_alone() -> None:
    assert guarded_end(list(range(MAX_PERIOD + 1)) * 4, 2) is None
    assert guarded_end([1, 2, *[7] * (MIN_TOKENS - 1), 3] * 2, 3) is None
    assert guarded_end([5] * 1000, 900) == (900, 1, 900)


def test_tokens_drawn_before_a_core_was_replaced_count(make_request: Callable[..., Any]) -> None:
    request = make_request("a", [1], 50, max_repetitions=3)
    state = RequestState(dataclasses.replace(request, output_ids=(7,) * 12))
    state.load_tokens()
    ends = []
    for _ in range(4):
        state.tokens.append(7)
        ends.append(state.finish_with(7))
    assert ends == [None, None, None, Finish("repetition", period=1, count=16)]


# ── a whole engine ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def engine(make_model: Callable[..., Path]) -> Iterator[sgl.Engine]:
    """Its pages do not suffice for all rows."""
    with sgl.Engine(
        model_path=str(make_model("llama")), device="cpu", steps_in_flight=2, max_total_tokens=512
    ) as engine:
        yield engine


# What a row may draw, so that it soon repeats itself.
FEW = {65: 100, 66: 98, 67: 96}
PROMPTS = [[index, 7 * index, 3] for index in range(6)]


def loops(count: int, **params: Any) -> dict[str, Any]:
    return {
        "temperature": 0,
        "max_new_tokens": 150,
        "ignore_eos": True,
        "max_repetitions": count,
        "n": 2,
        "logit_bias": FEW,
        **params,
    }


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "sampling_seed": 4}, {"min_new_tokens": 70}])
def test_outputs_are_those_without_the_guard_cut_where_it_fires(
    engine: sgl.Engine, params: dict[str, Any]
) -> None:
    whole = engine.generate(
        input_ids=PROMPTS, sampling_params=loops(3, **params) | {"max_repetitions": None}, return_logprob=True
    )
    guarded = engine.generate(input_ids=PROMPTS, sampling_params=loops(3, **params), return_logprob=True)
    num_cut = 0
    for result, other in zip(guarded, whole, strict=True):
        end = first_end(other["output_ids"], 3, params.get("min_new_tokens", 0))
        reason = result["meta_info"]["finish_reason"]
        if end is None:
            assert reason["type"] == "length"
            assert result["output_ids"] == other["output_ids"]
            continue
        num_cut += 1
        assert reason == {"type": "repetition", "period": end[1], "count": end[2]}
        assert result["output_ids"] == other["output_ids"][: end[0]]
        assert result["meta_info"]["completion_tokens"] == end[0]
        assert len(result["meta_info"]["output_token_logprobs"]) == end[0]
    assert num_cut > 3, [result["output_ids"] for result in whole]
    assert any(result["meta_info"]["num_retractions"] for result in whole)


def test_a_stream_ends_there_too(engine: sgl.Engine) -> None:
    params = loops(4, n=1)
    for prompt in PROMPTS[:3]:
        result = engine.generate(input_ids=prompt, sampling_params=params)
        chunks = list(engine.generate(input_ids=prompt, sampling_params=params, stream=True))
        assert "".join(chunk["text"] for chunk in chunks) == result["text"]
        assert [id for chunk in chunks for id in chunk["output_ids"]] == result["output_ids"]
        assert chunks[-1]["meta_info"]["finish_reason"] == result["meta_info"]["finish_reason"]
        assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])


def test_other_ends_keep_their_reasons(engine: sgl.Engine) -> None:
    """A stop token and a stop string that are there first, and a grammar whose text goes round."""
    result = engine.generate(input_ids=PROMPTS[0], sampling_params=loops(2, n=1))
    assert result["meta_info"]["finish_reason"]["type"] == "repetition"
    last = result["output_ids"][-1]
    stopped = engine.generate(input_ids=PROMPTS[0], sampling_params=loops(2, n=1, stop_token_ids=[last]))
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": last}
    params = loops(5, n=1, regex="(abc){20}", logit_bias=None)
    circle = engine.generate(input_ids=PROMPTS[0], sampling_params=params)
    assert circle["text"] == "abc" * 6
    assert circle["meta_info"]["finish_reason"] == {"type": "repetition", "period": 3, "count": 6}
    params |= {"stop": "cabcab"}
    assert engine.generate(input_ids=PROMPTS[0], sampling_params=params)["text"] == "ab"


def test_the_parameter_is_checked_and_may_be_set_for_all(make_model: Callable[..., Path]) -> None:
    for wrong in (1, 0, -3):
        with pytest.raises(sgl.InvalidArgument, match="max_repetitions must be at least 2"):
            sgl.SamplingParams(max_repetitions=wrong)
    with pytest.raises(sgl.WrongType, match="max_repetitions must be an integer"):
        sgl.SamplingParams(max_repetitions=2.5)
    with sgl.Engine(
        model_path=str(make_model("llama")), device="cpu", preferred_sampling_params={"max_repetitions": 3}
    ) as engine:
        bias = {"temperature": 0, "logit_bias": {65: 100}, "max_new_tokens": 50}
        result = engine.generate(input_ids=[1], sampling_params=bias)
        assert result["text"] == "A" * MIN_TOKENS
        assert result["meta_info"]["finish_reason"] == {"type": "repetition", "period": 1, "count": 16}
        bias["max_repetitions"] = None
        result = engine.generate(input_ids=[1], sampling_params=bias)
        assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 50}
