"""Sessions: what each turn sees, what is remembered, capacity, timeouts, many at once, and the tiny model."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as sgl
from tokenmill.frontend.sessions import NO_SESSION, Sessions
from tokenmill.messages import Finish

BOS, EOS = 256, 257
ENDLESS = {"ignore_eos": True, "max_new_tokens": 50_000}


# ── the books alone ───────────────────────────────────────────────────────────────────────────


class Clock:
    """Seconds that pass only when a test says so."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


_names = itertools.count()


def make_row(rid: str, prompt_ids: Any, output: list[int] | None = None, kind: str = "stop") -> Any:
    return SimpleNamespace(
        request=SimpleNamespace(id=rid, prompt_ids=np.asarray(prompt_ids, np.int32)),
        name=f"name{next(_names)}",
        token_ids=output or [],
        finish=Finish(kind),  # type: ignore[arg-type]
    )


def begin(sessions: Sessions, params: dict[str, Any], rid: str, new: list[int]) -> tuple[Any, Any, Any]:
    """Start a turn; gives its call, its row, and the names of requests that it made obsolete."""
    call = sessions.continuation(params)
    prompt = call.join(np.asarray(new, np.int32))
    row = make_row(rid, prompt)
    return call, row, call.start([row])


def take_turn(sessions: Sessions, params: dict[str, Any], rid: str, new: list[int], output: list[int]) -> Any:
    """Run a turn to its end; gives the prompt that the core would have got."""
    call, row, _ = begin(sessions, params, rid, new)
    row.token_ids = output
    call.finish(row)
    return row.request.prompt_ids.tolist()


@pytest.fixture
def sessions() -> Sessions:
    """Without a tokenizer a token is a character."""
    return Sessions(None)


def test_a_turn_continues_the_latest_in_either_dialect(sessions: Sessions) -> None:
    sessions.open(100, "s")
    assert take_turn(sessions, {"id": "s"}, "a", [1, 2], [3]) == [1, 2]
    assert take_turn(sessions, {"session_id": "s"}, "b", [4], [5, 6]) == [1, 2, 3, 4]
    assert take_turn(sessions, {"id": "s", "rid": None}, "c", [7], [8]) == [1, 2, 3, 4, 5, 6, 7]
    assert take_turn(sessions, {"id": "s", "rid": "a"}, "d", [9], [9]) == [1, 2, 3, 9]
    assert take_turn(sessions, {"id": "s"}, "e", [10], []) == [1, 2, 3, 9, 9, 10]


def test_cutting_what_is_continued(sessions: Sessions) -> None:
    sessions.open(100, "s")
    take_turn(sessions, {"id": "s"}, "a", [1, 2], [3, 4])
    take_turn(sessions, {"id": "s"}, "b", [5, 6], [7])
    on_b = {"id": "s", "rid": "b"}
    assert take_turn(sessions, on_b | {"drop_previous_output": True}, "c", [9], []) == [1, 2, 3, 4, 5, 6, 9]
    assert take_turn(sessions, on_b | {"offset": 5}, "d", [9], []) == [1, 2, 3, 4, 5, 9]
    assert take_turn(sessions, on_b | {"offset": 3}, "e", [9], []) == [1, 2, 3, 9]
    assert take_turn(sessions, on_b | {"offset": 7}, "f", [9], []) == [1, 2, 3, 4, 5, 6, 7, 9]
    # What was cut is cut for those that follow, too.
    assert take_turn(sessions, {"id": "s", "rid": "e"}, "g", [8], []) == [1, 2, 3, 9, 8]
    # As in a slice of a list.
    assert take_turn(sessions, on_b | {"offset": 80}, "h", [9], []) == [1, 2, 3, 4, 5, 6, 7, 9]
    assert take_turn(sessions, on_b | {"offset": -1}, "i", [9], []) == [1, 2, 3, 4, 5, 6, 9]
    assert take_turn(sessions, on_b | {"offset": -8}, "j", [9], []) == [9]
    assert take_turn(sessions, {"id": "s", "offset": -1, "replace": True}, "k", [9], []) == [9]


def test_replacing(sessions: Sessions) -> None:
    sessions.open(100, "s")
    take_turn(sessions, {"id": "s"}, "a", [1], [2])
    take_turn(sessions, {"id": "s"}, "b", [3], [4])
    take_turn(sessions, {"id": "s"}, "c", [5], [6])
    _, running, _ = begin(sessions, {"id": "s"}, "r", [0])
    assert take_turn(sessions, {"id": "s", "rid": "c"}, "x", [7], []) == [1, 2, 3, 4, 5, 6, 7]
    _, row, obsolete = begin(sessions, {"id": "s", "rid": "a", "replace": True}, "d", [8])
    assert row.request.prompt_ids.tolist() == [1, 2, 8]
    assert obsolete == [running.name]
    for gone in "bcrx":
        with pytest.raises(sgl.InvalidArgument, match=f"no turn '{gone}'"):
            sessions.continuation({"id": "s", "rid": gone})
    # Without rid everything is dropped, the turn that runs as well.
    _, fresh, obsolete = begin(sessions, {"id": "s", "replace": True}, "a", [1])
    assert fresh.request.prompt_ids.tolist() == [1]
    assert obsolete == [row.name]


def test_replacing_what_follows_a_running_turn_ends_it(sessions: Sessions) -> None:
    sessions.open(12, "s")
    take_turn(sessions, {"id": "s"}, "a", [1], [2])
    call, row, _ = begin(sessions, {"id": "s"}, "b", [3])
    row.token_ids = [4, 5]  # what its caller was given so far
    on_b = {"id": "s", "rid": "b", "replace": True}
    _, next_row, obsolete = begin(sessions, on_b, "c", [7])
    assert next_row.request.prompt_ids.tolist() == [1, 2, 3, 4, 5, 7]
    assert obsolete == [row.name]
    row.token_ids, row.finish = [4, 5, 6], Finish("abort")
    call.finish(row)
    assert take_turn(sessions, on_b, "d", [8], []) == [1, 2, 3, 4, 5, 8], "it is a turn like any other"
    _, _, obsolete = begin(sessions, on_b | {"offset": 2}, "e", [9])
    assert obsolete == []
    with pytest.raises(sgl.InvalidArgument, match="it has 5, and this call would add 8"):
        begin(sessions, on_b, "f", [9] * 8)


def test_a_call_that_was_replaced_changes_nothing_when_it_ends(sessions: Sessions) -> None:
    sessions.open(100, "s")
    call, row, _ = begin(sessions, {"id": "s"}, "a", [1])
    take_turn(sessions, {"id": "s", "replace": True}, "a", [2], [3])
    row.token_ids = [9, 9]
    call.finish(row)
    assert take_turn(sessions, {"id": "s"}, "b", [4], []) == [2, 3, 4]


def test_a_bos_is_removed_from_what_is_appended() -> None:
    class Letters:
        bos_token_id = BOS

        def decode_batch(self, token_ids: Any, *, skip_special_tokens: bool) -> list[str]:
            return ["x" * len(ids) for ids in token_ids]

    sessions = Sessions(Letters())
    sessions.open(100, "s")
    assert take_turn(sessions, {"id": "s"}, "a", [BOS, 1], [2]) == [BOS, 1]
    assert take_turn(sessions, {"id": "s"}, "b", [BOS, 3, BOS], [4]) == [BOS, 1, 2, 3, BOS]
    assert take_turn(sessions, {"id": "s"}, "c", [BOS], []) == [BOS, 1, 2, 3, BOS, 4]


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"id": "s", "rdi": "a"}, sgl.UnknownArgument, r"no key 'rdi'\. Did you mean 'rid'\?"),
        ({"id": "s", 3: "a"}, sgl.UnknownArgument, "no key 3"),
        ({}, sgl.InvalidArgument, "names no session"),
        ({"id": None}, sgl.InvalidArgument, "names no session"),
        ({"id": "s", "session_id": "s"}, sgl.InvalidArgument, "both id and session_id"),
        ({"id": "", "session_id": "s"}, sgl.InvalidArgument, "both id and session_id"),
        ({"id": 3}, sgl.WrongType, r"\['id'\] must be a string, got 3"),
        ({"session_id": 3}, sgl.WrongType, r"\['session_id'\] must be a string, got 3"),
        ({"id": "s", "rid": 1}, sgl.WrongType, r"\['rid'\] must be a string"),
        ({"id": "s", "offset": 1.0}, sgl.WrongType, r"\['offset'\] must be an integer, got 1.0"),
        ({"id": "s", "replace": 1}, sgl.WrongType, r"\['replace'\] must be True or False"),
        ({"id": "t"}, sgl.InvalidArgument, "no session 't'"),
        ({"id": "s", "rid": "a"}, sgl.InvalidArgument, "session 's' has no turn 'a'"),
        ({"id": "s", "rid": ""}, sgl.InvalidArgument, "session 's' has no turn ''"),
        ([{"id": "s"}], sgl.WrongType, "must be a dict for the whole call"),
        ("s", sgl.WrongType, "must be a dict"),
    ],
)
def test_what_session_params_may_be(sessions: Sessions, params: Any, error: Any, message: str) -> None:
    sessions.open(100, "s")
    with pytest.raises(error, match=message):
        sessions.continuation(params)


def test_no_session(sessions: Sessions) -> None:
    assert sessions.continuation(None) is NO_SESSION
    assert sessions.continuation(None, "affinity") is NO_SESSION
    sessions.open(100, "s")
    with pytest.raises(sgl.InvalidArgument, match="session_id and session_params are both given"):
        sessions.continuation({"id": "s"}, "affinity")


def test_unfinished_and_aborted_turns_cannot_be_continued(sessions: Sessions) -> None:
    sessions.open(100, "s")
    take_turn(sessions, {"id": "s"}, "a", [1], [2])
    call, row, _ = begin(sessions, {"id": "s"}, "b", [3])
    with pytest.raises(sgl.InvalidArgument, match="turn 'b' of session 's' has not finished"):
        sessions.continuation({"id": "s", "rid": "b"})
    assert take_turn(sessions, {"id": "s"}, "c", [4], []) == [1, 2, 4]  # the latest that finished
    row.finish = Finish("abort")
    call.finish(row)
    dropped, _, _ = begin(sessions, {"id": "s"}, "d", [3])
    dropped.drop()
    for forgotten in "bd":
        with pytest.raises(sgl.InvalidArgument, match=f"no turn '{forgotten}'"):
            sessions.continuation({"id": "s", "rid": forgotten})


def test_the_latest_turn_is_the_one_that_began_last(sessions: Sessions) -> None:
    sessions.open(100, "s")
    first, slow, _ = begin(sessions, {"id": "s"}, "slow", [1])
    take_turn(sessions, {"id": "s"}, "quick", [2], [3])
    slow.token_ids = [9]
    first.finish(slow)
    assert take_turn(sessions, {"id": "s"}, "next", [4], []) == [2, 3, 4]


def test_an_id_is_used_once(sessions: Sessions) -> None:
    sessions.open(100, "s")
    take_turn(sessions, {"id": "s"}, "a", [1], [2])
    with pytest.raises(sgl.InvalidArgument, match="rid 'a' is a turn of session 's' already"):
        take_turn(sessions, {"id": "s"}, "a", [1], [2])


# ── opening, closing, limits ──


def test_opening_and_closing(sessions: Sessions, caplog: pytest.LogCaptureFixture) -> None:
    drawn = {sessions.open(1) for _ in range(100)}
    assert len(drawn) == 100
    assert all(isinstance(each, str) for each in drawn)
    assert sessions.open(10, "mine") == "mine"
    assert sessions.open(10, "mine") is None
    call, row, _ = begin(sessions, {"id": "mine"}, "a", [1])
    sessions.close("mine")
    call.finish(row)  # goes on, and is not recorded
    with pytest.raises(sgl.InvalidArgument, match="no session 'mine'"):
        sessions.continuation({"id": "mine"})
    with caplog.at_level(logging.WARNING, "tokenmill"):
        sessions.close("mine")
    assert "there is no session 'mine' to close" in caplog.text
    assert sessions.open(10, "mine") == "mine"
    assert take_turn(sessions, {"id": "mine"}, "b", [5], []) == [5]


def test_a_session_that_is_closed_while_a_call_is_made(sessions: Sessions) -> None:
    sessions.open(10, "s")
    call = sessions.continuation({"id": "s"})
    prompt = call.join(np.asarray([1], np.int32))
    sessions.close("s")
    sessions.open(10, "s")
    with pytest.raises(sgl.InvalidArgument, match="no session 's'"):
        call.start([make_row("a", prompt)])


def test_a_turn_that_is_replaced_while_a_call_is_made(sessions: Sessions) -> None:
    sessions.open(10, "s")
    take_turn(sessions, {"id": "s"}, "a", [1], [2])
    call = sessions.continuation({"id": "s"})
    prompt = call.join(np.asarray([3], np.int32))
    take_turn(sessions, {"id": "s", "replace": True}, "b", [4], [])
    with pytest.raises(sgl.InvalidArgument, match="session 's' was changed meanwhile"):
        call.start([make_row("c", prompt)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity_of_str_len": 0}, "capacity_of_str_len must be at least 1, got 0"),
        ({"capacity_of_str_len": "4096"}, "capacity_of_str_len must be an integer"),
        ({"capacity_of_str_len": 1, "session_id": ""}, "session_id is empty"),
        ({"capacity_of_str_len": 1, "session_id": 4}, "session_id must be a string"),
        ({"capacity_of_str_len": 1, "timeout": 0}, "timeout must be a finite number above 0"),
        ({"capacity_of_str_len": 1, "streaming": "yes"}, "streaming must be True or False"),
    ],
)
def test_wrong_arguments_of_open(sessions: Sessions, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(sgl.InvalidArgument, match=message):
        sessions.open(**arguments)


def test_capacity(sessions: Sessions) -> None:
    sessions.open(10, "s")
    take_turn(sessions, {"id": "s"}, "a", [1] * 3, [2] * 2)
    take_turn(sessions, {"id": "s"}, "b", [1] * 3, [2])  # its context does not count again
    with pytest.raises(sgl.InvalidArgument, match=r"at most 10 characters.* it has 9, .* would add 2; start"):
        take_turn(sessions, {"id": "s"}, "c", [1, 1], [])
    # An answer that crosses the limit is kept, and is the last one.
    take_turn(sessions, {"id": "s"}, "c", [1], [2] * 30)
    with pytest.raises(sgl.InvalidArgument, match="it has 40"):
        take_turn(sessions, {"id": "s"}, "d", [1], [])
    with pytest.raises(sgl.InvalidArgument, match="would add 11"):
        take_turn(sessions, {"id": "s", "replace": True}, "d", [1] * 11, [])
    assert take_turn(sessions, {"id": "s", "rid": "a", "replace": True}, "d", [7], []) == [1] * 3 + [
        2
    ] * 2 + [7]
    take_turn(sessions, {"id": "s", "replace": True}, "e", [1] * 10, [])


def test_what_is_aborted_gives_its_room_back(sessions: Sessions) -> None:
    sessions.open(10, "s")
    for index in range(5):
        call, row, _ = begin(sessions, {"id": "s"}, f"r{index}", [1] * 9)
        if index % 2:
            call.drop()
        else:
            row.finish = Finish("abort")
            call.finish(row)


def test_an_idle_session_is_closed() -> None:
    clock = Clock()
    sessions = Sessions(None, clock=clock)
    sessions.open(100, "short", timeout=10)
    sessions.open(100, "long", timeout=1000)
    sessions.open(100, "ever")
    clock.seconds += 9
    take_turn(sessions, {"id": "short"}, "a", [1], [])
    clock.seconds += 9
    call, row, _ = begin(sessions, {"id": "short"}, "b", [1])
    clock.seconds += 500  # a request that runs keeps it open
    sessions.continuation({"id": "long"})
    call.finish(row)
    clock.seconds += 9
    assert take_turn(sessions, {"id": "short"}, "c", [2], []) == [1, 1, 2]
    clock.seconds += 11
    with pytest.raises(sgl.InvalidArgument, match=r"no session 'short'.*idle for longer than its timeout"):
        sessions.continuation({"id": "short"})
    assert sessions.open(100, "short") == "short"
    assert sessions.open(100, "long") is None
    clock.seconds += 10_000
    assert sessions.open(100, "ever") is None
    assert sessions.open(100, "long") == "long"
    assert len(sessions._open) == 3


def test_idle_sessions_do_not_pile_up() -> None:
    clock = Clock()
    sessions = Sessions(None, clock=clock)
    for _ in range(1000):
        clock.seconds += 1
        session_id = sessions.open(100, timeout=5)
        call, _, _ = begin(sessions, {"id": session_id}, "a", [1])
        call.drop()
    assert len(sessions._open) <= 6
    assert len(sessions._looks) <= 6


def test_a_closed_session_does_not_stay_until_it_would_have_been_idle(sessions: Sessions) -> None:
    sessions.open(100, "s", timeout=1000)
    take_turn(sessions, {"id": "s"}, "a", [1], [2])
    session = weakref.ref(sessions._open["s"])
    sessions.close("s")
    gc.collect()
    assert session() is None


def test_streaming_sessions_only_append_and_one_at_a_time(sessions: Sessions) -> None:
    sessions.open(100, "s", streaming=True)
    assert take_turn(sessions, {"id": "s"}, "a", [1], [2]) == [1]
    late = sessions.continuation({"id": "s"})
    assert take_turn(sessions, {"id": "s", "rid": "a"}, "b", [3], [4]) == [1, 2, 3]
    prompt = late.join(np.asarray([5], np.int32))
    with pytest.raises(sgl.InvalidArgument, match="one request at a time"):
        late.start([make_row("late", prompt)])
    for key, value in {"replace": True, "offset": 1, "drop_previous_output": True}.items():
        with pytest.raises(
            sgl.InvalidArgument, match=rf"\['{key}'\] is not possible in the streaming session"
        ):
            sessions.continuation({"id": "s", key: value})
    with pytest.raises(sgl.InvalidArgument, match="'a' is not the latest"):
        sessions.continuation({"id": "s", "rid": "a"})
    with pytest.raises(sgl.InvalidArgument, match="no turn 'x'"):
        sessions.continuation({"id": "s", "rid": "x"})
    call, _, _ = begin(sessions, {"id": "s"}, "c", [5])
    with pytest.raises(sgl.InvalidArgument, match="one request at a time"):
        sessions.continuation({"id": "s"})
    call.drop()
    two = sessions.continuation({"id": "s"})
    rows = [two.join(np.asarray([5], np.int32)) for _ in range(2)]
    with pytest.raises(sgl.InvalidArgument, match="one request at a time"):
        two.start([make_row("d", rows[0]), make_row("e", rows[1])])
    assert take_turn(sessions, {"id": "s"}, "f", [6], []) == [1, 2, 3, 4, 6]


# ── against plain lists ──


@dataclass
class Node:
    """A turn as a reference would keep it: everything it saw, everything it said."""

    parent: str | None
    prompt: list[int]
    output: list[int] | None = None


steps = st.tuples(
    st.sampled_from(["turn", "turn", "turn", "begin", "finish", "abort"]),
    st.integers(-1, 6),  # which turn to continue; -1: none named
    st.sampled_from([0, 0, 0, 1, 2, 5, 9, -1, -3, -20]),  # offset
    st.sampled_from([False, False, False, True]),  # replace
    st.booleans(),  # drop_previous_output
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.integers(1, 9), max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=25))
def test_like_plain_lists(script: list[Any]) -> None:
    sessions = Sessions(None)
    sessions.open(10**6, "s")
    nodes: dict[str, Node] = {}
    running: dict[str, tuple[Any, Any]] = {}
    for number, (kind, which, offset, replace, drop, new, output) in enumerate(script):
        rid = f"r{number}"
        if kind in ("finish", "abort"):
            for name, (call, row) in list(running.items())[:1]:
                del running[name]
                if kind == "finish":
                    row.token_ids = output
                    call.finish(row)
                    if name in nodes:
                        nodes[name].output = output
                else:
                    call.drop()
                    nodes.pop(name, None)
            continue
        named = list(nodes)[which] if 0 <= which < len(nodes) else None
        params = {"id": "s", "offset": offset, "replace": replace, "drop_previous_output": drop}
        finished = [name for name, node in nodes.items() if node.output is not None]
        parent = named or (finished[-1] if finished and not replace else None)
        context: list[int] | None = []
        if parent is not None:
            node = nodes[parent]
            if node.output is None and replace:  # it ends with what its caller has seen
                _, row = running.pop(parent)
                node.output = row.token_ids
            said = node.output if not drop else []
            context = None if node.output is None or said is None else [*node.prompt, *said]
        if context is None:
            with pytest.raises(sgl.InvalidArgument):
                begin(sessions, params | {"rid": named}, rid, new)
            continue
        call, row, _ = begin(sessions, params | {"rid": named}, rid, new)
        if replace:
            nodes = {n: node for n, node in nodes.items() if parent and parent not in ancestors(nodes, n)}
        nodes[rid] = Node(parent, [*(context[:offset] if offset else context), *new])
        assert row.request.prompt_ids.tolist() == nodes[rid].prompt
        if kind == "begin":
            row.token_ids = output[:2]
            running[rid] = (call, row)
        else:
            row.token_ids = output
            call.finish(row)
            nodes[rid].output = output


def ancestors(nodes: dict[str, Node], name: str) -> list[str]:
    above = []
    parent = nodes[name].parent
    while parent is not None:
        above.append(parent)
        parent = nodes[parent].parent
    return above


# ── through the engine, over a core that repeats the prompt ───────────────────────────────────


@pytest.fixture
def llm(cores: list[Any], byte_folder: Path) -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path=str(byte_folder)) as engine:
        yield engine


def prompts_of(core: Any) -> list[str]:
    """What the core was asked, with `|` for the end of an answer."""
    return [
        bytes(id if id != EOS else 124 for id in request.prompt_ids).decode() for request in core.submitted
    ]


def test_every_way_to_call(llm: sgl.Engine, cores: list[Any]) -> None:
    s = {"id": llm.open_session(1000)}
    assert llm.generate("a", session_params=s)["text"] == "a"
    assert list(llm.generate("b", session_params=s, stream=True))[-1]["meta_info"]["prompt_tokens"] == 4

    async def main() -> None:
        await llm.async_generate("c", {"stop": "|", "max_new_tokens": 2}, session_params=s)
        async for _ in await llm.async_generate("d", {"max_new_tokens": 1}, session_params=s, stream=True):
            pass

    asyncio.run(main())
    result = llm.generate(input_ids=[101], session_params=s)
    assert prompts_of(cores[0]) == ["a", "aa|b", "aa|baa|c", "aa|baa|caad", "aa|baa|caadae"]
    assert result["meta_info"]["prompt_tokens"] == len("aa|baa|caadae")


def test_a_stop_string_ends_a_turn(llm: sgl.Engine, cores: list[Any]) -> None:
    s = {"id": llm.open_session(1000)}
    assert llm.generate("ab.cd", {"stop": "."}, session_params=s)["text"] == "ab"
    llm.generate("!", session_params=s)
    assert prompts_of(cores[0])[1] == "ab.cdab.!"


@pytest.mark.parametrize("how", ["abort", "close", "garbage"])
def test_a_turn_that_is_left_early_is_forgotten(llm: sgl.Engine, cores: list[Any], how: str) -> None:
    s = {"id": llm.open_session(1000)}
    llm.generate("a", session_params=s)
    stream = llm.generate("b", ENDLESS, session_params=s, stream=True, rid="left")
    next(stream)
    with pytest.raises(sgl.InvalidArgument, match=r"'left' .*has not finished"):
        llm.generate("c", session_params={**s, "rid": "left"})
    if how == "abort":
        llm.abort("left")
        assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    elif how == "close":
        stream.close()
    del stream
    gc.collect()
    with pytest.raises(sgl.InvalidArgument, match="no turn 'left'"):
        llm.generate("c", session_params={**s, "rid": "left"})
    llm.generate("c", session_params=s)
    assert prompts_of(cores[0])[-1] == "aa|c"


def test_a_call_that_fails_leaves_the_session_as_it_was(llm: sgl.Engine, cores: list[Any]) -> None:
    s = {"id": llm.open_session(1000)}
    llm.generate("a", session_params=s, rid="first")
    stream = llm.generate("x", ENDLESS, stream=True, rid="taken")
    for broken in (
        {"sampling_params": {"temperature": -1}},
        {"rid": "taken"},
        {"rid": "first"},
        {"session_params": {**s, "replace": True}, "rid": "taken"},
    ):
        with pytest.raises(sgl.InvalidArgument):
            llm.generate("b", **{"session_params": s, **broken})
    stream.close()
    llm.generate("c", session_params=s)
    assert prompts_of(cores[0])[-1] == "aa|c"


def test_replacing_ends_what_runs(llm: sgl.Engine, cores: list[Any]) -> None:
    s = {"id": llm.open_session(1000)}
    stream = llm.generate("b", ENDLESS, session_params=s, stream=True)
    next(stream)
    llm.generate("fresh", session_params={**s, "replace": True})
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    llm.generate("!", session_params=s)
    assert prompts_of(cores[0])[-1] == "freshfresh|!"


def test_a_batch_and_samples_are_siblings(llm: sgl.Engine, cores: list[Any]) -> None:
    s = {"id": llm.open_session(1000)}
    llm.generate("a", session_params=s)
    outputs = llm.generate(["b", "cc"], {"n": 2, "max_new_tokens": 1}, session_params=s, rid=["x", "y"])
    assert outputs["meta_info"][3]["id"] == "y_1"
    llm.generate("d", {"max_new_tokens": 1}, session_params={**s, "rid": "x_0"})
    llm.generate("e", {"max_new_tokens": 1}, session_params={**s, "rid": "y_1"})
    assert sorted(prompts_of(cores[0])[1:5]) == ["aa|b", "aa|b", "aa|cc", "aa|cc"]
    assert prompts_of(cores[0])[5:] == ["aa|bad", "aa|ccae"]
    t = {"id": llm.open_session(1000)}
    llm.generate(["b", "cc", "d"], {"max_new_tokens": 1}, session_params=t)
    llm.generate("e", session_params=t)
    assert prompts_of(cores[0])[-1] == "dde"  # the last of the list is the latest


def test_messages_name_the_session(llm: sgl.Engine) -> None:
    s = {"id": llm.open_session(10**6, "mine")}
    llm.generate("x" * 60_000, {"max_new_tokens": 1}, session_params=s)
    with pytest.raises(sgl.InvalidArgument, match="prompt with its context in session 'mine' has 110001 tok"):
        llm.generate("x" * 50_000, session_params=s)
    with pytest.raises(sgl.InvalidArgument, match=r"prompt\[1\] with its context in session 'mine' has"):
        llm.generate(["a", "x" * 50_000], session_params=s)
    with pytest.raises(sgl.UnknownArgument, match="Did you mean 'session_id'"):
        llm.generate("a", session_params={"sesion_id": "mine"})


def test_capacity_is_in_characters(llm: sgl.Engine) -> None:
    s = {"id": llm.open_session(10)}
    llm.generate("äöü", {"max_new_tokens": 4}, session_params=s)  # six bytes; the answer is "äö"
    llm.generate("x" * 5, {"max_new_tokens": 1}, session_params=s)
    with pytest.raises(sgl.InvalidArgument, match="it has 11, and this call would add 1"):
        llm.generate("x", session_params=s)


def test_an_engine_without_tokenizer(cores: list[Any], byte_folder: Path) -> None:
    with sgl.Engine(model_path=str(byte_folder), skip_tokenizer_init=True) as llm:
        s = {"id": llm.open_session(1000)}
        llm.generate(input_ids=[97], session_params=s)
        llm.generate(input_ids=[98], session_params=s)
    assert prompts_of(cores[0]) == ["a", "aa|b"]


def test_threads_in_one_session_and_in_many(llm: sgl.Engine, cores: list[Any]) -> None:
    shared = llm.open_session(10**6, "shared")
    wrong: list[Any] = []

    def work(name: str) -> None:
        own = {"id": llm.open_session(10**6, name)}
        context = 0
        for turn in range(5):
            meta = llm.generate(name, {"max_new_tokens": 1}, session_params=own)["meta_info"]
            context += len(name) + (turn > 0)
            if meta["prompt_tokens"] != context:
                wrong.append((name, turn, meta))
            llm.generate(name, {"max_new_tokens": 1}, session_params={"id": shared}, rid=f"{name}-{turn}")
        llm.close_session(name)

    threads = [threading.Thread(target=work, args=(f"thread {index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(llm._sessions._open[str(shared)].turns) == 40


# ── the tiny model ────────────────────────────────────────────────────────────────────────────

GREEDY = {"temperature": 0, "max_new_tokens": 24}


def test_the_name_of_alice(tiny_engine: Any) -> None:
    """The code of the document that promises sessions."""
    engine = tiny_engine
    session_id = engine.open_session(capacity_of_str_len=4096)
    engine.generate(prompt="My name is Alice.", session_params={"session_id": session_id})
    response2 = engine.generate(prompt="What is my name?", session_params={"session_id": session_id})
    assert "Alice" in response2["text"]
    engine.close_session(session_id)
    assert "Alice" not in engine.generate("What is my name?", GREEDY)["text"]


def test_earlier_turns_are_not_computed_again(tiny_engine: Any) -> None:
    s = {"id": tiny_engine.open_session(10_000)}
    page = tiny_engine.get_server_info()["page_size"]
    computed = 0  # tokens whose keys and values an earlier turn left: all but its last one
    for question in ("My name is Alice.", *["What is the capital of Japan?"] * 6, "What is my name?"):
        result = tiny_engine.generate(question, GREEDY, session_params=s)
        meta = result["meta_info"]
        assert meta["cached_tokens"] >= computed // page * page
        computed = meta["prompt_tokens"] + meta["completion_tokens"] - 1
    assert computed > 5 * page
    assert "Alice" in result["text"]


def test_a_session_answers_as_one_long_prompt_does(tiny_engine: Any) -> None:
    s = {"id": tiny_engine.open_session(10_000)}
    encode = tiny_engine.get_tokenizer().encode
    context: list[int] = []
    for question in ("My name is Alice.", "I live in Paris.", "What is my name?"):
        context += encode(question)
        result = tiny_engine.generate(question, GREEDY, session_params=s)
        assert result["meta_info"]["prompt_tokens"] == len(context)
        assert (
            result["output_ids"]
            == tiny_engine.generate(input_ids=context, sampling_params=GREEDY)["output_ids"]
        )
        context += result["output_ids"]


@pytest.mark.parametrize(
    "nothing",
    [{"prompt": ""}, {"input_ids": []}, {"input_ids": np.empty(0, np.int32)}, {"prompt": [""]}],
    ids=str,
)
def test_an_empty_prompt_goes_on_with_what_is_there(tiny_engine: Any, nothing: dict[str, Any]) -> None:
    greedy = {"temperature": 0, "ignore_eos": True}
    whole = tiny_engine.generate("Once upon a time", {**greedy, "max_new_tokens": 8})
    s = {"id": tiny_engine.open_session(10_000)}
    with pytest.raises(sgl.InvalidArgument, match="is empty"):
        tiny_engine.generate(**nothing, session_params=s)
    first = tiny_engine.generate("Once upon a time", {**greedy, "max_new_tokens": 3}, session_params=s)
    rest = tiny_engine.generate(**nothing, sampling_params={**greedy, "max_new_tokens": 5}, session_params=s)
    rest = rest[0] if isinstance(rest, list) else rest
    assert first["output_ids"] + rest["output_ids"] == whole["output_ids"]
    assert rest["meta_info"]["prompt_tokens"] == first["meta_info"]["prompt_tokens"] + 3
    with pytest.raises(sgl.InvalidArgument, match="is empty"):
        tiny_engine.generate(**nothing, session_params={**s, "offset": -1000})


def test_a_turn_that_is_refused_costs_nothing(tiny_engine: Any) -> None:
    s = {"id": tiny_engine.open_session(40)}
    tiny_engine.generate("My name is Alice.", {**GREEDY, "max_new_tokens": 1}, session_params=s)
    with pytest.raises(sgl.InvalidArgument, match="capacity_of_str_len"):
        tiny_engine.generate("What is my name? " * 9, GREEDY, session_params=s)
    with pytest.raises(sgl.InvalidArgument, match="capacity_of_str_len"):
        tiny_engine.generate("What is my name? " * 9, GREEDY, session_params=s, stream=True)
    assert "Alice" in tiny_engine.generate("What is my name?", GREEDY, session_params=s)["text"]


def test_fifty_sessions_at_once(tiny_engine: Any) -> None:
    names = ["Alice", "Bob", "Carol", "David", "Emma"]

    async def converse(index: int) -> str:
        s = {"id": tiny_engine.open_session(4096)}
        await tiny_engine.async_generate(f"My name is {names[index % 5]}.", GREEDY, session_params=s)
        answer = await tiny_engine.async_generate("What is my name?", GREEDY, session_params=s)
        tiny_engine.close_session(s["id"])
        text: str = answer["text"]
        return text

    async def main() -> list[str]:
        return await asyncio.gather(*(converse(index) for index in range(50)))

    answers = asyncio.run(main())
    assert all(names[index % 5] in answer for index, answer in enumerate(answers)), answers


def test_a_call_that_raises_halfway_leaves_no_turn(tiny_engine: Any) -> None:
    """Its first row has finished when the second one fails."""

    def fail(logits: Any, custom_param_list: list[dict[str, Any]]) -> Any:
        if len(custom_param_list[0]["__req__"].output_ids) == 3:
            raise ValueError("for the test")
        return logits

    s = {"session_params": {"id": tiny_engine.open_session(1000)}}
    first = tiny_engine.generate("My name is Alice.", {"max_new_tokens": 4}, **s)["meta_info"]
    lengths = [{"max_new_tokens": 1}, {"max_new_tokens": 8, "ignore_eos": True}]
    asked: dict[str, Any] = {"sampling_params": lengths, "custom_logit_processor": [None, fail], **s}
    with pytest.raises(sgl.RequestFailed, match="for the test"):
        tiny_engine.generate(["I", "I"], **asked)
    with pytest.raises(sgl.RequestFailed, match="for the test"):
        asyncio.run(tiny_engine.async_generate(["I", "I"], **asked))
    last = tiny_engine.generate(input_ids=[40], sampling_params={"max_new_tokens": 1}, **s)["meta_info"]
    assert last["prompt_tokens"] == first["prompt_tokens"] + first["completion_tokens"] + 1
