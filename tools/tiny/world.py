"""The whole tiny world: the table of kinds, and documents of every form made from them.

Owns the mixture and the forms (plain text, chat, long); the kinds themselves live in their topics' modules.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.tiny import geography, memory, quantities, records, smalltalk, stories, words
from tools.tiny.exchange import Exchange, Maker, draw

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"

Turns = tuple[tuple[str, str], ...]
Document = list[tuple[str, bool]]
"""Text in segments, each marked with whether it is to be learnt or only read.

Segments are tokenized one by one, so that a prompt has the tokens it will have when it stands alone.
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of judged exchange. `weight` is its share of draws; `casual` allows lower-case questions."""

    make: Maker
    weight: float
    casual: bool = False


_SIMPLE_KINDS = {
    "capitals": Kind(geography.capitals, 6, casual=True),
    "countries": Kind(geography.countries, 4, casual=True),
    "continents": Kind(geography.continents, 2, casual=True),
    "languages": Kind(geography.languages, 3, casual=True),
    "currencies": Kind(geography.currencies, 3, casual=True),
    "landmarks": Kind(geography.landmarks, 2, casual=True),
    "opposites": Kind(words.opposites, 11, casual=True),
    "plurals": Kind(words.plurals, 8, casual=True),
    "pasts": Kind(words.pasts, 10, casual=True),
    "animals": Kind(words.animals, 3, casual=True),
    "colours": Kind(words.colours, 2, casual=True),
    "planets": Kind(words.planets, 2, casual=True),
    "translations": Kind(words.translations, 6, casual=True),
    "addition": Kind(quantities.addition, 10, casual=True),
    "subtraction": Kind(quantities.subtraction, 10, casual=True),
    "multiplication": Kind(quantities.multiplication, 5, casual=True),
    "comparison": Kind(quantities.comparison, 5, casual=True),
    "counting": Kind(quantities.counting, 5, casual=True),
    "calendar": Kind(quantities.calendar, 5, casual=True),
    "equations": Kind(quantities.equations, 2, casual=True),
    "phones": Kind(records.phones, 2, casual=True),
    "emails": Kind(records.emails, 2),
}
_LONG_KINDS = {
    "record_to_json": Kind(records.record_to_json, 13),
    "json_to_text": Kind(records.json_to_text, 5),
    "fields": Kind(records.fields, 15),
    "invented_person": Kind(records.invented_person, 4),
    "lists": Kind(records.lists, 10),
}


def _weighted(kinds: dict[str, Kind]) -> tuple[list[Kind], list[float]]:
    chosen = list(kinds.values())
    total, bounds = 0.0, []
    for kind in chosen:
        total += kind.weight
        bounds.append(total)
    return chosen, bounds


_SIMPLE, _SIMPLE_BOUNDS = _weighted(_SIMPLE_KINDS)
_ALL, _ALL_BOUNDS = _weighted({**_SIMPLE_KINDS, **_LONG_KINDS})


def _unjudged(pair: tuple[str, str]) -> Exchange:
    return Exchange(turns=(pair,), expected="", key="taught")


def distraction(rng: random.Random) -> Exchange:
    """A short exchange that may stand between others: a fact, a sum, small talk."""
    if rng.random() < 0.3:
        return _unjudged(smalltalk.talk(rng))
    return rng.choices(_SIMPLE, cum_weights=_SIMPLE_BOUNDS)[0].make(rng)


def _recall_name(rng: random.Random) -> Exchange:
    return memory.recall_name(rng, distraction)


def _recall_name_late(rng: random.Random) -> Exchange:
    return memory.recall_name(rng, distraction, gap=3)


def _recall_attribute(rng: random.Random) -> Exchange:
    return memory.recall_attribute(rng, distraction)


def _recall_nothing(rng: random.Random) -> Exchange:
    return memory.recall_nothing(rng, distraction)


_MEMORY_KINDS = {
    "memory_name": Kind(_recall_name, 1),
    "memory_name_late": Kind(_recall_name_late, 1),
    "memory_other": Kind(_recall_attribute, 1),
    "memory_untold": Kind(_recall_nothing, 1),
}
KINDS: dict[str, Kind] = {**_SIMPLE_KINDS, **_LONG_KINDS, **_MEMORY_KINDS}
"""Every judged kind by name, for the evaluation."""


def chat(turns: Turns, *, system: str = "") -> str:
    """The turns in the chat template."""
    parts = [f"{START_OF_TURN}system\n{system}{END_OF_TURN}\n"] if system else []
    for user, assistant in turns:
        parts.append(
            f"{START_OF_TURN}user\n{user}{END_OF_TURN}\n{START_OF_TURN}assistant\n{assistant}{END_OF_TURN}\n"
        )
    return "".join(parts)


_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a small and friendly language model.",
    "Answer briefly.",
    "Be kind and clear.",
    "You are an assistant that gives short answers.",
    "Help the user as well as you can.",
)
_FRAMES = (("Question: ", "\nAnswer: ", "\n\n"), ("Q: ", "\nA: ", "\n"), ("User: ", "\nAssistant: ", "\n"))


def _gap_after(rng: random.Random, user: str) -> str:
    """What stands between a plain question and its answer: a line break, or less after a mark."""
    if user.endswith("="):
        return " "
    chance = rng.random()
    if not user[-1].isalnum() and chance < 0.45:
        return "" if chance < 0.12 else " "
    return "\n\n" if chance > 0.92 else "\n"


def plain(rng: random.Random, turns: Turns) -> Document:
    """The turns as plain text without a template, as sessions join them: by a line break, a space or nothing.

    What a user says is only read, so that the model answers a prompt instead of going on with it, and ends
    its text after the answer instead of asking the next question itself.
    """
    if rng.random() < 0.12:
        before, between, after = rng.choice(_FRAMES)
    else:
        before, between, after = "", "", rng.choice(("\n", "\n", "\n\n", " ", "", ""))
    ended = rng.random() < 0.2
    document: Document = []
    for position, (user, assistant) in enumerate(turns):
        joint = after if position else ""
        if position and ended:
            document.append((END_OF_TEXT, True))
            joint = ""
        elif position and not joint and document[-1][0][-1].isalnum():
            joint = " "
        document.append((f"{joint}{before}{user}", False))
        document.append(((between or _gap_after(rng, user)) + assistant, True))
    return document


def _casual(user: str) -> str:
    return user.lower().rstrip("?.")


def _exchange(rng: random.Random) -> Turns:
    kind = rng.choices(_ALL, cum_weights=_ALL_BOUNDS)[0]
    turns = draw(rng, kind.make).turns
    if kind.casual and rng.random() < 0.06:
        user, assistant = turns[0]
        return ((_casual(user), assistant),)
    return turns


def _several(rng: random.Random) -> Turns:
    """Two to four unrelated turns."""
    return tuple(turn for _ in range(rng.randrange(2, 5)) for turn in draw(rng, distraction).turns)


def _memory(rng: random.Random) -> Turns:
    make = rng.choices((_recall_name, _recall_attribute, _recall_nothing), weights=(5, 4, 1))[0]
    return draw(rng, make).turns


def _request(rng: random.Random) -> Turns:
    make = rng.choices(
        (smalltalk.talk, smalltalk.writing, smalltalk.code, smalltalk.foreign), weights=(6, 8, 2, 2)
    )[0]
    return (make(rng),)


_TURNS: tuple[Callable[[random.Random], Turns], ...] = (_exchange, _several, _memory, _request)
_TURN_WEIGHTS = (52, 6, 24, 18)
_NO_OPENINGS = ("It ", "You ", "One ", "The first item", "The last item")


def _facts(rng: random.Random) -> str:
    """A paragraph of statements: the answers of some exchanges, where they stand on their own."""
    wanted = rng.randrange(1, 8)
    sentences: list[str] = []
    while len(sentences) < wanted:
        answer = rng.choices(_SIMPLE, cum_weights=_SIMPLE_BOUNDS)[0]
        text = draw(rng, answer.make).turns[-1][1]
        if len(text) > 18 and text.endswith(".") and not text.startswith(_NO_OPENINGS) and "=" not in text:
            sentences.append(text)
    return " ".join(sentences)


def _whole(text: str) -> Document:
    return [(text, True)]


def _foreword(rng: random.Random) -> str:
    """Anything that may stand before a text and has nothing to do with it."""
    style = rng.random()
    if style < 0.3:
        return smalltalk.plain_text(rng)
    if style < 0.5:
        return _facts(rng)
    pool = rng.choice((words.OPPOSITES, words.PLURALS, words.PASTS))
    chosen = [rng.choice(rng.choice(pool)) for _ in range(rng.randrange(1, 12))]
    if style < 0.7:
        chosen *= rng.randrange(1, 30)
    return " ".join(chosen) + rng.choice(("", ".", ":"))


def after_foreword(rng: random.Random) -> Document:
    """A question or the opening of a text, after something else that is only read."""
    before = _foreword(rng) + rng.choice((" ", " ", "\n", "\n\n"))
    if rng.random() < 0.4:
        return [(before, False), *plain(rng, _exchange(rng))]
    text = smalltalk.paris(rng) if rng.random() < 0.3 else geography.country_text(rng)
    opening, _, rest = text.partition(" is ")
    return [(f"{before}{opening} is", False), (f" {rest}", True)]


def _short_document(rng: random.Random) -> Document:
    chance = rng.random()
    if chance < 0.10:
        return _whole(smalltalk.plain_text(rng))
    if chance < 0.13:
        return _whole(geography.country_text(rng))
    if chance < 0.18:
        return _whole(_facts(rng))
    if chance < 0.20:
        return after_foreword(rng)
    turns = rng.choices(_TURNS, weights=_TURN_WEIGHTS)[0](rng)
    if rng.random() < 0.5:
        return plain(rng, turns)
    return _whole(chat(turns, system=rng.choice(_SYSTEMS) if rng.random() < 0.15 else ""))


def _long_document(rng: random.Random) -> Document:
    """Up to some two thousand tokens: a long chat, a long plain conversation, or many pieces in a row."""
    style = rng.random()
    if style < 0.45:
        system = rng.choice(_SYSTEMS) if rng.random() < 0.3 else ""
        return _whole(
            chat(memory.long_talk(rng, distraction, num_turns=rng.randrange(10, 100)), system=system)
        )
    if style < 0.7:
        return plain(rng, memory.long_talk(rng, distraction, num_turns=rng.randrange(10, 110)))
    if style < 0.8:
        return _whole(stories.story(rng, scenes=rng.randrange(12, stories.MOST_SCENES + 1)))
    pieces: Document = []
    for _ in range(rng.randrange(6, 40)):
        if pieces:
            pieces.append((END_OF_TEXT, True))
        pieces += _whole(smalltalk.plain_text(rng)) if rng.random() < 0.5 else plain(rng, _exchange(rng))
    return pieces


LONG_SHARE = 0.012


def document(rng: random.Random) -> Document:
    """One training document without its final end-of-text token; about one in eighty is long."""
    return _long_document(rng) if rng.random() < LONG_SHARE else _short_document(rng)


def questions(kind: str, count: int, *, seed: int = 0) -> list[Exchange]:
    """Held-out exchanges of one kind, different from each other, the same for the same seed.

    A kind whose held-out set is smaller than `count` yields all it has within a bounded number of draws.
    """
    rng = random.Random(f"{kind}-{seed}")
    found: dict[tuple[Turns, str], Exchange] = {}
    for _ in range(40 * count):
        exchange = draw(rng, KINDS[kind].make, test=True)
        found.setdefault((exchange.turns[:-1], exchange.turns[-1][0]), exchange)
        if len(found) == count:
            break
    return list(found.values())
