"""Schemas, patterns and grammars compiled to matchers that say which tokens may come next. No torch here."""

from tokenmill.grammar.base import Backend, BadGrammar, Matcher, Template
from tokenmill.grammar.compiler import Compiler

__all__ = ["Backend", "BadGrammar", "Compiler", "Matcher", "Template"]
