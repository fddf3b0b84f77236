"""The order of the waiting queue."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.config import EngineConfig
from tokenmill.core.policy import POLICIES, PriorityQueue, WaitingQueue, create_policy
from tokenmill.core.request import RequestState
from tokenmill.kvcache import Cache

pytestmark = pytest.mark.unit

Make = Callable[..., Any]


class Shortest:
    """A policy that only a test needs: the shortest prompt of the next four first."""

    window = 4

    def __init__(self, cache: Cache) -> None:
        pass

    def key(self, request: RequestState) -> int:
        return request.num_prompt


@pytest.fixture
def cache() -> Cache:
    return Cache(num_pages=64, page_size=2)


def remember(cache: Cache, token_ids: Sequence[int], namespace: bytes = b"") -> None:
    ids = array("i", token_ids)
    row = cache.match(ids.tobytes(), namespace=namespace)
    assert cache.reserve(row, len(ids))
    cache.commit(row, ids, num_tokens=len(ids))
    cache.release(row)


def states(make_request: Make, prompts: Sequence[Sequence[int]]) -> list[RequestState]:
    return [
        RequestState(make_request(str(index), prompt), arrival=index) for index, prompt in enumerate(prompts)
    ]


def drain(queue: WaitingQueue) -> list[int]:
    return [queue.pop().arrival for _ in range(len(queue))]


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
    for arrival, request in enumerate(requests):
        queue.add(RequestState(request, arrival=arrival))
    assert drain(queue) == [2, 1, 0, 3], "what nobody shares stands together by namespace"


def test_longest_output_first(cache: Cache, make_request: Make) -> None:
    queue = WaitingQueue(create_policy("lof", cache))
    lengths = [random.Random(index).randrange(50) for index in range(3000)]
    for index, length in enumerate(lengths):
        queue.add(RequestState(make_request(str(index), [1], length), arrival=index))
    assert drain(queue) == sorted(range(3000), key=lambda index: (-lengths[index], index))


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
    assert queue.pop().arrival == 3
    assert drain(queue) == [2, 1, 0, 4, 7, 6, 5, 8]


def test_preempted_requests_go_first_the_oldest_before_the_others(cache: Cache, make_request: Make) -> None:
    queue = WaitingQueue(create_policy("fcfs", cache))
    first, second, third, fourth = states(make_request, [[0]] * 4)
    queue.add(third)
    assert queue.peek() is third
    queue.add(fourth)
    queue.add_retracted(second)  # the youngest is preempted first
    queue.add_retracted(first)
    assert [state.arrival for state in queue] == [0, 1, 2, 3]
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
        place = state.age if state.num_retractions else state.arrival
        return (-state.urgency, not state.num_retractions, place)

    for arrival, (operation, number) in enumerate(operations):
        if operation == "add":
            request = make_request(str(arrival), [1], 5)
            waiting.append(RequestState(request, arrival=arrival, urgency=number % 4))
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
def test_keys_are_read_once_per_request_however_long_the_queue(
    cache: Cache, make_request: Make, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, num_keys = POLICIES[policy], 0
    original = kind.key

    def counting(self: Any, request: RequestState) -> Any:
        nonlocal num_keys
        num_keys += 1
        return original(self, request)

    monkeypatch.setattr(kind, "key", counting)
    queue = WaitingQueue(create_policy(policy, cache))
    for arrival in range(3000):
        queue.add(RequestState(make_request(str(arrival), [1, 2, 3]), arrival=arrival))
    assert queue.peek() is queue.peek()
    assert num_keys == kind.window
    drain(queue)
    assert num_keys == 3000
