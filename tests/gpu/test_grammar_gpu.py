"""Structured output on a GPU: every output follows its grammar, and other rows do not notice."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
import torch

import tokenmill as sgl

pytest.importorskip("llguidance")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": {"type": "array", "maxItems": 3}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
PATTERN = r"[a-f]{3,9}-\d{2}"
SCHEMA["properties"]["ages"]["items"] = {"type": "integer", "minimum": 0, "maximum": 99}  # type: ignore[index]


@pytest.mark.parametrize("graphs", [True, False])
def test_outputs_follow_and_neighbours_do_not_notice(graphs: bool) -> None:
    grammars: list[dict[str, Any]] = [
        {"json_schema": SCHEMA},
        {"regex": PATTERN, "frequency_penalty": 0.5},
        {},
        {"regex": PATTERN, "min_new_tokens": 3},
        {"json_schema": SCHEMA, "logit_bias": {20: 3.0}},
    ]
    params = [
        {"temperature": 1.2, "max_new_tokens": 200, "sampling_seed": index, **grammars[index % 5]}
        for index in range(30)
    ]
    plain = [index for index in range(30) if index % 5 == 2]
    with sgl.Engine(
        model_path="tiny",
        device="cuda",
        dtype="float32",
        disable_cuda_graph=not graphs,
        constrained_json_disable_any_whitespace=True,  # it would fill the outputs of a hot temperature
    ) as engine:
        alone = engine.generate(["Once"] * len(plain), [params[index] for index in plain])
        for _ in range(2):
            results = engine.generate(["Once"] * 30, params)
            for index, result in enumerate(results):
                check(index % 5, result)
            assert [results[index]["output_ids"] for index in plain] == alone["output_ids"]


def check(kind: int, result: Any) -> None:
    if kind == 2:
        return
    assert result["meta_info"]["finish_reason"]["type"] == "stop", result
    if kind in (1, 3):
        assert re.fullmatch(PATTERN, result["text"])
        return
    value = json.loads(result["text"])
    assert set(value) == {"name", "ages"}
    assert len(value["name"]) <= 8
    assert all(0 <= age <= 99 for age in value["ages"])


def test_the_first_steps_replay_what_was_captured_while_the_grammar_was_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tokenmill.core.loop import Loop
    from tokenmill.runner.recorder import Recorder

    record, compiled, captured = Recorder.record, Loop._report_compiled, []

    def recorded(self: Any, step: Any, title: str, **options: Any) -> Any:
        captured.append(title)
        return record(self, step, title, **options)

    def told(self: Any, outcomes: Any) -> None:
        def tell() -> None:
            captured.append("compiled")
            compiled(self, outcomes)

        threading.Timer(0.5, tell).start()  # a schema may take that long

    monkeypatch.setattr(Recorder, "record", recorded)
    monkeypatch.setattr(Loop, "_report_compiled", told)
    params = {"regex": PATTERN, "temperature": 0.8, "top_p": 0.9, "max_new_tokens": 40}
    with sgl.Engine(model_path="tiny", device="cuda") as engine:
        engine.generate("Once upon a time. " * 20, {"max_new_tokens": 2})  # waits for all kernels
        captured.clear()
        assert re.fullmatch(PATTERN, engine.generate("Once", params)["text"])
    assert captured.index("compiled") == 2  # logits and draw, behind the forward pass of before
    (prompt,) = captured[3:]
    assert prompt.startswith("StepShape")


@pytest.mark.parametrize("host", ["early", "late"])
def test_many_rows_are_those_of_the_plain_path(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come and go between steps; an early host has their masks copied, a late one has them read."""
    from tokenmill.runner.masked_draws import _EarlyCopies

    address_of, ways = _EarlyCopies.address, set()

    def watched(self: Any, bits: Any) -> int:
        self.waited_seconds = 1.0 if host == "early" else 0.0
        address = address_of(self, bits)
        ways.add("read" if address == bits.ctypes.data else "copied")
        return address

    monkeypatch.setattr(_EarlyCopies, "address", watched)
    params: list[dict[str, Any]] = [
        {
            "temperature": index % 3 / 2,
            "sampling_seed": index,
            "max_new_tokens": 5 + 7 * (index % 9),
            **({"json_schema": SCHEMA} if index % 4 else {"regex": PATTERN}),
        }
        for index in range(150)
    ]
    prompts = [f"Row {index % 11} says:" for index in range(150)]
    found = []
    for arguments in ({"max_running_requests": 64}, {"disable_cuda_graph": True, "steps_in_flight": 1}):
        with sgl.Engine(model_path="tiny", device="cuda", dtype="float32", **arguments) as engine:
            found.append([result["output_ids"] for result in engine.generate(prompts, params)])
    assert found[0] == found[1]
    assert ways == {"copied" if host == "early" else "read"}
