"""Whatever is drawn under the masks and comes to an end is right, with either library."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.grammar.conftest import CROWDED, VOCABULARY, allowed, backend, follows, tokenizer
from tokenmill.config import EngineConfig
from tokenmill.core.grammars import Grammars, Guide
from tokenmill.errors import InvalidArgument
from tokenmill.grammar import Backend, BadGrammar, Compiler, Matcher, Template, llguidance_backend
from tokenmill.grammar.backends import BACKENDS, check_backend, open_backend
from tokenmill.messages import Grammar, GrammarKind

pytestmark = pytest.mark.cpu

each_backend = pytest.mark.parametrize("name", BACKENDS)
Drawn = Callable[..., list[str]]

SCHEMAS: list[Any] = [
    {"type": "integer", "minimum": -3, "maximum": 120},
    {"enum": ["red", "gr\u00fcn", 7, None, {"a": 1}]},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "uniqueItems": False, "items": {"const": {"uniqueItems": False}}, "maxItems": 2},
    {
        "type": "object",
        "properties": {
            "host": {"type": "string", "format": "ipv4"},
            "since": {"type": "string", "format": "date-time"},
            "kind": {"anyOf": [{"type": "null"}, {"const": "x"}]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
            "next": {"$ref": "#/$defs/pair"},
        },
        "required": ["host", "since", "kind", "code", "next"],
        "additionalProperties": False,
        "$defs": {"pair": {"type": "array", "prefixItems": [{"enum": [1, 2]}], "items": False}},
    },
]
PATTERNS = [
    r"\d{3}-\d{3}-\d{4}",
    r"^(yes|no|maybe)[.!]?$",
    r"(?i:Monday|Tuesday) at \d\d?:\d\d",
    r"\w{2,4}@\w{1,3}\.(com|org)",
    r"[^\W\d_]{3}\s\S\D",
    r"(?s)a.b|[\]\-\\^/\"]{2}",
    r"(?:ab?){2,}c*?",
    "\u00e9\n[\u4e00-\u9fff]{2}",
]
# Of strings in JSON: each was followed wrongly once by one of the libraries, or by both.
STRING_PATTERNS = [
    r"^a(_[0-9]+)?Z$",
    r"^v[0-9](-[a-z]+)?$",
    r"^[0-9]{2}(\.[0-9]+)?$",
    r"^([0-9]+_)?x$",
    r"^é[^a]$",
    r"^é.$",
    r"^é\S$",
    r"^ü[^,]+$",
    r"^[ä-ü][^,]$",
    r"^[^,é]$",
    r"^\W{3}$",
    r"^\D{2}$",
    r"^[^\w][^\d]$",
    r"^\S[^\s]$",
    r"^(ab?|a?)$",
    r"^[^\]\w]$",
    r'^[^"]{2}$',
    r'^[^"\\]*$',
]
EQUATION = """
root ::= equation
equation ::= term (["+" "-"] term)*
term ::= factor (["*" "/"] factor)*
factor ::= number | "(" equation ")"
number ::= [0-9]+
"""
TAG = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer", "uniqueItems": False}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@each_backend
@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_json_follows_its_schema(name: str, schema: Any, drawn: Drawn) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for text in drawn(name, "json_schema", json.dumps(schema)):
        jsonschema.validate(json.loads(text), schema, format_checker=checker)


@each_backend
@pytest.mark.parametrize("pattern", STRING_PATTERNS)
def test_a_string_of_json_matches_its_pattern(name: str, pattern: str, drawn: Drawn) -> None:
    schema = {"type": "string", "pattern": pattern}
    for text in drawn(name, "json_schema", json.dumps(schema), count=16, most=30):
        jsonschema.validate(json.loads(text), schema)


@each_backend
@pytest.mark.parametrize("pattern", [r'^[^"]*$', r"^[^\\]*$", r'^\S[^"\n]*$'])
@pytest.mark.parametrize("value", ["a", 'a"', "a\\", "a\nb", "a\t", "a b"])
def test_an_escape_is_the_character_that_it_stands_for(name: str, pattern: str, value: str) -> None:
    """A quote that a class excludes does not come in as an escape of it."""
    schema = {"type": "string", "pattern": pattern}
    matcher = backend(name).compile(Grammar("json_schema", json.dumps(schema))).new()
    follows = all(matcher.accept(token) for token in tokenizer().encode(json.dumps(value)))
    is_match = re.search(pattern, value) is not None
    if name == "llguidance" or "\\" not in json.dumps(value):  # xgrammar writes no escapes here
        assert (follows and matcher.is_accepting) == is_match
    else:
        assert not (follows and matcher.is_accepting) or is_match


def test_patterns_of_names_and_of_parts_of_a_string() -> None:
    """Of a pattern without anchors only a part must match."""
    schema = {
        "type": "object",
        "patternProperties": {r"^\W$": {"const": 1}},
        "properties": {"a": {"type": "string", "pattern": r"\W"}},
        "additionalProperties": False,
    }
    template = backend("llguidance").compile(Grammar("json_schema", json.dumps(schema)))

    for text in ('{"-": 1}', '{"a": "b c"}', '{"a": "-", "+": 1}'):
        assert follows(template, text)
    for text in ('{"é": 1}', '{"-": 2}', '{"a": "bc"}', '{"a": "é座٣"}'):
        assert not follows(template, text)


@each_backend
@pytest.mark.parametrize("schema", ["{}", "true"])
@pytest.mark.parametrize("value", [None, [1, -2.5e3, 'a"b'], {"x": {"y": []}, "z": True}], ids=str)
def test_any_json(name: str, schema: str, value: Any) -> None:
    matcher = backend(name).compile(Grammar("json_schema", schema)).new()
    assert all(matcher.accept(token) for token in tokenizer().encode(json.dumps(value)))
    assert matcher.is_accepting


@each_backend
@pytest.mark.parametrize("pattern", PATTERNS)
def test_text_matches_its_pattern_as_a_whole(name: str, pattern: str, drawn: Drawn) -> None:
    for text in drawn(name, "regex", pattern):
        assert re.fullmatch(pattern, text), text


@each_backend
def test_a_mask_is_all_tokens_that_keep_the_output_possible(name: str) -> None:
    """Also where only one text is left, whatever tokens the tokenizer would take for it."""
    options = ["Paris, the capital", "Paris is large", "London"]
    library = backend(name)
    texts = [tokenizer().decode([token]) for token in range(len(tokenizer()))]
    special = set(tokenizer().all_special_ids)
    template = library.compile(Grammar("regex", "|".join(options)))
    masks = np.zeros((1, library.num_words), dtype=np.int32)
    for seed in range(6):
        random, matcher, output = np.random.default_rng(seed), template.new(), ""
        while output not in options:
            library.batch([matcher]).fill_masks(masks)
            found = allowed(masks[0])
            assert found == [
                token
                for token, text in enumerate(texts)
                if text and token not in special and any(each.startswith(output + text) for each in options)
            ]
            token = int(random.choice(found))
            assert matcher.accept(token)
            output += texts[token]


@each_backend
def test_recursive_grammar(name: str, drawn: Drawn) -> None:
    for text in drawn(name, "ebnf", EQUATION):
        assert re.fullmatch(r'[0-9()+\-*/" ]+', text)
        assert text.count("(") == text.count(")")


@each_backend
def test_palindromes(name: str, drawn: Drawn) -> None:
    """The parser sees each character, also where one token spans several symbols."""
    grammar = 'root ::= "a" root "a" | "b" root "b" | "-"'
    texts = drawn(name, "ebnf", grammar)
    assert all(text == text[::-1] and set(text) <= set("ab-") for text in texts)
    assert max(map(len, texts)) > 1


@each_backend
def test_tags_in_free_text(name: str, drawn: Drawn) -> None:
    for text in drawn(name, "structural_tag", json.dumps(TAG), end=0.05):
        for rest in text.split("<f=")[1:]:
            assert re.match(r"(a>\s*-?\d+\s*|b>\s*(true|false)\s*)</f>", rest), text


@each_backend
def test_a_begun_tag_must_be_finished(name: str) -> None:
    library = backend(name)
    matcher = library.compile(Grammar("structural_tag", json.dumps(TAG))).new()
    for token in tokenizer().encode("Hello <f=b>"):
        assert matcher.accept(token)
    assert not matcher.is_accepting
    masks = np.zeros((1, library.num_words), dtype=np.int32)
    library.batch([matcher]).fill_masks(masks)
    begins = {tokenizer().decode([token]).strip()[:1] for token in allowed(masks[0])}
    assert begins <= {"t", "f", ""}


@each_backend
@pytest.mark.parametrize("triggers", [["<fn", "<f"], ["<f", "<fn"]], ids=str)
def test_triggers_that_begin_with_each_other(name: str, triggers: list[str]) -> None:
    """The shorter one opens all their tags, in whatever order they are given."""
    tags = [{"begin": begin, "schema": {"type": "integer"}, "end": ">"} for begin in ("<fn=", "<f ")]
    template = backend(name).compile(
        Grammar("structural_tag", json.dumps({"structures": tags, "triggers": triggers}))
    )
    for text, is_allowed in (("a <fn=5> b", True), ("<f 5>", True), ("<fx", False)):
        matcher = template.new()
        assert all(matcher.accept(token) for token in tokenizer().encode(text)) is is_allowed


def test_many_properties_that_may_be_left_out() -> None:
    schema = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(700)}}
    matcher = backend("llguidance").compile(Grammar("json_schema", json.dumps(schema))).new()
    assert all(matcher.accept(token) for token in tokenizer().encode('{"p1": 5, "p699": 7}'))
    assert matcher.is_accepting


def test_limits_met_on_the_way_are_told_from_other_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.grammar.llguidance_backend._MAX_ITEMS_IN_ROW", 100)
    library = open_backend(EngineConfig(), VOCABULARY)
    schema = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(100)}}
    matcher = library.compile(Grammar("json_schema", json.dumps(schema))).new()
    assert not matcher.is_too_complex
    assert not all(matcher.accept(token) for token in tokenizer().encode('{"p1'))
    assert matcher.is_too_complex
    matcher = library.compile(Grammar("regex", "a")).new()
    assert not matcher.accept(tokenizer().encode("b")[0])
    assert not matcher.is_too_complex


ANY = {"type": "json_schema", "json_schema": {}}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<"], "tags": []}


@each_backend
def test_newer_form_of_tags(name: str, drawn: Drawn) -> None:
    tags = [
        {
            "type": "tag",
            "begin": each["begin"],
            "content": {"type": "json_schema", "json_schema": each["schema"], "style": "json"},
            "end": each["end"],
        }
        for each in TAG["structures"]
    ]
    form = {"type": "triggered_tags", "triggers": TAG["triggers"], "tags": tags, "at_least_one": False}
    text = json.dumps({"type": "structural_tag", "format": form})
    assert drawn(name, "structural_tag", text) == drawn(name, "structural_tag", json.dumps(TAG))


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (None, "'triggered_tags' alone"),
        ({"type": "sequence"}, "'triggered_tags' alone"),
        (TRIGGERED | {"at_least_one": True}, "'at_least_one'"),
        (TRIGGERED, "at least one"),
        (TRIGGERED | {"tags": [5]}, r"tags\[0\] must have"),
        (TRIGGERED | {"tags": [{"content": {"type": "any_text"}}]}, "type 'json_schema'"),
        (TRIGGERED | {"tags": [{"content": ANY | {"any_order": True}}]}, "any_order"),
        (TRIGGERED | {"tags": [{"content": ANY | {"style": "qwen_xml"}}]}, "style"),
    ],
)
def test_newer_tags_that_need_xgrammar(form: Any, reason: str) -> None:
    with pytest.raises(BadGrammar, match=reason):
        backend("llguidance").compile(Grammar("structural_tag", json.dumps({"format": form})))


def test_newest_tags_with_xgrammar(drawn: Drawn) -> None:
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "ok"}}
    assert set(drawn("xgrammar", "structural_tag", json.dumps(tag))) == {"ok"}
    with pytest.raises(BadGrammar, match="xgrammar"):
        backend("llguidance").compile(Grammar("structural_tag", json.dumps(tag)))


def test_tags_of_xgrammar_may_name_special_tokens() -> None:
    """By id or by name; elsewhere they still do not come."""
    library = backend("xgrammar")
    special = tokenizer().all_special_ids[1]
    name = tokenizer().convert_ids_to_tokens(special)
    inside = {"type": "regex", "pattern": "[ab]+"}
    for begin in (special, name):
        form = {"type": "tag", "begin": {"type": "token", "token": begin}, "content": inside, "end": "."}
        template = library.compile(Grammar("structural_tag", json.dumps({"format": form})))
        matcher = template.new()
        masks = np.zeros((1, library.num_words), dtype=np.int32)
        library.batch([matcher]).fill_masks(masks)
        assert allowed(masks[0]) == [special]
        assert matcher.accept(special)
        library.batch([matcher]).fill_masks(masks)
        texts = {tokenizer().decode([token]) for token in allowed(masks[0])}
        assert {"a", "b"} <= texts
        assert all(set(text.removesuffix(".")) <= set("ab") for text in texts)


def test_tags_of_xgrammar_that_differ_by_a_token() -> None:
    library = backend("xgrammar")
    masks = np.zeros((1, library.num_words), dtype=np.int32)
    for tokens in ([74], [300], [300, 301]):
        elements = [{"type": "token", "token": token} for token in tokens]
        form = {"type": "sequence", "elements": elements}
        matcher = library.compile(Grammar("structural_tag", json.dumps({"format": form}))).new()
        for token in tokens:
            library.batch([matcher]).fill_masks(masks)
            assert allowed(masks[0]) == [token]
            assert matcher.accept(token)
        assert matcher.is_accepting


@each_backend
def test_special_and_missing_tokens_are_never_allowed(name: str) -> None:
    library = backend(name)
    matcher = library.compile(Grammar("json_schema", '{"type":"string"}')).new()
    assert matcher.accept(tokenizer().encode('"')[0])
    masks = np.zeros((1, library.num_words), dtype=np.int32)
    library.batch([matcher]).fill_masks(masks)
    tokens = set(allowed(masks[0]))
    special = set(tokenizer().all_special_ids)
    assert len(tokens) > 1000
    assert not tokens & special
    assert max(tokens) < len(tokenizer()) < VOCABULARY


@each_backend
def test_many_masks_at_once_are_those_of_each(name: str) -> None:
    library = backend(name)
    templates = [
        library.compile(Grammar("regex", pattern)) for pattern in (r"\d+x", "[a-z]{3}", ".*", "(yes|no)")
    ]
    matchers = [templates[index % 4].new() for index in range(20)]
    together = np.zeros((20, library.num_words), dtype=np.int32)
    random = np.random.default_rng(3)
    for _ in range(4):
        are_accepting = library.batch(matchers).fill_masks(together)
        assert are_accepting.tolist() == [matcher.is_accepting for matcher in matchers]
        for matcher, row in zip(matchers, together, strict=True):
            alone = np.zeros((1, library.num_words), dtype=np.int32)
            library.batch([matcher]).fill_masks(alone)
            assert (alone[0] == row).all()
        going = [
            (matcher, tokens)
            for matcher, row in zip(matchers, together, strict=True)
            if (tokens := allowed(row))
        ]
        drawn = [int(random.choice(tokens)) for _, tokens in going]
        assert library.batch([matcher for matcher, _ in going]).accept(drawn) == [True] * len(going)
    assert not all(are_accepting)
    assert any(are_accepting)


def many(template: Template, count: int) -> list[Matcher]:
    """Matchers of as many outputs as an engine expects before it asks for the first."""
    template.expect(count)
    return [template.new() for _ in range(count)]


@each_backend
def test_of_many_tokens_those_that_do_not_follow_are_told(name: str) -> None:
    library = backend(name)
    template = library.compile(Grammar("regex", "[ab]+"))
    matchers = many(template, 50)
    tokens = [tokenizer().encode("b" if index % 7 == 3 else "a")[0] for index in range(50)]
    tokens[20] = tokenizer().encode("c")[0]
    assert library.batch(matchers).accept(tokens) == [index != 20 for index in range(50)]
    assert all(matcher.accept(tokens[0]) for index, matcher in enumerate(matchers) if index != 20)


def with_many_threads(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """llguidance on a machine with many processors, and with time to compile a grammar for each."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(llguidance_backend, "_COPY_SECONDS", 60.0)
    return open_backend(EngineConfig(), VOCABULARY)


def test_without_another_thread_a_popular_grammar_has_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    library = with_many_threads(monkeypatch)
    template = library.compile(Grammar("regex", "[ab]+"))
    monkeypatch.setattr(threading.Thread, "start", fail)
    matchers = many(template, 20)
    assert len({matcher.shared for matcher in matchers}) == 1  # type: ignore[attr-defined]
    assert library.batch(matchers).fill_masks(np.zeros((20, library.num_words), dtype=np.int32)).sum() == 0


def test_a_copy_that_fails_leaves_its_grammar_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    library = with_many_threads(monkeypatch)
    template = library.compile(Grammar("regex", "[ab]+"))

    def fail() -> None:
        raise ValueError("no copy")

    monkeypatch.setattr(template, "_again", fail)
    assert len({matcher.shared for matcher in many(template, 20)}) == 1  # type: ignore[attr-defined]


def test_nobody_waits_for_the_copies_of_a_grammar_that_becomes_popular(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = with_many_threads(monkeypatch)
    template = library.compile(Grammar("regex", "[ab]+"))
    again, may_copy = template._again, threading.Event()  # type: ignore[attr-defined]

    def copied() -> Any:
        assert may_copy.wait(10)
        return again()

    monkeypatch.setattr(template, "_again", copied)
    first = [matcher for _ in range(20) for matcher in many(template, 1)]
    may_copy.set()
    deadline = time.monotonic() + 10
    while len(template._copies) < 8:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    later = many(template, 20)
    assert len({matcher.shared for matcher in first}) == 1  # type: ignore[attr-defined]
    assert len({matcher.shared for matcher in later}) == 8  # type: ignore[attr-defined]
    masks = np.zeros((40, library.num_words), dtype=np.int32)
    library.batch(first + later).fill_masks(masks)
    assert (masks == masks[0]).all()


def test_masks_by_several_threads_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that many follow is compiled once for each thread; its matchers do not notice."""
    library = with_many_threads(monkeypatch)
    template = library.compile(Grammar("json_schema", '{"type": "object", "required": ["a"]}'))
    matchers = many(template, 64)
    assert len({matcher.shared for matcher in matchers}) > 4  # type: ignore[attr-defined]
    random, plain = np.random.default_rng(7), backend("llguidance")
    together = np.zeros((64, library.num_words), dtype=np.int32)
    alone = np.zeros((1, plain.num_words), dtype=np.int32)
    followers = [
        plain.compile(Grammar("json_schema", '{"type": "object", "required": ["a"]}')).new() for _ in matchers
    ]
    for _ in range(12):
        are_accepting = library.batch(matchers).fill_masks(together)
        going, drawn = [], []
        for matcher, follower, row, end in zip(matchers, followers, together, are_accepting, strict=True):
            assert plain.batch([follower]).fill_masks(alone) == [end]
            assert (alone[0] == row).all()
            if tokens := allowed(row):  # else the object is complete
                going.append(matcher)
                drawn.append(int(random.choice(tokens)))
                assert follower.accept(drawn[-1])
        assert library.batch(going).accept(drawn) == [True] * len(going)


@each_backend
def test_token_that_does_not_follow(name: str) -> None:
    matcher = backend(name).compile(Grammar("regex", "a")).new()
    assert not matcher.accept(tokenizer().encode("b")[0])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a+[漢-龍]b"),
        ("regex", "[a-z]{2}[一-鿿]。"),
        ("regex", r"\w{2}[^\w\s]\d"),
        ("regex", "(ab|cd*)([漢-龍]|x)b"),
        ("regex", "(ab|cd*)[漢-龍]*b"),
        ("regex", "[a-z]+[^a-z]x?[😀-😿]{2}y"),
        ("regex", r"\w?.\W+[漢字]{0,1}\d"),
        ("regex", r"[a-z]+\W[Ā-ř]\d"),
        ("regex", r"a\W[K-İ]"),
        ("regex", "[^a]{129}"),
        ("regex", r"\s{0,200}x"),
        ("regex", "([漢-龍]|[一-丁]){0,200}"),
        ("regex", "x?[Ā-ř]{130,}"),
        ("json_schema", '{"type":"string","pattern":"^[^a]{0,200}$"}'),
        ("json_schema", '{"type":"string","maxLength":200}'),
        ("ebnf", 'root ::= [a-z ]+ [Ā-ř] "."'),
        ("ebnf", 'root ::= "(" root* ")" | [a-z]'),
        ("ebnf", 'root ::= "a" | "ab" root | root [ab]'),
        ("ebnf", 'root ::= "(" [^()] root* ")" | [^()]'),
        ("ebnf", 'root ::= "a"+ [漢-龍] "b"'),
        ("ebnf", 'root ::= x [^a] "b" | "ab" [漢-龍]? x\nx ::= "a" x | "bc"'),
    ],
)
def test_xgrammar_allows_what_it_accepts(kind: GrammarKind, text: str) -> None:
    """Each token of the vocabulary, in each state on a few ways through the grammar."""
    library = backend("xgrammar")
    template = library.compile(Grammar(kind, text))
    masks = np.zeros((1, library.num_words), dtype=np.int32)
    random = np.random.default_rng(0)
    for _ in range(3):
        matcher = template.new()
        for _ in range(5):
            library.batch([matcher]).fill_masks(masks)
            accepted = accepted_by_xgrammar(matcher)
            assert allowed(masks[0] & matcher.known) == accepted
            if not accepted:
                break
            assert matcher.accept(int(random.choice(accepted)))


def test_a_grammar_that_is_too_ambiguous_says_so() -> None:
    matcher = backend("llguidance").compile(Grammar("ebnf", 'root ::= "a" | [^0] (root)+')).new()
    masks = np.zeros((1, backend("llguidance").num_words), dtype=np.int32)
    token = tokenizer().encode("b")[0]
    for _ in range(60):
        backend("llguidance").batch([matcher]).fill_masks(masks)
        if matcher.error or not matcher.accept(token):
            break
    assert "Too many items" in matcher.error
    assert matcher.is_too_complex


def accepted_by_xgrammar(matcher: Any) -> list[int]:
    """The tokens that are text, and that the library itself takes next; its state is as before."""
    accepted = []
    for token in allowed(matcher.known):
        if matcher.inner.accept_token(token):
            matcher.inner.rollback(1)
            accepted.append(token)
    return accepted


def test_a_token_that_xgrammar_takes_back_is_told_with_what_helps() -> None:
    matcher: Any = backend("xgrammar").compile(Grammar("regex", "ab")).new()
    assert not matcher.accept(tokenizer().encode("b")[0])
    assert "grammar_backend='llguidance'" in matcher.error


@each_backend
def test_white_space(name: str, drawn: Drawn) -> None:
    schema = '{"type":"array","items":{"type":"boolean"},"minItems":2}'
    library = backend(name)
    settings: dict[str, Any] = {"grammar_backend": name, "constrained_json_disable_any_whitespace": True}
    tight = open_backend(EngineConfig(**settings), VOCABULARY)
    matcher = tight.compile(Grammar("json_schema", schema)).new()
    for token in tokenizer().encode("[true,"):
        assert matcher.accept(token)
    masks = np.zeros((1, library.num_words), dtype=np.int32)
    tight.batch([matcher]).fill_masks(masks)
    assert not any(tokenizer().decode([token]).startswith((" ", "\n")) for token in allowed(masks[0]))
    assert not any(re.search(r"\s{65}", text) for text in drawn(name, "json_schema", schema))


BAD: list[tuple[GrammarKind, str, str]] = [
    ("regex", "(?=a)b", "look-ahead"),
    ("regex", r"(a)\1", "references"),
    ("regex", r"a\bb", "anchors"),
    ("regex", r"[^\s\S]", "empty"),
    ("json_schema", "false", "no output"),
    ("json_schema", '{"type":"array","uniqueItems":true}', "uniqueItems"),
    ("json_schema", '{"type":"nonsense"}', "nonsense"),
    ("json_schema", '{"const":10000000000000000000000}', "number 1000.* is out of range"),
    ("json_schema", '{"type":"integer","minimum":-9999999999999999999}', "number -999.* is out of range"),
    ("ebnf", 'root ::= "a" other', "other"),
    ("ebnf", 'root ::= "a', "."),
    ("ebnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "."),
    ("structural_tag", '{"structures":[],"triggers":["<"]}', "structures"),
    ("structural_tag", '{"structures":[{"begin":"x","schema":{},"end":"y"}],"triggers":["<"]}', "trigger"),
]


@each_backend
@pytest.mark.parametrize(("kind", "text", "reason"), BAD, ids=[text[:30] for _, text, _ in BAD])
def test_what_cannot_be_followed_says_why(name: str, kind: GrammarKind, text: str, reason: str) -> None:
    with pytest.raises((BadGrammar, RuntimeError), match=reason):
        backend(name).compile(Grammar(kind, text))


# With llguidance alone; xgrammar refuses the keywords.
BAD_SCHEMAS: list[tuple[str, str]] = [
    ('{"type":"integer","multipleOf":9999991}', "least common multiple above 100,000"),
    ('{"type":"number","multipleOf":1234.567}', "least common multiple above 100,000"),
    ('{"allOf":[{"multipleOf":9973},{"type":"integer","multipleOf":9967}]}', "least common multiple"),
    ('{"type":"object","minProperties":2}', "minProperties=2"),
    ('{"minProperties":2,"required":["a","b"],"properties":{"a":{}}}', "minProperties=2"),
    (
        '{"type":"number","exclusiveMinimum":0,"maximum":0.5}',
        "exclusiveMinimum=0 .*maximum=0.5.* use minimum",
    ),
    ('{"exclusiveMinimum":2,"exclusiveMaximum":2.25}', "exclusiveMinimum=2 .*exclusiveMaximum=2.25"),
    ('{"type":"number","minimum":-1.5,"exclusiveMaximum":-1}', "exclusiveMaximum=-1 .*minimum=-1.5"),
    ('{"minimum":-0.5,"allOf":[{"exclusiveMaximum":0.0}]}', "exclusiveMaximum=0.0 .*minimum=-0.5"),
    # It would end the process.
    ('{"const":-9223372036854775807}', r"'const' has the number -9223372036854775807, .* above -2\^63"),
    ('{"type":"integer","enum":[5,{"a":[-1e19]}]}', "'enum' has the number -1e"),
    ('{"type":"integer","minimum":-1e300,"maximum":-1e299}', "'minimum' has the number -1e"),
]


@pytest.mark.parametrize("low", [-2.5, -2, -0.3, 0, 0.7, 1])
@pytest.mark.parametrize("high", [-2, -1.5, 0, 0.3, 1, 1.5])
@pytest.mark.parametrize("names", [("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")])
def test_excluded_bounds_stay_out(low: float, high: float, names: tuple[str, str]) -> None:
    """Of those that are not refused no bound is a number that may come out."""
    if low >= high:
        return
    schema = {"type": "number", names[0]: low, names[1]: high}
    excluded = low if names[0] == "exclusiveMinimum" else high
    try:
        template = backend("llguidance").compile(Grammar("json_schema", json.dumps(schema)))
    except BadGrammar:
        assert excluded == int(excluded)
        return
    texts = {f"{excluded}", f"{float(excluded)}"} | ({"-0", "-0.0"} if excluded == 0 else set())
    for text in texts:
        matcher = template.new()
        assert not (all(map(matcher.accept, tokenizer().encode(text))) and matcher.is_accepting), text


@pytest.mark.parametrize(("schema", "reason"), BAD_SCHEMAS, ids=[schema for schema, _ in BAD_SCHEMAS])
def test_schemas_that_llguidance_would_get_wrong(schema: str, reason: str) -> None:
    library = backend("llguidance")
    with pytest.raises(BadGrammar, match=reason):
        library.compile(Grammar("json_schema", schema))
    tag = {"structures": [{"begin": "<a>", "schema": json.loads(schema), "end": "<"}], "triggers": ["<"]}
    with pytest.raises(BadGrammar, match=reason):
        library.compile(Grammar("structural_tag", json.dumps(tag)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.05, "minimum": 0, "maximum": 2},
        {"multipleOf": 1_000_000, "enum": [5, 3_000_000]},
        {"allOf": [{"multipleOf": 0.001}, {"multipleOf": 1000}], "enum": [1, 2000]},
        {
            "type": "object",
            "minProperties": 2,
            "required": ["a", "b"],
            "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"multipleOf": {"const": 9999991}},
            "additionalProperties": False,
            "minProperties": 1,
        },
    ],
    ids=str,
)
def test_multiples_and_counts_of_names_that_work(schema: Any, drawn: Drawn) -> None:
    for text in drawn("llguidance", "json_schema", json.dumps(schema)):
        jsonschema.validate(json.loads(text), schema)


HOSTILE: list[tuple[GrammarKind, str]] = [
    ("regex", "((a{100}){100}){100}"),
    ("regex", "(a|b)*a(a|b){500}"),
    ("ebnf", 'root ::= (("a"{1000}){1000}){1000}'),
    ("ebnf", "root ::= " + '"a" ' * 50_000),
    ("ebnf", "root ::= root"),
    ("ebnf", 'root ::= root root | "a" | ""'),
    ("ebnf", "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(30)) + '\na30 ::= "x"'),
    ("json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}'),
    ("json_schema", '{"type":"string","maxLength":1000000000}'),
    ("json_schema", json.dumps({"enum": [f"{'x' * 90}{index}" for index in range(4000)]})),
]


@pytest.mark.parametrize(("kind", "text"), HOSTILE, ids=[text[:30] for _, text in HOSTILE])
def test_hostile_grammars_cost_llguidance_little(kind: GrammarKind, text: str) -> None:
    """They are refused or they work; a test that hangs fails by its time limit."""
    library = backend("llguidance")
    try:
        matcher = library.compile(Grammar(kind, text)).new()
    except BadGrammar:
        return
    masks = np.zeros((1, library.num_words), dtype=np.int32)
    library.batch([matcher]).fill_masks(masks)
    assert matcher.error or allowed(masks[0])


def test_counts_that_xgrammar_would_write_out() -> None:
    pytest.importorskip("xgrammar")
    with pytest.raises(BadGrammar, match="maxLength above 10,000"):
        backend("xgrammar").compile(Grammar("json_schema", '{"type":"string","maxLength":1000000000}'))


def test_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_backend(EngineConfig())
    with pytest.raises(InvalidArgument, match=r"tokenmill\[xgrammar\]"):
        check_backend(EngineConfig(grammar_backend="xgrammar"))


def test_white_space_pattern_needs_llguidance() -> None:
    pytest.importorskip("xgrammar")
    config = EngineConfig(grammar_backend="xgrammar", constrained_json_whitespace_pattern=" ?")
    with pytest.raises(InvalidArgument, match="constrained_json_whitespace_pattern"):
        check_backend(config)


@each_backend
def test_strings_of_limited_length_have_no_control_characters(name: str) -> None:
    library = backend(name)
    matcher = library.compile(Grammar("json_schema", '{"type":"string","maxLength":5}')).new()
    assert matcher.accept(tokenizer().encode('"')[0])
    masks = np.zeros((1, library.num_words), dtype=np.int32)
    library.batch([matcher]).fill_masks(masks)
    texts = [tokenizer().decode([token]) for token in allowed(masks[0])]
    assert texts
    assert not any(re.search(r"[\x00-\x1f]", text) for text in texts)


def test_a_matcher_whose_work_grows_without_bound_ends_alone() -> None:
    """Texts of some patterns are read in ever more ways."""
    library = backend("xgrammar")
    endless = library.compile(Grammar("regex", r"(\w+\s?){1,30}\.")).new()
    plain = library.compile(Grammar("regex", "[a-z]+")).new()
    token = tokenizer().encode("aaaa")[0]
    masks = np.zeros((2, library.num_words), dtype=np.int32)
    for _ in range(400):
        library.batch([endless, plain]).fill_masks(masks)
        if endless.error:
            break
        library.batch([endless, plain]).accept([token, token])
    assert "at most 0.3 s" in endless.error
    assert endless.is_too_complex
    assert not masks[0].any()
    assert masks[1].any()
    assert not plain.error


# ── what matchers share is used up ──

LIMIT = 200


def walk(books: Grammars, guides: list[Guide], draws: np.random.Generator, num_steps: int) -> list[list[Any]]:
    """The masks of each step, and the tokens drawn under them."""
    masks: list[list[Any]] = []
    for _ in range(num_steps):
        bits = books.masks(list(enumerate(guides))).bits.copy()
        masks.append([bits, [guide.finish for guide in guides]])
        for guide, row in zip(guides, bits, strict=True):
            if tokens := allowed(row):
                guide.note(int(draws.choice(tokens)))
    return masks


def test_masks_are_the_same_when_others_use_up_what_is_shared(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    """llguidance limits the states of a lexer, which matchers of a grammar share."""

    def run(limit: int) -> list[list[Any]]:
        monkeypatch.setattr(llguidance_backend, "_MAX_LEXER_STATES", limit)
        library = open_backend(EngineConfig(), VOCABULARY)
        compiler = Compiler(lambda: library)
        facts: Any = SimpleNamespace(vocab_size=VOCABULARY, eos_token_ids=(0,))
        template = compiler.compile(Grammar("regex", CROWDED)).result(10)
        request: Any = SimpleNamespace(params=SimpleNamespace(min_new_tokens=0), stop_ids=())
        guides = [Guide(template, request, end_ids=(0,)) for _ in range(40)]
        masks = walk(Grammars(compiler, facts), guides, np.random.default_rng(5), 25)
        compiler.close()
        return masks

    expected = run(50_000)
    compiled.clear()
    for (found, ends), (expected_masks, expected_ends) in zip(run(LIMIT), expected, strict=True):
        assert (found == expected_masks).all()
        assert ends == expected_ends
    assert len(compiled) > 10


@each_backend
def test_a_matcher_that_is_not_broken_keeps_its_place(name: str) -> None:
    template = backend(name).compile(Grammar("regex", "ab?"))
    for matcher in many(template, 2):
        assert matcher.accept(tokenizer().encode("a")[0])
        assert template.renewed(matcher) is None
    assert not template.is_used_up
