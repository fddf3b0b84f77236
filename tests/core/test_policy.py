"""The order of the waiting queue."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill import queue_order
from tokenmill.config import EngineConfig
from tokenmill.core.policy import POLICIES, PriorityQueue, WaitingQueue, choose_policy, create_policy
from tokenmill.core.request import RequestState
from tokenmill.kvcache import Cache
from tokenmill.sampling_params import SamplingParams

pytestmark = pytest.mark.unit

Make = Callable[..., Any]


class Shortest:
    """A policy that only a test needs: the shortest prompt of the next four first."""

    window = 4

    def __init__(self, cache: Cache) -> None:
        pass

    def ordered(self, requests: list[RequestState]) -> list[RequestState]:
        return sorted(requests, key=lambda each: each.num_prompt)


@pytest.fixture
def cache() -> Cache:
    return Cache(num_pages=64, page_size=2)


def remember(cache: Cache, token_ids: Sequence[int], namespace: bytes = b"") -> None:
    ids = array("i", token_ids)
    row = cache.match(ids.tobytes(), namespace=namespace)
    assert cache.reserve(row, len(ids))
    cache.commit(row, ids, num_tokens=len(ids))
    cache.release(row)


def place_of(state: RequestState) -> int:
    """Its place among all, of which tests make the ids."""
    return int(state.request.id)


def states(make_request: Make, prompts: Sequence[Sequence[int]]) -> list[RequestState]:
    return [RequestState(make_request(str(index), prompt)) for index, prompt in enumerate(prompts)]


def drain(queue: WaitingQueue) -> list[int]:
    return [place_of(queue.pop()) for _ in range(len(queue))]


def test_the_table_has_what_the_configuration_offers() -> None:
    field = EngineConfig.__dataclass_fields__["schedule_policy"]
    assert tuple(POLICIES) == field.metadata["choices"]


def test_first_come_first_served(cache: Cache, make_request: Make) -> None:
    queue = WaitingQueue(create_policy("fcfs", cache))
    for state in states(make_request, [[3], [1], [2]] * 50):
        queue.add(state)
    assert drain(queue) == list(range(150))


def test_longest_cached_prefix_first(cache: Cache, make_request: Make) -> None:
    remember(cache, [1, 2, 3, 4])
    remember(cache, [5, 6])
    queue = WaitingQueue(create_policy("lpm", cache))
    for state in states(make_request, [[0, 0, 0], [5, 6, 0], [1, 2, 3, 4, 0], [1, 2, 0]]):
        queue.add(state)
    assert drain(queue) == [2, 3, 1, 0]


def test_only_the_prefixes_of_its_own_namespace_count(cache: Cache, make_request: Make) -> None:
    remember(cache, [1, 2, 3, 4], b"a")
    requests = [
        make_request("0", [1, 2, 3, 4, 0], cache_namespace=b"b"),
        make_request("1", [0, 0, 0]),
        make_request("2", [1, 2, 3, 4, 0], cache_namespace=b"a"),
        make_request("3", [2, 2], cache_namespace=b"b"),
    ]
    queue = WaitingQueue(create_policy("lpm", cache))
    for request in requests:
        queue.add(RequestState(request))
    assert drain(queue) == [2, 0, 1, 3], "the others share nothing, and go as they came"


def test_longest_output_first(cache: Cache, make_request: Make) -> None:
    queue = WaitingQueue(create_policy("lof", cache))
    lengths = [random.Random(index).randrange(50) for index in range(3000)]
    for index, length in enumerate(lengths):
        queue.add(RequestState(make_request(str(index), [1], length)))
    assert drain(queue) == sorted(range(3000), key=lambda index: (-lengths[index], index))


def test_where_none_is_named_the_longest_outputs_go_first(make_request: Make) -> None:
    """All have rows and pages, to the last one."""
    lengths = [random.Random(index).randrange(50) for index in range(1800)]
    cache = Cache(num_pages=sum(2 + -(-length // 2) for length in lengths), page_size=2)
    queue = WaitingQueue(choose_policy(cache, max_rows=1800, has_priorities=False))
    for index, length in enumerate(lengths):
        queue.add(RequestState(make_request(str(index), [index % 7] * 4, length)))
    assert drain(queue) == sorted(range(1800), key=lambda index: (-lengths[index], index))


@pytest.mark.parametrize(("max_rows", "num_pages"), [(50, 10**6), (1800, 1800 * 4), (1024, 10**6)])
def test_where_none_is_named_and_not_all_can_run_prefixes_stand_together(
    make_request: Make, max_rows: int, num_pages: int
) -> None:
    prompts = [[index % 7] * 4 for index in range(1800)]
    cache = Cache(num_pages=num_pages, page_size=2)
    policy, named_policy = (
        choose_policy(cache, max_rows=max_rows, has_priorities=False),
        create_policy("lpm", cache),
    )
    named_policy.window = policy.window
    queue, named = WaitingQueue(policy), WaitingQueue(named_policy)
    for index, prompt in enumerate(prompts):
        request = make_request(str(index), prompt, 1 + index % 10)
        queue.add(RequestState(request))
        named.add(RequestState(request))
    window = policy.window
    order = drain(queue)[:window]
    assert order == drain(named)[:window]
    groups = [place % 7 for place in order]
    assert sum(one != other for one, other in pairwise(groups)) == 6
    alike = [place for place in order if place % 70 == 0]
    assert alike == sorted(alike), "equals go as they came"


def test_where_none_is_named_pages_of_running_rows_count(harness: Make, make_request: Make) -> None:
    """Rows for all, and pages for all but for those that a long row holds."""
    computed = {}
    for policy in (None, "lpm"):
        loop = harness(
            policy=policy, num_pages=400, max_rows=64, max_sequence_tokens=1600, max_step_tokens=1600
        )
        loop.submit(make_request("long", [4] * 1530, 30))
        loop.step()
        prompts = [[*([group] * 32), index] for index in range(10) for group in range(4)]
        loop.submit(*(make_request(str(index), each, 1 + index % 3) for index, each in enumerate(prompts)))
        loop.run()
        computed[policy] = loop.mill.num_computed
    assert computed[None] == computed["lpm"]


def test_what_was_drawn_already_does_not_count(make_request: Make) -> None:
    """Of a core that died, rows come back with their tokens."""
    cache = Cache(num_pages=5000, page_size=2)
    queue = WaitingQueue(choose_policy(cache, max_rows=8, has_priorities=False))
    nearly_done = make_request("0", [1], 50)
    object.__setattr__(nearly_done, "output_ids", (1,) * 45)
    for request in (nearly_done, make_request("1", [1], 4), make_request("2", [1], 6)):
        queue.add(RequestState(request))
    assert drain(queue) == [2, 0, 1]


def test_where_none_is_named_no_prefix_is_lost_for_want_of_pages(harness: Make, make_request: Make) -> None:
    """Groups by turns, outputs of three lengths, rows for all, a pool for the prefix of one group."""
    prompts = [[*([group] * 16), 10 + index] for index in range(6) for group in (1, 2)]
    computed = {}
    for policy in (None, "lpm", "lof"):
        loop = harness(policy=policy, num_pages=5, max_rows=64, max_sequence_tokens=20)
        requests = [make_request(str(index), each, 1 + index % 3) for index, each in enumerate(prompts)]
        loop.scheduler.submit(requests)
        loop.run()
        computed[policy] = loop.mill.num_computed
    assert computed[None] == computed["lpm"] < computed["lof"]


def test_where_none_is_named_and_priorities_count_equals_go_as_they_came(
    cache: Cache, make_request: Make
) -> None:
    queue = PriorityQueue(choose_policy(cache, max_rows=50, has_priorities=True))
    for index in range(100):
        queue.add(RequestState(make_request(str(index), [1], 1 + index), urgency=index % 3))
    order = [place_of(queue.pop()) for _ in range(100)]
    assert order == sorted(range(100), key=lambda index: (-(index % 3), index))


def test_random_order_is_an_order_and_no_other_policys(cache: Cache, make_request: Make) -> None:
    orders = []
    for _ in range(2):
        queue = WaitingQueue(create_policy("random", cache))
        for state in states(make_request, [[0]] * 500):
            queue.add(state)
        orders.append(drain(queue))
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(500))
    assert orders[0] != orders[1]
    assert abs(sum(orders[0][:250]) / 250 - 250) < 60


def test_prompts_with_a_common_prefix_stand_together(cache: Cache, make_request: Make) -> None:
    """Nothing is cached yet, but the job tells what will be."""
    prefixes = [[random.Random(index).randrange(2**31) for _ in range(6)] for index in range(10)]
    prompts = [[*prefixes[index % 10], index] for index in range(200)]
    queue = WaitingQueue(create_policy("lpm", cache))
    for state in states(make_request, prompts):
        queue.add(state)
    order = [arrival % 10 for arrival in drain(queue)]
    assert sum(one != other for one, other in pairwise(order)) == 9


def test_lpm_serves_a_shared_prefix_once_where_fcfs_loses_it(harness: Make, make_request: Make) -> None:
    """Two groups by turns, and a pool that holds the prefix of one group only."""
    prompts = [[*([group] * 16), 10 + index] for index in range(6) for group in (1, 2)]
    computed = {}
    for policy in ("fcfs", "lpm"):
        loop = harness(policy=policy, num_pages=5, max_rows=1, max_sequence_tokens=20)
        loop.scheduler.submit([make_request(str(index), each, 1) for index, each in enumerate(prompts)])
        loop.run()
        computed[policy] = loop.mill.num_computed
    assert computed == {"fcfs": 12 * 17, "lpm": 2 * 17 + 10 * 1}


def test_a_window_is_ordered_at_a_time(cache: Cache, make_request: Make) -> None:
    queue = WaitingQueue(Shortest(cache))
    for state in states(make_request, [[0] * size for size in (5, 4, 3, 2, 1, 9, 8, 7, 6)]):
        queue.add(state)
    assert place_of(queue.pop()) == 3
    assert drain(queue) == [2, 1, 0, 4, 7, 6, 5, 8]


def test_looking_ahead_changes_no_order_and_orders_no_more_than_the_next_window(
    cache: Cache, make_request: Make
) -> None:
    sizes = [random.Random(index).randrange(1, 30) for index in range(22)]
    waiting = states(make_request, [[0] * size for size in sizes])
    plain, looking = WaitingQueue(Shortest(cache)), WaitingQueue(Shortest(cache))
    for state in waiting:
        plain.add(state)
        looking.add(state)
    expected, found = drain(plain), []
    while len(looking):
        looking.look_ahead()
        assert len(looking._window) <= 4
        found.append(place_of(looking.pop()))
    assert found == expected


@pytest.mark.parametrize("kind", [WaitingQueue, PriorityQueue])
def test_looked_ahead_for_a_window_is_in_order_before_it_is_asked_for(
    cache: Cache, make_request: Make, kind: Any
) -> None:
    class Counting(Shortest):
        window = 8
        num_ordered = 0

        def ordered(self, requests: list[RequestState]) -> list[RequestState]:
            Counting.num_ordered += len(requests)
            return super().ordered(requests)

    queue = kind(Counting(cache))
    for state in states(make_request, [[0]] * 20):
        queue.add(state)
    ordered = []
    for _ in range(20):
        queue.pop()
        queue.look_ahead()
        ordered.append(Counting.num_ordered)
    # The second window when one of the first is left, not sooner; the third is not full, and may get more.
    assert ordered == [8] * 6 + [16] * 10 + [20] * 4


def test_who_may_still_come_into_a_window_is_waited_for(cache: Cache, make_request: Make) -> None:
    queue = WaitingQueue(Shortest(cache))
    first, *later, last = states(make_request, [[0] * size for size in (9, 8, 7, 6, 5)])
    queue.add(first)
    for state in later:
        queue.add(state)
    assert place_of(queue.pop()) == 3
    assert drain(queue) == [2, 1, 0]
    for state in (first, *later[:2]):
        queue.add(state)
    queue.look_ahead()
    queue.add(last)
    assert drain(queue)[0] == place_of(last)


def test_preempted_requests_go_first_the_oldest_before_the_others(cache: Cache, make_request: Make) -> None:
    queue = WaitingQueue(create_policy("fcfs", cache))
    first, second, third, fourth = states(make_request, [[0]] * 4)
    queue.add(third)
    assert queue.peek() is third
    queue.add(fourth)
    queue.add_retracted(second)  # the youngest is preempted first
    queue.add_retracted(first)
    assert [*map(place_of, queue)] == [0, 1, 2, 3]
    assert queue.peek() is first
    assert drain(queue) == [0, 1, 2, 3]


def test_a_request_can_leave_from_anywhere(cache: Cache, make_request: Make) -> None:
    queue = WaitingQueue(Shortest(cache))
    retracted, *others = states(make_request, [[0]] * 8)
    for state in others:
        queue.add(state)
    queue.peek()  # fills the window with four of them
    retracted.num_retractions = 1
    queue.add_retracted(retracted)
    for state in (retracted, others[1], others[6]):
        queue.remove(state)
    assert len(queue) == 5
    assert drain(queue) == [1, 3, 4, 5, 6]


def test_a_request_can_leave_when_it_was_ordered_ahead(cache: Cache, make_request: Make) -> None:
    queue = WaitingQueue(Shortest(cache))
    waiting = states(make_request, [[0]] * 9)
    for state in waiting:
        queue.add(state)
    assert [place_of(queue.pop()) for _ in range(4)] == [0, 1, 2, 3]
    queue.look_ahead()
    queue.remove(waiting[6])
    assert drain(queue) == [4, 5, 7, 8]


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "add", "pop", "push back", "remove"]), st.integers(0, 10**6)),
        max_size=60,
    )
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_priority_queue_is_a_sorted_list(
    cache: Cache, make_request: Make, operations: list[tuple[str, int]]
) -> None:
    """The longest outputs first among equals; whoever ran goes before these, in the order of admission."""
    queue = PriorityQueue(create_policy("lof", cache))
    waiting: list[RequestState] = []
    running: list[RequestState] = []

    def rank(state: RequestState) -> tuple[int, bool, int]:
        place = state.age if state.num_retractions else place_of(state)
        return (-state.urgency, not state.num_retractions, place)

    for arrival, (operation, number) in enumerate(operations):
        if operation == "add":
            request = make_request(str(arrival), [1], 5)
            waiting.append(RequestState(request, urgency=number % 4))
            queue.add(waiting[-1])
        elif operation == "push back" and running:
            # The youngest of some urgency, as the scheduler does.
            level = running[number % len(running)].urgency
            state = max((each for each in running if each.urgency == level), key=lambda each: each.age)
            running.remove(state)
            state.num_retractions += 1
            queue.add_retracted(state)
            waiting.append(state)
        elif operation == "remove" and waiting:
            queue.remove(waiting.pop(number % len(waiting)))
        elif operation == "pop" and waiting:
            first = min(waiting, key=rank)
            assert queue.peek() is first
            assert queue.pop() is first
            waiting.remove(first)
            first.age = arrival if first.age < 0 else first.age
            running.append(first)
        assert list(queue) == sorted(waiting, key=rank)
        assert len(queue) == len(waiting)
        if waiting:
            assert queue.last is max(waiting, key=rank)
    assert [queue.pop() for _ in range(len(queue))] == sorted(waiting, key=rank)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_request_is_put_into_order_once_however_long_the_queue(
    cache: Cache, make_request: Make, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, num_ordered = POLICIES[policy], 0
    original = kind.ordered

    def counting(self: Any, requests: list[RequestState]) -> Any:
        nonlocal num_ordered
        num_ordered += len(requests)
        return original(self, requests)

    monkeypatch.setattr(kind, "ordered", counting)
    queue = WaitingQueue(create_policy(policy, cache))
    for arrival in range(3000):
        queue.add(RequestState(make_request(str(arrival), [1, 2, 3])))
    assert queue.peek() is queue.peek()
    assert num_ordered == kind.window
    while len(queue):
        queue.pop()
        queue.look_ahead()
    assert num_ordered == 3000


# ── prefixes together, and the longest first ──────────────────────────────────────────────────


def prefixes_of(state: RequestState, page_size: int) -> list[tuple[int, ...]]:
    ids = tuple(state.request.prompt_ids.tolist())
    return [ids[:end] for end in range(page_size, len(ids) + 1, page_size)]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=9), st.integers(1, 5)), min_size=1, max_size=40)
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_group_is_parted_and_the_longest_goes_first_at_every_fork(
    cache: Cache, make_request: Make, rows: list[tuple[list[int], int]]
) -> None:
    waiting = [
        RequestState(make_request(str(index), [0, *prompt], limit))
        for index, (prompt, limit) in enumerate(rows)
    ]
    order = create_policy("lpm", cache).ordered(waiting)
    assert sorted(order, key=place_of) == waiting
    groups: dict[tuple[int, ...], list[int]] = {(): list(range(len(order)))}
    for place, state in enumerate(order):
        for prefix in prefixes_of(state, cache.page_size):
            groups.setdefault(prefix, []).append(place)
    for prefix, places in groups.items():
        assert places == list(range(places[0], places[0] + len(places))), "a group stands in one piece"
        # What forks here: the groups one page longer, and the prompts that end before.
        below = [
            members
            for longer, members in groups.items()
            if len(longer) == len(prefix) + cache.page_size and longer[: len(prefix)] == prefix
        ]
        inside = {place for members in below for place in members}
        below += [[place] for place in places if place not in inside]
        longest = [max(order[each].request.max_new_tokens for each in members) for members in sorted(below)]
        assert longest == sorted(longest, reverse=True)


def run_job(harness: Make, requests: Sequence[Any], **limits: Any) -> tuple[int, int]:
    """Steps and computed tokens of requests that are all there from the start."""
    loop = harness(policy="lpm", **limits)
    loop.submit(*requests)
    loop.run()
    return len(loop.plans), loop.mill.num_computed


@pytest.fixture
def by_prefix_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Leave the length of outputs out of account from now on."""

    def leave_out() -> None:
        monkeypatch.setattr(queue_order, "_longest", lambda request: 0)

    return leave_out


def mixed_requests(make_request: Make, seed: int) -> list[Any]:
    """Four groups with a common beginning; most outputs are short, a few are long."""
    draw = random.Random(seed)
    requests = []
    for index in range(64):
        group = [index % 4] * 8
        limit = 40 if draw.random() < 0.1 else draw.randint(2, 8)
        own = [draw.randrange(5) for _ in range(draw.randint(1, 8))]
        requests.append(make_request(str(index), [*group, *own], limit))
    return requests


def test_a_job_ends_sooner_with_the_longest_first(
    harness: Make, make_request: Make, by_prefix_only: Callable[[], None]
) -> None:
    """And next to nothing more is computed for it: a page where a prompt follows one that it begins."""
    jobs = [mixed_requests(make_request, seed) for seed in range(10)]
    longest_first = [run_job(harness, job, num_pages=400) for job in jobs]
    by_prefix_only()
    by_prefix = [run_job(harness, job, num_pages=400) for job in jobs]
    computed, computed_before = (sum(tokens for _, tokens in runs) for runs in (longest_first, by_prefix))
    assert computed <= 1.002 * computed_before
    steps, steps_before = (sum(steps for steps, _ in runs) for runs in (longest_first, by_prefix))
    assert steps < 0.88 * steps_before
    for job, (taken, _) in zip(jobs, longest_first, strict=True):
        # No schedule is shorter than its longest row, or than all rows over all slots.
        least = max(40, sum(request.max_new_tokens for request in job) / 8)
        assert taken <= 1.25 * least


def test_a_small_pool_serves_as_many_prefixes_as_without(
    harness: Make, make_request: Make, by_prefix_only: Callable[[], None]
) -> None:
    jobs = [mixed_requests(make_request, seed) for seed in range(10)]
    small = {"num_pages": 24, "max_rows": 4}
    longest_first = sum(run_job(harness, job, **small)[1] for job in jobs)
    by_prefix_only()
    assert longest_first <= 1.03 * sum(run_job(harness, job, **small)[1] for job in jobs)


def test_rows_that_come_in_windows_are_ordered_window_by_window(harness: Make, make_request: Make) -> None:
    """As a job sends them: a few new rows whenever some have finished. Each prefix is computed once."""
    loop = harness(policy="lpm", num_pages=400, max_rows=4, page_size=4)
    rows = [make_request(str(index), [*([index % 8] * 8), index % 5, index % 3], 3) for index in range(160)]
    waiting = iter(rows)
    num_sent = 40
    loop.submit(*islice(waiting, num_sent))
    while not loop.scheduler.idle:
        loop.step()
        num_done = sum(outputs[-1].finish is not None for outputs in loop.outputs.values())
        new = list(islice(waiting, num_done + 40 - num_sent))
        num_sent += len(new)
        loop.submit(*new)
    assert len(loop.outputs) == 160
    # The eight prefixes of two pages once, the rest of each prompt, and the tokens that are read back.
    assert loop.mill.num_computed == 8 * 8 + 160 * 2 + 160 * 2


def test_whoever_names_no_limit_may_write_longest(cache: Cache, make_request: Make) -> None:
    open_end = make_request("0", [1], 3)
    object.__setattr__(open_end, "params", SamplingParams(max_new_tokens=None))
    requests = [make_request("1", [2], 50), open_end, make_request("2", [3], 4)]
    waiting = [RequestState(each) for index, each in enumerate(requests)]
    assert [*map(place_of, create_policy("lpm", cache).ordered(waiting))] == [0, 1, 2]


def test_a_window_of_deep_prefixes_is_ordered_quickly(make_request: Make) -> None:
    """Prompts that grow page by page: each is the prefix of the next."""
    cache = Cache(num_pages=64, page_size=2)
    waiting = [
        RequestState(make_request(str(index), [0] * (2 * index + 1), 1 + index % 7)) for index in range(1024)
    ]
    began = time.perf_counter()
    order = create_policy("lpm", cache).ordered(waiting)
    assert time.perf_counter() - began < 1.0
    assert len(order) == 1024
