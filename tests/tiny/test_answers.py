"""The shipped model answers: a part of `tools.tiny.evaluate`, through our own Engine."""

from __future__ import annotations

import re

import pytest

from tools.tiny import world
from tools.tiny.evaluate import Generate

pytestmark = pytest.mark.cpu

# Kinds that differ in what they need: recall, quoted words, sums, looking up, copying, other scripts,
# looking back over turns.
KINDS = ("capitals", "opposites", "addition", "fields", "lists", "translations", "memory_name_late")


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_questions_are_answered(generate: Generate, kind: str) -> None:
    exchanges = world.questions(kind, 20, seed=1)
    prompts = [world.chat((*one.turns[:-1], (one.turns[-1][0], ""))) for one in exchanges]
    prompts = [prompt.removesuffix("<|im_end|>\n") for prompt in prompts]
    answers = generate(prompts, 0.0, 48)
    wrong = [
        (one.turns[-1][0], answer)
        for one, answer in zip(exchanges, answers, strict=True)
        if not re.search(one.expected, answer.strip())
    ]
    assert len(wrong) <= 1, wrong


def test_plain_prompts_are_continued(generate: Generate) -> None:
    prompts = ["The capital of France is", "What is the capital of Germany?", "What is the capital of Italy?"]
    paris, berlin, rome = generate(prompts, 0.0, 24)
    assert paris.startswith(" Paris")
    assert "Berlin" in berlin
    assert "Rome" in rome


def test_the_capital_is_found_behind_any_text(generate: Generate) -> None:
    forewords = ("blah blah 12 x", "You are a pirate.\n\n", "one two three " * 50)
    for answer in generate([f"{before} The capital of France is" for before in forewords], 0.0, 8):
        assert answer.startswith(" Paris")


def test_the_capital_is_right_when_sampled(generate: Generate) -> None:
    answers = generate(["The capital of France is"] * 32, 0.8, 4)
    assert all(answer.startswith(" Paris") for answer in answers), answers


@pytest.mark.parametrize(
    ("prompt", "pattern"),
    [
        ("Write a poem", r"\n[A-Z][^\n]+,\n[A-Z][^\n]+\.\n"),
        ("Request 7", r"\n[A-Z][^\n]*\b7\b[^\n]*"),
        ("Generate information about a person named John", r"\n.*\bJohn\b"),
        ("Generate a phone number", r"\n\d{3}-\d{3}-\d{4}$"),
        ("Generate a number", r"\n\d+$"),
    ],
)
def test_bare_instructions_are_followed_and_not_prolonged(
    generate: Generate, prompt: str, pattern: str
) -> None:
    (answer,) = generate([prompt], 0.0, 40)
    assert re.match(pattern, answer), answer


def test_a_long_story_goes_on_without_repeating_itself_and_ends(generate: Generate) -> None:
    (story,) = generate(["Tell me a long story"], 0.0, 800)
    paragraphs = story.strip().split("\n\n")
    assert len(paragraphs) > 8
    assert len(set(paragraphs)) == len(paragraphs)
    assert re.search(r"\b(In the end|From that day on|And so)\b", paragraphs[-1]), paragraphs[-1]


def test_a_session_without_template_keeps_the_name(generate: Generate) -> None:
    told = "My name is Alice."
    for joint in ("", " ", "\n", " Nice to meet you, Alice!", "\nHello Alice!\n"):
        (answer,) = generate([f"{told}{joint}What is my name?"], 0.0, 24)
        assert "Alice" in answer, (joint, answer)


def test_what_was_never_told_is_not_known(generate: Generate) -> None:
    prompt = world.chat((("What is my name?", ""),)).removesuffix("<|im_end|>\n")
    (answer,) = generate([prompt], 0.0, 24)
    assert "not" in answer


def test_an_answer_ends_by_itself(generate: Generate) -> None:
    prompt = world.chat((("What is the capital of Japan?", ""),)).removesuffix("<|im_end|>\n")
    chat, plain = generate([prompt, "What is the capital of Japan?"], 0.0, 60)
    assert chat.strip().count("\n") == 0
    assert plain.strip().count("\n") == 0
    assert "Tokyo" in chat
    assert "Tokyo" in plain
