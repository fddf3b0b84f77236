"""`Engine(...)` with arguments that nobody should pass: each is taken, or refused by its name."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from typing import Any

import pytest

import tokenmill as sgl
from tests import hostile
from tokenmill.arguments import argument_names

pytestmark = pytest.mark.cpu

NUM_CALLS = int(os.environ.get("TOKENMILL_HOSTILE_ARGUMENTS", "1000"))
SEED = int(os.environ.get("TOKENMILL_HOSTILE_SEED", "1"))


class Accepted(Exception):
    """The arguments were good enough to load a model with."""


@pytest.mark.filterwarnings("ignore")
def test_no_argument_is_refused_without_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_core(*arguments: Any, **keywords: Any) -> Any:
        raise Accepted

    monkeypatch.setattr("tokenmill.core.launch.start_core", start_core)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    monkeypatch.setattr(logging.getLogger("tokenmill"), "disabled", True)
    rng, num_accepted = random.Random(SEED), 0
    names = [*argument_names(), *["server_args", "unheard_of", "model_path"] * 5]
    for _ in range(NUM_CALLS):
        name, value = rng.choice(names), hostile.value(rng)
        arguments = {
            "model_path": "tiny",
            "load_format": "dummy",
            "skip_tokenizer_init": rng.random() < 0.95,
            name: value,
        }
        before, began = hostile.print_of(value), time.perf_counter()
        try:
            sgl.Engine(**arguments)
        except Accepted:
            num_accepted += 1
        except sgl.InvalidArgument as error:
            assert len(str(error)) < 2000  # noqa: PT017
            # The tokenizer is looked for in `model_path`; `server_args` holds arguments of other names.
            assert name in str(error) or "tokenizer" in str(error) or name == "server_args"  # noqa: PT017
            assert hostile.print_of(value) == before
        assert time.perf_counter() - began < 20
    assert num_accepted > NUM_CALLS // 10
