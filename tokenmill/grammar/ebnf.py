"""Grammars and patterns in the part of GBNF that xgrammar knows and follows as it is meant.

Patterns are written this way, too: the library takes far longer over its own reading of a regular expression.
"""

from __future__ import annotations

from tokenmill.grammar.base import BadGrammar
from tokenmill.grammar.characters import Ranges, wide_class
from tokenmill.grammar.counts import with_small_counts
from tokenmill.grammar.expressions import Expression, Reference, RuleWriter, no_deeper_than_python
from tokenmill.grammar.gbnf import read_rules
from tokenmill.grammar.patterns import check_length, read_pattern
from tokenmill.grammar.recursion import find_cycle

_ONE_BYTE = 0x100
_MOST_NAMED = 6


def ebnf_of(text: str) -> str:
    """A grammar in GBNF, rewritten. Raises `BadGrammar` with the line of a mistake, and for endless readings:
    of such a grammar the library loses tokens, or it ends the process."""
    rules = read_rules(text)
    with no_deeper_than_python():
        cycle = find_cycle(rules)
    if cycle:
        raise BadGrammar(
            f"rule {cycle[0]!r} can stand for itself with nothing beside it"
            + (f" (by {', '.join(map(repr, cycle[1:_MOST_NAMED]))})" if len(cycle) > 1 else "")
            + ", which xgrammar cannot follow; rewrite it, or use grammar_backend='llguidance'"
        )
    return _written(rules)


def ebnf_of_pattern(pattern: str) -> str:
    """A regular expression. Raises `BadGrammar` for what has no such form, or `re.error`."""
    with no_deeper_than_python():
        return _written({"root": read_pattern(pattern)})


def _written(rules: dict[str, Expression]) -> str:
    classes = _Classes()
    groups: dict[str, Expression] = {}

    def group(repeated: Expression) -> Expression:
        name = f"group {len(groups)}"  # which no rule of a text is called
        groups[name] = repeated
        return Reference(name)

    with no_deeper_than_python():
        # What is repeated by a rule of its own is compiled once for all repetitions.
        rules = {name: with_small_counts(rule, group) for name, rule in rules.items()} | groups
        names = {name: f"rule_{index}" for index, name in enumerate(rules)}
        writer = RuleWriter(names, classes.alone, repeated=classes.write, has_literals=True)
        lines = [f"{names[name]} ::= {writer.write(rule)}" for name, rule in rules.items()]
    # Where rules refer to `root` itself, the library loses tokens that may follow it there.
    return "\n".join([f"root ::= {names['root']}", *lines, *classes.rules])


class _Classes:
    """Writes classes, with a rule of its own for each that the library would misread.

    To know which tokens may end a rule it looks at what follows the rule, and there it (0.2.8) lets any
    others in, or leaves some out, for a class with code points of more than a byte (as if it kept their last
    one only), unless a rule stands in between. With one rule for all places of a class it would know nothing
    of what follows them, and masks take long.
    """

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._length = 0

    def alone(self, ranges: Ranges) -> str:
        """A class, or the name of its rule."""
        is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
        if is_one or not ranges or ranges[-1][1] < _ONE_BYTE:
            return self.write(ranges)
        name = f"class_{len(self.rules)}"
        self.rules.append(f"{name} ::= {self.write(ranges)}")
        return name

    def write(self, ranges: Ranges) -> str:
        """The class itself."""
        text = wide_class(ranges)
        self._length += len(text)
        check_length(self._length)
        return text
