"""Grammars followed by xgrammar: compiled against the vocabulary first, so that most masks are looked up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xgrammar

from tokenmill.config import EngineConfig
from tokenmill.grammar.base import BadGrammar, Matcher
from tokenmill.grammar.patterns import translate
from tokenmill.grammar.tags import MAX_WHITESPACE, read_legacy
from tokenmill.grammar.vocabulary import load_tokenizer
from tokenmill.messages import Grammar, IntArray

# Fewer matchers than this are done before other threads have woken up.
_FEW = 16
_COMPILE_THREADS = 2
_CACHE_BYTES = 256 * 2**20
# The library passes over keywords of a schema that it does not know; outputs would break the schema.
_ENFORCED = (
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "$defs",
    "definitions",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "pattern",
    "format",
)
# These say nothing about a value.
_NOTES = (
    "$schema",
    "$id",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
)
_FORMATS = frozenset(
    ["email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"]
)
# Counts are written out; larger ones keep the library busy for ever.
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_MAX_COUNT = 10_000
_CONTROLS = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
# Keywords whose value maps names of the user to schemas, holds schemas, or holds no schema at all.
_NAMED = ("properties", "$defs", "definitions")
_VALUES = ("enum", "const", "default", "examples", "required", "type")


class XgrammarMatcher:
    """See `Matcher`."""

    def __init__(self, matcher: Any, known: IntArray) -> None:
        self.inner = matcher
        self.known = known
        self.error = ""

    @property
    def is_accepting(self) -> bool:
        """See `Matcher`."""
        return bool(self.inner.is_completed())

    def fill_mask(self, out: IntArray) -> None:
        """Write its mask, int32 [words]; if that fails, there is an `error`."""
        try:
            self.inner.fill_next_token_bitmask(out.reshape(1, -1))
        except RuntimeError as error:
            self.error = str(error).strip()[:500]
        out &= self.known

    def accept(self, token: int) -> bool:
        """See `Matcher`."""
        return bool(self.inner.accept_token(token))

    def rollback(self, count: int) -> None:
        """See `Matcher`."""
        self.inner.rollback(count)


class XgrammarTemplate:
    """See `Template`."""

    def __init__(self, compiled: Any, known: IntArray) -> None:
        self._compiled = compiled
        self._known = known

    def new(self) -> XgrammarMatcher:
        """See `Template`."""
        return XgrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._known)


class XgrammarBackend:
    """See `Backend`."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        tokenizer = load_tokenizer(config)
        num_tokens = max(vocab_size, len(tokenizer))
        self.num_words = -(-num_tokens // 32)
        # Ends of text are set by whoever uses the masks; the library wants to know one all the same.
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=num_tokens, stop_token_ids=[tokenizer.eos_token_id]
        )
        self._compiler = xgrammar.GrammarCompiler(
            vocabulary, max_threads=_COMPILE_THREADS, cache_limit_bytes=_CACHE_BYTES
        )
        self._batch = xgrammar.BatchGrammarMatcher()
        self._texts = _text_tokens(tokenizer, self.num_words)
        self._plain_texts = self._texts & ~_control_tokens(vocabulary, self.num_words)
        self._any_whitespace = not config.constrained_json_disable_any_whitespace

    def compile(self, grammar: Grammar) -> XgrammarTemplate:
        """See `Backend`."""
        has_json = grammar.kind in ("json_schema", "structural_tag")
        return XgrammarTemplate(self._compiled(grammar), self._plain_texts if has_json else self._texts)

    def fill_masks(self, matchers: Sequence[Matcher], out: IntArray) -> None:
        """See `Backend`."""
        if len(matchers) < _FEW or not self._fill_together(matchers, out):
            for matcher, row in zip(matchers, out, strict=True):
                matcher.fill_mask(row)  # type: ignore[attr-defined]

    def _fill_together(self, matchers: Sequence[Matcher], out: IntArray) -> bool:
        """False if one of them failed; which one, the library does not say."""
        inner = [matcher.inner for matcher in matchers]  # type: ignore[attr-defined]
        try:
            self._batch.batch_fill_next_token_bitmask(inner, out)
        except RuntimeError:
            return False
        out &= np.stack([matcher.known for matcher in matchers])  # type: ignore[attr-defined]
        return True

    def _compiled(self, grammar: Grammar) -> Any:
        match grammar.kind:
            case "json_schema":
                return self._json(json.loads(grammar.text))
            case "regex":
                return self._compiler.compile_regex(translate(grammar.text))
            case "ebnf":
                return self._compiler.compile_grammar(grammar.text)
            case "structural_tag":
                return self._compiler.compile_structural_tag(_new_form(grammar.text))

    def _json(self, schema: Any) -> Any:
        if schema is False:
            raise BadGrammar("the schema `false` allows no output")
        schema = {} if schema is True else schema
        for problem in _unknown(schema):
            raise BadGrammar(f"xgrammar cannot follow {problem}; leave it out, or use llguidance")
        return self._compiler.compile_json_schema(
            json.dumps(schema),
            any_whitespace=self._any_whitespace,
            separators=None if self._any_whitespace else (",", ":"),
            max_whitespace_cnt=MAX_WHITESPACE if self._any_whitespace else None,
        )


def _text_tokens(tokenizer: Any, num_words: int) -> IntArray:
    """A mask of the ids that are text; the library allows special ones, and ids beyond the tokenizer's."""
    bits = np.zeros(32 * num_words, dtype=np.uint8)
    bits[list(tokenizer.get_vocab().values())] = 1
    bits[[index for index, token in tokenizer.added_tokens_decoder.items() if token.special]] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)


def _control_tokens(vocabulary: Any, num_words: int) -> IntArray:
    """A mask of the ids with control characters other than line ends.

    JSON has no place for them, yet the library allows them in strings whose length is limited.
    """
    bits = np.zeros(32 * num_words, dtype=np.uint8)
    found = [index for index, text in enumerate(vocabulary.decoded_vocab) if _CONTROLS.search(text)]
    bits[found] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _unknown(schema: Any) -> Iterator[str]:
    """Keywords of a schema that would be passed over."""
    if isinstance(schema, list):
        for item in schema:
            yield from _unknown(item)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key not in _ENFORCED and key not in _NOTES:
            yield f"the keyword {key!r} of a schema"
        elif key == "format" and value not in _FORMATS:
            yield f"the format {value!r}"
        elif key == "pattern" and ("minLength" in schema or "maxLength" in schema):
            yield "'pattern' together with a length"
        elif key in _COUNTS and isinstance(value, int) and value > _MAX_COUNT:
            yield f"a {key} above {_MAX_COUNT:,}"
        elif key in _NAMED and isinstance(value, dict):
            yield from _unknown(list(value.values()))
        elif key not in _VALUES:
            yield from _unknown(value)


def _new_form(text: str) -> str:
    """The tag in the library's own form; SGLang's first form is one of its kinds."""
    document = json.loads(text)
    if "structures" not in document:
        return text
    tags = [
        {
            "type": "tag",
            "begin": tag.begin,
            "content": {"type": "json_schema", "json_schema": tag.schema},
            "end": tag.end,
        }
        for tag in read_legacy(text)
    ]
    form = {"type": "triggered_tags", "triggers": document["triggers"], "tags": tags}
    return json.dumps({"type": "structural_tag", "format": form})
