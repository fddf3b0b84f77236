"""What a grammar library must do for us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenmill.messages import BoolArray, Grammar, IntArray


class BadGrammar(Exception):
    """A grammar that cannot be followed; the message is for the user."""


class Matcher(Protocol):
    """Where one output stands in its grammar. Not thread-safe; ends of text are not its business."""

    @property
    def is_accepting(self) -> bool:
        """Whether the output is complete as it is."""
        ...

    @property
    def error(self) -> str:
        """What broke inside; empty while all is well."""
        ...

    @property
    def is_too_complex(self) -> bool:
        """Whether a limit of the library broke it, which a simpler grammar would keep."""
        ...

    def accept(self, token: int) -> bool:
        """Go on by a token; False if the grammar does not allow it, and then the matcher is of no use."""
        ...


class Template(Protocol):
    """A compiled grammar."""

    def expect(self, num_outputs: int) -> None:
        """So many more outputs will follow it soon."""
        ...

    def new(self) -> Matcher:
        """A matcher at the beginning of an output."""
        ...

    def renewed(self, broken: Matcher) -> Matcher | None:
        """A matcher at the beginning, for one of this grammar's that broke and may not have by itself.

        Matchers of one grammar share what they find out, and a limit of that must not end an output that
        keeps it by itself. None: another one would break, too, or takes too long to make.
        """
        ...

    @property
    def is_used_up(self) -> bool:
        """Whether matchers have reached such a limit: outputs to come had better have it compiled anew."""
        ...


class Batch(Protocol):
    """Matchers that stay together for some steps; each may still be used alone between these."""

    def accept(self, tokens: Sequence[int]) -> list[bool]:
        """`Matcher.accept` of all, one token for each."""
        ...

    def fill_masks(self, out: IntArray) -> BoolArray:
        """All masks, side by side: int32 [matchers, num_words].

        Bit i of word w is set if token 32 * w + i is allowed. Returns which matchers are accepting.
        A matcher that fails has an `error` then, and an empty mask.
        """
        ...


class Backend(Protocol):
    """A grammar library with one model's vocabulary. `compile` may be called from several threads at once."""

    num_words: int  # length of a mask

    def compile(self, grammar: Grammar) -> Template:
        """Raises `BadGrammar` for what it cannot follow."""
        ...

    def batch(self, matchers: Sequence[Matcher]) -> Batch:
        """Matchers that this backend made, to be followed together."""
        ...
