"""Grammars followed by llguidance: next to nothing to compile, masks computed as they are needed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from tokenmill.config import EngineConfig
from tokenmill.grammar.base import BadGrammar, Matcher
from tokenmill.grammar.lark import lark_of
from tokenmill.grammar.llguidance_schemas import prepare_schema
from tokenmill.grammar.llguidance_vocabulary import rename_added_tokens
from tokenmill.grammar.patterns import translate
from tokenmill.grammar.schemas import names_control_characters, read_schema
from tokenmill.grammar.stacks import deep_stacks, run_deep
from tokenmill.grammar.tags import MAX_WHITESPACE, read_tags
from tokenmill.grammar.unions import OVERLAP
from tokenmill.grammar.vocabulary import read_vocabulary
from tokenmill.messages import BoolArray, Grammar, IntArray

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Room for large schemas; what needs more is hostile or hopeless.
_MAX_LEXER_STATES = 50_000
_MAX_ITEMS_IN_ROW = 50_000  # objects with thousands of properties that may be left out
# How its messages name these limits; its reasons to stop do not tell them from other failures.
_LIMITS = re.compile("too many (states|expressions)|items; max is|Too many items|fuel exhausted|TooComplex")
# The first of them; what it does not know, xgrammar does not know either.
_UNKNOWN_KEYWORD = re.compile(r'Unimplemented keys: \["([^"]*)"')
_ESCAPES = 'nrbtf\\"'  # letters behind a backslash in JSON
# Matchers of one grammar share what they know of it behind a lock. Threads wait for each other there, unless
# a mask takes longer than this, or there are several locks.
_SLOW_SECONDS = 2e-4
_MANY_LOCKS = 4
# Fewer matchers are done before a thread wakes up.
_MANY_MASKS = 32
# A grammar that so many outputs follow is compiled once more for every thread, if that is done in this time.
_POPULAR = 16
_COPY_SECONDS = 0.05
# One whose matchers have used up what they share is compiled anew, while all wait, if that takes no longer.
_RENEWAL_SECONDS = 0.5
_MOST_BROKEN_ALONE = 4  # outputs that used it up by themselves; then this is done no more
_MOST_THREADS = 8


class LlguidanceMatcher:
    """See `Matcher`."""

    def __init__(self, shared: _Shared, place: int) -> None:
        shared.num_made += 1
        self.inner = shared.first.deep_copy()
        self.shared = shared
        self.place = place  # of that in the template

    @property
    def is_accepting(self) -> bool:
        """See `Matcher`."""
        return bool(self.inner.is_accepting())

    @property
    def error(self) -> str:
        """See `Matcher`."""
        return _reason(self.inner) if self.inner.is_error() else ""

    @property
    def is_too_complex(self) -> bool:
        """See `Matcher`."""
        return _LIMITS.search(self.error) is not None

    def accept(self, token: int) -> bool:
        """See `Matcher`."""
        return bool(self.inner.consume_token(token))


class _Shared:
    """What the library has found out of a grammar, behind a lock: shared by matchers that come of `first`."""

    def __init__(self, first: LLMatcher) -> None:
        self.first = first  # at the beginning of an output
        self.num_made = 0  # matchers, so far
        self.is_used_up = False  # a limit was reached


class LlguidanceTemplate:
    """See `Template`. Thread-safe. Its matchers take turns in sharing each of its copies."""

    def __init__(
        self, first: LLMatcher, again: Callable[[], LLMatcher], *, seconds: float, num_threads: int
    ) -> None:
        """`again` compiles it once more, which takes so many seconds."""
        self._copies = [_Shared(first)]
        self._again = again
        self._seconds = seconds
        self._num_copies = min(num_threads, 1 + int(_COPY_SECONDS / seconds))  # once many use it
        self._num_expected = 0
        self._num_matchers = 0
        self._num_broken_alone = 0
        self._lacks_copies = self._num_copies > 1
        self._guard = threading.Lock()

    @property
    def is_used_up(self) -> bool:
        """See `Template`."""
        return any(copy.is_used_up for copy in self._copies)

    def expect(self, num_outputs: int) -> None:
        """See `Template`."""
        with self._guard:
            self._num_expected += num_outputs

    def new(self) -> LlguidanceMatcher:
        """See `Template`. Copies are begun with the first matcher after many were expected."""
        with self._guard:
            if self._lacks_copies and self._num_expected >= _POPULAR:
                self._begin_copies()
            self._num_matchers += 1
            place = self._num_matchers % len(self._copies)
            return LlguidanceMatcher(self._copies[place], place)

    def renewed(self, broken: Matcher) -> LlguidanceMatcher | None:
        """See `Template`. Without room for states the library refuses tokens, mostly with that as reason."""
        assert isinstance(broken, LlguidanceMatcher)
        if not broken.error:
            return None
        with self._guard:
            broken.shared.is_used_up |= broken.is_too_complex
            is_alone = broken.shared.num_made == 1
            self._num_broken_alone += is_alone
            if is_alone or self._num_broken_alone > _MOST_BROKEN_ALONE or self._seconds > _RENEWAL_SECONDS:
                return None
            current = self._copies[broken.place]
            if current is not broken.shared and not current.is_used_up:
                return LlguidanceMatcher(current, broken.place)
        with contextlib.suppress(Exception):
            first = run_deep(self._again)
            if not first.is_error():
                return self._first_of(_Shared(first), broken.place)
        return None

    def _first_of(self, copy: _Shared, place: int) -> LlguidanceMatcher:
        """The first matcher of a new copy, which takes the place of one that is used up."""
        with self._guard:
            if self._copies[place].is_used_up:
                self._copies[place] = copy
            return LlguidanceMatcher(copy, place)

    def _begin_copies(self) -> None:
        """Where many outputs begin together, they wait for the copies: the device computes prompts mostly.

        Earlier, the copies would keep the host from launching these; later, nobody waits for them.
        """
        self._lacks_copies = False
        thread = threading.Thread(target=self._copy, name="tokenmill-grammar", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads can be had: one copy will do
            thread.start()
            if not self._num_matchers:
                thread.join()

    def _copy(self) -> None:
        """Side by side, for the library needs no interpreter for most of it; one that fails leaves none."""
        with contextlib.suppress(Exception), ThreadPoolExecutor(self._num_copies - 1) as threads:
            with deep_stacks():
                copies = threads.map(lambda _: _Shared(self._again()), range(1, self._num_copies))
            self._copies += list(copies)


class LlguidanceBatch:
    """See `Batch`. What the library wants to be handed in each step is made once."""

    def __init__(self, matchers: Sequence[Any], backend: LlguidanceBackend) -> None:
        self._backend = backend
        self._inner = [matcher.inner for matcher in matchers]
        self._rows = list(zip(self._inner, range(len(matchers)), strict=True))
        # Whether threads would get through many matchers without waiting for each other.
        num_locks = len({matcher.shared for matcher in matchers})
        self._work_side_by_side = len(matchers) >= _MANY_MASKS and num_locks >= _MANY_LOCKS

    def accept(self, tokens: Sequence[int]) -> list[bool]:
        """See `Batch`."""
        drawn = zip(self._inner, tokens, strict=True)
        if not self._work_side_by_side:
            return [bool(inner.consume_token(token)) for inner, token in drawn]
        return self._backend.threads.consume_token_par(list(drawn))

    def fill_masks(self, out: IntArray) -> BoolArray:
        """See `Batch`."""
        backend, began = self._backend, time.perf_counter()
        if backend.mask_seconds > _SLOW_SECONDS or self._work_side_by_side:
            num_bytes = 4 * backend.num_words
            backend.threads.unsafe_compute_mask_ptr(self._rows, out.ctypes.data, num_bytes, len(self._rows))
        else:
            address, num_bytes = out.ctypes.data, out.strides[0]
            for inner in self._inner:  # NumPy's own way to the address of a row takes longer than some masks
                inner.unsafe_compute_mask_ptr(address, num_bytes)
                address += num_bytes
        backend.mask_seconds = (time.perf_counter() - began) / max(1, len(self._inner))
        # The library allows its end of text, and nothing else, to a matcher that has failed, too.
        ends, end_bit = out.view(np.uint32)[:, backend.end_id // 32], np.uint32(1 << backend.end_id % 32)
        are_accepting: BoolArray = ends & end_bit != 0
        ends &= ~end_bit
        return are_accepting


class LlguidanceBackend:
    """See `Backend`."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        vocabulary = read_vocabulary(config)
        num_tokens = max(vocab_size, vocabulary.num_tokens)
        self.num_words = -(-num_tokens // 32)
        # Ends of text are set by whoever uses the masks; the library wants to know one all the same.
        self.end_id = vocabulary.end_id
        document = rename_added_tokens(vocabulary.document)
        self._tokenizer = LLTokenizer(document, n_vocab=num_tokens, eos_token=self.end_id)
        self._num_threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self.threads = LLExecutor(self._num_threads)
        self.mask_seconds = 0.0  # that one took last time
        self._json_options = _json_options(config)

    def compile(self, grammar: Grammar) -> LlguidanceTemplate:
        """See `Backend`."""
        source = _unforced(self._source(grammar))
        began = time.perf_counter()
        matcher = self._matcher(source)
        # What is too complex shows when the first mask is computed; the copies find its work done.
        if not matcher.is_error():
            first: IntArray = np.zeros(self.num_words, dtype=np.int32)
            matcher.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
            if not matcher.is_error() and not first.any() and not matcher.is_accepting():
                raise BadGrammar("no output can follow it")
        if matcher.is_error():
            raise BadGrammar(_reason(matcher))
        again, seconds = partial(self._matcher, source), time.perf_counter() - began
        return LlguidanceTemplate(matcher, again, seconds=seconds, num_threads=self._num_threads)

    def _matcher(self, source: str) -> LLMatcher:
        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, max_items_in_row=_MAX_ITEMS_IN_ROW)
        return LLMatcher(self._tokenizer, source, log_level=0, limits=limits)

    def batch(self, matchers: Sequence[Matcher]) -> LlguidanceBatch:
        """See `Backend`."""
        return LlguidanceBatch(matchers, self)

    def _source(self, grammar: Grammar) -> str:
        match grammar.kind:
            case "json_schema":
                return self._json(grammar.text)
            case "regex":
                return str(LLMatcher.grammar_from_regex(translate(grammar.text)))
            case "ebnf":
                return str(LLMatcher.grammar_from_lark(lark_of(grammar.text)))
            case "structural_tag":
                return self._tags(grammar.text)

    def _json(self, text: str) -> str:
        schema = {"anyOf": [{}]} if text == "true" else read_schema(text)
        prepare_schema(schema)
        try:
            options = _options_for(schema, self._json_options)
            return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))
        except ValueError as error:
            raise BadGrammar(str(error)) from None

    def _tags(self, text: str) -> str:
        """Free text up to a trigger, then one of the tags that begin with it, and so on."""
        tags = read_tags(text)
        prepare_schema([tag.schema for tag in tags])
        rules = [
            "%llguidance {}",
            f"start: ({' | '.join(f'tag{index}' for index in range(len(tags)))})* TEXT",
            r"TEXT: /(?s:.*)/",
        ]
        for index, tag in enumerate(tags):
            rest = tag.begin.removeprefix(tag.trigger)
            schema = json.dumps(_with_options(tag.schema, _options_for(tag.schema, self._json_options)))
            rules.append(f"head{index}[lazy]: TEXT {_quoted(tag.trigger)}")
            rules.append(f"tag{index}: head{index} {_quoted(rest)} %json {schema} {_quoted(tag.end)}")
        return str(LLMatcher.grammar_from_lark("\n".join(rules)))


def _json_options(config: EngineConfig) -> JsonCompileOptions:
    if config.constrained_json_disable_any_whitespace:
        return {"whitespace_flexible": False}
    # A model that has lost the thread writes spaces for ever if it may.
    pattern = config.constrained_json_whitespace_pattern
    return {"whitespace_pattern": pattern or rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}"}


def _options_for(schema: Any, options: JsonCompileOptions) -> JsonCompileOptions:
    """Without escapes of code points: the library takes a name that is spelled so for another one than its
    plain spelling. Only control characters have no other way to be written."""
    return options if names_control_characters(schema) else {**options, "json_allowed_escapes": _ESCAPES}


def _with_options(schema: Any, options: JsonCompileOptions) -> Any:
    """A schema that carries its own options, for where none can be given beside it."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return {**schema, "x-guidance": options}


def _unforced(source: str) -> str:
    """The same grammar; where it leaves only one text, the model may write it in whatever tokens.

    Else the library allows the one token that the tokenizer would take: a mask would not be all tokens that
    keep the output possible, and log-probabilities and draws not those of the model under the grammar.
    """
    inner = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    inner[0]["name"] = "inner"
    outer = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @inner'}
    return json.dumps({"grammars": [outer, *inner]})


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


def _reason(matcher: LLMatcher) -> str:
    """The library's message without its state and the grammar."""
    message = str(matcher.get_error()).partition("<state>")[0].strip()
    if message.startswith("NoExtension"):
        return "no output can follow it"
    if unknown := _UNKNOWN_KEYWORD.match(message):
        return f"no library follows the keyword {unknown[1]!r} of a schema; leave it out"
    if message.startswith("oneOf constraints"):
        return OVERLAP
    return message[:300] or str(matcher.stop_reason())
