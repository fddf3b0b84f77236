"""Rows that wait for masks: whatever comes between, their tokens are those of a row alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.conftest import FACTS, Unprepared, run_alone, tokens_of
from tokenmill.core.grammars import Guide
from tokenmill.core.loop import Call, Cancel, Close, Inbox, Loop, Submit
from tokenmill.core.priority import Priorities
from tokenmill.messages import Finish, Grammar, Lane, Output, StepPlan, StepResult

pytestmark = pytest.mark.unit

Make = Callable[..., Any]
STUCK = Finish("stop", message="nothing is left")


class Runner(Unprepared):
    """Hands plans on to a fake mill; `then` is what happens while a step is drawn."""

    def __init__(self, mill: Any, depth: int, then: Callable[[], None]) -> None:
        self.facts = replace(FACTS, steps_in_flight=depth)
        self._mill = mill
        self._then = then

    def launch(self, plan: StepPlan) -> None:
        self._mill.launch(plan)

    def sample(self, masks: Any) -> None:
        self._then()

    def collect(self, lane: Lane = Lane.WHOLE) -> StepResult:
        return self._mill.collect()


class Grammars:
    """Allows everything; a guide is stuck when its masks run out."""

    def __init__(self, num_masks: dict[str, int]) -> None:
        self._left: dict[int, int] = {}
        self._num_masks = num_masks

    def compile(self, grammar: Grammar, requests: Sequence[Any], done: Callable[[Any], None]) -> None:
        done([(request.id, self._guide(request)) for request in requests])

    def _guide(self, request: Any) -> Guide:
        guide = Guide(None, request, end_ids=())  # type: ignore[arg-type]
        guide.note = lambda token: None  # type: ignore[method-assign]
        self._left[id(guide)] = self._num_masks.get(request.id, 10**9)
        return guide

    def masks(self, guided: Sequence[tuple[int, Guide]]) -> None:
        for _, guide in guided:
            self._left[id(guide)] -= 1
            if self._left[id(guide)] < 0:
                guide.finish = STUCK

    def forget_failures(self) -> None:
        pass

    def close(self) -> None:
        pass


def run_loop(
    world: Any,
    requests: Sequence[Any],
    messages: dict[int, list[Any]],
    *,
    depth: int,
    num_masks: dict[str, int],
) -> dict[str, list[Output]]:
    """The outputs of each request; `messages` come while so many steps were drawn."""
    inbox, ended, count = Inbox(), set(), [0]
    outputs: dict[str, list[Output]] = {}

    def deliver(delivered: Sequence[Output]) -> None:
        for output in delivered:
            outputs.setdefault(output.request_id, []).append(output)
            if output.finish is not None:
                ended.add(output.request_id)
        if len(ended) == len(requests):
            inbox.put(Close())

    def then() -> None:
        count[0] += 1
        for message in messages.get(count[0], []):
            inbox.put(message)

    grammars: Any = Grammars(num_masks)
    runner: Any = Runner(world.mill, depth, then)
    runner.call = lambda name, **arguments: None
    inbox.put(Submit(requests))
    Loop(runner, world.scheduler, world.cache, grammars=grammars, inbox=inbox, deliver=deliver).run()
    return outputs


def guided(make_request: Make, name: str, length: int, **changes: Any) -> Any:
    request = make_request(name, [1 + len(name), 2, 3, 4], length, **changes)
    return replace(request, grammar=Grammar("regex", "x"))


KINDS = ("pause", "check", "flush", "cancel")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # they only make things
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    plain=st.sets(st.integers(0, 11)),
    stuck=st.dictionaries(st.integers(0, 11), st.integers(0, 5)),
    events=st.lists(st.tuples(st.integers(1, 30), st.sampled_from(KINDS), st.integers(0, 11)), max_size=6),
    num_pages=st.integers(16, 40),
    priorities=st.booleans(),
    depth=st.integers(1, 3),
)
def test_whatever_comes_between(
    harness: Make,
    make_request: Make,
    lengths: list[int],
    plain: set[int],
    stuck: dict[int, int],
    events: list[tuple[int, str, int]],
    num_pages: int,
    priorities: bool,
    depth: int,
) -> None:
    """Calls, cancellations, rows that end at their masks, preemption: tokens are those of a request alone."""
    replies: list[Any] = []

    def keep(*reply: Any) -> None:
        replies.append(reply)

    messages: dict[int, list[Any]] = {}
    cancelled = set()
    for at, kind, target in events:
        into = messages.setdefault(at, [])
        if kind == "pause":
            modes = ("in_place", "retract")
            into.append(Call("pause_generation", {"mode": modes[target % 2]}, keep))
            into.append(Call("check", {}, keep))
            into.append(Call("continue_generation", {}, keep))
        elif kind == "cancel":
            into.append(Cancel([f"r{target}"]))
            cancelled.add(f"r{target}")
        else:
            into.append(Call({"check": "check", "flush": "flush_cache"}[kind], {}, keep))
    requests = []
    for index, length in enumerate(lengths):
        make = make_request if index in plain else partial(guided, make_request)
        arguments = ([1 + index, 2, 3, 4], length) if index in plain else (length,)
        requests.append(make(f"r{index}", *arguments, **({"priority": index % 3} if priorities else {})))
    world = harness(num_pages=num_pages, priorities=Priorities(enabled=True) if priorities else None)
    outputs = run_loop(
        world, requests, messages, depth=depth, num_masks={f"r{at}": n for at, n in stuck.items()}
    )
    for index, request in enumerate(requests):
        expected, finish = run_alone(request)
        found, end = tokens_of(outputs[request.id]), outputs[request.id][-1].finish
        assert end is not None
        assert sum(output.finish is not None for output in outputs[request.id]) == 1
        if end.message is None:
            assert (found, end) == (expected, finish)
        else:
            assert found == expected[: len(found)]
            assert request.id in cancelled or (end == STUCK and index in stuck)
    assert all(error is None for _, error in replies)
    world.scheduler.check_invariants()
