"""Conversations that refer back: what a user said about themselves, asked again some turns later.

Owns the attributes, their sentences and the small talk; the distracting exchanges are handed in by `world`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from tools.tiny.exchange import Exchange, Maker, article, draw, word
from tools.tiny.people import CITIES, COLOURS, FOODS, HOBBIES, JOBS, PET_NAMES, PETS, first_name


@dataclass(frozen=True, slots=True)
class Attribute:
    """Something a user may tell: how values are drawn, told, acknowledged, asked and answered."""

    name: str
    value: Callable[[random.Random], str]
    statements: tuple[str, ...]
    replies: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


def _pet(rng: random.Random) -> str:
    return f"{rng.choice(PETS)} called {rng.choice(PET_NAMES)}"


ATTRIBUTES = (
    Attribute(
        name="name",
        value=first_name,
        statements=(
            "My name is {0}.",
            "My name is {0}.",
            "Hi, my name is {0}.",
            "Hello, I am {0}.",
            "I'm {0}.",
            "Hello! My name is {0}.",
            "Call me {0}.",
            "I am {0}, nice to meet you.",
            "My friends call me {0}.",
            "Please remember that my name is {0}.",
            "Hi! I'm {0}. How are you?",
            "Hey there, {0} here.",
        ),
        replies=(
            "Nice to meet you, {0}!",
            "Hello, {0}! How can I help you?",
            "Hi {0}, it is good to meet you.",
            "Welcome, {0}. What can I do for you?",
            "Hello {0}!",
            "Nice to meet you, {0}. How can I help you today?",
        ),
        questions=(
            "What is my name?",
            "What is my name?",
            "Do you remember my name?",
            "What's my name?",
            "Who am I?",
            "Can you tell me my name?",
            "Tell me my name.",
            "How am I called?",
            "What did I say my name was?",
            "What was my name again?",
        ),
        answers=(
            "Your name is {0}.",
            "Your name is {0}.",
            "You are {0}.",
            "You told me that your name is {0}.",
        ),
    ),
    Attribute(
        name="colour",
        value=lambda rng: rng.choice(COLOURS),
        statements=(
            "My favourite colour is {0}.",
            "My favorite color is {0}.",
            "I like the colour {0} best.",
            "The colour I love most is {0}.",
            "I love {0}, it is my favourite colour.",
        ),
        replies=(
            "{0} is a beautiful colour.",
            "That is a lovely colour.",
            "I will remember that you like {0}.",
            "Good choice!",
        ),
        questions=(
            "What is my favourite colour?",
            "What is my favorite color?",
            "Which colour do I like best?",
            "Do you remember my favourite colour?",
            "What colour do I love most?",
        ),
        answers=("Your favourite colour is {0}.", "You like {0} best.", "It is {0}."),
    ),
    Attribute(
        name="city",
        value=lambda rng: rng.choice(CITIES),
        statements=(
            "I live in {0}.",
            "My home is in {0}.",
            "I am from {0}.",
            "I moved to {0} last year.",
            "At the moment I live in {0}.",
        ),
        replies=(
            "{0} is a nice place.",
            "How do you like {0}?",
            "I will remember that you live in {0}.",
            "Greetings to {0}!",
        ),
        questions=(
            "Where do I live?",
            "Which city do I live in?",
            "In which city is my home?",
            "Do you remember where I live?",
            "What city am I in?",
        ),
        answers=("You live in {0}.", "You told me that you live in {0}.", "Your home is in {0}."),
    ),
    Attribute(
        name="age",
        value=lambda rng: str(rng.randrange(6, 96)),
        statements=(
            "I am {0} years old.",
            "I'm {0} years old.",
            "My age is {0}.",
            "I turned {0} this year.",
            "I just had my birthday and I am now {0}.",
        ),
        replies=(
            "{0} is a good age.",
            "Thank you for telling me.",
            "I see, you are {0} years old.",
            "All right.",
        ),
        questions=(
            "How old am I?",
            "What is my age?",
            "Do you remember how old I am?",
            "Can you tell me my age?",
            "Tell me how old I am.",
        ),
        answers=("You are {0} years old.", "You told me that you are {0} years old.", "You are {0}."),
    ),
    Attribute(
        name="pet",
        value=_pet,
        statements=(
            "I have a {0}.",
            "At home I have a {0}.",
            "My pet is a {0}.",
            "I share my flat with a {0}.",
            "We have a {0}.",
        ),
        replies=(
            "That sounds lovely.",
            "Pets are wonderful.",
            "A {0}, how nice!",
            "I would like to hear more about your pet.",
        ),
        questions=(
            "What pet do I have?",
            "Which pet do I have?",
            "Do you remember my pet?",
            "What is my pet?",
            "Tell me about my pet.",
        ),
        answers=("You have a {0}.", "Your pet is a {0}.", "You told me that you have a {0}."),
    ),
    Attribute(
        name="job",
        value=lambda rng: article(rng.choice(JOBS)),
        statements=(
            "I am {0}.",
            "I work as {0}.",
            "My job is to be {0}.",
            "For a living I work as {0}.",
            "I have worked as {0} for years.",
        ),
        replies=(
            "That is an interesting job.",
            "It must be exciting to be {0}.",
            "Good to know.",
            "How do you like your work?",
        ),
        questions=(
            "What is my job?",
            "What do I do for a living?",
            "Do you remember my job?",
            "What do I work as?",
            "Tell me what my job is.",
        ),
        answers=("You are {0}.", "You work as {0}.", "You told me that you work as {0}."),
    ),
    Attribute(
        name="food",
        value=lambda rng: rng.choice(FOODS),
        statements=(
            "My favourite food is {0}.",
            "I love to eat {0}.",
            "The food I like best is {0}.",
            "My favorite food is {0}.",
            "I could eat {0} every day.",
        ),
        replies=(
            "{0}, that sounds tasty!",
            "Enjoy your meal!",
            "I will remember that you like {0}.",
            "Delicious!",
        ),
        questions=(
            "What is my favourite food?",
            "What do I like to eat?",
            "Which food do I like best?",
            "What is my favorite food?",
            "Do you remember my favourite food?",
        ),
        answers=("Your favourite food is {0}.", "You like {0}.", "You love to eat {0}."),
    ),
    Attribute(
        name="hobby",
        value=lambda rng: rng.choice(HOBBIES),
        statements=(
            "My hobby is {0}.",
            "In my free time I enjoy {0}.",
            "I like {0} very much.",
            "I spend my weekends with {0}.",
            "What I enjoy most is {0}.",
        ),
        replies=(
            "{0} is a nice hobby.",
            "That sounds like fun.",
            "How long have you enjoyed {0}?",
            "Wonderful!",
        ),
        questions=(
            "What is my hobby?",
            "What do I enjoy in my free time?",
            "Do you remember my hobby?",
            "How do I spend my free time?",
            "What do I like to do?",
        ),
        answers=("Your hobby is {0}.", "You enjoy {0}.", "You told me that you enjoy {0}."),
    ),
)
_UNKNOWN_ANSWERS = (
    "You have not told me your {0} yet.",
    "I do not know your {0}. You have not told me yet.",
)
_UNKNOWN_NAMES = {
    "name": "name",
    "colour": "favourite colour",
    "age": "age",
    "food": "favourite food",
    "hobby": "hobby",
}


def _told(rng: random.Random, attribute: Attribute, value: str) -> tuple[str, str, str]:
    """A statement, the reply to it, and the statement's template."""
    template = rng.choice(attribute.statements)
    reply = rng.choice(attribute.replies).format(value)
    return template.format(value), reply[:1].upper() + reply[1:], template


def _recall(
    rng: random.Random,
    distract: Maker,
    kind: str,
    *,
    attributes: list[Attribute],
    gap: int,
    judged: Attribute,
) -> Exchange:
    turns: list[tuple[str, str]] = []
    wanted, key = "", ""
    for attribute in attributes:
        value = attribute.value(rng)
        statement, reply, template = _told(rng, attribute, value)
        turns.append((statement, reply))
        if attribute is judged:
            wanted, key = value, f"{kind}|{value}|{template}"
    for _ in range(gap):
        turns.extend(draw(rng, distract).turns)
    index = rng.randrange(len(judged.questions))
    turns.append((judged.questions[index], rng.choice(judged.answers).format(wanted)))
    return Exchange(turns=tuple(turns), expected=word(wanted), key=f"{key}|{index}")


def recall_name(rng: random.Random, distract: Maker, *, gap: int | None = None) -> Exchange:
    """The user's name, asked after `gap` other turns; by default at once or after up to three."""
    attributes = [ATTRIBUTES[0]]
    if rng.random() < 0.3:
        attributes.insert(rng.randrange(2), rng.choice(ATTRIBUTES[1:]))
    others = rng.choice((0, 0, 1, 1, 2, 3)) if gap is None else gap
    return _recall(rng, distract, "name", attributes=attributes, gap=others, judged=ATTRIBUTES[0])


def recall_attribute(rng: random.Random, distract: Maker) -> Exchange:
    """Another attribute of the user, told among one to three and asked later."""
    attributes = rng.sample(ATTRIBUTES, rng.randrange(1, 4))
    judged = rng.choice(attributes)
    return _recall(
        rng, distract, "attribute", attributes=attributes, gap=rng.choice((0, 0, 1, 2)), judged=judged
    )


def recall_nothing(rng: random.Random, distract: Maker) -> Exchange:
    """The user asks for something never told: the honest answer is that it is not known."""
    name = rng.choice(tuple(_UNKNOWN_NAMES))
    asked = next(attribute for attribute in ATTRIBUTES if attribute.name == name)
    turns: list[tuple[str, str]] = []
    told = rng.sample([one for one in ATTRIBUTES if one is not asked], rng.randrange(2))
    for attribute in told:
        turns.append(_told(rng, attribute, attribute.value(rng))[:2])
    for _ in range(rng.randrange(2)):
        turns.extend(draw(rng, distract).turns)
    index = rng.randrange(len(asked.questions))
    answer = rng.choice(_UNKNOWN_ANSWERS).format(_UNKNOWN_NAMES[name])
    turns.append((asked.questions[index], answer))
    key = f"nothing|{name}|{index}|{turns[0][0]}"
    return Exchange(turns=tuple(turns), expected=re.escape("not"), key=key)


def long_talk(rng: random.Random, distract: Maker, *, num_turns: int) -> tuple[tuple[str, str], ...]:
    """Turns of a long conversation in which attributes are told, changed never, and asked again and again."""
    turns: list[tuple[str, str]] = []
    told: dict[str, str] = {}
    by_name = {attribute.name: attribute for attribute in ATTRIBUTES}
    untold = rng.sample(ATTRIBUTES, len(ATTRIBUTES))
    while len(turns) < num_turns:
        chance = rng.random()
        if untold and (chance < 0.25 or not told):
            attribute = untold.pop()
            told[attribute.name] = attribute.value(rng)
            turns.append(_told(rng, attribute, told[attribute.name])[:2])
        elif chance < 0.6:
            name = rng.choice(tuple(told))
            attribute = by_name[name]
            turns.append((rng.choice(attribute.questions), rng.choice(attribute.answers).format(told[name])))
        else:
            turns.extend(draw(rng, distract).turns)
    return tuple(turns)
