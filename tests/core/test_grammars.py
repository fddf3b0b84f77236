"""Requests whose grammar is being compiled, and what becomes of the ends of text under a grammar."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.conftest import FACTS
from tokenmill.core import grammars as grammars_module
from tokenmill.core.grammars import Grammars, Guide
from tokenmill.core.loop import Close, Inbox, Loop, Submit
from tokenmill.grammar import BadGrammar
from tokenmill.messages import Finish, Grammar
from tokenmill.sampling_params import SamplingParams

pytestmark = pytest.mark.unit

Make = Callable[..., Any]


@pytest.fixture
def world(harness: Make) -> Any:
    return harness()


class FakeMatcher:
    """Follows one text of tokens, after which it is complete."""

    def __init__(self, tokens: list[int], *, open_end: bool = False) -> None:
        self.tokens, self.open_end, self.error = list(tokens), open_end, ""
        self.is_too_complex = False
        self.breaks_before: int | None = None  # this token

    @property
    def is_accepting(self) -> bool:
        return not self.tokens

    def accept(self, token: int) -> bool:
        return not self.error and bool(self.tokens) and self.tokens.pop(0) == token

    def fill_mask(self, out: Any) -> None:
        if self.breaks_before in self.tokens[:1]:
            self.error = "no more room"
        if self.error:
            out[0] = 0
            return
        out[0] = 1 << self.tokens[0] if self.tokens else (0b1000 if self.open_end else 0)


class FakeTemplate:
    """Its only matcher, and those that take its place when it breaks."""

    is_used_up = False

    def __init__(self, matcher: FakeMatcher, *others: FakeMatcher) -> None:
        self.matcher, self.others = matcher, list(others)
        self.num_made = 0

    def expect(self, num_outputs: int) -> None:
        pass

    def new(self) -> Any:
        self.num_made += 1
        return self.matcher

    def renewed(self, broken: Any) -> Any:
        return self.others.pop(0) if broken.error and self.others else None


class FakeBatch:
    def __init__(self, matchers: Any) -> None:
        self._matchers = matchers

    def accept(self, tokens: Any) -> list[bool]:
        return [matcher.accept(token) for matcher, token in zip(self._matchers, tokens, strict=True)]

    def fill_masks(self, out: Any) -> Any:
        for matcher, row in zip(self._matchers, out, strict=True):
            matcher.fill_mask(row)
        return np.array([matcher.is_accepting for matcher in self._matchers])


class FakeCompiler:
    """A backend and its compiler in one; the test decides when a grammar is there."""

    num_words = 1

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def compile(self, grammar: Grammar) -> Future[Any]:
        return self.future

    def backend(self) -> FakeCompiler:
        return self

    def batch(self, matchers: Any) -> FakeBatch:
        return FakeBatch(matchers)


def guided(make_request: Make, **changes: Any) -> Any:
    request = make_request("a", [1, 2], 4)
    return replace(request, grammar=Grammar("regex", "x"), **changes)


# ── while a grammar is compiled ──


def test_a_request_waits_for_its_grammar(world: Any, make_request: Make) -> None:
    request = guided(make_request)
    world.submit(request, make_request("b", [1], 2))
    assert world.scheduler.num_waiting == 2
    while not world.scheduler.is_asleep:
        world.step()
    assert list(world.outputs) == ["b"]
    assert not world.scheduler.idle
    guide = Guide(FakeTemplate(FakeMatcher([1] * 9)), request, end_ids=())
    guide.note = lambda token: None  # type: ignore[method-assign]
    assert world.scheduler.compiled("a", guide) == []
    world.scheduler.check_invariants()
    world.run()
    assert world.outputs["a"][-1].finish == Finish("length", length=4)


@pytest.mark.parametrize("end", ["cancel", "time_out"])
def test_ending_while_the_grammar_is_compiled(world: Any, make_request: Make, end: str) -> None:
    world.submit(guided(make_request, timeout_seconds=1.0))
    (output,) = getattr(world.scheduler, end)(["a"])
    assert output.finish.kind == "abort"
    assert world.scheduler.idle
    assert world.scheduler.compiled("a", Finish("abort")) == []
    world.scheduler.check_invariants()


def test_a_bad_grammar_ends_its_request(world: Any, make_request: Make) -> None:
    request = guided(make_request)
    world.submit(request)
    compiler = FakeCompiler()
    outcomes: list[Any] = []
    grammars(compiler).compile(request.grammar, [request], outcomes.extend)
    assert outcomes == []
    compiler.future.set_exception(BadGrammar("it is bad"))
    (output,) = world.scheduler.compiled(*outcomes[0])
    assert (output.finish.status_code, output.finish.error_type) == (400, "bad_grammar")
    assert "regex" in output.finish.message
    assert "it is bad" in output.finish.message
    assert world.scheduler.idle


@pytest.mark.parametrize(
    ("is_too_complex", "end"), [(True, (400, "bad_grammar")), (False, (500, "internal"))]
)
def test_a_grammar_that_breaks_while_it_is_followed(
    make_request: Make, is_too_complex: bool, end: tuple[int, str]
) -> None:
    matcher: Any = FakeMatcher([])
    guide = Guide(FakeTemplate(matcher), guided(make_request), end_ids=())
    matcher.error, matcher.is_too_complex = "3,000 items, the limit is 2,000", is_too_complex
    guide.look()
    for finish in (guide.finish, guide.accept(1)):
        assert finish is not None
        assert (finish.status_code, finish.error_type) == end
        assert "the limit is 2,000" in finish.message


class Readiness:
    """What a loop asks of its runner, in order: the numbers of rows launched, the ids of rows expected."""

    def __init__(self, world: Any, compiler: FakeCompiler, *, steps_in_flight: int) -> None:
        self.events: list[int | list[str]] = []
        self.inbox = Inbox()
        self._world, self._compiler = world, compiler
        self.runner: Any = SimpleNamespace(
            facts=replace(FACTS, steps_in_flight=steps_in_flight),
            preparation_seconds=0.0,
            prepare_more=lambda num_rows: False,
            launch=self._launch,
            sample=lambda masks: None,
            collect=world.mill.collect,
            call=self.call,
        )

    def _launch(self, plan: Any) -> None:
        self.events.append(len(plan.slots))
        self._world.mill.launch(plan)

    def call(self, name: str, requests: Any) -> None:
        assert name == "expect_masks"
        self.events.append([request.id for request in requests])

    def run(self, deliver: Callable[[Any], None]) -> None:
        books = grammars(self._compiler)
        books.close = lambda: None  # type: ignore[method-assign]
        world = self._world
        Loop(
            self.runner, world.scheduler, world.cache, grammars=books, inbox=self.inbox, deliver=deliver
        ).run()


def test_the_device_gets_ready_while_grammars_take_long_to_compile(world: Any, make_request: Make) -> None:
    """Where nothing else is to be done; requests that come while others run must not hold these up."""
    compiler = FakeCompiler()
    loop = Readiness(world, compiler, steps_in_flight=1)
    note = loop.call

    def call(name: str, requests: Any) -> None:
        note(name, requests)
        compiler.future.set_exception(BadGrammar("it is bad"))

    def deliver(outputs: Any) -> None:
        for output in outputs:
            if output.request_id == "late":
                loop.inbox.put(Close())
            elif output.request_id == "second":
                loop.inbox.put(Submit([make_request("plain", [1], 9)]))
                loop.inbox.put(Submit([guided(make_request, id="late")]))

    loop.runner.call = call
    loop.inbox.put(Submit([guided(make_request, id="first"), guided(make_request, id="second")]))
    loop.run(deliver)
    assert [event for event in loop.events if isinstance(event, list)] == [["first", "second"]]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_device_gets_ready_while_it_computes_the_prompts(
    world: Any, make_request: Make, steps_in_flight: int
) -> None:
    """Grammars are there sooner than what is prepared for them."""
    compiler = FakeCompiler()
    compiler.future.set_result(FakeTemplate(FakeMatcher([])))
    loop = Readiness(world, compiler, steps_in_flight=steps_in_flight)
    for name in ("first", "second"):
        loop.inbox.put(Submit([guided(make_request, id=name)]))
    loop.run(lambda outputs: loop.inbox.put(Close()))
    assert loop.events[steps_in_flight] == ["first", "second"]
    assert len([event for event in loop.events if isinstance(event, list)]) == 1


def test_the_device_need_not_get_ready_for_grammars_that_are_refused(world: Any, make_request: Make) -> None:
    compiler = FakeCompiler()
    compiler.future.set_exception(BadGrammar("it is bad"))
    loop = Readiness(world, compiler, steps_in_flight=1)

    def deliver(outputs: Any) -> None:
        for output in outputs:
            if output.request_id == "bad":
                loop.inbox.put(Submit([make_request("plain", [1], 9)]))
            elif output.finish is not None:
                loop.inbox.put(Close())

    loop.inbox.put(Submit([guided(make_request, id="bad")]))
    loop.run(deliver)
    assert loop.events
    assert set(loop.events) == {1}  # the rows of steps


def test_a_matcher_is_made_for_the_first_mask(make_request: Make) -> None:
    """Many of them take long, and before that the device would wait for them."""
    compiler, template, found = FakeCompiler(), FakeTemplate(FakeMatcher([7, 5])), []
    compiler.future.set_result(template)
    books = grammars(compiler)
    request = guided(make_request, stop_ids=(0,))
    books.compile(request.grammar, [request], found.extend)
    assert template.num_made == 0
    [(_, guide)] = found
    for token in (7, 5, 0):
        assert mask(books, guide) == {token}
        guide.note(token)
    assert template.num_made == 1


# ── ends of text ──


def grammars(compiler: FakeCompiler, eos_ids: tuple[int, ...] = (0,)) -> Grammars:
    facts: Any = type("Facts", (), {"vocab_size": 20, "eos_token_ids": eos_ids})()
    return Grammars(compiler, facts)  # type: ignore[arg-type]


def guide_of(make_request: Make, *matchers: FakeMatcher, **changes: Any) -> tuple[Grammars, Guide]:
    compiler = FakeCompiler()
    compiler.future.set_result(FakeTemplate(*matchers))
    found: list[Any] = []
    books = grammars(compiler, changes.pop("eos_ids", (0,)))
    request = guided(make_request, **changes)
    books.compile(request.grammar, [request], found.extend)
    [(_, guide)] = found
    return books, guide


def mask(books: Grammars, guide: Guide) -> set[int]:
    masks = books.masks([(3, guide)])
    assert masks.slots.tolist() == [3]
    return set(np.flatnonzero(np.unpackbits(masks.bits.view(np.uint8), bitorder="little")).tolist())


def test_ends_are_allowed_where_the_output_is_complete(make_request: Make) -> None:
    books, guide = guide_of(make_request, FakeMatcher([7]), stop_ids=(0, 9))
    assert mask(books, guide) == {7}
    guide.accept(7)
    assert mask(books, guide) == {0, 9}
    guide.accept(9)
    assert guide.finish is None


def test_a_stop_id_in_the_middle_is_not_allowed(make_request: Make) -> None:
    books, guide = guide_of(make_request, FakeMatcher([7]), stop_ids=(7,))
    assert mask(books, guide) == set()
    assert guide.finish is not None
    assert guide.finish.error_type == "bad_parameters"
    assert "stop_token_ids" in str(guide.finish.message)


def test_with_ignore_eos_the_models_ends_follow(make_request: Make) -> None:
    books, guide = guide_of(make_request, FakeMatcher([], open_end=True), stop_ids=())
    assert mask(books, guide) == {0, 3}
    guide.accept(0)
    assert mask(books, guide) == {0}
    guide.accept(0)
    assert guide.finish is None


def test_a_model_without_end_of_text(make_request: Make) -> None:
    books, guide = guide_of(make_request, FakeMatcher([]), stop_ids=(), eos_ids=())
    assert mask(books, guide) == set()
    assert guide.finish == Finish("stop")


def test_min_new_tokens_beyond_the_grammar(make_request: Make) -> None:
    params = SamplingParams(min_new_tokens=2)
    books, guide = guide_of(make_request, FakeMatcher([7]), params=params, stop_ids=(0,))
    guide.accept(7)
    assert mask(books, guide) == set()
    assert guide.finish is not None
    assert guide.finish.error_type == "bad_parameters"


def test_a_token_that_does_not_follow_fails_the_request(make_request: Make) -> None:
    for is_noted in (False, True):
        books, guide = guide_of(make_request, FakeMatcher([7]), stop_ids=(0,))
        if is_noted:
            guide.note(8)
            books.masks([(3, guide)])
        else:
            guide.accept(8)
        assert guide.finish is not None
        assert guide.finish.status_code == 500
        assert "token 8 " in str(guide.finish.message)


def test_a_noted_token_counts_with_the_next_mask(make_request: Make) -> None:
    books, guide = guide_of(make_request, FakeMatcher([7, 5]), stop_ids=(0,))
    guide.note(7)
    assert mask(books, guide) == {5}
    guide.note(5)
    assert mask(books, guide) == {0}
    guide.note(0)
    assert mask(books, guide) == {0}
    assert guide.finish is None


# ── rows that stay together ──


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_that_stay_together_are_masked_as_rows_that_meet_anew(data: st.DataObject) -> None:
    """What is kept from step to step, ends and all, is what would be found out each time."""
    num_rows = data.draw(st.integers(1, 5))
    scripts = [data.draw(st.lists(st.integers(4, 9), max_size=4)) for _ in range(num_rows)]
    stop_ids = [data.draw(st.sampled_from([(), (0,), (0, 12), (4,)])) for _ in range(num_rows)]
    held_back = [data.draw(st.sampled_from([0, 0, 3])) for _ in range(num_rows)]
    kept, guides, others = (
        grammars(FakeCompiler()),
        *(
            [
                Guide(
                    FakeTemplate(FakeMatcher(script)),  # type: ignore[arg-type]
                    row_request(ends, min_new_tokens),
                    end_ids=ends or (0,),
                )
                for script, ends, min_new_tokens in zip(scripts, stop_ids, held_back, strict=True)
            ]
            for _ in range(2)
        ),
    )
    rows = list(range(num_rows))
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            rows = data.draw(st.lists(st.sampled_from(range(num_rows)), min_size=1, unique=True))
        rows = [row for row in rows if guides[row].finish is None]
        if not rows:
            return
        found = kept.masks([(row + 3, guides[row]) for row in rows])
        expected = grammars(FakeCompiler()).masks([(row + 3, others[row]) for row in rows])
        assert found.slots.tolist() == expected.slots.tolist() == [row + 3 for row in rows]
        finishes = [guides[row].finish for row in rows]
        assert finishes == [others[row].finish for row in rows]
        for index, row in enumerate(rows):
            if finishes[index] is not None:
                continue
            assert (found.bits[index] == expected.bits[index]).all()
            allowed = np.flatnonzero(np.unpackbits(found.bits[index].view(np.uint8), bitorder="little"))
            token = data.draw(st.sampled_from([*allowed.tolist(), *allowed.tolist(), 11]))
            if data.draw(st.integers(0, 5)):  # else its draw failed
                guides[row].note(token)
                others[row].note(token)


def row_request(stop_ids: tuple[int, ...], min_new_tokens: int) -> Any:
    return SimpleNamespace(stop_ids=stop_ids, params=SimpleNamespace(min_new_tokens=min_new_tokens))


# ── a matcher that breaks because others have used up what it shares with them ──


def breaking(tokens: list[int], before: int) -> FakeMatcher:
    matcher = FakeMatcher(tokens)
    matcher.breaks_before = before
    return matcher


def follow(books: Grammars, guide: Guide, *, at_once: bool) -> list[int]:
    """Masks until there is none; each is the token that is drawn next."""
    masks = []
    while not masks or masks[-1]:
        masks.append(int(books.masks([(0, guide)]).bits[0, 0]))
        if guide.finish is not None:
            break
        if masks[-1]:
            token = masks[-1].bit_length() - 1
            guide.accept(token) if at_once else guide.note(token)
    return masks


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("before", [5, 6, 7])
def test_a_matcher_that_takes_its_place_goes_on_where_it_broke(
    make_request: Make, before: int, at_once: bool
) -> None:
    whole = [5, 6, 7, 8]
    _, guide = guide_of(make_request, FakeMatcher(whole), eos_ids=())
    expected = follow(grammars(FakeCompiler(), ()), guide, at_once=at_once)
    others = breaking(whole, 6), breaking(whole, 8), FakeMatcher(whole)
    books, guide = guide_of(make_request, breaking(whole, before), *others, eos_ids=())
    assert follow(books, guide, at_once=at_once) == expected == [1 << 5, 1 << 6, 1 << 7, 1 << 8, 0]
    assert guide.finish == Finish("stop")


def test_ends_of_text_stay_forbidden_under_the_matcher_that_takes_a_place(make_request: Make) -> None:
    class Open(FakeMatcher):
        def fill_mask(self, out: Any) -> None:
            out[0] = 0b1100001

    books, guide = guide_of(make_request, breaking([5], 5), Open([5]), eos_ids=(0,), stop_ids=(6,))
    assert books.masks([(0, guide)]).bits[0, 0] == 0b0100000


def test_without_another_matcher_the_row_fails(make_request: Make) -> None:
    books, guide = guide_of(make_request, breaking([5, 6], 6), breaking([5, 6], 6))
    books.masks([(0, guide)])
    guide.note(5)
    books.masks([(0, guide)])
    assert guide.finish is not None
    assert "no more room" in (guide.finish.message or "")


def test_what_all_wait_for_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(grammars_module, "time", SimpleNamespace(monotonic=lambda: now))
    allowance = grammars_module._Allowance(2.0, share=0.1)
    for seconds in (1.5, 1.5):
        assert allowance.is_left()
        with allowance.spent():
            now += seconds
    assert not allowance.is_left()
    now += 10.0
    assert allowance.is_left()
    now += 1000.0
    assert allowance.is_left()
    with allowance.spent():
        now += 2.5
    assert not allowance.is_left()  # what is not used is not kept for ever
