"""Priorities, queue limits, timeouts and salts as users meet them, on the model in the package."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tokenmill as sgl

pytestmark = pytest.mark.cpu

LONG = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 150}
SHORT = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 4}
PROMPTS = ["The capital of France is", "My name is", "Once upon a time", "The future of AI is"]


@pytest.fixture(scope="module")
def plain() -> Iterator[Any]:
    with sgl.Engine(model_path="tiny", device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def urgent() -> Iterator[Any]:
    """One row, so that everybody else waits or is pushed back."""
    with sgl.Engine(
        model_path="tiny", device="cpu", max_running_requests=1, enable_priority_scheduling=True
    ) as engine:
        yield engine


@pytest.fixture(scope="module", params=[False, True], ids=["thread", "process"])
def bounded(request: pytest.FixtureRequest) -> Iterator[Any]:
    with sgl.Engine(
        model_path="tiny",
        device="cpu",
        max_running_requests=1,
        max_queued_requests=1,
        abort_on_priority_when_disabled=True,
        core_process=request.param,
    ) as engine:
        yield engine


def ends(chunks: Any) -> list[int]:
    """Which result ended when."""
    return [chunk["index"] for chunk in chunks if chunk["meta_info"]["finish_reason"] is not None]


def test_a_batch_runs_in_the_order_of_its_priorities(urgent: Any) -> None:
    chunks = urgent.generate(PROMPTS, SHORT, priority=[5, None, 9, 5], stream=True)
    assert ends(chunks) == [2, 0, 3, 1]


def test_an_urgent_request_pushes_a_running_one_back_and_changes_no_token(urgent: Any, plain: Any) -> None:
    expected = plain.generate(PROMPTS[2], LONG)
    stream = urgent.generate(PROMPTS[2], LONG, priority=0, stream=True)
    chunks = [next(stream)]
    answer = urgent.generate(PROMPTS[0], SHORT, priority=11)
    chunks += list(stream)
    assert answer["text"] == plain.generate(PROMPTS[0], SHORT)["text"]
    assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
    last = chunks[-1]["meta_info"]
    assert last["num_retractions"] == 1
    assert answer["meta_info"]["response_sent_to_client_ts"] < last["response_sent_to_client_ts"]


def test_without_priorities_they_are_ignored(plain: Any) -> None:
    assert (
        plain.generate(PROMPTS[:2], SHORT, priority=[1, 2])["text"]
        == (plain.generate(PROMPTS[:2], SHORT)["text"])
    )


def test_a_full_queue_refuses_and_the_engine_goes_on(bounded: Any, plain: Any) -> None:
    with pytest.raises(sgl.QueueFull, match=r"request [23] .*max_queued_requests=1") as caught:
        bounded.generate(PROMPTS, SHORT)
    assert (caught.value.status_code, caught.value.error_type) == (503, "queue_full")
    for _ in range(100):  # the others of that batch are cancelled a moment later
        if bounded.flush_cache():
            break
        time.sleep(0.01)
    outputs = bounded.generate(PROMPTS[:2], SHORT)
    assert outputs["text"] == plain.generate(PROMPTS[:2], SHORT)["text"]


def test_a_priority_is_refused_where_there_are_none(bounded: Any) -> None:
    with pytest.raises(sgl.RequestFailed, match=r"priority=3.*enable_priority_scheduling") as caught:
        bounded.generate(PROMPTS[0], SHORT, priority=3)
    assert caught.value.status_code == 503
    assert not isinstance(caught.value, sgl.QueueFull)


def test_a_timeout_gives_what_is_there(bounded: Any, plain: Any) -> None:
    endless = {**LONG, "max_new_tokens": 1500}
    started = time.monotonic()
    late, waiting = bounded.generate(PROMPTS[:2], endless, timeout=[0.3, 0.2])
    assert 0.3 <= time.monotonic() - started < 5
    reason = late["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"], reason["err_type"]) == ("abort", 408, "timeout")
    assert reason["message"] == "the request timed out after 0.3 s (timeout)"
    count = late["meta_info"]["completion_tokens"]
    assert 0 < count < 1500
    expected = plain.generate(PROMPTS[0], {**LONG, "max_new_tokens": count})
    assert late["output_ids"] == expected["output_ids"]
    assert late["text"]
    assert waiting["meta_info"]["finish_reason"]["err_type"] == "timeout"
    assert waiting["output_ids"] == []
    in_time = bounded.generate(PROMPTS[0], SHORT, timeout=60)
    assert in_time["meta_info"]["finish_reason"]["type"] == "length"


def test_prompts_of_different_salts_share_nothing(plain: Any) -> None:
    prompt = "My name is Alice. I live in Paris. I have a dog and two cats. " * 3
    plain.flush_cache()

    def cached(salt: str | None) -> int:
        return plain.generate(prompt, SHORT, cache_salt=salt)["meta_info"]["cached_tokens"]

    first, other, again, bare, odd = (cached(salt) for salt in ("a", "b", "a", None, "\ud800"))
    assert (first, other, bare, odd) == (0, 0, 0, 0)
    assert again > 0
    batch = plain.generate([prompt] * 4, SHORT, cache_salt=["c", "d", "c", None])
    assert [each["meta_info"]["cached_tokens"] for each in batch] == [0, 0, again, again]
    assert len(set(batch["text"])) == 1


def test_many_threads_with_mixed_priorities_all_get_their_own(urgent: Any, plain: Any) -> None:
    results: dict[int, str] = {}

    def ask(index: int) -> None:
        results[index] = urgent.generate(PROMPTS[index % 4], LONG | {"max_new_tokens": 12}, priority=index)[
            "text"
        ]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(0, 200, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = plain.generate(PROMPTS, LONG | {"max_new_tokens": 12})["text"]
    assert results == {index: expected[index % 4] for index in range(0, 200, 13)}
