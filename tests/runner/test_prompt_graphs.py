"""Steps with prompts from what a graph reads give the tokens of steps that are launched kernel by kernel.

There is no GPU here; see `graphs_on_the_cpu`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenmill as sgl
from tests.runner.conftest import GraphCalls
from tokenmill.messages import StepPlan
from tokenmill.runner import graphs, prompt_graphs, recorder
from tokenmill.sampling import SamplingNeeds

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns one-element arrays into loop bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


PAGES = ("page_slots", "page_groups", "page_columns", "page_ids")


@pytest.fixture(autouse=True)
def only_steps_with_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.DecodeGraphs, "replay", lambda *_, **__: None)


def prompts(shared: int = 0) -> list[list[int]]:
    """Some that share so many ids, and have up to 14 of their own."""
    rng = random.Random(7)
    head = [rng.randrange(256) for _ in range(shared)]
    return [head + [rng.randrange(256) for _ in range(length)] for length in (14, 1, 9, 5, 6, 3)]


def generate(folder: Path, inputs: list[list[int]], lengths: list[int], **settings: Any) -> list[list[int]]:
    """The new ids; few tokens fit into a step, so prompts are cut and join rows that decode."""
    arguments = {"chunked_prefill_size": 12, "max_running_requests": 4, "dtype": "float32", "device": "cpu"}
    sampling = {"temperature": 0, "ignore_eos": True, **settings.pop("sampling", {})}
    params = [{**sampling, "max_new_tokens": length} for length in lengths]
    with sgl.Engine(model_path=str(folder), **arguments, **settings) as engine:
        return [r["output_ids"] for r in engine.generate(input_ids=inputs, sampling_params=params)]


def uncached(folder: Path, **settings: Any) -> sgl.Engine:
    """An engine that computes every prompt."""
    arguments = {"dtype": "float32", "device": "cpu", "disable_radix_cache": True}
    return sgl.Engine(model_path=str(folder), **arguments, **settings)


def test_greedy_tokens_are_those_of_transformers(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    graphs_on_the_cpu: GraphCalls,
) -> None:
    folder, lengths, shared = make_model("qwen3", num_hidden_layers=1), [3, 2, 3, 3, 1, 2], 18
    rows = generate(folder, prompts(shared), lengths)
    assert rows == [
        transformers_greedy(folder, prompt, length)
        for prompt, length in zip(prompts(shared), lengths, strict=True)
    ]
    assert graphs_on_the_cpu.replayed > 5
    assert len(graphs_on_the_cpu.captured) < graphs_on_the_cpu.replayed


def test_long_steps_give_the_tokens_of_transformers(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    graphs_on_the_cpu: GraphCalls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have much room to spare, and attend in the last layer for the tokens that are sampled only."""
    from tokenmill.attention import triton_backend

    monkeypatch.setattr(prompt_graphs, "_LONG_STEP", 1)
    monkeypatch.setattr(prompt_graphs, "_DECODES_OF_LONG", (0, 8))
    monkeypatch.setattr(prompt_graphs, "PROMPTS_OF_LONG", (8, 16))
    monkeypatch.setattr(triton_backend, "MANY_TOKENS", 1)
    folder, lengths = make_model("qwen3", num_hidden_layers=1), [3, 2, 4, 3, 1, 2]
    assert generate(folder, prompts(6), lengths) == [
        transformers_greedy(folder, prompt, length)
        for prompt, length in zip(prompts(6), lengths, strict=True)
    ]
    assert graphs_on_the_cpu.replayed > 5


def test_drawn_tokens_are_those_of_plain_steps(
    make_model: Callable[..., Path], graphs_on_the_cpu: GraphCalls
) -> None:
    folder, lengths = make_model("qwen2", num_hidden_layers=1), [2, 3, 1, 2, 4, 2]
    sampling = {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "sampling_seed": 11}
    rows = generate(folder, prompts(), lengths, sampling=sampling)
    assert graphs_on_the_cpu.replayed
    replayed = graphs_on_the_cpu.replayed
    assert generate(folder, prompts(), lengths, sampling=sampling, disable_cuda_graph=True) == rows
    assert graphs_on_the_cpu.replayed == replayed


def test_rows_with_extras_get_what_plain_steps_give_them(
    make_model: Callable[..., Path], graphs_on_the_cpu: GraphCalls
) -> None:
    """Such steps end before the logits: what is drawn and shown is up to what the rows ask for."""
    changes: list[dict[str, Any]] = [
        {"frequency_penalty": 1.5, "repetition_penalty": 1.2},
        {},
        {"logit_bias": {"7": 3.0, "9": 4.0}},
        {"min_new_tokens": 2, "ignore_eos": False, "stop_token_ids": list(range(0, 256, 2))},
        {"temperature": 0.9, "top_p": 0.8, "sampling_seed": 5},
        {"custom_params": {"token_ids": [3, 5, 8]}},
    ]

    def run(**settings: Any) -> list[Any]:
        arguments = {"chunked_prefill_size": 12, "max_running_requests": 4, "dtype": "float32"}
        greedy = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 3}
        folder = make_model("qwen3", num_hidden_layers=1)
        with sgl.Engine(model_path=str(folder), device="cpu", **arguments, **settings) as engine:
            results = engine.generate(
                input_ids=prompts(),
                sampling_params=[{**greedy, **change} for change in changes],
                return_logprob=[True, False, True, False, True, True],
                top_logprobs_num=2,
                return_hidden_states=[False, "last", False, False, True, False],
                custom_logit_processor=[None] * 5 + ["allowed_tokens"],
                logprob_start_len=[0, -1, 5, -1, -1, 1],
                token_ids_logprob=[[3, 4], None, None, None, None, [3, 4]],
            )
        names = (
            *("output_token_logprobs", "output_top_logprobs", "hidden_states"),
            *("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"),
        )
        return [(r["output_ids"], *(r["meta_info"].get(name) for name in names)) for r in results]

    found, replayed = run(), graphs_on_the_cpu.replayed
    assert replayed > 2
    assert {title.rpartition("shows_all=")[2] for title in graphs_on_the_cpu.captured} == {"True)", "False)"}
    for one, other in zip(found, run(disable_cuda_graph=True), strict=True):
        assert one[0] == other[0]
        assert numbers_in(one[1:]) == pytest.approx(numbers_in(other[1:]), abs=1e-4)
    assert graphs_on_the_cpu.replayed == replayed
    assert set(found[5][0]) <= {3, 5, 8}


@pytest.mark.parametrize("error", [RuntimeError("no"), torch.OutOfMemoryError("no")])
def test_prompts_are_shown_when_that_fails_after_a_graph(
    make_model: Callable[..., Path],
    graphs_on_the_cpu: GraphCalls,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """The step begins anew, kernel by kernel."""
    from tokenmill.runner import eager

    folder, failed = make_model("qwen3", num_hidden_layers=1), []
    small = {"chunked_prefill_size": 12, "max_running_requests": 4}

    def run(**settings: Any) -> list[Any]:
        with sgl.Engine(model_path=str(folder), dtype="float32", device="cpu", **small, **settings) as engine:
            results = engine.generate(
                input_ids=prompts(3),
                sampling_params={"temperature": 0, "ignore_eos": True, "max_new_tokens": 2},
                return_logprob=True,
                logprob_start_len=0,
                return_hidden_states=True,
            )
        names = ("input_token_logprobs", "output_token_logprobs", "hidden_states")
        return [(r["output_ids"], *(r["meta_info"][name] for name in names)) for r in results]

    def show(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) % 2 and len(failed) < 3:  # after a graph; the step that begins anew is next
            failed.append(1)
            raise error
        return real(*arguments)

    calls: list[int] = []
    expected, real = run(disable_cuda_graph=True), eager.show
    monkeypatch.setattr(eager, "show", show)
    assert numbers_in(run()) == pytest.approx(numbers_in(expected), abs=1e-4)
    assert len(failed) == 3


def numbers_in(nested: Any) -> list[float]:
    """All numbers in lists of lists."""
    if isinstance(nested, list | tuple):
        return [number for item in nested for number in numbers_in(item)]
    return [] if nested is None else [float(nested)]


@pytest.mark.parametrize(
    ("title", "long_step"), [("", prompt_graphs._LONG_STEP), ("the draw", 16)], ids=["any", "draw"]
)
def test_without_memory_for_a_graph_steps_are_plain(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    graphs_on_the_cpu: GraphCalls,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    title: str,
    long_step: int,
) -> None:
    monkeypatch.setattr(prompt_graphs, "_LONG_STEP", long_step)
    graphs_on_the_cpu.full_for = title
    folder = make_model("llama", num_hidden_layers=1)
    with caplog.at_level("WARNING", "tokenmill"):
        rows = generate(folder, prompts(), [3] * 6, log_level="warning")
    assert rows == [transformers_greedy(folder, prompt, 3) for prompt in prompts()]
    assert len([record for record in caplog.messages if "no memory is left to capture" in record]) == 1
    assert bool(graphs_on_the_cpu.captured) == bool(title)
    assert not graphs_on_the_cpu.replayed


def test_a_draw_that_is_captured_later_touches_no_row(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    graphs_on_the_cpu: GraphCalls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here a capture runs what it records, as one does that fails at first."""
    monkeypatch.setattr(prompt_graphs, "_LONG_STEP", 16)
    folder, rng = make_model("qwen3", num_hidden_layers=1), random.Random(3)
    inputs = [[rng.randrange(256) for _ in range(length)] for length in (5, *[19] * 5)]
    greedy = {"temperature": 0, "ignore_eos": True}
    filtered = {"temperature": 0.9, "top_p": 0.8, "ignore_eos": True, "max_new_tokens": 3}
    params = [{**greedy, "max_new_tokens": 20}, *[{**greedy, "max_new_tokens": 3}] * 3, filtered, filtered]
    with uncached(folder, chunked_prefill_size=24, max_running_requests=2) as engine:
        first, *_ = engine.generate(input_ids=inputs, sampling_params=params)
    assert first["output_ids"] == transformers_greedy(folder, inputs[0], 20)
    assert len(graphs_on_the_cpu.captured_draws) > len(graphs_on_the_cpu.captured)


def test_a_larger_graph_serves_on_where_a_draw_finds_no_memory(
    make_model: Callable[..., Path], graphs_on_the_cpu: GraphCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "_LONG_STEP", 16)
    # As long as it takes to pad 32 tokens to 64, and half of that.
    graphs_on_the_cpu.capture_seconds = 1.5 * 32e-6
    folder = make_model("llama", num_hidden_layers=1)
    with uncached(folder) as engine:
        # 20 and 21 are of one shape, which gets its own graph when it comes again, but none for its draw.
        for length, replayed in [(60, 1), (20, 2), (21, 2), (20, 3), (22, 4), (60, 5)]:
            graphs_on_the_cpu.full_for = "the draw" if length == 21 else graphs_on_the_cpu.full_for
            engine.generate(input_ids=list(range(length)), sampling_params={"max_new_tokens": 1})
            assert graphs_on_the_cpu.replayed == replayed


def test_a_short_shape_gets_a_graph_once_all_kernels_are_compiled(
    make_model: Callable[..., Path], graphs_on_the_cpu: GraphCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "_LAUNCH_SECONDS", 16e-6)  # as long as 16 tokens take
    with sgl.Engine(
        model_path=str(make_model("llama", num_hidden_layers=1)), dtype="float32", device="cpu"
    ) as engine:
        for steps, (captured, replayed) in enumerate([(0, 0), (0, 0), (1, 1), (1, 2)], start=1):
            graphs_on_the_cpu.compiles = steps < 3
            engine.generate(input_ids=[steps, 1, 2], sampling_params={"max_new_tokens": 1})
            assert (len(graphs_on_the_cpu.captured), graphs_on_the_cpu.replayed) == (captured, replayed)
        # More tokens keep the device busy without a graph.
        engine.generate(input_ids=[1] * 17, sampling_params={"max_new_tokens": 1})
        assert graphs_on_the_cpu.replayed == 2


@pytest.mark.parametrize("waits_for_compilers", [False, True])
def test_a_larger_graph_serves_until_a_shape_has_its_own(
    waits_for_compilers: bool,
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    graphs_on_the_cpu: GraphCalls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As long as it takes to pad 16 tokens to 32 twice, and half of that.
    graphs_on_the_cpu.capture_seconds = 2.5 * 16e-6
    if waits_for_compilers:  # those that come later need not wait for them
        monkeypatch.setattr(prompt_graphs, "LONGEST_CAPTURE_SECONDS", 2.5 * 16e-6)
        graphs_on_the_cpu.capture_seconds = 100.0
    folder, (prompt, *_) = make_model("llama", num_hidden_layers=1), prompts(6)
    greedy = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    with uncached(folder) as engine:
        for length, captured, replayed in [(20, 1, 1), (19, 1, 2), (5, 1, 3), (6, 1, 4), (5, 2, 5)]:
            result = engine.generate(input_ids=prompt[:length], sampling_params=greedy)
            assert result["output_ids"] == transformers_greedy(folder, prompt[:length], 2)
            assert (len(graphs_on_the_cpu.captured), graphs_on_the_cpu.replayed) == (captured, replayed)


def test_one_graph_of_a_long_step_serves_however_tokens_are_drawn(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    graphs_on_the_cpu: GraphCalls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_graphs, "_LONG_STEP", 16)
    folder, (prompt, *_) = make_model("llama", num_hidden_layers=1), prompts(6)
    greedy = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    ways: list[tuple[dict[str, Any], int, int]] = [  # with the draws that are captured and replayed then
        ({"temperature": 0.9}, 1, 1),
        (greedy, 1, 2),
        ({"temperature": 0.9, "top_p": 0.8}, 2, 3),
        ({"frequency_penalty": 0.5}, 2, 3),  # drawn kernel by kernel
        (greedy, 2, 4),
    ]
    with uncached(folder) as engine:
        for replayed, (params, draws, replayed_draws) in enumerate(ways, start=1):
            result = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 2, **params})
            if params is greedy:
                assert result["output_ids"] == transformers_greedy(folder, prompt, 2)
            calls = graphs_on_the_cpu
            assert (len(calls.captured), calls.replayed) == (1, replayed)
            assert (len(calls.captured_draws), calls.replayed_draws) == (draws, replayed_draws)


@pytest.mark.parametrize(
    ("long_step", "full_step", "expected"),
    [
        (16, 24, [(32, False), (32, True)]),
        (16, 64, [(64, False), (64, True), (32, False)]),
        (17, 25, [(32, False), (32, True)]),
        (64, 24, []),
    ],
)
def test_long_steps_of_prompts_are_captured_before_they_come(
    long_step: int,
    full_step: int,
    expected: list[tuple[int, bool]],
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    graphs_on_the_cpu: GraphCalls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of prompts that are long, too, and with their draw; nothing where a full step is short."""
    monkeypatch.setattr(prompt_graphs, "_LONG_STEP", long_step)
    replay, ahead = prompt_graphs.PromptGraphs.replay, []

    def prepared(self: prompt_graphs.PromptGraphs, *arguments: Any, **wishes: Any) -> Any:
        while (shape := self.next_shape) is not None:
            self.capture(shape)
            ahead.append((shape.tokens, shape.long_queries))
        return replay(self, *arguments, **wishes)

    monkeypatch.setattr(prompt_graphs.PromptGraphs, "replay", prepared)
    folder, inputs = make_model("llama", num_hidden_layers=1), [[at] * full_step for at in (1, 2, 3)]
    greedy = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    with uncached(folder, chunked_prefill_size=full_step, max_running_requests=4) as engine:
        results = engine.generate(input_ids=inputs, sampling_params=greedy)
    assert ahead == expected
    assert len(graphs_on_the_cpu.captured_draws) == len(ahead)
    assert len(graphs_on_the_cpu.captured) == max(1, len(ahead))
    assert graphs_on_the_cpu.replayed == 3
    for prompt, result in zip(inputs, results, strict=True):
        assert result["output_ids"] == transformers_greedy(folder, prompt, 1)


def test_with_many_graphs_a_short_shape_gets_one_when_it_comes_again(
    make_model: Callable[..., Path], graphs_on_the_cpu: GraphCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "_MANY_GRAPHS", 1)
    with uncached(make_model("llama", num_hidden_layers=1)) as engine:
        for length, captured, replayed in [
            (5, 1, 1),
            (20, 1, 1),
            (40, 1, 1),
            (21, 2, 2),
            (41, 3, 3),
            (42, 3, 4),
        ]:
            engine.generate(input_ids=list(range(length)), sampling_params={"max_new_tokens": 1})
            assert (len(graphs_on_the_cpu.captured), graphs_on_the_cpu.replayed) == (captured, replayed)


def test_only_so_many_shapes_get_a_graph(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    graphs_on_the_cpu: GraphCalls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_graphs, "_MOST_GRAPHS", 1)
    folder = make_model("llama", num_hidden_layers=1)
    with sgl.Engine(model_path=str(folder), dtype="float32", device="cpu") as engine:
        for length in (5, 40, 6):
            prompt = prompts()[0][:2] * length
            result = engine.generate(
                input_ids=prompt, sampling_params={"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
            )
            assert result["output_ids"] == transformers_greedy(folder, prompt, 2)
    assert (len(graphs_on_the_cpu.captured), graphs_on_the_cpu.replayed) == (1, 2)


def test_all_that_is_left_over_is_a_prompt_of_the_spare_row() -> None:
    kind, needs = recorder.StepKind(), SamplingNeeds(random=True, filters=False)
    shape = prompt_graphs.StepShape(
        tokens=16, decodes=8, prompts=4, long_queries=False, long_prefixes=False, kind=kind, needs=needs
    )
    plan = StepPlan(
        slots=np.array([5, 3, 4], dtype=np.int32),
        starts=np.array([7, 0, 20], dtype=np.int32),
        counts=np.array([1, 6, 2], dtype=np.int32),
        samples=np.array([True, False, True]),
        num_decodes=1,
        token_ids=np.arange(30, 38, dtype=np.int32),
        **{name: np.zeros(0, dtype=np.int32) for name in PAGES},
    )
    tokens_T, rows_R, starts_P = prompt_graphs._views(prompt_graphs.pack(plan, shape, spare_slot=99), shape)
    assert tokens_T[0].tolist() == [5] + [3] * 6 + [4] * 2 + [99] * 7  # slots
    assert tokens_T[1].tolist() == [7, 0, 1, 2, 3, 4, 5, 20, 21] + [0] * 7  # positions
    assert tokens_T[2].tolist() == [-1, *range(30, 38)] + [0] * 7  # ids
    assert rows_R[0].tolist() == [5] + [99] * 7 + [3, 4, 99, 99]
    assert rows_R[1].tolist() == [8] + [1] * 7 + [6, 22, 7, 1]  # lengths
    assert rows_R[2].tolist() == [0] * 8 + [6, 8, 15, 15]  # the tokens that draw
    assert rows_R[3].tolist() == [5] + [99] * 7 + [99, 4, 99, 99]  # who gets what they draw
    assert starts_P.tolist() == [1, 7, 9, 16, 16]
