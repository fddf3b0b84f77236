"""The compiler's cache, its time limit, and threads that never come back; over a library made of waiting."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tokenmill.grammar import BadGrammar, Compiler
from tokenmill.messages import Grammar

pytestmark = pytest.mark.unit


class Made(str):
    """A template."""

    is_used_up = False


class SlowLibrary:
    """Compiles `wait` and the like when it is released, fails on `bad` and `broken`, and counts."""

    num_words = 1

    def __init__(self) -> None:
        self.released = threading.Event()
        self.compiled: list[str] = []

    def compile(self, grammar: Grammar) -> Any:
        self.compiled.append(grammar.text)
        if grammar.text.startswith("wait"):
            self.released.wait(60)
        if grammar.text == "bad":
            raise BadGrammar("it is bad")
        if grammar.text == "broken":
            raise RuntimeError("it broke")
        return Made(f"template of {grammar.text}")

    def batch(self, matchers: Any) -> Any:
        raise AssertionError


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


@pytest.fixture
def library() -> Any:
    library = SlowLibrary()
    yield library
    library.released.set()


def test_each_text_is_compiled_once(library: SlowLibrary) -> None:
    compiler = Compiler(lambda: library)
    futures = [compiler.compile(regex(text)) for text in "abab"]
    assert [future.result(10) for future in futures] == [f"template of {text}" for text in "abab"]
    assert sorted(library.compiled) == ["a", "b"]
    compiler.close()


def test_only_failures_are_forgotten(library: SlowLibrary) -> None:
    def compile_both() -> list[str]:
        assert compiler.compile(regex("a")).result(10)
        with pytest.raises(BadGrammar, match="it is bad"):
            compiler.compile(regex("bad")).result(10)
        return sorted(library.compiled)

    compiler = Compiler(lambda: library)
    assert compile_both() == compile_both() == ["a", "bad"]
    compiler.forget_failures()
    assert compile_both() == ["a", "bad", "bad"]
    compiler.close()


def test_what_is_used_up_is_compiled_anew(library: SlowLibrary) -> None:
    compiler = Compiler(lambda: library)
    first: Any = compiler.compile(regex("a")).result(10)
    first.is_used_up = True
    again = compiler.compile(regex("a")).result(10)
    assert (again, again is first, library.compiled) == (first, False, ["a", "a"])
    assert compiler.compile(regex("a")).result(10) is again
    compiler.close()


def test_the_same_text_of_another_kind_is_another_grammar(library: SlowLibrary) -> None:
    compiler = Compiler(lambda: library)
    compiler.compile(Grammar("ebnf", "a")).result(10)
    compiler.compile(regex("a")).result(10)
    assert library.compiled == ["a", "a"]
    compiler.close()


def test_what_was_used_last_is_kept(library: SlowLibrary) -> None:
    compiler = Compiler(lambda: library, capacity=2)
    for text in "abaca":
        compiler.compile(regex(text)).result(10)
    assert library.compiled == ["a", "b", "c"]
    compiler.close()


@pytest.mark.parametrize("text", ["bad", "broken"])
def test_failures_are_bad_grammars(library: SlowLibrary, text: str) -> None:
    compiler = Compiler(lambda: library)
    with pytest.raises(BadGrammar, match=r"it (is bad|broke)"):
        compiler.compile(regex(text)).result(10)
    assert compiler.compile(regex("good")).result(10) == "template of good"
    compiler.close()


def test_slow_grammars_are_given_up_and_block_nobody(library: SlowLibrary) -> None:
    compiler = Compiler(lambda: library, seconds=0.05)
    slow = [compiler.compile(Grammar(kind, "wait")) for kind in ("regex", "ebnf", "json_schema")]
    assert compiler.compile(regex("quick")).result(10) == "template of quick"
    for future in slow:
        with pytest.raises(BadGrammar, match=r"longer than 0\.05 seconds"):
            future.result(10)
    library.released.set()
    assert compiler.compile(regex("later")).result(10) == "template of later"
    compiler.close()


def wait_until(library: SlowLibrary, count: int) -> None:
    """So many grammars are being compiled or were."""
    deadline = time.monotonic() + 10
    while len(library.compiled) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_slow_grammars_hold_up_nobody_even_before_they_are_given_up(
    library: SlowLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.grammar.compiler._LONG_SECONDS", 0.02)
    compiler = Compiler(lambda: library)
    slow = [compiler.compile(regex(f"wait {number}")) for number in range(5)]
    assert compiler.compile(regex("quick")).result(10) == "template of quick"
    assert not any(future.done() for future in slow)
    library.released.set()
    assert [future.result(10) for future in slow] == [f"template of wait {number}" for number in range(5)]
    assert compiler.compile(regex("later")).result(10) == "template of later"
    compiler.close()


def test_only_so_many_are_compiled_at_once(library: SlowLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.grammar.compiler._LONG_SECONDS", 0.01)
    monkeypatch.setattr("tokenmill.grammar.compiler._MOST_REPLACED", 2)
    compiler = Compiler(lambda: library)
    slow = [compiler.compile(regex(f"wait {number}")) for number in range(9)]
    wait_until(library, 4)
    time.sleep(0.2)
    assert len(library.compiled) == 4
    library.released.set()
    assert all(future.result(10) for future in slow)
    compiler.close()


def test_short_texts_go_first(library: SlowLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.grammar.compiler._NUM_THREADS", 1)
    compiler = Compiler(lambda: library)
    compiler.compile(regex("wait"))
    wait_until(library, 1)
    last = compiler.compile(regex("long" * 10))
    for text in ("bb", "aaa", "a", "cc"):
        compiler.compile(regex(text))
    library.released.set()
    last.result(10)
    assert library.compiled == ["wait", "a", "bb", "cc", "aaa", "long" * 10]
    compiler.close()


def test_a_library_that_cannot_be_opened_fails_every_grammar() -> None:
    def fail() -> Any:
        raise BadGrammar("no tokenizer")

    compiler = Compiler(fail)
    for text in "ab":
        with pytest.raises(BadGrammar, match="no tokenizer"):
            compiler.compile(regex(text)).result(10)
    compiler.close()
