"""Exchanges about records of people: text to JSON, JSON to text, single fields, phone numbers, addresses.

Owns how a `Person` is written down; the persons come from `people`.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from tools.tiny.exchange import Exchange, article, ask, phrase, word, wording
from tools.tiny.people import (
    COLOURS,
    FIRST_NAMES,
    FOODS,
    Person,
    email_address,
    first_name,
    person,
    phone_number,
)

_FIELDS = ("age", "city", "email", "phone", "job", "hobby")
_SENTENCES = {
    "age": ("{first} is {age} years old.", "{first} is {age}.", "The age of {first} is {age}."),
    "city": ("{first} lives in {city}.", "{first} comes from {city}.", "The home of {first} is {city}."),
    "email": ("The email address of {first} is {email}.", "You can write to {email}.", "Email: {email}."),
    "phone": ("The phone number is {phone}.", "Call {phone}.", "{first} can be reached at {phone}."),
    "job": ("{first} works as {job_a}.", "{first} is {job_a}.", "The job of {first} is {job}."),
    "hobby": ("{first} likes {hobby}.", "{first} enjoys {hobby}.", "The hobby of {first} is {hobby}."),
}
_QUESTIONS = {
    "age": (
        "How old is {first}?",
        "What is the age of {first}?",
        "What is {first}'s age?",
        "Tell me the age of {first}.",
    ),
    "city": (
        "Where does {first} live?",
        "In which city does {first} live?",
        "Which city does {first} live in?",
        "Tell me the city of {first}.",
    ),
    "email": (
        "What is the email address of {first}?",
        "What is {first}'s email?",
        "Which email address does {first} have?",
        "Tell me the email address of {first}.",
    ),
    "phone": (
        "What is the phone number of {first}?",
        "What is {first}'s phone number?",
        "Which phone number does {first} have?",
        "Tell me the phone number of {first}.",
    ),
    "job": (
        "What does {first} do for a living?",
        "What is the job of {first}?",
        "What is {first}'s job?",
        "Tell me the job of {first}.",
    ),
    "hobby": (
        "What does {first} like?",
        "What is the hobby of {first}?",
        "What is {first}'s hobby?",
        "Tell me the hobby of {first}.",
    ),
}
_ANSWERS = {
    "age": "{first} is {age} years old.",
    "city": "{first} lives in {city}.",
    "email": "The email address of {first} is {email}.",
    "phone": "The phone number of {first} is {phone}.",
    "job": "{first} is {job_a}.",
    "hobby": "{first} likes {hobby}.",
}


def _values(someone: Person) -> dict[str, Any]:
    return {
        "name": someone.name,
        "first": someone.first,
        "job_a": article(someone.job),
        **{field: getattr(someone, field) for field in _FIELDS},
    }


def _record(someone: Person, fields: tuple[str, ...]) -> dict[str, Any]:
    return {"name": someone.name, **{field: getattr(someone, field) for field in fields}}


def _some_fields(rng: random.Random, count: int) -> tuple[str, ...]:
    """Fields in their fixed order, so that a record has one right form."""
    chosen = rng.sample(_FIELDS, count)
    return tuple(field for field in _FIELDS if field in chosen)


def describe(rng: random.Random, someone: Person, fields: tuple[str, ...]) -> str:
    """Sentences that tell the fields of a person."""
    values = _values(someone)
    opening = rng.choice(
        (
            "{name} is a person.",
            "This is {name}.",
            "Meet {name}.",
            "My friend is called {name}.",
            "The name is {name}.",
        )
    )
    sentences = [rng.choice(_SENTENCES[field]) for field in fields]
    return " ".join([opening, *sentences]).format(**values)


def _nested(someone: Person, fields: tuple[str, ...]) -> dict[str, Any]:
    """The record with the reachable fields in an inner object."""
    contact = {field: getattr(someone, field) for field in fields if field in ("email", "phone")}
    rest = tuple(field for field in fields if field not in contact)
    return {**_record(someone, rest), "contact": contact}


def record_to_json(rng: random.Random) -> Exchange:
    """Sentences about a person become a JSON object with the fields told, in order."""
    someone = person(rng)
    fields = _some_fields(rng, rng.randrange(2, 5))
    index, template = phrase(
        rng,
        (
            "Write this as JSON: {0}",
            "Convert to JSON: {0}",
            "Turn this text into a JSON object. {0}",
            "{0} Write this as JSON.",
            "Extract the record as JSON.\n{0}",
            "{0}\nGive me the JSON.",
            "Make a JSON record from this: {0}",
            "Return the following as JSON: {0}",
        ),
    )
    nested = rng.random() < 0.15 and ("email" in fields or "phone" in fields)
    record = _nested(someone, fields) if nested else _record(someone, fields)
    question = template.format(describe(rng, someone, fields))
    if nested:
        question += " Put the contact fields into an inner object."
    written = json.dumps(record)
    return ask(question, written, re.escape(written), key=f"record_to_json|{someone.first}|{index}")


def json_to_text(rng: random.Random) -> Exchange:
    """A JSON object becomes sentences."""
    someone = person(rng)
    fields = _some_fields(rng, rng.randrange(1, 4))
    index, template = phrase(
        rng,
        (
            "Write this record as sentences: {0}",
            "Turn this JSON into text: {0}",
            "Describe this person: {0}",
            "{0}\nWrite this as a sentence.",
            "What does this record say? {0}",
            "Read this JSON to me: {0}",
            "Put this into words: {0}",
        ),
    )
    values = _values(someone)
    text = " ".join(
        _ANSWERS[field].format(**{**values, "first": someone.name if not position else someone.first})
        for position, field in enumerate(fields)
    )
    written = json.dumps(_record(someone, fields))
    return ask(template.format(written), text, re.escape(text), key=f"json_to_text|{someone.first}|{index}")


def fields(rng: random.Random) -> Exchange:
    """One field of a person, asked after a text or a JSON object about that person."""
    someone = person(rng)
    chosen = _some_fields(rng, rng.randrange(2, 5))
    asked = rng.choice(chosen)
    written = rng.random() < 0.5
    context = json.dumps(_record(someone, chosen)) if written else describe(rng, someone, chosen)
    question = rng.choice(_QUESTIONS[asked]).format(first=someone.first)
    layout = rng.choice(("{0}\n{1}", "{0} {1}", "{0}\n\n{1}", "Read this: {0}\n{1}"))
    values = _values(someone)
    return ask(
        layout.format(context, question),
        _ANSWERS[asked].format(**values),
        re.escape(str(values[asked])),
        key=f"fields|{someone.first}|{asked}",
    )


def person_json(rng: random.Random, name: str) -> str:
    """A JSON object about an invented person of that first name, as the seeds' schema asks."""
    someone = person(rng, first=name)
    shape = rng.random()
    first = someone.name if rng.random() < 0.8 else someone.first
    if shape < 0.6:
        record: dict[str, Any] = {"name": first, "age": someone.age, "email": someone.email}
    elif shape < 0.8:
        record = {"name": first, "age": someone.age, "city": someone.city}
    else:
        record = {
            "name": first,
            "age": someone.age,
            "email": someone.email,
            "phone": someone.phone,
            "city": someone.city,
        }
    return json.dumps(record, indent=2 if rng.random() < 0.15 else None)


def invented_person(rng: random.Random) -> Exchange:
    """A request for information about an invented person, answered as JSON or in sentences."""
    name = "John" if rng.random() < 0.3 else rng.choice(FIRST_NAMES)
    wants_json = rng.random() < 0.5
    questions = (
        (
            "Generate information about a person named {0} as JSON.",
            "Generate a JSON record for a person named {0}.",
            "Give me a JSON object about {0}.",
        )
        if wants_json
        else (
            "Generate information about a person named {0}",
            "Generate information about a person named {0}.",
            "Tell me about a person called {0}.",
            "Invent a person named {0}.",
            "Describe a person named {0}.",
        )
    )
    index, question = phrase(rng, questions)
    if wants_json or rng.random() < 0.4:
        answer = person_json(rng, name)
    else:
        someone = person(rng, first=name)
        chosen = _some_fields(rng, rng.randrange(3, 6))
        answer = (
            " ".join(_ANSWERS[field] for field in chosen)
            .replace("{first}", "{name}", 1)
            .format(**_values(someone))
        )
    return ask(question.format(name), answer, word(name), key=f"invented_person|{name}|{wants_json}|{index}")


def phones(rng: random.Random) -> Exchange:
    """A request for a phone number in a held-out wording; the form of the answer is judged."""
    request = wording(
        rng,
        (
            *("a phone number", "one phone number", "an example phone number", "a made-up phone number"),
            *("an example of a phone number", "a phone number for a form", "some phone number"),
        ),
    )
    return ask(request, phone_number(rng), r"^\d{3}-\d{3}-\d{4}$", key=f"phones|{request.rstrip('.')}")


def emails(rng: random.Random) -> Exchange:
    """A request for an e-mail address for a named person; name and form are judged."""
    first, last = first_name(rng), person(rng).last
    index, question = phrase(
        rng,
        (
            "Generate an email address for {0}.",
            "Write an email address for {0}.",
            "Make up an email address for {0}.",
            "Give me an e-mail address for {0}.",
            "What could be the email address of {0}?",
            "Invent an email for {0}.",
        ),
    )
    answer = email_address(rng, first, last)
    expected = rf"(?i)^{first[0]}\S*@\S+\.\w+$"
    return ask(question.format(f"{first} {last}"), answer, expected, key=f"emails|{first}|{index}")


_FIRST_QUESTIONS = (
    "What is the first item in this list: {0}?",
    "Here is a list: {0}. What comes first?",
    "What comes first in this list: {0}?",
    "Tell me the first item of this list: {0}",
    "{0}. What is the first item?",
)
_LAST_QUESTIONS = (
    "What is the last item in this list: {0}?",
    "Here is a list: {0}. What comes last?",
    "What comes last in this list: {0}?",
    "Tell me the last item of this list: {0}",
    "{0}. What is the last item?",
)
_REPEAT_QUESTIONS = (
    "Repeat this list: {0}",
    "Say this again: {0}",
    "Repeat this: {0}",
    "Write this list again: {0}",
    "Write this list as a JSON array: {0}",
    "Turn this list into a JSON array: {0}",
)


def lists(rng: random.Random) -> Exchange:
    """Short lists, asked for their first or last item, or to be said or written again."""
    items = rng.sample(rng.choice((COLOURS, FOODS, FIRST_NAMES)), rng.randrange(3, 6))
    joined = ", ".join(items)
    style = rng.choice(("first", "last", "repeat"))
    key = f"lists|{style}|{items[0]}|{items[-1]}"
    if style == "repeat":
        question = rng.choice(_REPEAT_QUESTIONS)
        answer = json.dumps(items) if "JSON" in question else joined
        return ask(question.format(joined), answer, re.escape(answer), key=key)
    question = rng.choice(_FIRST_QUESTIONS if style == "first" else _LAST_QUESTIONS)
    item = items[0] if style == "first" else items[-1]
    return ask(question.format(joined), f"The {style} item is {item}.", word(item), key=key)
