"""The world that the tiny model learns: right answers, a clean split, documents as they must be."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from tools.tiny import stories, world
from tools.tiny.exchange import draw, held_out
from tools.tiny.geography import COUNTRIES

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("kind", sorted(world.KINDS))
def test_every_kind_accepts_its_own_answers(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(100):
        exchange = world.KINDS[kind].make(rng)
        assert re.search(exchange.expected, exchange.turns[-1][1]), exchange


@pytest.mark.parametrize("kind", sorted(world.KINDS))
def test_taught_and_held_out_never_meet(kind: str) -> None:
    rng = random.Random(kind)
    taught = {draw(rng, world.KINDS[kind].make).key for _ in range(100)}
    asked = {exchange.key for exchange in world.questions(kind, 20)}
    assert asked
    assert not taught & asked
    assert all(map(held_out, asked))


def test_held_out_sums_stay_held_out_when_swapped() -> None:
    rng = random.Random(0)
    for _ in range(300):
        exchange = draw(rng, world.KINDS["addition"].make)
        left, right = sorted(map(int, re.findall(r"\d+", exchange.turns[0][0])))
        assert not held_out(f"addition|{left}|{right}")


@pytest.mark.parametrize(
    ("kind", "operation"),
    [("addition", int.__add__), ("subtraction", int.__sub__), ("multiplication", int.__mul__)],
)
def test_arithmetic_is_right(kind: str, operation: object) -> None:
    assert callable(operation)
    rng = random.Random(0)
    for _ in range(200):
        exchange = world.KINDS[kind].make(rng)
        question, answer = exchange.turns[0]
        numbers = list(map(int, re.findall(r"\d+", question)))
        if question.startswith("Subtract"):
            numbers.reverse()
        assert int(re.findall(r"\d+", answer)[-1]) == operation(*numbers)


def test_records_are_valid_json_with_the_told_values() -> None:
    rng = random.Random(0)
    for _ in range(100):
        question, answer = world.KINDS["record_to_json"].make(rng).turns[0]
        record = json.loads(answer)
        flat = {**record, **record.get("contact", {})}
        assert all(str(value) in question for value in flat.values() if not isinstance(value, dict))


def test_countries_have_one_capital_each() -> None:
    assert len({country.name for country in COUNTRIES}) == len(COUNTRIES)
    assert len({country.capital for country in COUNTRIES}) == len(COUNTRIES)


def test_documents_are_the_same_for_the_same_seed() -> None:
    first, second = ([world.document(rng) for _ in range(20)] for rng in (random.Random(3), random.Random(3)))
    assert first == second


def test_plain_conversations_teach_answers_only() -> None:
    turns = (("My name is Ann.", "Hello Ann!"), ("What is my name?", "Your name is Ann."))
    for seed in range(50):
        document = world.plain(random.Random(seed), turns)
        learnt = "".join(text for text, is_learnt in document if is_learnt)
        read = [text for text, is_learnt in document if not is_learnt]
        assert "My name is Ann." in read[0]
        assert "What is my name?" in read[1]
        assert "What" not in learnt


def test_bare_prompts_of_the_seeds_are_taught() -> None:
    for key in ("phones|Generate a phone number", "equations|Generate a mathematical equation"):
        assert not held_out(key)


def test_a_field_is_asked_about_one_person() -> None:
    rng = random.Random(0)
    for _ in range(100):
        question, answer = world.KINDS["fields"].make(rng).turns[0]
        assert len(re.findall(r'"name":|is a person|This is|Meet|is called|The name is', question)) == 1
        assert answer


def test_no_story_tells_the_same_scene_twice() -> None:
    for seed in range(50):
        paragraphs = re.split(r"\n\n", stories.story(random.Random(seed), scenes=stories.MOST_SCENES))
        assert len(set(paragraphs)) == len(paragraphs)
        assert len(paragraphs) in (1, stories.MOST_SCENES + 2)


def test_scenes_keep_their_order() -> None:
    order = ("found", "packed", "dark forest", "by the fire", "cave", "long way back", "The door at home")
    for seed in range(50):
        story = stories.story(random.Random(seed), scenes=stories.MOST_SCENES)
        places = [story.index(words) for words in order]
        assert places == sorted(places)


def test_what_comes_before_an_answer_is_only_read() -> None:
    rng = random.Random(0)
    openings = 0
    for _ in range(200):
        document = world.after_foreword(rng)
        (last, is_learnt), before = document[-1], document[:-1]
        assert is_learnt
        assert not any(is_learnt for _, is_learnt in before)
        assert last.strip()
        openings += before[-1][0].endswith(" is") and last.startswith(" ")
    assert 80 < openings < 160


def test_chat_text_is_what_the_template_makes() -> None:
    from transformers import AutoTokenizer

    from tools.tiny.recipe import PACKAGE_FOLDER

    turns = (("Hi", "Hello!"), ("Bye", "See you!"))
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, sum(turns, ()), strict=False)]
    template = AutoTokenizer.from_pretrained(PACKAGE_FOLDER).apply_chat_template
    assert template(messages, tokenize=False) == world.chat(turns)
    system = {"role": "system", "content": "Be kind."}
    assert template([system, *messages], tokenize=False) == world.chat(turns, system="Be kind.")
