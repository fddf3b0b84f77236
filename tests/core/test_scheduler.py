"""The scheduler's rules, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.core.conftest import run_alone, tokens_of
from tokenmill.core.policy import FirstComeFirstServed
from tokenmill.core.priority import Priorities
from tokenmill.messages import Finish, StepPlan

pytestmark = pytest.mark.unit

Make = Callable[..., Any]


def rows(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    """Slot, start, count and draw of each row."""
    columns = (plan.slots, plan.starts, plan.counts, plan.samples)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def pages(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """Slot, group, column and page of each page-table entry."""
    columns = (plan.page_slots, plan.page_groups, plan.page_columns, plan.page_ids)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# ── what a plan looks like ────────────────────────────────────────────────────────────────────


def test_a_prompt_then_its_decode_steps(harness: Make, make_request: Make) -> None:
    loop = harness(page_size=4)
    loop.scheduler.submit([make_request("a", [1, 2, 3], 4)])
    first, second, third = [loop.launch() or loop.take_in() for _ in range(3)]
    assert rows(first) == [(0, 0, 3, True)]
    assert (first.num_decodes, first.token_ids.tolist(), pages(first)) == (0, [1, 2, 3], [(0, 0, 0, 0)])
    assert (rows(second), second.num_decodes, pages(second)) == ([(0, 3, 1, True)], 1, [])
    assert second.token_ids.tolist() == []
    assert second.new_rows is None
    assert (rows(third), third.num_decodes, pages(third)) == ([(0, 4, 1, True)], 1, [(0, 0, 1, 1)])


def test_all_columns_have_their_types(harness: Make, make_request: Make) -> None:
    loop = harness(max_step_tokens=6)
    loop.scheduler.submit([make_request("a", [1] * 5), make_request("b", [2] * 9)])
    loop.step()
    loop.step()
    for plan in loop.plans:
        for name in ("slots", "starts", "counts", "token_ids", "page_slots", "page_columns", "page_ids"):
            assert getattr(plan, name).dtype == np.int32, name
        assert plan.samples.dtype == np.bool_


def test_row_starts_carry_the_parameters(harness: Make, make_request: Make) -> None:
    loop = harness()
    settings = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "min_new_tokens": 2}
    loop.scheduler.submit(
        [
            make_request("a", [1, 2, 3], seed=2**64 - 1, held_ids=(9, 8), **settings),
            make_request("b", [1], temperature=0.0),
        ]
    )
    new = loop.launch().new_rows
    assert new.slots.tolist() == [0, 1]
    assert new.prompt_lengths.tolist() == [3, 1]
    assert new.temperatures.tolist() == [0.5, 0.0]
    assert new.top_ks.tolist() == [7, -1]
    assert new.top_ps.tolist() == [0.25, 1.0]
    assert new.min_ps.tolist() == [0.125, 0.0]
    assert new.seeds.tolist() == [2**64 - 1, 0]
    assert new.seeds.dtype == np.uint64
    assert new.min_new_tokens.tolist() == [2, 0]
    assert new.held_ids == ((9, 8), ())


def test_a_long_prompt_comes_in_chunks_and_draws_after_the_last(harness: Make, make_request: Make) -> None:
    loop = harness(max_step_tokens=4, page_size=4)
    loop.scheduler.submit([make_request("a", range(10), 2)])
    loop.run()
    assert [rows(plan)[0][1:] for plan in loop.plans] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
        (10, 1, True),
    ]
    assert [plan.token_ids.tolist() for plan in loop.plans] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]
    assert [plan.new_rows is not None for plan in loop.plans] == [True, False, False, False]


def test_decode_and_prefill_share_a_step_decode_first(harness: Make, make_request: Make) -> None:
    loop = harness(max_step_tokens=8)
    loop.scheduler.submit([make_request("a", [1, 1]), make_request("b", [2] * 9)])
    loop.step()
    loop.scheduler.submit([make_request("c", [3] * 20)])
    loop.step()
    first, second = loop.plans
    assert rows(first) == [(0, 0, 2, True), (1, 0, 6, False)]
    assert second.num_decodes == 1
    assert rows(second) == [(0, 2, 1, True), (1, 6, 3, True), (2, 0, 4, False)]
    assert second.token_ids.tolist() == [2] * 3 + [3] * 4


def test_more_rows_than_a_step_has_tokens(harness: Make, make_request: Make, alone: Make) -> None:
    """Then the oldest decode, and prompts wait until they ended."""
    loop = harness(max_step_tokens=2, max_rows=8)
    job = [make_request(str(index), [index], 6) for index in range(5)]
    loop.scheduler.submit(job)
    loop.run()
    assert all(loop.tokens(request.id) == alone(request)[0] for request in job)
    assert loop.plans[1].slots.tolist() == [0, 1]


# ── ends ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("depth", [1, 3])
def test_the_end_by_length_is_foreseen(harness: Make, make_request: Make, alone: Make, depth: int) -> None:
    loop = harness(depth=depth)
    request = make_request("a", [1, 2], 3)
    loop.scheduler.submit([request])
    loop.run()
    assert len(loop.plans) == 3
    assert loop.tokens("a") == alone(request)[0]
    assert loop.last("a").finish == Finish("length", length=3)


def test_an_ended_row_gives_way_before_its_result_is_there(harness: Make, make_request: Make) -> None:
    """The slot and the pages go to the next request in the very next plan, not in the same one."""
    loop = harness(max_rows=1, num_pages=2, max_sequence_tokens=8, prefix_caching=False)
    loop.scheduler.submit([make_request("a", [1] * 7, 1), make_request("b", [2] * 7, 1)])
    first, second = loop.launch(), loop.launch()
    assert (rows(first), rows(second)) == ([(0, 0, 7, True)], [(0, 0, 7, True)])
    assert loop.scheduler.num_running == 2
    assert loop.scheduler.num_in_flight == 2
    assert loop.launch() is None
    assert [output.request_id for output in loop.take_in() + loop.take_in()] == ["a", "b"]
    assert loop.scheduler.idle


def test_pages_are_not_given_away_twice_in_a_plan(harness: Make, make_request: Make, alone: Make) -> None:
    """Requests that end with their prompt step leave evictable pages behind only after the plan."""
    loop = harness(num_pages=5, page_size=1, max_sequence_tokens=4, max_rows=8)
    job = [make_request(str(index), [index, index], 1) for index in range(6)]
    loop.scheduler.submit(job)
    assert len(loop.launch().slots) == 2
    loop.run()
    assert all(loop.tokens(request.id) == alone(request)[0] for request in job)


def test_zero_new_tokens_only_computes_the_prompt(harness: Make, make_request: Make) -> None:
    loop = harness(max_step_tokens=6)
    loop.scheduler.submit([make_request("a", range(9), 0), make_request("b", range(9), 2)])
    loop.run()
    assert [rows(plan)[0][1:] for plan in loop.plans[:2]] == [(0, 6, False), (6, 3, False)]
    assert (loop.tokens("a"), loop.last("a").finish) == ([], Finish("length", length=0))
    assert loop.last("b").cached_tokens == 8


def test_a_stop_id_ends_and_later_results_are_ignored(harness: Make, make_request: Make, alone: Make) -> None:
    tokens, _ = alone(make_request("a", [3, 1], 40))
    stop_id = next(token for index, token in enumerate(tokens) if index > 1 and token not in tokens[:index])
    request = make_request("a", [3, 1], 40, stop_ids=(stop_id, 77))
    tokens, finish = alone(request)
    loop = harness(depth=3)
    loop.scheduler.submit([request])
    loop.run()
    assert (loop.tokens("a"), loop.last("a").finish) == (tokens, finish)
    assert len(loop.outputs["a"]) == 1
    assert len(loop.plans) == len(tokens) + 2
    assert loop.cache.num_used_pages == 0


def test_a_stop_id_as_the_last_allowed_token_is_a_stop(
    harness: Make, make_request: Make, alone: Make
) -> None:
    tokens, _ = alone(make_request("a", [3, 1], 5))
    length = next(index for index in range(1, 5) if tokens[index] not in tokens[:index]) + 1
    loop = harness()
    loop.scheduler.submit([make_request("a", [3, 1], length, stop_ids=(tokens[length - 1],))])
    loop.run()
    assert loop.tokens("a") == tokens[:length]
    assert loop.last("a").finish == Finish("stop", matched=tokens[length - 1])


# ── prefixes ──────────────────────────────────────────────────────────────────────────────────


def test_a_shared_prefix_is_computed_once_even_in_one_step(
    harness: Make, make_request: Make, alone: Make
) -> None:
    loop = harness()
    job = [make_request(name, [*range(8), index], 3) for index, name in enumerate("abc")]
    loop.scheduler.submit(job)
    plan = loop.launch()
    assert rows(plan) == [(0, 0, 9, True), (1, 8, 1, True), (2, 8, 1, True)]
    assert plan.num_decodes == 0
    assert plan.token_ids.tolist() == [*range(8), 0, 1, 2]
    table = {(slot, column): page for slot, _, column, page in pages(plan)}
    assert len(table) == 9, "matched pages are listed, too"
    assert table[0, 0] == table[1, 0] == table[2, 0]
    assert len({table[0, 2], table[1, 2], table[2, 2]}) == 3
    loop.run()
    assert [loop.last(name).cached_tokens for name in "abc"] == [0, 8, 8]
    assert all(loop.tokens(request.id) == alone(request)[0] for request in job)


def test_the_last_prompt_token_is_always_computed(harness: Make, make_request: Make) -> None:
    loop = harness()
    for name in "ab":
        loop.scheduler.submit([make_request(name, range(8), 1)])
        loop.run()
    assert rows(loop.plans[1]) == [(0, 4, 4, True)]
    assert loop.last("b").cached_tokens == 4


def test_an_answer_is_cached_for_the_next_turn(harness: Make, make_request: Make, alone: Make) -> None:
    loop = harness()
    request = make_request("a", [1, 2, 3], 10)
    loop.scheduler.submit([request])
    loop.run()
    loop.scheduler.submit([make_request("b", [1, 2, 3, *alone(request)[0], 4], 1)])
    loop.run()
    assert loop.last("b").cached_tokens == 12


def test_requests_of_different_namespaces_share_no_page(
    harness: Make, make_request: Make, alone: Make
) -> None:
    loop = harness()
    prompt = list(range(9))
    job = [
        make_request(str(index), prompt, 4, cache_namespace=salt)
        for index, salt in enumerate([b"", b"a", b"b", b"a", b""])
    ]
    loop.submit(*job)
    plan = loop.launch()
    table: dict[int, set[int]] = {}
    for slot, _, _, page in pages(plan):
        table.setdefault(slot, set()).add(page)
    assert [len(table[0] & table[slot]) for slot in range(1, 5)] == [0, 0, 0, 2]
    assert [len(table[1] & table[slot]) for slot in (2, 3)] == [0, 2]
    loop.run()
    assert [loop.last(str(index)).cached_tokens for index in range(5)] == [0, 0, 0, 8, 8]
    assert all(loop.tokens(request.id) == alone(request)[0] for request in job)


def test_without_prefix_caching_nothing_is_shared(harness: Make, make_request: Make) -> None:
    loop = harness(prefix_caching=False)
    loop.scheduler.submit([make_request(name, range(9), 3) for name in "ab"])
    loop.run()
    assert rows(loop.plans[0]) == [(0, 0, 9, True), (1, 0, 9, True)]
    assert loop.last("b").cached_tokens == 0
    assert loop.cache.num_free_pages == 64


def test_every_page_group_gets_its_pages(harness: Make, make_request: Make) -> None:
    loop = harness(num_pages=[16, 20])
    loop.scheduler.submit([make_request("a", range(6), 4)])
    loop.run()
    assert [entry[:3] for entry in pages(loop.plans[0])] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert [entry[:3] for entry in pages(loop.plans[3])] == [(0, 0, 2), (0, 1, 2)]


# ── when pages run out ────────────────────────────────────────────────────────────────────────


def test_the_youngest_row_is_preempted_and_resumes_cheaply(
    harness: Make, make_request: Make, alone: Make
) -> None:
    loop = harness(num_pages=8, page_size=4, max_sequence_tokens=32)
    job = [make_request("a", [1] * 4, 20), make_request("b", [2] * 4, 14)]
    loop.scheduler.submit(job)
    loop.run()
    assert [loop.last(name).num_retractions for name in "ab"] == [0, 1]
    assert all(loop.tokens(request.id) == alone(request)[0] for request in job)
    resumed = [plan for plan in loop.plans[1:] if plan.new_rows is not None]
    assert len(resumed) == 1
    assert resumed[0].starts[-1] >= 4, "some of its pages were still in the tree"
    assert resumed[0].new_rows.prompt_lengths.tolist() == [4], "outputs are no prompt"
    assert loop.last("b").cached_tokens == 0, "what a resumed request finds was not cached for it"


def test_a_prompt_in_chunks_is_preempted_before_an_older_row(
    harness: Make, make_request: Make, alone: Make
) -> None:
    loop = harness(num_pages=9, page_size=2, max_step_tokens=2, max_sequence_tokens=18, max_rows=4)
    job = [make_request("a", [1], 17), make_request("b", [2] * 13, 2)]
    loop.scheduler.submit(job)
    loop.run()
    assert [loop.last(name).num_retractions for name in "ab"] == [0, 1]
    assert all(loop.tokens(request.id) == alone(request)[0] for request in job)


def test_a_preempted_request_waits_for_its_draws_in_flight(
    harness: Make, make_request: Make, alone: Make
) -> None:
    """Until then its tokens are not known, and nobody behind it may take its place."""
    loop = harness(num_pages=8, page_size=4, max_sequence_tokens=32)
    job = [make_request("a", [1] * 4, 6), make_request("b", [2] * 16, 9), make_request("c", [3], 1)]
    loop.scheduler.submit(job[:2])
    for _ in range(6):
        loop.launch()
    assert loop.plans[-1].slots.tolist() == [0], "b was preempted, and a launched its last draw"
    loop.scheduler.submit(job[2:])
    assert loop.launch() is None
    assert loop.scheduler.num_waiting == 2
    while loop.scheduler.num_in_flight:
        loop.take_in()
    assert loop.launch().new_rows.prompt_lengths.tolist() == [16, 1]
    loop.run()
    assert loop.last("b").num_retractions == 1
    assert all(loop.tokens(request.id) == alone(request)[0] for request in job)


def test_a_stop_id_that_arrives_after_preemption_ends_the_request(
    harness: Make, make_request: Make, alone: Make
) -> None:
    tokens, _ = alone(make_request("b", [2] * 16, 9))
    place = next(index for index in range(1, 4) if tokens[index] not in tokens[:index])
    loop = harness(num_pages=8, page_size=4, max_sequence_tokens=32)
    request = make_request("b", [2] * 16, 9, stop_ids=(tokens[place],))
    loop.scheduler.submit([make_request("a", [1] * 4, 12), request])
    for _ in range(6):
        loop.launch()
    assert loop.scheduler.num_waiting == 1
    while "b" not in loop.outputs:
        loop.take_in()
    assert loop.tokens("b") == tokens[: place + 1]
    assert loop.last("b").finish.kind == "stop"
    assert loop.scheduler.num_waiting == 0
    loop.run()


def test_admission_leaves_a_page_for_each_running_row(harness: Make, make_request: Make) -> None:
    loop = harness(num_pages=6, page_size=4, max_sequence_tokens=24, max_rows=8)
    loop.scheduler.submit([make_request(str(index), [index], 12) for index in range(6)])
    assert len(loop.launch().slots) == 3


# ── reports, cancelling, numbers ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("interval", "sizes"), [(0, [7]), (1, [1] * 7), (3, [1, 3, 3]), (4, [1, 4, 2]), (7, [1, 6])]
)
def test_tokens_are_reported_when_due(
    harness: Make, make_request: Make, alone: Make, interval: int, sizes: list[int]
) -> None:
    loop = harness(depth=2)
    request = make_request("a", [1], 7, report_interval=interval)
    loop.scheduler.submit([request])
    loop.run()
    assert [len(output.token_ids) for output in loop.outputs["a"]] == sizes
    assert loop.tokens("a") == alone(request)[0]


def test_cancel_in_every_phase(harness: Make, make_request: Make, alone: Make) -> None:
    loop = harness(max_rows=3, max_step_tokens=12, num_pages=32)
    decoding, draining = make_request("decoding", [1], 9), make_request("draining", [2], 3)
    job = [decoding, draining, make_request("prefill", [3] * 40, 9), make_request("waiting", [4], 9)]
    loop.scheduler.submit(job)
    for _ in range(3):
        loop.launch()
    loop.take_in()
    names = [request.id for request in job]
    outputs = loop.keep(loop.scheduler.cancel([*names, "nobody", "waiting"]))
    assert [output.request_id for output in outputs] == names
    assert [list(output.token_ids) for output in outputs] == [
        alone(decoding)[0][:1],
        alone(draining)[0][:1],
        [],
        [],
    ]
    assert {output.finish.kind for output in outputs} == {"abort"}
    assert all(output.finish.message for output in outputs)
    assert not loop.scheduler.idle, "steps are in flight"
    assert loop.launch() is None
    assert loop.take_in() + loop.take_in() == []
    assert loop.scheduler.idle
    assert loop.cache.num_used_pages == 0


def test_cancel_reports_only_what_was_not_reported(harness: Make, make_request: Make, alone: Make) -> None:
    loop = harness()
    request = make_request("a", [1], 9, report_interval=2)
    loop.scheduler.submit([request])
    for _ in range(4):
        loop.step()
    (output,) = loop.keep(loop.scheduler.cancel(["a"]))
    assert list(output.token_ids) == alone(request)[0][3:4]


def test_an_id_is_free_again_when_its_request_ended(harness: Make, make_request: Make, alone: Make) -> None:
    """The results in flight of the cancelled request do not reach its successor."""
    loop = harness(depth=3)
    loop.scheduler.submit([make_request("a", [1], 9)])
    loop.launch()
    loop.launch()
    loop.scheduler.cancel(["a"])
    again = make_request("a", [2], 9)
    loop.scheduler.submit([again])
    loop.run()
    assert loop.tokens("a") == alone(again)[0]


def test_abort_all_says_why(harness: Make, make_request: Make) -> None:
    loop = harness(max_rows=1)
    loop.scheduler.submit([make_request(name, [1], 9) for name in "ab"])
    loop.step()
    outputs = loop.scheduler.abort_all("the device is gone")
    assert {output.request_id for output in outputs} == {"a", "b"}
    assert [output.finish for output in outputs] == 2 * [Finish("abort", message="the device is gone")]
    assert loop.scheduler.idle


# ── a queue with an end ───────────────────────────────────────────────────────────────────────


def test_a_batch_fills_the_free_rows_and_the_queue_and_the_rest_is_refused(
    harness: Make, make_request: Make
) -> None:
    loop = harness(max_rows=2, max_queued=3)
    refused = loop.submit(*[make_request(str(index), [index], 3) for index in range(8)])
    assert [output.request_id for output in refused] == ["5", "6", "7"]
    finish = refused[0].finish
    assert (finish.kind, finish.status_code, finish.error_type) == ("abort", 503, "queue_full")
    assert "max_queued_requests=3" in finish.message
    loop.step()
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (2, 3)
    assert [output.request_id for output in loop.submit(make_request("late", [1], 3))] == ["late"]
    loop.run()
    assert [loop.last(str(index)).finish.kind for index in range(5)] == ["length"] * 5
    assert loop.submit(make_request("later", [1], 3)) == []
    loop.run()


def test_no_queue_at_all(harness: Make, make_request: Make) -> None:
    loop = harness(max_rows=1, max_queued=0)
    assert loop.submit(make_request("a", [1], 3)) == []
    assert [output.request_id for output in loop.submit(make_request("b", [1], 3))] == ["b"]
    loop.step()
    assert [output.request_id for output in loop.submit(make_request("c", [1], 3))] == ["c"]
    loop.run()
    assert loop.last("a").finish.kind == "length"


def test_a_more_urgent_request_takes_the_place_of_the_last_in_a_full_queue(
    harness: Make, make_request: Make
) -> None:
    loop = harness(max_rows=1, max_queued=2, priorities=Priorities(enabled=True))
    names = [
        ("first", 0),
        ("a", 5),
        ("b", 5),
        ("equal", 5),
        ("less", 4),
        ("more", 6),
        ("most", 7),
        ("late", 6),
    ]
    refused = [
        output.request_id
        for name, value in names
        for output in loop.submit(make_request(name, [1], 3, priority=value))
    ]
    # Nothing runs yet: the first three are those that wait, one of them for the free row.
    assert refused == ["first", "less", "equal", "b", "a"]
    loop.run()
    assert [name for name in loop.outputs if name not in refused] == ["most", "more", "late"]


def test_without_priorities_nobody_makes_way(harness: Make, make_request: Make) -> None:
    loop = harness(max_rows=1, max_queued=1)
    loop.submit(make_request("a", [1], 3), make_request("b", [1], 3))
    assert [output.request_id for output in loop.submit(make_request("c", [1], 3, priority=9))] == ["c"]
    loop.run()


def test_no_more_rows_decode_than_a_step_has_tokens(harness: Make, make_request: Make) -> None:
    loop = harness(max_rows=8, max_step_tokens=3, depth=2)
    requests = [make_request(str(at), [at, 1], 2 + at) for at in range(8)]
    loop.submit(*requests)
    loop.run()
    assert max(plan.num_decodes for plan in loop.plans) == 3
    for request in requests:
        assert tokens_of(loop.outputs[request.id]) == run_alone(request)[0]


def test_the_queue_is_put_into_order_behind_a_plan(
    harness: Make, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = harness(max_rows=8)
    ordered: list[int] = []
    monkeypatch.setattr(
        FirstComeFirstServed, "ordered", lambda _, requests: ordered.append(len(requests)) or requests
    )
    loop.submit(*[make_request(str(at), [1], 1) for at in range(200)])
    in_plans: list[int] = []
    while not loop.scheduler.idle:
        before = len(ordered)
        plan = loop.scheduler.plan_step()
        in_plans += ordered[before:]
        loop.mill.launch(plan)
        loop.scheduler.settle()
        loop.take_in()
    assert ordered == [64, 64, 64, 8]
    assert in_plans == [64, 8], "the first window, and the last, which more might have come into"


def test_a_plan_is_settled_before_anything_else(harness: Make, make_request: Make) -> None:
    loop = harness(depth=2)
    loop.submit(make_request("a", [1], 3))
    loop.mill.launch(loop.scheduler.plan_step())
    with pytest.raises(AssertionError, match="settle"):
        loop.scheduler.plan_step()
    with pytest.raises(AssertionError, match="settle"):
        loop.take_in()


def test_numbers(harness: Make, make_request: Make) -> None:
    loop = harness(max_rows=2)
    scheduler = loop.scheduler
    assert scheduler.idle
    assert scheduler.plan_step() is None
    scheduler.submit([make_request(name, [1], 2) for name in "abc"])
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.idle) == (3, 0, False)
    loop.launch()
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_in_flight) == (1, 2, 1)
    loop.run()
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_in_flight) == (0, 0, 0)


def test_requests_beyond_the_limits_are_a_bug_of_the_caller(harness: Make, make_request: Make) -> None:
    loop = harness(max_sequence_tokens=8)
    with pytest.raises(AssertionError):
        loop.scheduler.submit([make_request("a", [1] * 5, 5)])
    loop.scheduler.submit([make_request("a", [1] * 5, 3)])
    with pytest.raises(AssertionError, match="in use"):
        loop.scheduler.submit([make_request("a", [1], 1)])
    with pytest.raises(AssertionError, match="full sequence"):
        harness(num_pages=4, page_size=4, max_sequence_tokens=17)
