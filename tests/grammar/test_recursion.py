"""Rules that come back to themselves, with both libraries, one of which would end the process on some."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.grammar.conftest import allowed, backend, follows
from tokenmill.grammar import BadGrammar, Matcher
from tokenmill.grammar.backends import BACKENDS
from tokenmill.messages import Grammar

pytestmark = pytest.mark.cpu

each_backend = pytest.mark.parametrize("name", BACKENDS)

PARTS = ['"a"', '"ab"', "[a-d]", "[^()]", '"("', "[漢-龍]", "[^é]", '""', "[Ā-Ŀ]", "root", "other", "last"]
EXPRESSIONS = st.recursive(
    st.sampled_from(PARTS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(" ".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: f"({' | '.join(options)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,3}", "{0}"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)
GRAMMARS = st.tuples(EXPRESSIONS, EXPRESSIONS, EXPRESSIONS).map(
    lambda rules: "\n".join(
        f"{name} ::= {rule}" for name, rule in zip(("root", "other", "last"), rules, strict=True)
    )
)


def mask_of(name: str, matcher: Matcher) -> tuple[list[int], bool]:
    library = backend(name)
    masks = np.zeros((1, library.num_words), dtype=np.int32)
    are_accepting = library.batch([matcher]).fill_masks(masks)
    return allowed(masks[0]), bool(are_accepting[0])


@given(GRAMMARS, st.randoms())
@settings(max_examples=60, deadline=None)
def test_both_libraries_allow_the_same(grammar: str, random: np.random.Generator) -> None:
    try:
        matchers = {name: backend(name).compile(Grammar("ebnf", grammar)).new() for name in BACKENDS}
    except BadGrammar:
        assume(False)
    for _ in range(8):
        (tokens, ends), others = (mask_of(name, matcher) for name, matcher in matchers.items())
        assume(not any(matcher.error for matcher in matchers.values()))
        assert (tokens, ends) == others
        assert tokens or ends, "a dead end"
        if not tokens:
            break
        token = random.choice(tokens)  # type: ignore[arg-type]
        assert all(matcher.accept(token) for matcher in matchers.values())


@each_backend
@pytest.mark.parametrize(
    "rules", ['"a" | "b" bad\nbad ::= "c" bad', '"a" | bad{2}\nbad ::= bad{2}', '"a" | (root "b")']
)
def test_what_would_never_end_is_never_begun(name: str, rules: str) -> None:
    template = backend(name).compile(Grammar("ebnf", f"root ::= {rules}"))
    assert follows(template, "a")
    assert not follows(template, "b")


@each_backend
@pytest.mark.parametrize(
    "rules", ["root{2}", 'root "a"', '"(" other ")"\nother ::= other "b" | root', "root"]
)
def test_a_grammar_without_an_end_is_refused(name: str, rules: str) -> None:
    with pytest.raises(BadGrammar, match="no output can follow it"):
        backend(name).compile(Grammar("ebnf", f"root ::= {rules}"))


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ("root{0,2}", "'root' can"),
        ('("" root)? | "a"', "'root' can"),
        (
            'other{1,3} | "a"\nother ::= last "b"? | "c"\nlast ::= root',
            r"'root' can .* \(by 'other', 'last'\)",
        ),
        (
            '"a" other\nother ::= "b" | last\nlast ::= other empty\nempty ::= "c"*',
            r"'other' .* \(by 'last'\)",
        ),
    ],
)
def test_endless_readings_are_refused_by_xgrammar_alone(rules: str, named: str) -> None:
    grammar = Grammar("ebnf", f"root ::= {rules}")
    with pytest.raises(BadGrammar, match=f"rule {named}"):
        backend("xgrammar").compile(grammar)
    backend("llguidance").compile(grammar)


@each_backend
def test_a_rule_that_nobody_uses_is_no_matter(name: str) -> None:
    assert follows(backend(name).compile(Grammar("ebnf", 'root ::= "a"\nother ::= other')), "a")
