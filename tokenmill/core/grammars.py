"""The grammars of one engine's requests: compiled while they wait, followed token by token while they run.

Owns the matchers, and what a grammar makes of the ends of text: the ids that end a request are allowed where
its output is complete, and nowhere else.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, cached_property, partial

import numpy as np

from tokenmill.config import EngineConfig
from tokenmill.grammar import Backend, BadGrammar, Compiler, Matcher, Template
from tokenmill.grammar.backends import open_backend
from tokenmill.messages import BoolArray, EngineFacts, Finish, Grammar, IntArray, Request, TokenMasks

Words = tuple[tuple[int, np.int32], ...]

_NO_TOKEN = -1
_FIRST_WORDS = 8
# What matchers that are broken by others' work may take of the loop's time.
_RENEWAL_SECONDS = 2.0
_RENEWAL_SHARE = 0.2
_NO_FURTHER = "the grammar could not be followed any further"


class Guide:
    """One request's place in its grammar: it has seen every token that the host has, also when preempted."""

    def __init__(self, template: Template, request: Request, *, end_ids: tuple[int, ...]) -> None:
        self._template = template
        self.end_ids = end_ids
        # How the request ends now, because its grammar leaves it no token to draw.
        self.finish: Finish | None = None
        self.has_ended = False  # an end was drawn and, with `ignore_eos`, the request goes on
        self.unread = _NO_TOKEN  # the token drawn last, while the matcher has not gone on by it
        # Ends are held back until so many tokens are out. Those that do not end the request, with
        # `ignore_eos`, are not where the grammar has nothing else.
        self.min_new_tokens = request.params.min_new_tokens
        self.goes_on = not request.stop_ids
        self._tokens: list[int] = []

    @property
    def num_accepted(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    @cached_property
    def matcher(self) -> Matcher:
        """Made for the first mask, while the device computes the prompt: before, it would wait for that."""
        return self._template.new()

    def accept(self, token: int) -> Finish | None:
        """Go on by a token drawn under this guide's mask; returns `finish`."""
        self.note(token)
        if self.is_behind():
            _note_read([self], [self.matcher.accept(token)])
        return self.finish

    def note(self, token: int) -> None:
        """As `accept`, but the matcher goes on with the next mask: the host has no time before."""
        self._tokens.append(token)
        self.unread = token

    def is_behind(self) -> bool:
        """Whether the matcher must go on by the noted token, which ends of text are no matter of."""
        if self.unread == _NO_TOKEN:
            return False
        if self.has_ended or (self.unread in self.end_ids and self.matcher.is_accepting):
            self.has_ended = True
            self.unread = _NO_TOKEN
            return False
        return True

    def refuse(self) -> None:
        """Set `finish`: the matcher could not go on by the noted token."""
        self.finish = self._break(f"token {self.unread} was drawn, which it does not allow")

    def look(self) -> None:
        """Set `finish` if computing the mask broke the matcher."""
        if self.finish is None and self.matcher.error:
            self.finish = self._break()

    @property
    def is_broken(self) -> bool:
        """Whether the matcher is, and is still needed."""
        return not self.has_ended and bool(self.matcher.error)

    def renewed(self) -> Matcher | None:
        """Another matcher instead of a broken one, which has gone on by all tokens; None: there is none."""
        while (renewed := self._template.renewed(self.matcher)) is not None:
            self.matcher = renewed
            if all(map(renewed.accept, self._tokens)):
                self.finish = None
                return renewed
        return None

    def _break(self, reason: str = "") -> Finish:
        """The end of a request whose matcher broke, for what the library says or else for this reason."""
        reason = self.matcher.error or reason
        if not self.matcher.is_too_complex:
            return _broken(reason)
        message = f"{_NO_FURTHER}, because it is too complex: {reason}"
        return Finish("abort", message=message, status_code=400, error_type="bad_grammar")

    def get_stuck(self, *, for_ends: bool) -> None:
        """Set `finish`: no token is left; `for_ends`: some were, but they would end the request."""
        if self.finish is None:
            self.finish = self._stuck(self.has_ended or self.matcher.is_accepting, for_ends)

    def _stuck(self, is_complete: bool, for_ends: bool) -> Finish:
        """The end of a request for which no token is left."""
        if not is_complete and for_ends:
            return Finish(
                "abort",
                message=f"after {self.num_accepted} tokens the grammar needs an id of stop_token_ids, and "
                "those end outputs, which are not complete there; leave it out of stop_token_ids",
                status_code=400,
                error_type="bad_parameters",
            )
        if not is_complete:
            return _broken("no token of the vocabulary can follow")
        if self.num_accepted >= self.min_new_tokens:
            return Finish("stop")  # the model has no end of text
        return Finish(
            "abort",
            message=f"min_new_tokens is {self.min_new_tokens}, but the grammar ends the output after "
            f"{self.num_accepted} tokens; lower min_new_tokens",
            status_code=400,
            error_type="bad_parameters",
        )


def _broken(reason: str) -> Finish:
    return Finish("abort", message=f"{_NO_FURTHER}: {reason}", status_code=500, error_type="internal")


class _Rows:
    """The guides of rows that draw together, and what stays the same from step to step until others do."""

    def __init__(self, guided: Sequence[tuple[int, Guide]], backend: Backend) -> None:
        self.guided = guided
        self.slots: IntArray = np.array([slot for slot, _ in guided], dtype=np.int32)
        self.guides = [guide for _, guide in guided]
        self.num_words = backend.num_words
        self.batch = backend.batch([guide.matcher for guide in self.guides])
        # Rows by the ids that end them, those that must not end for a while, and those that have ended.
        of_ends: dict[tuple[int, ...], list[int]] = {}
        for row, guide in enumerate(self.guides):
            of_ends.setdefault(guide.end_ids, []).append(row)
        self.of_ends: Mapping[tuple[int, ...], list[int] | slice] = of_ends
        if len(of_ends) == 1:
            self.of_ends = dict.fromkeys(of_ends, slice(None))
        self.held_back = [row for row, guide in enumerate(self.guides) if guide.min_new_tokens]
        self.ended = [row for row, guide in enumerate(self.guides) if guide.has_ended]
        self._backend = backend
        self._end_ids = frozenset(token for end_ids in of_ends for token in end_ids)

    def go_on(self) -> tuple[list[Guide], list[bool]]:
        """Let the matchers go on by the tokens that were noted; returns whose did, and whether each could."""
        tokens = [guide.unread for guide in self.guides]
        if not (_NO_TOKEN in tokens or self.ended) and self._end_ids.isdisjoint(tokens):
            return self.guides, self.batch.accept(tokens)
        behind = [guide for guide in self.guides if guide.is_behind()]
        self.ended = [row for row, guide in enumerate(self.guides) if guide.has_ended]
        batch = self._backend.batch([guide.matcher for guide in behind])
        return behind, batch.accept([guide.unread for guide in behind])


class _Allowance:
    """Time for what all else waits for: some seconds at once, and in the long run a share of the time."""

    def __init__(self, seconds: float, *, share: float) -> None:
        self._most = self._left = seconds
        self._share = share
        self._counted = time.monotonic()  # until then

    def is_left(self) -> bool:
        """Whether the work may be done."""
        now = time.monotonic()
        self._left = min(self._most, self._left + self._share * (now - self._counted))
        self._counted = now
        return self._left > 0

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """The work takes as long as this."""
        began = time.monotonic()
        yield
        self._left -= time.monotonic() - began


class Grammars:
    """Compiles grammars and fills masks for an engine. For the loop's thread only."""

    def __init__(self, compiler: Compiler, facts: EngineFacts) -> None:
        self._compiler = compiler
        self._num_words = -(-facts.vocab_size // 32)
        self._eos_ids = facts.eos_token_ids
        self._words = cache(_words)
        self._bits: IntArray = np.zeros((0, 0), dtype=np.int32)  # masks of the step at hand
        self._rows: _Rows | None = None  # of the step before, mostly those of the next one
        self._renewals = _Allowance(_RENEWAL_SECONDS, share=_RENEWAL_SHARE)

    def compile(
        self,
        grammar: Grammar,
        requests: Sequence[Request],
        done: Callable[[list[tuple[str, Guide | Finish]]], None],
    ) -> None:
        """Compile a grammar that requests share.

        `done` gets the guide or the end of each, with its id: now, or later in another thread.
        """

        def tell(future: Future[Template]) -> None:
            try:
                template = future.result()
            except BadGrammar as error:
                done([(request.id, _refusal(grammar, error)) for request in requests])
            else:
                template.expect(len(requests))
                done([(request.id, self._guide(template, request)) for request in requests])

        self._compiler.compile(grammar).add_done_callback(tell)

    def _guide(self, template: Template, request: Request) -> Guide | Finish:
        """The guide of a request, behind the tokens that it has; its end if they break the grammar."""
        guide = Guide(template, request, end_ids=request.stop_ids or self._eos_ids)
        failures = map(guide.accept, request.output_ids)
        return next(filter(None, failures), guide)

    def masks(self, guided: Sequence[tuple[int, Guide]]) -> TokenMasks:
        """The tokens that each slot may draw next; valid until the next call.

        The row of a guide with a `finish` then means nothing.
        """
        rows = self._rows
        if rows is None or rows.guided != guided:
            rows = self._rows = _Rows(guided, self._compiler.backend())
        bits = self._room(len(guided), rows.num_words)
        # One right after the other, so that the library's threads do not fall asleep in between.
        behind, allowed = rows.go_on()
        are_complete = rows.batch.fill_masks(bits)
        _note_read(behind, allowed)
        self._forbid_ends(bits)
        guides, without_token = rows.guides, _empty_rows(bits)
        broken = [row for row in without_token if guides[row].is_broken]
        if self._renew(guides, broken, bits, are_complete):
            without_token = _empty_rows(bits)
        for row in without_token:
            guides[row].look()
        self._set_ends(rows, bits, are_complete)
        for row in _empty_rows(bits):
            guides[row].get_stuck(for_ends=row not in without_token)
        # The tokenizer may know more ids than the model.
        return TokenMasks(rows.slots, bits[:, : self._num_words])

    def _forbid_ends(self, bits: IntArray) -> None:
        """Take the model's ends of text out of masks, as which a library may allow them."""
        for word, eos_bits in self._words(self._eos_ids):
            bits[:, word] &= ~eos_bits

    def _renew(self, guides: list[Guide], broken: list[int], bits: IntArray, are_complete: BoolArray) -> bool:
        """Give rows whose matchers are broken others, and their masks what these allow.

        Returns whether some got one. All requests wait meanwhile, so there is a limit to the time for it.
        """
        have_changed = False
        for row in broken:
            if not self._renewals.is_left():
                break
            with self._renewals.spent():
                have_changed |= self._renew_row(guides[row], slice(row, row + 1), bits, are_complete)
        if have_changed:
            self._rows = None  # the matchers of the next step are others
            self._forbid_ends(bits)
        return have_changed

    def _renew_row(self, guide: Guide, row: slice, bits: IntArray, are_complete: BoolArray) -> bool:
        """Whether a guide got another matcher, and its mask is written."""
        while (matcher := guide.renewed()) is not None:
            are_complete[row] = self._compiler.backend().batch([matcher]).fill_masks(bits[row])
            if not matcher.error:
                return True
        return False

    def _room(self, num_rows: int, num_words: int) -> IntArray:
        if self._bits.shape[0] < num_rows or self._bits.shape[1] != num_words:
            self._bits = _own_pages(2 * num_rows, num_words)
        return self._bits[:num_rows]

    def _set_ends(self, rows: _Rows, bits: IntArray, are_complete: BoolArray) -> None:
        """Complete the masks [guides, words]: ends are allowed where an output may end, and nowhere else.

        `are_complete` are the outputs that the grammar lets end; it is used up.

        The device waits for this in every step, so what can be done for all rows at once is.
        """
        if rows.ended:
            bits[rows.ended], are_complete[rows.ended] = 0, True
        for row in rows.held_back:
            guide = rows.guides[row]
            if guide.num_accepted < guide.min_new_tokens and not (guide.goes_on and not bits[row].any()):
                are_complete[row] = False
        for end_ids, of_these in rows.of_ends.items():
            for word, end_bits in self._words(end_ids):
                column = bits[of_these, word]
                bits[of_these, word] = np.where(are_complete[of_these], column | end_bits, column & ~end_bits)

    def forget_failures(self) -> None:
        """See `Compiler.forget_failures`; no row follows a grammar now."""
        self._rows = None
        self._compiler.forget_failures()

    def close(self) -> None:
        """End the compiler's threads."""
        self._compiler.close()


def _note_read(guides: Sequence[Guide], are_allowed: Sequence[bool]) -> None:
    """The matchers of guides went on by the noted tokens, or could not."""
    for guide, is_allowed in zip(guides, are_allowed, strict=True):
        if not is_allowed:
            guide.refuse()
        guide.unread = _NO_TOKEN


def _own_pages(num_rows: int, num_words: int) -> IntArray:
    """Zeros in memory pages that hold nothing else, so that a device can be told of them."""
    return np.frombuffer(mmap.mmap(-1, 4 * num_rows * num_words), dtype=np.int32).reshape(num_rows, num_words)


def _empty_rows(bits: IntArray) -> list[int]:
    """Masks [rows, words] that allow nothing."""
    # Where any text can follow, a byte can, and these are the first tokens of nearly all vocabularies.
    candidates: list[int] = np.flatnonzero(~bits[:, :_FIRST_WORDS].any(axis=1)).tolist()
    return [row for row in candidates if not bits[row].any()]


def _words(token_ids: tuple[int, ...]) -> Words:
    """(word, its bits) for some ids."""
    bits: dict[int, int] = {}
    for token in token_ids:
        bits[token // 32] = bits.get(token // 32, 0) | 1 << token % 32
    return tuple((word, np.int32(value - (value >> 31 << 32))) for word, value in bits.items())


def _refusal(grammar: Grammar, error: BadGrammar) -> Finish:
    return Finish(
        "abort",
        message=f"{grammar.kind} cannot be used: {error}",
        status_code=400,
        error_type="bad_grammar",
    )


def build_grammars(config: EngineConfig, facts: EngineFacts) -> Grammars:
    """The grammars of an engine, with a backend that `check_backend` knows to be there.

    The library reads a large vocabulary in half a second. On a GPU, where a start takes seconds anyway, it
    does so at once; on a CPU with the first grammar.
    """
    compiler = Compiler(partial(open_backend, config, facts.vocab_size))
    if facts.device != "cpu" and not config.skip_tokenizer_init and config.grammar_backend != "none":
        compiler.prepare()
    return Grammars(compiler, facts)
