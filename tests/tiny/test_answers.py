"""The shipped model answers: a part of `tools.tiny.evaluate`, through our own Engine."""

from __future__ import annotations

import re

import pytest

from tools.tiny import world
from tools.tiny.evaluate import Generate

pytestmark = pytest.mark.cpu

# Kinds that differ in what they need: recall, sums, copying, other scripts, looking back over turns.
KINDS = ("capitals", "addition", "translations", "json_to_text", "memory_name_late")


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
