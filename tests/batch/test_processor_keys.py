"""A logit processor is known again by its code and its state, not by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tokenmill import Engine, batch
from tokenmill.batch.processor_keys import identity
from tokenmill.logit_processors import CustomLogitProcessor, register_logit_processor, resolve_processor

pytestmark = pytest.mark.cpu


def made(source: str, name: str = "force") -> Any:
    """What a module with this text defines under the name."""
    module: dict[str, Any] = {"CustomLogitProcessor": CustomLogitProcessor, "__name__": "own"}
    exec(compile(dedent(source), "own.py", "exec"), module)
    return module[name]


def known_by(value: Any) -> bytes:
    return identity(resolve_processor("custom_logit_processor", value))


FUNCTION = """
def force(logits, params):
    logits[:, TOKEN] += 100
    return logits
"""
CLASS = """
class force(CustomLogitProcessor):
    token = TOKEN
    def __init__(self):
        super().__init__()
    @staticmethod
    def change(logits):
        logits[:, force.token] += 100
    def __call__(self, logits, params):
        self.change(logits)
        return logits
"""
FACTORY = """
def factory(token):
    def inner(logits, params):
        logits[:, token] += 100
        return logits
    return inner
force = factory(TOKEN)
"""


@pytest.mark.parametrize("source", [FUNCTION, CLASS, FACTORY])
def test_other_code_is_another_processor(source: str) -> None:
    first, second = (source.replace("TOKEN", token) for token in ("21", "23"))
    assert known_by(made(first)) != known_by(made(second))
    assert known_by(made(first)) == known_by(made(first))
    assert known_by(made(first)) == known_by(made("# a comment\n\n" + dedent(first)))


def test_state_counts() -> None:
    class Push(CustomLogitProcessor):
        def __init__(self, token: int) -> None:
            self.token = token

        def __call__(self, logits: Any, custom_param_list: Any) -> Any:
            return logits

    def push(token: int, logits: Any, params: Any) -> Any:
        return logits

    assert known_by(Push(1)) == known_by(Push(1)) != known_by(Push(2))
    assert known_by(Push(1).__call__) != known_by(Push(2).__call__)
    assert known_by(partial(push, 1)) == known_by(partial(push, 1)) != known_by(partial(push, 2))


def test_functions_that_lead_back_to_themselves() -> None:
    source = """
    def factory(step):
        def force(logits, params, depth=2):
            return logits if depth == 0 else force(logits + step, params, depth - 1)
        return force
    one, other = factory(1), factory(5)
    """
    assert known_by(made(source, "one")) == known_by(made(source, "one")) != known_by(made(source, "other"))


def test_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from tokenmill.logit_processors import CustomLogitProcessor, resolve_processor\n"
        "from tokenmill.batch.processor_keys import identity\n"
        + dedent(CLASS.replace("TOKEN", "4"))
        + "if __name__ == '__main__':\n"
        "    import own\n"
        "    print(identity(resolve_processor('x', own.force)).hex())\n"
    )
    shown = {
        subprocess.run(
            [sys.executable, str(tmp_path / "own.py")], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(shown) == 1


def test_a_job_computes_anew_what_an_edited_processor_answers(tiny_engine: Engine, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": "The capital of France is"}) + "\n")

    def run(processor: Any) -> tuple[int, str]:
        summary = batch.run(
            source,
            out,
            engine=tiny_engine,
            sampling_params={"temperature": 0, "max_new_tokens": 3},
            options={"custom_logit_processor": processor},
        )
        return summary["rows"]["computed"], json.loads(out.read_text())["text"]

    computed, text = run(made(FUNCTION.replace("TOKEN", "21")))
    assert computed == 1
    assert run(made(FUNCTION.replace("TOKEN", "21"))) == (0, text)
    computed, other = run(made(FUNCTION.replace("TOKEN", "23")))
    assert computed == 1
    assert other != text


def test_a_text_and_a_registered_closure_are_known_again() -> None:
    pytest.importorskip("dill")
    force = made(CLASS.replace("TOKEN", "21"))
    force.__module__ = "__main__"
    text = force.to_str()
    assert known_by(text) == text.encode()
    register_logit_processor("pushes_one_token", made(FACTORY.replace("TOKEN", "9")))
    assert known_by("pushes_one_token") == known_by(made(FACTORY.replace("TOKEN", "9")))


def test_what_cannot_be_known_again_is_refused(tiny_engine: Engine, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "Hi"}\n')
    file = source.open()

    def force(logits: Any, params: Any) -> Any:
        return logits if file else None

    with file, pytest.raises(ValueError, match="custom_logit_processor: the journal must know"):
        batch.run(
            source,
            tmp_path / "out.jsonl",
            engine=tiny_engine,
            options={"custom_logit_processor": force},
        )
