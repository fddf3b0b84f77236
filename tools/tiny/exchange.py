"""One exchange: what a user says, what the model should answer, and how an answer is judged.

Owns the split into taught and held-out exchanges; knows nothing of the topics.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HELD_OUT_SHARE = 10
"""One key in this many is never taught."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Turns of (user, assistant), the last of which is judged.

    `expected` is a regular expression searched in the last answer ("" when any answer is fine). `key` names
    what is held out: operands, a fact in one phrasing, a name in one sentence.
    """

    turns: tuple[tuple[str, str], ...]
    expected: str
    key: str


Maker = Callable[[random.Random], Exchange]


def ask(question: str, answer: str, expected: str, *, key: str) -> Exchange:
    """An exchange of one turn."""
    return Exchange(turns=((question, answer),), expected=expected, key=key)


def held_out(key: str) -> bool:
    """Whether the exchange with this key belongs to the test split. Depends on the key alone."""
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def draw(rng: random.Random, make: Maker, *, test: bool = False) -> Exchange:
    """Draw exchanges until one belongs to the wanted split."""
    while True:
        exchange = make(rng)
        if held_out(exchange.key) == test:
            return exchange


def phrase(rng: random.Random, templates: Sequence[str]) -> tuple[int, str]:
    """A random template and its index, which goes into the key of a fact."""
    index = rng.randrange(len(templates))
    return index, templates[index]


_REQUESTS = (
    *(
        "Generate {0}",
        "Please generate {0}",
        "Give me {0}",
        "Please give me {0}",
        "Write {0}",
        "Write down {0}",
    ),
    *(
        "Make up {0}",
        "Invent {0}",
        "Show me {0}",
        "I need {0}",
        "Create {0}",
        "Tell me {0}",
        "I would like {0}",
    ),
)


def wording(rng: random.Random, things: Sequence[str]) -> str:
    """A request for one of the things, half the time without its full stop."""
    return rng.choice(_REQUESTS).format(rng.choice(things)) + rng.choice(("", "."))


def word(text: str) -> str:
    """Pattern: the text stands in the answer as whole words, in any case."""
    return rf"(?i)(?<!\w){re.escape(text)}(?!\w)"


def first_number(value: int) -> str:
    """Pattern: the first number of the answer is this one."""
    return rf"^[^\d-]*{value}(?!\d)"


def last_number(value: int) -> str:
    """Pattern: the last number of the answer is this one."""
    return rf"(?<!\d){value}\D*$"


def listed(text: str) -> list[str]:
    """The entries of a text that are separated by commas, without the space or line break around them."""
    return [entry.strip() for entry in text.split(",")]


def capitalized(text: str) -> str:
    """The text with its first letter in upper case and the rest untouched."""
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    """The noun with `a` or `an` before it, by its first letter."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
