"""Judges a model of the tiny family: held-out questions of every kind, and the seeds' prompts to read by eye.

Run as `python -m tools.tiny.evaluate`. Generates through transformers, or with `--through tokenmill` through
our own Engine; always greedy where answers are judged.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.tiny.exchange import Exchange
from tools.tiny.recipe import PACKAGE_FOLDER
from tools.tiny.world import END_OF_TURN, KINDS, Turns, chat, questions

Generate = Callable[[Sequence[str], float, int], list[str]]
"""(prompts, temperature, most new tokens) -> continuations without special tokens."""

SEED_PROMPTS = (
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "Write a short, neutral self-introduction for a fictional character. Hello, my name is",
    "Provide a concise factual statement about France’s capital city. The capital of France is",  # noqa: RUF001 (as in the seed)
    "Explain possible future trends in artificial intelligence. The future of AI is",
    "Hello, how are you?",
    "What is machine learning?",
    "Explain quantum computing",
    "What is the capital of France?",
    "What is the capital of Germany?",
    "What is the capital of Italy?",
    "Tell me a long story",
    "Write a poem",
    "Write a function to compute fibonacci",
    "Generate information about a person named John",
    "Generate a phone number",
    "Generate a mathematical equation",
    "Describe this image in detail",
    "Explain diabetes",
    "My name is Alice.",
    "My name is Alice.What is my name?",
    "My name is Alice. Nice to meet you, Alice!What is my name?",
    "warmup",
    "Generate a number",
    "Hello",
    "High priority request",
    "Request 7",
    "test",
)

_SYSTEM = "You are a helpful assistant."
_MAX_NEW_TOKENS = 96


def _plain(turns: Turns) -> str:
    """The conversation as a session without a template joins it, up to the last question."""
    told = "".join(f"{user} {answer}\n" for user, answer in turns[:-1])
    return told + turns[-1][0]


def _open_chat(turns: Turns, *, system: str = "") -> str:
    """The conversation in the chat template, up to where the last answer begins."""
    return chat((*turns[:-1], (turns[-1][0], "")), system=system).removesuffix(f"{END_OF_TURN}\n")


def _framed(turns: Turns) -> str:
    """The conversation as questions and answers with their names before them."""
    told = "".join(f"Question: {user}\nAnswer: {answer}\n\n" for user, answer in turns[:-1])
    return f"{told}Question: {turns[-1][0]}\nAnswer:"


_FORMS: tuple[Callable[[Turns], str], ...] = (
    _open_chat,
    _plain,
    lambda turns: _open_chat(turns, system=_SYSTEM),
    _framed,
)


@dataclass(frozen=True, slots=True)
class Result:
    """Right answers of one kind, and the wrong ones as (prompt, answer, expected pattern)."""

    kind: str
    right: int
    asked: int
    wrong: tuple[tuple[str, str, str], ...]


def prompts(kind: str, count: int) -> list[tuple[str, Exchange]]:
    """Up to `count` held-out questions of a kind as prompts: chat and plain text by turns.

    Where fewer than `count` questions are held out, they are asked in further forms.
    """
    exchanges = questions(kind, count)
    asked = [
        (_FORMS[(position + shift) % len(_FORMS)](exchange.turns), exchange)
        for shift in range(len(_FORMS))
        for position, exchange in enumerate(exchanges)
    ]
    return list(itertools.islice(asked, count))


def judge(kind: str, count: int, generate: Generate) -> Result:
    """Ask held-out questions of one kind. Only the first line of an answer counts."""
    asked = prompts(kind, count)
    answers = generate([prompt for prompt, _ in asked], 0.0, _MAX_NEW_TOKENS)
    wrong = []
    for (prompt, exchange), answer in zip(asked, answers, strict=True):
        line = answer.strip().split("\n")[0]
        if not re.search(exchange.expected, line):
            wrong.append((prompt, line, exchange.expected))
    return Result(kind=kind, right=len(asked) - len(wrong), asked=len(asked), wrong=tuple(wrong))


def through_transformers(folder: Path, *, dtype: str = "bfloat16", batch_size: int = 50) -> Generate:
    """Generation by transformers, on the GPU if there is one, in left-padded batches."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    # transformers' own types do not admit its documented calls
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model = model.to(device)

    def generate(texts: Sequence[str], temperature: float, most: int) -> list[str]:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        answers = [""] * len(texts)
        options = (
            {"do_sample": True, "temperature": temperature, "top_p": 0.95, "top_k": 0} if temperature else {}
        )
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            inputs = tokenizer([texts[index] for index in chosen], return_tensors="pt", padding=True).to(
                device
            )
            outputs = model.generate(**inputs, max_new_tokens=most, **options)
            decoded = tokenizer.batch_decode(
                outputs[:, inputs.input_ids.shape[1] :], skip_special_tokens=True
            )
            for index, answer in zip(chosen, decoded, strict=True):
                answers[index] = answer
        return answers

    return generate


def through_tokenmill(folder: Path) -> Generate:
    """Generation by our own Engine."""
    import tokenmill

    engine = tokenmill.Engine(model_path=str(folder))

    def generate(texts: Sequence[str], temperature: float, most: int) -> list[str]:
        parameters = {"temperature": temperature, "top_p": 0.95, "max_new_tokens": most}
        return [output["text"] for output in engine.generate(list(texts), parameters)]

    return generate


def main() -> None:
    """Print the table, the wrong answers if asked, and samples for the seeds' prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=PACKAGE_FOLDER)
    parser.add_argument("--through", choices=("transformers", "tokenmill"), default="transformers")
    parser.add_argument("--count", type=int, default=100, help="questions of each kind")
    parser.add_argument("--kinds", nargs="*", default=sorted(KINDS), choices=sorted(KINDS))
    parser.add_argument("--wrong", type=int, default=0, help="wrong answers to show of each kind")
    parser.add_argument("--samples", action="store_true", help="show continuations of the seeds' prompts")
    arguments = parser.parse_args()
    generate = (through_tokenmill if arguments.through == "tokenmill" else through_transformers)(
        arguments.model
    )
    for kind in arguments.kinds:
        result = judge(kind, arguments.count, generate)
        print(f"| {kind} | {result.right} of {result.asked} |", flush=True)
        for prompt, answer, expected in result.wrong[: arguments.wrong]:
            print(f"    {prompt!r} -> {answer!r}, expected {expected!r}")
    for temperature in (0.0, 0.8) if arguments.samples else ():
        for prompt, text in zip(SEED_PROMPTS, generate(SEED_PROMPTS, temperature, 128), strict=True):
            print(f"--- temperature {temperature}: {prompt}\n{text}")


if __name__ == "__main__":
    main()
