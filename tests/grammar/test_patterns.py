"""Patterns mean what Python's `re` means by them, however they are written for a library."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
from collections.abc import Iterator

import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st

from tests.grammar.conftest import backend, draw, follows
from tokenmill.grammar import BadGrammar
from tokenmill.grammar.backends import BACKENDS
from tokenmill.grammar.patterns import translate, translate_plain
from tokenmill.messages import Grammar

pytestmark = pytest.mark.cpu

each_backend = pytest.mark.parametrize("name", BACKENDS)

COUNTS = ["*", "+", "?", "*?", "{0}", "{1}", "{2}", "{0,2}", "{1,2}", "{1,}", "{2,}"]
PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "", r"[^\s\S]", "[\ud800]"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
        st.tuples(inner, st.sampled_from(COUNTS)).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=8,
)
TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("ab", repeat=length)]


@contextlib.contextmanager
def for_a_second() -> Iterator[None]:
    """What takes longer is no example: of `(?:(?:a?|a?){2,}){2,}` each letter takes `re` 50 times as long."""
    before = signal.signal(signal.SIGALRM, lambda *_: reject())
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def matches(pattern: str) -> list[str]:
    with for_a_second():
        return [text for text in TEXTS if re.fullmatch(pattern, text)]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts `re`")
@given(PATTERNS)
@example("(?:(?:a?|a?){2,}){2,}")
def test_a_pattern_means_the_same_when_it_is_rewritten(pattern: str) -> None:
    found = matches(pattern)
    try:
        written = translate(pattern)
    except BadGrammar:
        assert not found
        return
    # These letters are written in signs that Python reads, too.
    assert matches(written) == found


@pytest.mark.parametrize(
    "pattern", [r"(\w*\s?)*\.", "(?:[a-z]* ?)*end", "(.|)*x", r"((\w*)\s*)+\?", r"(.*\n?)*END", "(a*b*|c?)*x"]
)
def test_repetitions_of_what_may_be_empty_cost_xgrammar_little(pattern: str) -> None:
    """No matcher fails for its time, however long the output."""
    for seed in range(3):
        text = draw("xgrammar", "regex", pattern, seed=seed, most=100)
        assert text is None or re.fullmatch(pattern, text)


@given(st.integers(0, 1_500), st.one_of(st.none(), st.integers(0, 1_500)), st.sampled_from(["a", "(?:ab|b)"]))
def test_large_counts_in_groups_count_the_same(low: int, more: int | None, body: str) -> None:
    high = None if more is None else low + more
    written = translate_plain(f"{body}{{{low},{'' if high is None else high}}}")
    assert all(int(count) <= 32 for count in re.findall(r"\d+", written))
    for number in {max(0, low - 1), low, low + 1, low + 700, low + (more or 0), low + (more or 0) + 1}:
        is_match = low <= number and (high is None or number <= high)
        assert bool(re.fullmatch(written, ("a" if body == "a" else "b") * number)) == is_match, number


@each_backend
@pytest.mark.parametrize("pattern", [r"a|[^\s\S]", r"a([^\w\W])?", r"a([^\w\W]b)*", r"(?:[^\s\S]|a)"])
def test_an_alternative_without_a_text_leaves_the_others(name: str, pattern: str) -> None:
    assert follows(backend(name).compile(Grammar("regex", pattern)), "a")


@each_backend
@pytest.mark.parametrize("grammar", ['root ::= "a" root{0}', 'root ::= "a" | "b" root{0,0} root'])
def test_what_comes_no_time(name: str, grammar: str) -> None:
    assert follows(backend(name).compile(Grammar("ebnf", grammar)), "a")


@each_backend
@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(?i)[^\u017f]", r"(?i)[^\u0131]", r"(?i)[^\u0130]", r"(?i)[^\u212a]", r"(?ai)[^\u017f]"),
        *(r"(?i)[^k]", r"(?i)[^k-m\d]", r"(?i)[^\ud800]"),
        *(r"(?a)(?u:\W)", r"(?a)(?u:\w)", r"(?a:\w)", r"(?a:\W)(?u:)"),
    ],
)
def test_classes_are_those_of_python(name: str, pattern: str) -> None:
    """Of characters beyond ASCII some may be left out, where case does not count."""
    template = backend(name).compile(Grammar("regex", pattern))
    for code in [*range(32, 127), 0xE9, 0x130, 0x131, 0x17F, 0x3A3]:
        is_match = re.fullmatch(pattern, chr(code)) is not None
        is_followed = follows(template, chr(code))
        assert is_followed == is_match if code < 128 else is_match or not is_followed, chr(code)
