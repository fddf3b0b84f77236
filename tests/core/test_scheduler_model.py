"""Random jobs on small page pools against what every request produces alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.core.priority import Priorities

pytestmark = pytest.mark.unit

_PREFIXES: tuple[list[int], ...] = ([], [1, 2, 3, 4], [1, 2, 3, 4, 0, 0, 0, 0, 2, 2], [2, 2, 2, 2])

requests = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            lambda prefix, tail: [*prefix, *tail],
            st.sampled_from(_PREFIXES),
            st.lists(st.integers(0, 2), min_size=1, max_size=14),
        ),
        "max_new_tokens": st.one_of(st.integers(0, 2), st.integers(0, 24)),
        "stop_ids": st.sampled_from([(), (), (0,), (1, 4)]),
        "seed": st.sampled_from([0, 0, 1, 2**40 + 12345]),
        "report_interval": st.sampled_from([0, 0, 1, 3]),
        "priority": st.sampled_from([None, None, 0, 3, 20, -15]),
        "cache_namespace": st.sampled_from([b"", b"", b"salt"]),
    }
)
# When each request comes, and when (if ever) it is cancelled after that, in turns of the loop.
times = st.tuples(
    st.one_of(st.just(0), st.integers(0, 25)), st.one_of(st.none(), st.none(), st.integers(0, 25))
)
set_ups = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 4]),
        "max_rows": st.integers(1, 8),
        "max_step_tokens": st.one_of(st.integers(1, 10), st.just(60)),
        "depth": st.integers(1, 4),
        "prefix_caching": st.booleans(),
        "lanes": st.one_of(st.none(), st.integers(0, 2**16)),
        "lags": st.booleans(),
    }
)
# What the queue does: its order, who pushes whom back, and how many may wait.
orders = st.one_of(
    st.fixed_dictionaries({"policy": st.sampled_from([None, "fcfs", "lpm", "lof", "random"])}),
    st.fixed_dictionaries(
        {
            "policy": st.sampled_from([None, "fcfs", "lof"]),
            "priorities": st.builds(
                Priorities,
                enabled=st.just(True),
                low_values_first=st.booleans(),
                default=st.sampled_from([None, 5]),
                threshold=st.sampled_from([None, 0, 10]),
            ),
        }
    ),
)


@settings(max_examples=160, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    set_up=set_ups,
    order=orders,
    max_queued=st.one_of(st.none(), st.none(), st.integers(0, 6)),
    spare_pages=st.one_of(st.integers(0, 5), st.integers(0, 30)),
    groups=st.integers(1, 2),
    jobs=st.lists(st.tuples(requests, times), min_size=1, max_size=16),
)
def test_every_request_gets_what_it_gets_alone(
    harness: Callable[..., Any],
    make_request: Callable[..., Any],
    alone: Callable[..., Any],
    set_up: dict[str, Any],
    order: dict[str, Any],
    max_queued: int | None,
    spare_pages: int,
    groups: int,
    jobs: list[Any],
) -> None:
    queue = [(make_request(str(index), **job), when) for index, (job, when) in enumerate(jobs)]
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request, _ in queue)
    smallest = -(-longest // set_up["page_size"]) + spare_pages
    sizes = [smallest + 3 * group for group in range(groups)]
    loop = harness(num_pages=sizes, max_sequence_tokens=longest, max_queued=max_queued, **set_up, **order)

    for turn in range(60):
        for output in loop.submit(*(request for request, (start, _) in queue if start == turn)):
            assert output.finish.error_type == "queue_full"
            assert max_queued is not None
        cancelled = [
            request.id for request, (start, wait) in queue if wait is not None and start + wait == turn
        ]
        for output in loop.keep(loop.scheduler.cancel([*cancelled, "unknown"])):
            assert output.finish.kind == "abort"
        if not loop.scheduler.idle:
            loop.step()
    loop.run()

    assert sorted(loop.outputs) == sorted(request.id for request, _ in queue)
    for request, (_, wait) in queue:
        tokens, finish = alone(request)
        last = loop.last(request.id)
        if last.finish.kind == "abort":
            assert wait is not None or last.finish.error_type == "queue_full"
            assert loop.tokens(request.id) == tokens[: len(loop.tokens(request.id))]
        else:
            assert loop.tokens(request.id) == tokens
            assert last.finish == finish
        sizes_told = [len(output.token_ids) for output in loop.outputs[request.id][:-1]]
        assert sizes_told == [1, *[request.report_interval] * (len(sizes_told) - 1)][: len(sizes_told)]
    assert loop.cache.num_used_pages == 0
    assert loop.cache.num_free_pages + loop.cache.num_cached_pages == sum(sizes)
    loop.cache.flush()
    assert loop.cache.num_free_pages == sum(sizes)


@pytest.mark.parametrize("lanes", [None, 1, 2])
def test_a_long_job_on_a_pool_for_two_requests(
    harness: Callable[..., Any],
    make_request: Callable[..., Any],
    alone: Callable[..., Any],
    lanes: int | None,
) -> None:
    """Hundreds of requests that preempt each other all the time end right, and the work stays bounded."""
    loop = harness(
        num_pages=24,
        page_size=2,
        max_rows=8,
        max_step_tokens=24,
        max_sequence_tokens=24,
        depth=2,
        lanes=lanes,
        lags=lanes == 2,
    )
    job = [
        make_request(str(index), [index % 3] * (1 + index % 7), 5 + index % 11, seed=index)
        for index in range(300)
    ]
    loop.scheduler.submit(job)
    loop.run()
    assert all(loop.tokens(request.id) == alone(request)[0] for request in job)
    assert sum(loop.last(request.id).num_retractions for request in job) > 20
    needed = sum(len(request.prompt_ids) + request.max_new_tokens - 1 for request in job)
    assert loop.mill.num_computed < 2 * needed
