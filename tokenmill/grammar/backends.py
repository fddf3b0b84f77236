"""The table of grammar libraries; each has a file beside this one, imported when the first grammar comes."""

from __future__ import annotations

import importlib
import importlib.util

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument
from tokenmill.grammar.base import Backend

# Name of `grammar_backend` -> its class.
BACKENDS = {
    "llguidance": "tokenmill.grammar.llguidance_backend:LlguidanceBackend",
    "xgrammar": "tokenmill.grammar.xgrammar_backend:XgrammarBackend",
}


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
    module, _, name = BACKENDS[config.grammar_backend].partition(":")
    make = getattr(importlib.import_module(module), name)
    backend: Backend = make(config, vocab_size)
    return backend
