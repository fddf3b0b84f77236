"""Steps with prompts from what a graph reads give the tokens of steps that are launched kernel by kernel.

There is no GPU here: a graph is the function that would be captured, called again at each replay, and the
kernels run in Triton's interpreter.
"""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenmill as sgl
from tokenmill.runner import prompt_graphs, recorder
from tokenmill.sampling import SamplingNeeds

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns one-element arrays into loop bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@dataclass
class Calls:
    """What stands in for the device's graphs has done."""

    captured: int = 0
    replayed: int = 0
    full: bool = False  # there is no memory for a graph


@pytest.fixture
def graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Calls:
    interpreter = runpy.run_path(str(Path(__file__).parents[1] / "kernels" / "interpreter.py"))
    if interpreter["device"]() != "cpu":
        pytest.skip("there is a GPU, whose tests do the same")
    from tokenmill.attention import triton_backend
    from tokenmill.runner import graphs, hardware, runner

    calls = Calls()

    class Replay:
        def __init__(self, step: Callable[[], torch.Tensor]) -> None:
            self.step, self.tokens, self.seconds = step, step(), 0.0

        def replay(self) -> None:
            calls.replayed += 1
            self.tokens.copy_(self.step())

    class Again:
        def __init__(self, device: torch.device) -> None:
            pass

        def record(self, step: Callable[[], torch.Tensor], title: str) -> Replay:
            if calls.full:
                raise torch.OutOfMemoryError(title)
            calls.captured += 1
            return Replay(step)

    monkeypatch.setattr(hardware, "_attention_backend", lambda *_: "triton")
    monkeypatch.setattr(runner, "Recorder", Again)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(prompt_graphs, "_STEPS_BEFORE_CAPTURE", 0)
    monkeypatch.setattr(triton_backend, "SHARING_BYTES", 0)  # these models are too small for it to pay
    # Only steps with prompts are of interest.
    monkeypatch.setattr(graphs.DecodeGraphs, "replay", lambda *_: None)
    return calls


def prompts(shared: int = 0) -> list[list[int]]:
    """Some that share so many ids, and have up to 30 of their own."""
    rng = random.Random(7)
    head = [rng.randrange(256) for _ in range(shared)]
    return [head + [rng.randrange(256) for _ in range(length)] for length in (30, 1, 17, 5, 23, 9)]


def generate(folder: Path, inputs: list[list[int]], lengths: list[int], **settings: Any) -> list[list[int]]:
    """The new ids; few tokens fit into a step, so prompts are cut and join rows that decode."""
    arguments = {"chunked_prefill_size": 12, "max_running_requests": 4, "dtype": "float32", "device": "cpu"}
    sampling = {"temperature": 0, "ignore_eos": True, **settings.pop("sampling", {})}
    params = [{**sampling, "max_new_tokens": length} for length in lengths]
    with sgl.Engine(model_path=str(folder), **arguments, **settings) as engine:
        return [r["output_ids"] for r in engine.generate(input_ids=inputs, sampling_params=params)]


@pytest.mark.parametrize(("family", "shared"), [("llama", 0), ("qwen3", 40)])
def test_greedy_tokens_are_those_of_transformers(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    graphs_on_the_cpu: Calls,
    family: str,
    shared: int,
) -> None:
    folder, lengths = make_model(family), [9, 3, 6, 8, 1, 4]
    rows = generate(folder, prompts(shared), lengths)
    assert rows == [
        transformers_greedy(folder, prompt, length)
        for prompt, length in zip(prompts(shared), lengths, strict=True)
    ]
    assert graphs_on_the_cpu.replayed > 8
    assert graphs_on_the_cpu.captured < graphs_on_the_cpu.replayed


def test_drawn_tokens_are_those_of_plain_steps(
    make_model: Callable[..., Path], graphs_on_the_cpu: Calls
) -> None:
    folder, lengths = make_model("qwen2"), [5, 7, 2, 6, 4, 3]
    sampling = {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "sampling_seed": 11}
    rows = generate(folder, prompts(), lengths, sampling=sampling)
    assert graphs_on_the_cpu.replayed
    replayed = graphs_on_the_cpu.replayed
    assert generate(folder, prompts(), lengths, sampling=sampling, disable_cuda_graph=True) == rows
    assert graphs_on_the_cpu.replayed == replayed


def test_without_memory_for_a_graph_steps_are_plain(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    graphs_on_the_cpu: Calls,
    caplog: pytest.LogCaptureFixture,
) -> None:
    graphs_on_the_cpu.full = True
    folder = make_model("llama")
    with caplog.at_level("WARNING", "tokenmill"):
        rows = generate(folder, prompts(), [3] * 6, log_level="warning")
    assert rows == [transformers_greedy(folder, prompt, 3) for prompt in prompts()]
    assert [record for record in caplog.messages if "no memory is left to capture" in record]
    assert not graphs_on_the_cpu.replayed


def test_a_shape_gets_a_graph_when_it_has_come_often(
    make_model: Callable[..., Path], graphs_on_the_cpu: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "_STEPS_BEFORE_CAPTURE", 2)
    with sgl.Engine(model_path=str(make_model("llama")), dtype="float32", device="cpu") as engine:
        for steps, (captured, replayed) in enumerate([(0, 0), (0, 0), (1, 1), (1, 2)], start=1):
            engine.generate(input_ids=[steps, 1, 2], sampling_params={"max_new_tokens": 1})
            assert (graphs_on_the_cpu.captured, graphs_on_the_cpu.replayed) == (captured, replayed)
        # Long prompts keep the device busy without a graph: none has room for so many tokens.
        engine.generate(input_ids=[prompts(0)[0]] * 2, sampling_params={"max_new_tokens": 1})
        assert graphs_on_the_cpu.replayed == 2


def test_a_step_of_the_spare_row_says_nothing_of_others() -> None:
    kind = recorder.StepKind(SamplingNeeds(random=True, filters=False))
    shape = prompt_graphs.StepShape(tokens=16, decodes=8, prompts=4, long_prefixes=False, kind=kind)
    inputs = prompt_graphs._spare_inputs(shape, 99)
    tokens_T, rows_R, starts_P = prompt_graphs._views(inputs, shape)
    assert tokens_T[0].tolist() == [99] * 16
    assert rows_R[0].tolist() == rows_R[3].tolist() == [99] * 12
    assert starts_P.tolist() == [16] * 5
