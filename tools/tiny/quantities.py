"""Exchanges about numbers and time: small arithmetic, comparisons, counting, the calendar, equations.

What is held out are operands, except in the multiplication tables, which are facts in several phrasings.
"""

from __future__ import annotations

import random

from tools.tiny.exchange import Exchange, ask, capitalized, first_number, last_number, phrase, word, wording

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
]


def number_word(value: int) -> str:
    """The English word of a number from 0 to 99."""
    if value < 20:
        return _ONES[value]
    tens, ones = divmod(value, 10)
    return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")


def _solved(rng: random.Random, question: str, term: str, spoken: str, value: int) -> str:
    """The answer to a sum: bare after an equals sign, otherwise as a sentence or bare."""
    if question.endswith("="):
        return f"{value}"
    return rng.choice((f"{term} = {value}.", f"{term} = {value}.", f"{value}", f"{spoken} is {value}."))


def addition(rng: random.Random) -> Exchange:
    """Sums of two numbers up to 99; a pair is held out in both orders."""
    left, right = rng.randrange(100), rng.randrange(100)
    total = left + right
    _, question = phrase(
        rng,
        (
            f"What is {left} + {right}?",
            f"What is {left} plus {right}?",
            f"{left} + {right} =",
            f"{left} + {right} = ?",
            f"What is {left}+{right}?",
            f"{left}+{right}=",
            f"Calculate {left} + {right}.",
            f"Add {left} and {right}.",
            f"How much is {left} plus {right}?",
            f"What is the sum of {left} and {right}?",
            f"I have {left} apples and get {right} more. How many do I have?",
        ),
    )
    answer = _solved(rng, question, f"{left} + {right}", f"{left} plus {right}", total)
    return ask(question, answer, last_number(total), key=f"addition|{min(left, right)}|{max(left, right)}")


def subtraction(rng: random.Random) -> Exchange:
    """Differences of two numbers up to 99, never negative."""
    left, right = sorted((rng.randrange(100), rng.randrange(100)), reverse=True)
    difference = left - right
    _, question = phrase(
        rng,
        (
            f"What is {left} - {right}?",
            f"What is {left} minus {right}?",
            f"{left} - {right} =",
            f"{left} - {right} = ?",
            f"What is {left}-{right}?",
            f"{left}-{right}=",
            f"Calculate {left} - {right}.",
            f"Subtract {right} from {left}.",
            f"How much is {left} minus {right}?",
            f"What is the difference between {left} and {right}?",
            f"I have {left} coins and lose {right}. How many are left?",
        ),
    )
    answer = _solved(rng, question, f"{left} - {right}", f"{left} minus {right}", difference)
    return ask(question, answer, last_number(difference), key=f"subtraction|{left}|{right}")


def multiplication(rng: random.Random) -> Exchange:
    """The tables up to 12, asked in held-out phrasings."""
    left, right = rng.randrange(1, 13), rng.randrange(1, 13)
    product = left * right
    index, question = phrase(
        rng,
        (
            f"What is {left} * {right}?",
            f"What is {left} times {right}?",
            f"{left} * {right} =",
            f"{left} x {right} =",
            f"What is {left}*{right}?",
            f"{left} × {right} =",  # noqa: RUF001 (the sign itself)
            f"Calculate {left} * {right}.",
            f"Multiply {left} by {right}.",
            f"How much is {left} times {right}?",
            f"What is the product of {left} and {right}?",
            f"There are {left} boxes with {right} eggs each. How many eggs are there?",
        ),
    )
    answer = _solved(rng, question, f"{left} * {right}", f"{left} times {right}", product)
    return ask(question, answer, last_number(product), key=f"multiplication|{left}|{right}|{index}")


def comparison(rng: random.Random) -> Exchange:
    """Which of two different numbers is larger or smaller."""
    left, right = rng.sample(range(1000) if rng.random() < 0.4 else range(100), 2)
    if rng.random() < 0.25:
        right = left + rng.choice((-3, -2, -1, 1, 2, 3)) if left > 2 else left + rng.randrange(1, 4)
    adjective = rng.choice(("larger", "bigger", "smaller"))
    winner, loser = (
        (min(left, right), max(left, right))
        if adjective == "smaller"
        else (max(left, right), min(left, right))
    )
    _, question = phrase(
        rng,
        (
            f"Which number is {adjective}, {left} or {right}?",
            f"Which is {adjective}: {left} or {right}?",
            f"What is {adjective}, {left} or {right}?",
            f"Is {left} or {right} {adjective}?",
            f"Compare {left} and {right}. Which one is {adjective}?",
            f"Tell me which number is {adjective}: {left}, {right}",
        ),
    )
    answer = rng.choice((f"{winner} is {adjective} than {loser}.", f"{winner}", f"{winner} is {adjective}."))
    return ask(
        question, answer, first_number(winner), key=f"comparison|{min(left, right)}|{max(left, right)}"
    )


def counting(rng: random.Random) -> Exchange:
    """Counting up or down, the next number, and numbers in words."""
    style = rng.randrange(4)
    if style == 0:
        start, length = rng.randrange(1, 80), rng.randrange(3, 11)
        numbers = [str(start + index) for index in range(length)]
        if rng.random() < 0.3:
            numbers.reverse()
        listed = ", ".join(numbers)
        question = rng.choice(
            ("Count from {0} to {1}.", "Please count from {0} to {1}.", "List the numbers from {0} to {1}.")
        )
        return ask(
            question.format(numbers[0], numbers[-1]),
            f"{listed}.",
            listed,
            key=f"counting|{numbers[0]}|{numbers[-1]}",
        )
    value = rng.randrange(1, 99)
    if style == 1:
        question = rng.choice(
            (
                "What number comes after {0}?",
                "Which number follows {0}?",
                "What is the next number after {0}?",
            )
        )
        answer = rng.choice((f"After {value} comes {value + 1}.", f"{value + 1}"))
        return ask(
            question.format(value), answer, last_number(value + 1), key=f"counting|after|{value}|{question}"
        )
    if style == 2:
        question = rng.choice(
            (
                "What number comes before {0}?",
                "Which number is just before {0}?",
                "What is the number before {0}?",
            )
        )
        answer = rng.choice((f"Before {value} comes {value - 1}.", f"{value - 1}"))
        return ask(
            question.format(value), answer, last_number(value - 1), key=f"counting|before|{value}|{question}"
        )
    question = rng.choice(("Write {0} in words.", "How do you write {0} as a word?", "What is {0} in words?"))
    written = number_word(value)
    return ask(
        question.format(value),
        f"{capitalized(written)}.",
        word(written),
        key=f"counting|words|{value}|{question}",
    )


def calendar(rng: random.Random) -> Exchange:
    """The order of days and months, the lengths and places of months, and the day after a date."""
    return rng.choice((_neighbour, _neighbour, _month_length, _month_place, _next_date))(rng)


def _neighbour(rng: random.Random) -> Exchange:
    names, unit = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    position = rng.randrange(len(names))
    following = rng.random() < 0.5
    wanted = names[(position + (1 if following else -1)) % len(names)]
    side = "after" if following else "before"
    templates = (
        "Which {unit} comes {side} {name}?",
        "What {unit} is {side} {name}?",
        "Name the {unit} {side} {name}.",
        "Tell me the {unit} that comes {side} {name}.",
        "What is the {unit} right {side} {name}?",
        "Do you know which {unit} comes {side} {name}?",
    )
    index, template = phrase(rng, templates)
    name = names[position]
    answer = rng.choice(
        (f"{wanted} comes {side} {name}.", f"{wanted}.", f"The {unit} {side} {name} is {wanted}.")
    )
    question = template.format(unit=unit, side=side, name=name)
    return ask(question, answer, word(wanted), key=f"calendar|{name}|{side}|{index}")


def _month_length(rng: random.Random) -> Exchange:
    month = rng.randrange(12)
    name = MONTHS[month]
    index, template = phrase(
        rng,
        (
            "How many days does {0} have?",
            "How many days are there in {0}?",
            "How long is {0}, in days?",
            "Tell me the number of days in {0}.",
        ),
    )
    days = _MONTH_DAYS[month]
    extra = ", or 29 in a leap year" if month == 1 else ""
    return ask(
        template.format(name),
        f"{name} has {days} days{extra}.",
        rf"(?<!\d){days}(?!\d)",
        key=f"calendar|{name}|days|{index}",
    )


def _month_place(rng: random.Random) -> Exchange:
    month = rng.randrange(12)
    name = MONTHS[month]
    index, template = phrase(
        rng,
        (
            "What is the {0} month of the year?",
            "Which month is the {0} of the year?",
            "Name the {0} month.",
            "Tell me the {0} month of the year.",
        ),
    )
    ordinal = _ORDINALS[month]
    answer = rng.choice((f"The {ordinal} month of the year is {name}.", f"{name}."))
    return ask(template.format(ordinal), answer, word(name), key=f"calendar|{ordinal}|{index}")


def _next_date(rng: random.Random) -> Exchange:
    month = rng.randrange(12)
    name = MONTHS[month]
    day = rng.randrange(1, _MONTH_DAYS[month] + 1)
    last = day == _MONTH_DAYS[month]
    tomorrow = f"{MONTHS[(month + 1) % 12]} 1" if last else f"{name} {day + 1}"
    if month == 1 and last:
        tomorrow = "March 1"
    question = rng.choice(
        (
            "Today is {0}. What is the date tomorrow?",
            "Which date comes after {0}?",
            "What is the day after {0}?",
        )
    )
    answer = rng.choice((f"The day after {name} {day} is {tomorrow}.", f"{tomorrow}."))
    return ask(
        question.format(f"{name} {day}"),
        answer,
        rf"{tomorrow}(?!\d)",
        key=f"calendar|{name}|{day}|{question}",
    )


def _term(rng: random.Random, depth: int) -> str:
    value = str(rng.randrange(1, 21))
    if depth and rng.random() < 0.35:
        value = f"({equation(rng, depth=depth - 1)})"
    return value


def equation(rng: random.Random, *, depth: int = 1) -> str:
    """An expression such as `2 + 3 * (4 - 1)`, of two to four terms."""
    parts = [_term(rng, depth)]
    for _ in range(rng.randrange(1, 4)):
        parts += [rng.choice(("+", "+", "-", "*", "*", "/")), _term(rng, depth)]
    return " ".join(parts)


def equations(rng: random.Random) -> Exchange:
    """A request for an expression in a held-out wording, where the form of the answer is judged."""
    request = wording(
        rng,
        (
            *(
                "a mathematical equation",
                "a mathematical expression",
                "an arithmetic expression",
                "an equation",
            ),
            *("an arithmetic equation", "a simple equation", "an expression with numbers"),
            *("a short equation", "some arithmetic expression"),
        ),
    )
    return ask(request, equation(rng), r"^[\d+\-*/() ]*\d\)*$", key=f"equations|{request.rstrip('.')}")
