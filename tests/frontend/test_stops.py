"""Stop patterns in a growing text against Python's own `re`, which looks at every prefix of the whole."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenmill.errors import InvalidArgument
from tokenmill.frontend.stops import PatternTooSlow, Stops
from tokenmill.frontend.tokenizer import Tokenizer
from tokenmill.messages import Finish, Request

pytestmark = pytest.mark.unit

# What tries every way and fails: exponential in the length of the text.
ENDLESS = r"(?:a|aa)+\d"


def search(tokens: Sequence[str], strings: Sequence[str], patterns: Sequence[str], *, keep: bool) -> tuple:
    """(text, number of tokens, what matched), by looking through the whole text after each token."""
    for count in range(1, len(tokens) + 1):
        text = "".join(tokens[:count])
        found = [(text.find(s), text.find(s) + len(s), s) for s in strings if s in text]
        found += [(*match.span(), p) for p in patterns if (match := re.search(p, text))]
        if found:
            start, end, name = min(found, key=lambda place: (place[0], -place[1]))
            return text[: end if keep else start], count, name
    return "".join(tokens), len(tokens), None


def watch(tokens: Sequence[str], stops: Stops) -> tuple:
    released = ""
    for count, token in enumerate(tokens, 1):
        released += stops.push(token)
        if stops.matched is not None:
            return released, count, stops.matched
    return released + stops.release(), len(tokens), None


# Pieces of patterns: plain, repeated, with a way back, and those that look around.
ATOMS = [
    "a",
    "b",
    "c",
    ".",
    "[ab]",
    "[^a]",
    r"\w",
    r"\s",
    "(a|ab)",
    "(?:a|bc)",
    "(?i:A)",
    "[]a]",
    r"[\[b]",
    r"[\]\N{BULLET}[]",
    r"\N{BULLET}",
    r"\n",
]
REPEATS = ["", "", "", "*", "+", "?", "{2}", "{1,3}", "{,2}", "*?", "+?", "??", "{1,2}?"]
AHEAD = ["(?!b$)", r"(?!b\b)", "(?!a(?!b))", "(?=a+?b)", "(?=a$)", "(?!a*$)"]
LOOKS = [
    *AHEAD,
    r"\b",
    r"\B",
    "$",
    r"\Z",
    "^",
    "(?=b)",
    "(?!ab)",
    "(?=a.)",
    "(?<=b)",
    "(?<!a)",
    "(?<=ab)",
    r"(?<!\b)",
]
FIRM = ["(?>a+)", "(?>a|ab)", "(?>[ab]+?)", "a++", "[ab]*+", "{", "}", "}?", "a{e}", r"\1", "(?#b[)", r"[\b]"]


@st.composite
def patterns(draw: st.DrawFn) -> str:
    atom = st.tuples(st.sampled_from(ATOMS), st.sampled_from(REPEATS)).map("".join)
    part = st.one_of(atom, atom, st.sampled_from(LOOKS), st.sampled_from(FIRM))
    text = draw(st.sampled_from(["", "", "", "(?m)", "(?s)"]))
    text += "".join(draw(st.lists(part, min_size=1, max_size=5)))
    if draw(st.booleans()):
        group = "".join(draw(st.lists(part, min_size=1, max_size=3)))
        text += f"({group}){draw(st.sampled_from(REPEATS))}{draw(st.sampled_from(['', 'a', 'c']))}"
    return text


def is_usable(pattern: str) -> bool:
    try:
        return re.search(pattern, "") is None
    except re.error:
        return False


@settings(max_examples=600, deadline=None)
@example(chosen=[r"a(?!b$)bc"], strings=[], text="abc", cuts=[1, 2], keep=False)
@example(chosen=[r"a\Bb"], strings=["c"], text="cab", cuts=[], keep=True)
@example(chosen=[r".+?(?<=ab)"], strings=[], text="caab", cuts=[1, 2, 3], keep=False)
@example(chosen=[r"(?>a+?)a\sb"], strings=[], text="aa b", cuts=[1, 2, 3], keep=False)
@example(chosen=[r"(?x) a b  # [ \b"], strings=["c"], text="bab", cuts=[1, 2], keep=False)
@given(
    chosen=st.lists(patterns().filter(is_usable), min_size=1, max_size=3),
    strings=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    text=st.text("aaabbbc \n{}e]•\\[", min_size=1, max_size=14),
    cuts=st.lists(st.integers(1, 13)),
    keep=st.booleans(),
)
def test_patterns_against_a_plain_search(
    chosen: list[str], strings: list[str], text: str, cuts: list[int], keep: bool
) -> None:
    """A token may be any piece of the text. Nothing that was given out is ever taken back."""
    edges = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    tokens = [text[start:end] for start, end in pairwise(edges)]
    expected = search(tokens, strings, chosen, keep=keep)
    assert watch(tokens, Stops(strings, chosen, keep=keep)) == expected


@settings(max_examples=150, deadline=None)
@given(
    words=st.text("abé😀1 ", min_size=1, max_size=30),
    pattern=st.sampled_from([r"\d+", r"a+b", r"(?<=é)\W", r"b\b", r" .*😀", r"(a|b)\1", r"\w{3} "]),
    keep=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_how_tokens_arrive_changes_nothing(
    words: str,
    pattern: str,
    keep: bool,
    seed: int,
    tokenizers: dict[str, Tokenizer],
    make_request: Callable[..., Request],
) -> None:
    """Tokens are bytes here, so that a character comes with the last of its tokens."""
    ids = list(words.encode())
    tokens, end = ["" for _ in ids], -1
    for character in words:
        end += len(character.encode())
        tokens[end] = character
    text, count, matched = search(tokens, (), (pattern,), keep=keep)

    stream = tokenizers["bytes"].open_text(make_request(stop_regex=pattern, no_stop_trim=keep))
    rng, pieces, taken, finish, start = random.Random(seed), [], 0, None, 0
    while finish is None:
        end = start + rng.randint(1, 6)
        piece, number, finish = stream.push(ids[start:end], Finish("length") if end >= len(ids) else None)
        pieces.append(piece)
        taken += number
        start = end

    assert ("".join(pieces), taken) == (text, count)
    assert finish == (Finish("length") if matched is None else Finish("stop", matched=matched))


def test_text_that_cannot_be_part_of_a_match_streams_at_once() -> None:
    stops = Stops([], [r"\n\d+\.\s", r"</\w+>"], keep=False)
    parts = ["One", " line\n", "12", "x", " <", "b", "> </", "i", ">", "more"]
    assert [stops.push(part) for part in parts[:8]] == ["One", " line", "", "\n12x", " ", "<b", "> ", ""]
    assert stops.push(parts[8]) == ""
    assert stops.matched == r"</\w+>"


@pytest.mark.parametrize(
    ("strings", "patterns", "expected", "matched"),
    [
        (["world"], ["l+"], "he", "l+"),  # the earliest in the text
        (["llo"], ["l+"], "he", "llo"),  # the longest of those that start together
        (["ll"], ["l+"], "he", "ll"),  # a string before a pattern
        ([], ["o", "h.*o"], "", "h.*o"),
    ],
)
def test_which_stop_wins(strings: list[str], patterns: list[str], expected: str, matched: str) -> None:
    stops = Stops(strings, patterns, keep=False)
    assert stops.push("hello world") == expected
    assert stops.matched == matched


def test_a_pattern_that_tries_every_way_fails_soon() -> None:
    stops = Stops([], [ENDLESS], keep=False)
    start = time.thread_time()
    with pytest.raises(PatternTooSlow, match=re.escape(ENDLESS)):
        watch(["a"] * 200, stops)
    assert time.thread_time() - start < 3


def test_the_row_of_a_slow_pattern_fails_with_its_name(
    tokenizers: dict[str, Tokenizer], make_request: Callable[..., Request]
) -> None:
    stream = tokenizers["bytes"].open_text(make_request(stop_regex=ENDLESS))
    _, count, finish = stream.push(list(b"a" * 200), None)
    assert 0 < count < 200
    assert finish is not None
    assert (finish.kind, finish.status_code, finish.error_type) == ("abort", 400, "bad_parameters")
    assert ENDLESS in (finish.message or "").replace("\\\\", "\\")


def test_searching_a_long_text_costs_little() -> None:
    """Only what is held back is searched again."""
    stops = Stops(["STOP"], [r"\n\nEND\b", r"<\w+>"], keep=False)
    start = time.thread_time()
    for _ in range(10_000):
        stops.push(" word")
    assert time.thread_time() - start < 2


@pytest.mark.parametrize("pattern", ["a{4294967290}b", "(?:(?:a{1000}){1000}){1000}b"])
def test_repeats_that_would_fill_the_memory(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match="counts of repeats multiply to more than 100000"):
        Stops([], [pattern], keep=False)
