"""What a grammar library must do for us, and the table of those that do; each has a file beside this one."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Protocol

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument
from tokenmill.messages import Grammar, IntArray

# Name of `grammar_backend` -> its class; imported when the first grammar comes.
BACKENDS = {
    "llguidance": "tokenmill.grammar.llguidance_backend:LlguidanceBackend",
    "xgrammar": "tokenmill.grammar.xgrammar_backend:XgrammarBackend",
}


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

    def fill_mask(self, out: IntArray) -> None:
        """Write the allowed tokens: bit i of `out[w]` is token 32 * w + i. `out` is int32 [words]."""
        ...

    def accept(self, token: int) -> bool:
        """Go on by a token; False if the grammar does not allow it, and then the matcher is of no use."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens accepted."""
        ...


class Template(Protocol):
    """A compiled grammar."""

    def new(self) -> Matcher:
        """A matcher at the beginning of an output."""
        ...


class Backend(Protocol):
    """A grammar library with one model's vocabulary. `compile` may be called from several threads at once."""

    num_words: int  # length of a mask

    def compile(self, grammar: Grammar) -> Template:
        """Raises `BadGrammar` for what it cannot follow."""
        ...

    def fill_masks(self, matchers: Sequence[Matcher], out: IntArray) -> None:
        """The masks of matchers that this backend made, side by side: int32 [matchers, num_words].

        A matcher that fails has an `error` then, and a row that means nothing.
        """
        ...


def check_backend(config: EngineConfig) -> None:
    """Raise `InvalidArgument` if the backend of the configuration cannot work as configured."""
    if config.grammar_backend != "xgrammar":
        return
    if importlib.util.find_spec("xgrammar") is None:
        raise InvalidArgument(
            "grammar_backend='xgrammar' needs the package xgrammar; install it with "
            "`pip install 'tokenmill[xgrammar]'`, or use grammar_backend='llguidance'"
        )
    if config.constrained_json_whitespace_pattern is not None:
        raise InvalidArgument(
            "constrained_json_whitespace_pattern works with grammar_backend='llguidance' only; "
            "xgrammar has constrained_json_disable_any_whitespace"
        )


def open_backend(config: EngineConfig, vocab_size: int) -> Backend:
    """The backend of the configuration over the model's tokenizer; loads both, which takes a second.

    Raises `BadGrammar` if there is no tokenizer that the library can work with.
    """
    from tokenmill.grammar.vocabulary import load_tokenizer

    module, _, name = BACKENDS[config.grammar_backend].partition(":")
    make = getattr(importlib.import_module(module), name)
    backend: Backend = make(load_tokenizer(config), vocab_size, config)
    return backend
