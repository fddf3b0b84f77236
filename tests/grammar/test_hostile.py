"""Grammars and outputs at the edges: too much to write out, bytes that are no text, other spellings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.grammar.conftest import VOCABULARY, allowed, backend, tokenizer
from tokenmill.grammar import BadGrammar, Compiler
from tokenmill.grammar.backends import BACKENDS
from tokenmill.grammar.ebnf import ebnf_of_pattern
from tokenmill.grammar.lark import lark_of
from tokenmill.grammar.patterns import MAX_LENGTH, translate
from tokenmill.grammar.schemas import normalize
from tokenmill.messages import Grammar, GrammarKind

pytestmark = pytest.mark.cpu
each_backend = pytest.mark.parametrize("name", [name for name in BACKENDS if name != "none"])


@pytest.mark.parametrize("write", [translate, ebnf_of_pattern])
@pytest.mark.parametrize(
    "pattern", [r"\w" * 31_000, r"[\w\-]" * 8_000, "|".join(rf"{n}\w" for n in range(900)), r"(\w\W)" * 900]
)
def test_a_pattern_with_too_many_large_classes_is_refused_before_they_are_written(
    pattern: str, write: Callable[[str], str]
) -> None:
    with pytest.raises(BadGrammar, match=f"more than {MAX_LENGTH:,} characters"):
        write(pattern)


def test_large_classes_have_room() -> None:
    assert len(translate(r"(?:\w+ ){3}" * 300)) > 1_000_000


def test_a_grammar_with_too_many_rules_is_refused_where_it_has_too_many() -> None:
    rules = "\n".join(f'a{index} ::= "x" a{index + 1}' for index in range(20_000))
    with pytest.raises(BadGrammar, match=r"line 50\d\d: the grammar has 20,00\d parts up to here"):
        lark_of(f'root ::= a0\n{rules}\na20000 ::= "y"')


def test_a_missing_rule_among_many_is_named() -> None:
    rules = "\n".join(f'a{index} ::= "x" a{index + 1}' for index in range(4_000))
    with pytest.raises(BadGrammar, match="'a3999' uses 'a4000'"):
        lark_of(f"root ::= a0\n{rules}")


def chain(count: int) -> str:
    """A schema whose definitions are lists of the next one each; two levels each."""
    definitions: dict[str, Any] = {
        f"d{index}": {"type": "array", "items": {"$ref": f"#/$defs/d{index + 1}"}} for index in range(count)
    }
    definitions[f"d{count}"] = {"type": "null"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


@each_backend
def test_chains_of_definitions_have_room(name: str) -> None:
    """Libraries follow them by recursion, which ended the process."""
    compiler = Compiler(lambda: backend(name))
    try:
        template = compiler.compile(Grammar("json_schema", chain(2_400))).result()
        template.expect(100)
        for matcher in (template.new(), template.new()):
            assert all(matcher.accept(token) for token in tokenizer().encode("[[[[[]"))
        with pytest.raises(BadGrammar, match=r"lead through up to 16,00\d levels, the limit is 5,000"):
            compiler.compile(Grammar("json_schema", chain(8_000))).result()
    finally:
        compiler.close()


def test_references_that_are_not_found_count_as_the_whole_schema() -> None:
    deep: Any = {}
    for _ in range(50):
        deep = {"items": deep}
    schema = {"$defs": {"deep": deep}, "anyOf": [{"$ref": f"other#{index}"} for index in range(100)]}
    with pytest.raises(BadGrammar, match=r"up to 5,\d\d\d levels"):
        normalize(schema)
    schema["anyOf"] = [{"$ref": f"#/anyOf/{index}"} for index in range(100)]
    normalize(schema)


@pytest.mark.parametrize("write", [translate, ebnf_of_pattern])
def test_patterns_nested_too_deeply_say_so(write: Callable[[str], str]) -> None:
    with pytest.raises(BadGrammar, match="nested too deeply"):
        write("(" * 300 + "a" + "b)*" * 300)


def token_bytes() -> list[bytes]:
    xgrammar = pytest.importorskip("xgrammar")
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=VOCABULARY)
    texts: list[bytes] = vocabulary.decoded_vocab
    return texts


SECOND_BYTES = {
    0xE0: range(0xA0, 0xC0),
    0xE1: range(0x80, 0xC0),
    0xED: range(0x80, 0xA0),
    0xF0: range(0x90, 0xC0),
}


@each_backend
@pytest.mark.parametrize("first", SECOND_BYTES, ids=hex)
@pytest.mark.parametrize("schema", ['{"type":"string","maxLength":3}', '{"type":"string"}', "{}"])
def test_bytes_that_no_character_has_are_never_allowed(name: str, schema: str, first: int) -> None:
    """The library may count them as one character where Python reads three."""
    texts, library = token_bytes(), backend(name)
    template = library.compile(Grammar("json_schema", schema))
    matchers, masks = [template.new(), template.new()], np.zeros((2, library.num_words), dtype=np.int32)
    for token in (b'"', bytes([first])):
        assert library.batch(matchers).accept([texts.index(token)] * 2) == [True, True]
    for rows in (matchers[:1], matchers):
        library.batch(rows).fill_masks(masks[: len(rows)])
    after = {texts[token][0] for token in allowed(masks[0])}
    assert after == set(SECOND_BYTES[first]) & {text[0] for text in texts if text}
    before = template.new()
    assert before.accept(texts.index(b'"'))
    library.batch([before]).fill_masks(masks[:1])
    assert texts.index(b"a") in allowed(masks[0])


def begins(name: str, kind: GrammarKind, grammar: str, text: str) -> bool:
    """Whether an output may begin so."""
    library = backend(name)
    matcher = library.compile(Grammar(kind, grammar)).new()
    tokens = tokenizer().encode(text, add_special_tokens=False)
    return all(library.batch([matcher]).accept([token])[0] for token in tokens)


HAS_A = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":true}'


@each_backend
def test_a_property_has_one_spelling(name: str) -> None:
    """Its name with an escape is its name, and its value must follow the schema."""
    assert begins(name, "json_schema", HAS_A, '{"a":1,"b":"x"')
    assert not begins(name, "json_schema", HAS_A, r'{"a":1,"\u0061":"x"')


@each_backend
@pytest.mark.parametrize(
    ("text", "is_text"),
    [
        (r'"\u00e9"', False),
        (r'"\ud800"', False),
        (r'"\\u"', True),
        (r'"\\\u"', False),
        (r'"\\\\user"', True),
        (r'"\n\u0061"', False),
        (r'"\n \t\"\\"', True),
    ],
)
def test_characters_have_one_spelling(name: str, text: str, is_text: bool) -> None:
    """However the tokenizer cuts it; a backslash may be escaped itself."""
    texts = token_bytes()
    letters = [texts.index(letter.encode()) for letter in text]
    for tokens in (tokenizer().encode(text), letters):
        library = backend(name)
        matcher = library.compile(Grammar("json_schema", '{"type":"string"}')).new()
        masks = np.zeros((1, library.num_words), dtype=np.int32)
        was_allowed = True
        for token in tokens:
            library.batch([matcher]).fill_masks(masks)
            was_allowed = was_allowed and token in allowed(masks[0])
            assert matcher.accept(token) == was_allowed
            if not was_allowed:
                break
        assert was_allowed == is_text


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ('{"const":"\\u0001"}', r'"\u0001"'),
        ('{"enum":["a","\\u007f"]}', r'"\u007f"'),
        (r'{"type":"string","pattern":"^\\x01$"}', r'"\u0001"'),
        ('{"type":"string"}', r'"\n\t\\\""'),
    ],
)
@each_backend
def test_control_characters_can_be_written_where_they_are_asked_for(
    name: str, schema: str, text: str
) -> None:
    if name == "xgrammar" and "pattern" in schema:
        pytest.skip("xgrammar takes no such pattern")
    assert begins(name, "json_schema", schema, text)
