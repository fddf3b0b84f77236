"""Grammars followed by xgrammar: compiled against the vocabulary first, so that most masks are looked up."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xgrammar

from tokenmill.config import EngineConfig
from tokenmill.grammar.base import BadGrammar, Matcher
from tokenmill.grammar.ebnf import ebnf_of, ebnf_of_pattern
from tokenmill.grammar.schemas import names_control_characters, normalize, read_json, read_schema
from tokenmill.grammar.tags import MAX_WHITESPACE, read_tags
from tokenmill.grammar.vocabulary import load_tokenizer
from tokenmill.grammar.xgrammar_schemas import prepare_schema
from tokenmill.grammar.xgrammar_tokens import KnownTokens, known_ids
from tokenmill.messages import BoolArray, Grammar, IntArray

# Fewer matchers than this are done before other threads have woken up.
_FEW = 16
# All rows of a step wait for the slowest one. A matcher keeps all ways to read a text, and they can multiply.
_MOST_SECONDS = 0.3
_COMPILE_THREADS = 2
_CACHE_BYTES = 256 * 2**20
# Time and place in the library's source, which its messages begin with.
_ORIGIN = re.compile(r"\[[\d:]+\] \S+:\d+: ")


class XgrammarMatcher:
    """See `Matcher`."""

    def __init__(self, matcher: Any, known: KnownTokens) -> None:
        self.inner = matcher
        self._known = known
        self._end = 0  # of the tokens so far, see `KnownTokens`
        self.error = ""
        self.is_too_complex = False

    @property
    def is_accepting(self) -> bool:
        """See `Matcher`."""
        return bool(self.inner.is_completed())

    def fill_mask(self, out: IntArray) -> None:
        """Write its mask, int32 [words]; if that fails, there is an `error`, and the mask is empty."""
        began = time.thread_time()
        try:
            if not self.error:
                self.inner.fill_next_token_bitmask(out.reshape(1, -1))
        except RuntimeError as error:
            self.error = _message(error)
        self._end_if_slow(began)
        out &= 0 if self.error else self.known

    @property
    def known(self) -> IntArray:
        """The tokens that are text behind those so far; what the library allows beyond them is an error."""
        return self._known.after(self._end)

    def accept(self, token: int) -> bool:
        """See `Matcher`."""
        began = time.thread_time()
        word, bit = divmod(token, 32)
        is_allowed = bool(self.known[word] >> bit & 1) and bool(self.inner.accept_token(token))
        self._end_if_slow(began)
        if is_allowed:
            self._end = self._known.end_after(self._end, token)
        elif not self.error:
            # It is drawn under the library's own mask.
            self.error = (
                f"xgrammar allowed token {token} and refuses it now; use grammar_backend='llguidance'"
            )
        return is_allowed

    def _end_if_slow(self, began: float) -> None:
        seconds = time.thread_time() - began
        if seconds > _MOST_SECONDS and not self.error:
            self.error = (
                f"a token of it takes {seconds:.2f} s, and at most {_MOST_SECONDS:g} s are allowed; give a "
                "text fewer ways to be read, or use grammar_backend='llguidance'"
            )
            self.is_too_complex = True


class XgrammarTemplate:
    """See `Template`."""

    def __init__(self, compiled: Any, known: KnownTokens) -> None:
        self._compiled = compiled
        self._known = known

    def expect(self, num_outputs: int) -> None:
        """See `Template`."""

    def new(self) -> XgrammarMatcher:
        """See `Template`."""
        return XgrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._known)

    def renewed(self, broken: Matcher) -> Matcher | None:
        """See `Template`. The only limit is one of time, and of one matcher."""
        return None

    @property
    def is_used_up(self) -> bool:
        """See `Template`."""
        return False


class XgrammarBatch:
    """See `Batch`."""

    def __init__(self, matchers: Sequence[Any], backend: XgrammarBackend) -> None:
        self._matchers = matchers
        self._backend = backend

    def accept(self, tokens: Sequence[int]) -> list[bool]:
        """See `Batch`."""
        return [matcher.accept(token) for matcher, token in zip(self._matchers, tokens, strict=True)]

    def fill_masks(self, out: IntArray) -> BoolArray:
        """See `Batch`."""
        began = time.perf_counter()
        # Which matcher fails or takes long, the library does not say.
        if len(self._matchers) < _FEW or self._backend.was_slow or not self._fill_together(out):
            for matcher, row in zip(self._matchers, out, strict=True):
                matcher.fill_mask(row)
        self._backend.was_slow = time.perf_counter() - began > _MOST_SECONDS
        return np.array([matcher.is_accepting for matcher in self._matchers], dtype=np.bool_)

    def _fill_together(self, out: IntArray) -> bool:
        """False if one of them failed."""
        if any(matcher.error for matcher in self._matchers):
            return False
        inner = [matcher.inner for matcher in self._matchers]
        try:
            self._backend.filler.batch_fill_next_token_bitmask(inner, out)
        except RuntimeError:
            return False
        out &= np.stack([matcher.known for matcher in self._matchers])
        return True


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
        # The cache takes rules that differ by a token alone for one.
        self._compiler_for_tokens = xgrammar.GrammarCompiler(
            vocabulary, max_threads=_COMPILE_THREADS, cache_enabled=False
        )
        self.filler = xgrammar.BatchGrammarMatcher()
        self.was_slow = False  # the last masks
        self._ids: dict[str, int] = tokenizer.get_vocab()
        texts: list[bytes] = vocabulary.decoded_vocab
        self._texts = KnownTokens.of(texts, known_ids(tokenizer, self.num_words))
        self._json_texts = [self._texts.of_json(has_code_points=has_them) for has_them in (False, True)]
        self._any_whitespace = not config.constrained_json_disable_any_whitespace

    def compile(self, grammar: Grammar) -> XgrammarTemplate:
        """See `Backend`."""
        try:
            compiled, known = self._compiled(grammar)
        except RuntimeError as error:
            raise BadGrammar(_message(error)) from None
        template = XgrammarTemplate(compiled, known)
        matcher = template.new()
        first: IntArray = np.zeros(self.num_words, dtype=np.int32)
        matcher.fill_mask(first)
        if matcher.error or not (first.any() or matcher.is_accepting):
            raise BadGrammar(matcher.error or "no output can follow it")
        return template

    def batch(self, matchers: Sequence[Matcher]) -> XgrammarBatch:
        """See `Backend`."""
        return XgrammarBatch(matchers, self)

    def _compiled(self, grammar: Grammar) -> tuple[Any, KnownTokens]:
        """The library's own object, and the tokens that may come whatever it says."""
        match grammar.kind:
            case "json_schema":
                schema = read_schema(grammar.text)
                known = self._json_texts[names_control_characters(schema)]
                return self._json(schema), known
            case "regex":
                return self._compiler.compile_grammar(ebnf_of_pattern(grammar.text)), self._texts
            case "ebnf":
                return self._compiler.compile_grammar(ebnf_of(grammar.text)), self._texts
            case "structural_tag":
                return self._tag(_new_form(grammar.text))

    def _json(self, schema: Any) -> Any:
        schema = {} if schema is True else schema
        prepare_schema(schema)
        return self._compiler.compile_json_schema(
            json.dumps(schema),
            any_whitespace=self._any_whitespace,
            separators=None if self._any_whitespace else (",", ":"),
            max_whitespace_cnt=MAX_WHITESPACE if self._any_whitespace else None,
        )

    def _tag(self, document: Any) -> tuple[Any, KnownTokens]:
        for part in list(_objects(document)):
            if "json_schema" in part:
                normalize(part["json_schema"])
                prepare_schema(part["json_schema"])
            _write_as_rules(part)
        names = _named_tokens(document)
        compiler = self._compiler_for_tokens if names else self._compiler
        ids = [self._ids.get(name, -1) if isinstance(name, str) else name for name in names]
        # Beside the JSON there is free text.
        known = self._json_texts[True].with_ids(ids)
        return compiler.compile_structural_tag(json.dumps(document)), known


def _message(error: RuntimeError) -> str:
    return _ORIGIN.sub("", str(error), count=1).strip()[:500]


def _new_form(text: str) -> Any:
    """The tag in the library's own form; SGLang's first form is one of its kinds."""
    document = read_json(text)
    if "structures" not in document:
        return document
    structures = read_tags(text)
    tags = [
        {
            "type": "tag",
            "begin": tag.begin,
            "content": {"type": "json_schema", "json_schema": tag.schema},
            "end": tag.end,
        }
        for tag in structures
    ]
    # The library wants each tag to have one of them.
    triggers = sorted({tag.trigger for tag in structures})
    form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return {"type": "structural_tag", "format": form}


def _objects(document: Any) -> Iterator[dict[str, Any]]:
    """The parts of a tag that may say what is to come; schemas within it are no such parts."""
    if isinstance(document, dict):
        yield document
    if isinstance(document, dict | list) and "json_schema" not in document:
        for part in document.values() if isinstance(document, dict) else document:
            yield from _objects(part)


def _named_tokens(document: Any) -> list[int | str]:
    """The tokens that a tag asks for by id or name, special ones, too."""
    found: list[Any] = []
    for part in _objects(document):
        match part:
            case {"type": "token", "token": token}:
                found.append(token)
            case {"type": "token_triggered_tags", "trigger_tokens": [*tokens]}:
                found += tokens
            case {"type": "token_dispatch", "rules": [*rules]}:
                found += [rule[0] for rule in rules]
    return [token for token in found if isinstance(token, int | str)]


def _write_as_rules(part: dict[str, Any]) -> None:
    """Patterns and grammars of a tag, in place."""
    if part.get("type") == "regex" and isinstance(part.get("pattern"), str):
        part.update({"type": "grammar", "grammar": ebnf_of_pattern(part.pop("pattern"))})
    elif part.get("type") == "grammar" and isinstance(part.get("grammar"), str):
        part["grammar"] = ebnf_of(part["grammar"])
