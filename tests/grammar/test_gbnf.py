"""GBNF as it is written in the wild, against regular expressions and by what a matcher accepts."""

from __future__ import annotations

import pytest

from tests.grammar.conftest import backend, tokenizer
from tokenmill.grammar import BadGrammar
from tokenmill.grammar.backends import BACKENDS
from tokenmill.grammar.lark import lark_of
from tokenmill.messages import Grammar

pytestmark = pytest.mark.cpu

JSON = r"""
# a grammar of JSON with comments, groups over lines, and empty alternatives
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


each_backend = pytest.mark.parametrize("name", BACKENDS)


def accepts(name: str, grammar: str, text: str) -> bool:
    matcher = backend(name).compile(Grammar("ebnf", grammar)).new()
    return all(matcher.accept(token) for token in tokenizer().encode(text)) and matcher.is_accepting


@each_backend
@pytest.mark.parametrize(
    ("text", "is_json"),
    [
        ('{"a": [1, 2.5e3, {}], "b\\n": "\\u00e4"}', True),
        ('{"a": true}', True),
        ('{"a": tru}', False),
        ("[1]", False),
        ('{"a" 1}', False),
    ],
)
def test_grammar_of_json(name: str, text: str, is_json: bool) -> None:
    assert accepts(name, JSON, text) is is_json


@each_backend
@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        # The longest match of one part must not eat what the next one needs.
        ('root ::= [a-z]+ "x"', "abxx", "abc"),
        ('root ::= a "x" | "(" root ")"\na ::= [a-z]+', "((abxx))", "((ab))"),
        ('root ::= "a" "b" | "abc" | "(" root ")"', "(abc)", "(ac)"),
        ("root ::= [^a-c\\]]{2,3} .?", "\u00e9]"[:1] + "xy!", "ax"),
        (r'root ::= "\x41\u00e9\"\\" [\-+]', 'A\u00e9"\\-', 'A\u00e9"\\*'),
        ('root ::= ("a" | )\n  "b"\nother ::= "c"', "b", "c"),
        ("root ::= long-name_1\nlong-name_1 ::= [0-9]{3}", "123", "12"),
        ('root ::= "a"{2,} "b"{,1}', "aaab", "ab"),
        ("root ::= .{2}", "\u00e9a", "a\n"),
        ('root ::= "a" root "b" | ', "aabb", "aab"),
        ('root ::= ("yes" | "no" "!"? | [^\\x00-\\x7f])+ # or\n', "no!yes\u00e9", "ye"),
        (r'root ::= "\n\"\\[]" ["\]\\^-]', '\n"\\[]-', '\n"\\[]a'),
    ],
)
def test_signs(name: str, grammar: str, yes: str, no: str) -> None:
    assert accepts(name, grammar, yes)
    assert not accepts(name, grammar, no)


@each_backend
@pytest.mark.parametrize("grammar", ["root ::= root", 'root ::= a "b"\na ::= a', r'root ::= "\ud800"'])
def test_grammars_without_an_output(name: str, grammar: str) -> None:
    with pytest.raises(BadGrammar, match=r"no output can|empty"):
        backend(name).compile(Grammar("ebnf", grammar))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "a', "line 1"),
        ("root ::= [a", "line 1"),
        ('root ::= "a"\nroot ::= "b"', "line 2.*twice"),
        ('root ::= "a" )', "line 1"),
        ('root ::= ("a"', r"expected `\)`"),
        ('root ::= "a"{3,1}', "3 to 1"),
        ("root ::= [z-a]", "backwards"),
        (r'root ::= "\q"', "escape"),
        ("root ::= missing", "missing"),
        ('other ::= "a"', "root"),
    ],
)
def test_mistakes_name_their_line(grammar: str, reason: str) -> None:
    with pytest.raises(BadGrammar, match=reason):
        lark_of(grammar)
