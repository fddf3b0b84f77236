"""Steps of rows that decode as graphs: which graph takes a step, and that it draws what plain steps draw.

A device without memory for another graph goes on with those it has, or without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenmill as sgl
from tests.runner.conftest import GraphCalls
from tokenmill.config import MOST_STEPS_IN_FLIGHT
from tokenmill.messages import Lane
from tokenmill.runner import graphs, prompt_graphs
from tokenmill.runner.capture import CapturePolicy
from tokenmill.runner.graph_sets import GraphSets
from tokenmill.runner.lanes import Lanes
from tokenmill.runner.quarantine import Quarantine
from tokenmill.runner.recorder import StepKind
from tokenmill.runner.runner import LocalRunner
from tokenmill.sampling import SamplingNeeds

pytestmark = [
    pytest.mark.cpu,
    # Triton's interpreter turns one-element arrays into loop bounds.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

NOTHING: Any = None
KIND, SHORT = StepKind(), StepKind(longest=512)
PLAIN = SamplingNeeds(random=True, filters=False)
FILTERED = SamplingNeeds(random=True, filters=True)
PENALIZED = SamplingNeeds(random=True, filters=False, penalties=True)


def test_steps_of_graphs_have_the_kernels_that_are_best_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their logits, too."""
    from tokenmill.kernels.launching import are_replayed
    from tokenmill.runner.executor import Executor

    executor: Any = Executor.__new__(Executor)
    monkeypatch.setattr(executor, "_deterministic", False, raising=False)
    asked: list[bool] = []
    model = type("Model", (), {"logits": lambda _, hidden: asked.append(are_replayed()) or hidden})()
    monkeypatch.setattr(executor, "_model", model, raising=False)
    graphs.decode_logits(executor, graphs.Forwarded(torch.zeros(1, 1), NOTHING, NOTHING))
    executor.logits(torch.zeros(1, 1))
    assert asked == [True, False]


class MadeGraphs(graphs.DecodeGraphs):
    """Captured without a device, up to 64 rows; sizes above 16 need too much memory, as do penalties.

    After one step with padding a smaller graph is wanted.
    """

    def __init__(self) -> None:
        policy = CapturePolicy(64, row_seconds=0.02)
        super().__init__(NOTHING, NOTHING, NOTHING, policy=policy, recorder=NOTHING)
        self.captured: list[Any] = []

    def size_for(
        self, num_rows: int, needs: SamplingNeeds | None = PLAIN, kind: StepKind = KIND
    ) -> int | None:
        """Rows of the graph that takes such a step; None: it is launched kernel by kernel."""
        captured = self._graph(num_rows, kind, needs)
        assert captured is None or captured.end(needs) is not None
        return None if captured is None else captured.num_rows

    def _capture(self, size: int, kind: StepKind, *, is_rehearsal: bool = False) -> Any:
        if size > 16:
            raise torch.OutOfMemoryError
        self.captured.append(f"rehearsal of {size}" if is_rehearsal else size)
        return graphs._Captured(graphs.Graph(NOTHING, NOTHING, 0.01), size)

    def _capture_logits(self, captured: Any) -> Any:
        self.captured.append("logits")
        return object()

    def _capture_draw(self, captured: Any, needs: SamplingNeeds) -> Any:
        if needs == PENALIZED:
            raise torch.OutOfMemoryError
        self.captured.append(needs)
        return object()


@pytest.fixture
def made() -> MadeGraphs:
    return MadeGraphs()


def test_graphs_that_exist_are_used_when_memory_is_out(made: MadeGraphs) -> None:
    assert made.size_for(9) == 16
    assert made.size_for(20) is None
    assert made.size_for(2) == 16
    assert made.size_for(1, FILTERED) is None
    assert made.size_for(64) is None
    assert made.captured == [16, PLAIN]


def test_a_smaller_graph_can_wait(made: MadeGraphs) -> None:
    assert made.size_for(9) == 16
    assert made.wanted_seconds == 0
    assert made.size_for(2) == 16
    assert made.wanted_seconds == 0.01
    made.capture_wanted()
    assert made.wanted_seconds == 0
    assert made.size_for(2) == 2
    made.capture_wanted()
    assert made.size_for(4) == 16  # nothing else was captured


def test_kernels_are_loaded_by_a_rehearsal(made: MadeGraphs) -> None:
    made.rehearse_wanted()
    assert not made.captured
    assert [made.size_for(rows) for rows in (9, 2)] == [16, 16]
    made.rehearse_wanted()
    made.capture_wanted()
    assert made.captured == [16, PLAIN, "rehearsal of 2", PLAIN, 2, PLAIN]


def test_a_graph_is_not_wanted_forever(made: MadeGraphs) -> None:
    assert [made.size_for(rows) for rows in (9, 2, 2)] == [16, 16, 2]
    assert made.wanted_seconds == 0


def test_a_graph_that_was_put_off_is_wanted_again_when_it_would_have_served(made: MadeGraphs) -> None:
    assert [made.size_for(rows) for rows in (9, 2)] == [16, 16]
    made.forget_wanted()
    assert made.wanted_seconds == 0
    made.capture_wanted()
    assert made.captured == [16, PLAIN]
    assert made.size_for(2) == 16
    assert made.wanted_seconds == 0.01


def test_a_graph_is_put_off_a_few_times_only(made: MadeGraphs) -> None:
    """One short job after the other never has time for it."""
    assert made.size_for(9) == 16
    for _ in range(3):
        assert made.size_for(2) == 16
        made.forget_wanted()
    assert made.size_for(2) == 2
    assert made.size_for(8) == 16  # others can wait again
    assert made.wanted_seconds == 0.01


def test_graphs_that_fail_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no captures today")

    runner: Any = LocalRunner.__new__(LocalRunner)
    written: list[Any] = []
    runner._rows = SimpleNamespace(
        extras=SimpleNamespace(are_late=lambda _: False),
        hides_stops=lambda _: False,
        write_pages=written.append,
    )
    runner._quarantine = Quarantine(runner._rows, torch.device("cpu"))
    failing: Any = SimpleNamespace(
        decodes=SimpleNamespace(replay=fail, wanted_seconds=1.0, rehearse_wanted=fail, capture_wanted=fail)
    )
    runner._graphs = GraphSets(
        lambda: failing,
        fail,
        Lanes(torch.device("cpu"), None),
        has_room=lambda: True,
        tell=runner._tell_of_graphs,
    )
    plan = SimpleNamespace(slots=[0], num_decodes=1, lane=Lane.WHOLE)
    with caplog.at_level("WARNING", "tokenmill"):
        for _ in range(2):
            assert runner._try_replay(plan) is None
        runner.rehearse()
        runner.prepare()
    assert written == [plan, plan]  # for the step that is launched instead
    (record,) = caplog.records
    assert "launched kernel by kernel" in record.message
    assert "no captures today" in record.message


def test_several_graphs_may_be_put_off(made: MadeGraphs) -> None:
    """Each is captured when there is time for it, one after the other."""
    made._most_wanted = 3
    assert [made.size_for(rows) for rows in (9, 2, 4, 1)] == [16] * 4
    while made.wanted_seconds:
        made.rehearse_wanted()
        made.capture_wanted()
    sizes = [each for each in made.captured if isinstance(each, int)]
    assert sizes == [16, 2, 4, 1]
    assert [made.size_for(rows) for rows in (2, 4, 1)] == [2, 4, 1]


def test_what_is_captured_at_once_is_not_wanted_any_more(made: MadeGraphs) -> None:
    made._most_wanted = 3
    assert [made.size_for(rows) for rows in (9, 2)] == [16, 16]
    made._policy._padding_seconds = 1.0  # a late step, for which there will not be more time
    assert made.size_for(2, None) == 2
    assert made.wanted_seconds == 0


def test_graphs_are_there_before_they_are_wanted(made: MadeGraphs) -> None:
    """The most useful ones first. What was wanted meanwhile is no more."""
    assert made.size_for(9) == 16
    assert made.size_for(2) == 16
    assert made.wanted_seconds == 0.01
    while (size := made.next_size(16)) is not None:
        made.capture_size(size)
    assert made.captured == [16, PLAIN, 8, PLAIN, 4, PLAIN, 2, PLAIN, 1, PLAIN]
    assert made.are_ready(16)
    assert not made.are_ready(17)
    assert made.wanted_seconds == 0
    assert [made.size_for(rows) for rows in (1, 2, 3, 5, 9)] == [1, 2, 4, 8, 16]
    assert len(made.captured) == 10


def test_without_memory_no_more_graphs_are_made_ready(made: MadeGraphs) -> None:
    size = made.next_size(64)
    assert size == 64
    made.capture_size(size)
    assert made.next_size(64) is None
    assert not made.are_ready(1)


def test_graphs_for_any_length_serve_rows_that_read_few_keys(
    made: MadeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[StepKind] = []
    monkeypatch.setattr(graphs, "step_kind", lambda *_: StepKind(longest=512, max_pieces=3))
    monkeypatch.setattr(made, "_graph", lambda num_rows, kind, needs: asked.append(kind))
    for for_any_length in (False, True):
        monkeypatch.setattr(made, "_for_any_length", for_any_length)
        assert made.replay(SimpleNamespace(slots=[0]), late=True) is None  # type: ignore[arg-type]
    assert asked == [StepKind(longest=512, max_pieces=3), StepKind(longest=None, max_pieces=3)]


def test_graphs_for_any_length_stand_in_for_others(made: MadeGraphs) -> None:
    """Until there is time to capture those, or has not been for long."""
    made.capture_size(16)
    made.capture_size(4)
    assert [made.size_for(3, kind=SHORT) for _ in range(3)] == [4, 4, 4]
    assert made.wanted_seconds > 0
    made.capture_wanted()
    assert made.size_for(3, kind=SHORT) == 4
    assert made.captured == [16, PLAIN, 4, PLAIN, 4, PLAIN]
    for _ in range(3):
        assert made.size_for(9, kind=SHORT) == 16
        made.forget_wanted()
    assert made.captured[6:] == []
    assert made.size_for(9, kind=SHORT) == 16
    assert made.captured[6:] == [16, PLAIN]


def test_graphs_for_any_length_serve_where_no_others_can_be_had(made: MadeGraphs) -> None:
    made.capture_size(16)
    made.capture_size(32)  # there is no memory
    assert made.size_for(3, kind=SHORT) == 16
    assert made.size_for(20, kind=SHORT) is None
    assert made.captured == [16, PLAIN]


def test_late_steps_wait_for_no_graph(made: MadeGraphs) -> None:
    """Nothing can be launched before they are drawn, so there will not be more time than now."""
    assert [made.size_for(rows, None) for rows in (9, 2)] == [16, 2]


def test_a_wanted_graph_for_which_there_is_no_memory(made: MadeGraphs) -> None:
    made.size_for(9)
    made._wanted[24, KIND] = PLAIN
    made.rehearse_wanted()
    made.capture_wanted()
    assert made.wanted_seconds == 0
    assert [made.size_for(rows) for rows in (2, 2, 2)] == [16, 16, 16]


def test_one_forward_pass_has_several_ends(made: MadeGraphs) -> None:
    assert [made.size_for(9, needs) for needs in (PLAIN, None, FILTERED, PLAIN)] == [16, 16, 16, 16]
    assert made.captured == [16, PLAIN, "logits", FILTERED]


def test_without_memory_for_an_end_a_larger_graph_that_has_it_serves(made: MadeGraphs) -> None:
    assert [made.size_for(9), made.size_for(9, FILTERED), made.size_for(2), made.size_for(2)] == [
        16,
        16,
        16,
        2,
    ]
    assert made.size_for(2, PENALIZED) is None
    assert made.size_for(2, FILTERED) == 16
    assert made.size_for(2) == 2


def test_a_step_is_not_kept_where_there_is_no_memory_for_its_end(made: MadeGraphs) -> None:
    made.size_for(9)
    made._wanted[2, KIND] = PENALIZED
    made.capture_wanted()
    assert made.size_for(2) == 16


PROMPTS = [[3, 5, 8], [7], [2, 200, 31, 4], [9, 9], [100]]
# Rows that draw in the same way, then in other ways; the last two kinds are drawn late.
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.3, "sampling_seed": 5},
    {"temperature": 1.1, "top_p": 0.7, "sampling_seed": 6},
    {"temperature": 0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 0, "logit_bias": {"7": 2.0}},
    {"temperature": 0, "min_new_tokens": 4, "stop_token_ids": list(range(0, 256, 2)), "ignore_eos": False},
    {"temperature": 0.8, "sampling_seed": 7, "custom_params": {"token_ids": [3, 5, 8]}},
]
ALL_WAYS, FEW_WAYS = [*WAYS, WAYS[0]], [WAYS[0], WAYS[2]]


def run(folder: Path, ways: Sequence[dict[str, Any]] = ALL_WAYS, **settings: Any) -> list[Any]:
    """Ids and log-probabilities: each way to draw by itself, then rows of all ways side by side."""
    arguments = {"dtype": "float32", "device": "cpu", "max_running_requests": 8, **settings}
    plain = {"max_new_tokens": 5, "ignore_eos": True}
    found: list[Any] = []
    with sgl.Engine(model_path=str(folder), **arguments) as engine:
        for chosen in ([each] * 3 for each in ways):
            found += generate(engine, [{**plain, **each} for each in chosen], shown=[False] * 3)
        found += generate(engine, [{**plain, **each} for each in WAYS], shown=[True, False] * 3 + [True])
    return found


@cache
def plain(folder: Path, *, few: bool = False) -> list[Any]:
    """The same by plain steps."""
    return run(folder, FEW_WAYS if few else ALL_WAYS, disable_cuda_graph=True)


def generate(engine: sgl.Engine, params: list[dict[str, Any]], shown: list[bool]) -> list[Any]:
    processors = ["allowed_tokens" if "custom_params" in each else None for each in params]
    results = engine.generate(
        input_ids=[PROMPTS[index % len(PROMPTS)] for index in range(len(params))],
        sampling_params=params,
        custom_logit_processor=processors if any(processors) else None,
        return_logprob=shown,
    )
    return [(each["output_ids"], each["meta_info"].get("output_token_logprobs")) for each in results]


def same(found: list[Any], expected: list[Any]) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, logprobs), (_, others) in zip(found, expected, strict=True):
        assert (logprobs is None) == (others is None)
        if logprobs:
            assert [each[0] for each in logprobs] == pytest.approx([each[0] for each in others], abs=1e-4)


def test_every_way_to_draw_gives_what_plain_steps_give(
    make_model: Callable[..., Path], graphs_on_the_cpu: GraphCalls
) -> None:
    folder, calls = make_model("qwen3", num_hidden_layers=1), graphs_on_the_cpu
    found = run(folder)
    forwards = [title for title in calls.captured if "rows, StepKind" in title]
    assert 0 < len(forwards) == len(set(forwards))  # however their tokens were drawn
    assert len(calls.captured_draws) > len(forwards)
    replayed = calls.replayed
    same(found, plain(folder))
    assert calls.replayed == replayed


def test_what_is_captured_ahead_draws_what_plain_steps_draw(
    make_model: Callable[..., Path],
    transformers_greedy: Callable[..., list[int]],
    graphs_on_the_cpu: GraphCalls,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While prompts are computed, and for all rows that are going to decode."""
    folder, calls = make_model("qwen3", num_hidden_layers=1), graphs_on_the_cpu
    calls.captures_ahead = True
    # Here nothing takes what a step has made to the host before the next one makes the same.
    monkeypatch.setattr(prompt_graphs.PromptGraphs, "replay", lambda *_, **__: None)
    prompts = [[at, *range(20 * at, 20 * at + 19)] for at in (1, 2, 3)]
    with sgl.Engine(
        model_path=str(folder),
        dtype="float32",
        device="cpu",
        steps_in_flight=2,
        max_running_requests=4,
        chunked_prefill_size=16,
    ) as engine:
        results = engine.generate(
            input_ids=prompts, sampling_params={"max_new_tokens": 18, "ignore_eos": True, "temperature": 0}
        )
    captured = [title.split()[0] for title in calls.captured if "rows, StepKind(longest=None" in title]
    assert captured == ["4", "2", "1"]
    assert calls.replayed > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result["output_ids"] == transformers_greedy(folder, prompt, 18)


def test_steps_whose_graph_cannot_be_launched_are_plain(
    make_model: Callable[..., Path], graphs_on_the_cpu: GraphCalls
) -> None:
    """Those behind them take their own inputs, and give their own tokens."""
    folder, calls = make_model("qwen3", num_hidden_layers=1), graphs_on_the_cpu
    calls.failing = frozenset({2, 3, 6, 9})
    found = run(folder, FEW_WAYS)
    assert calls.replayed > 12
    same(found, plain(folder, few=True))


def test_a_draw_that_cannot_be_captured_takes_no_letter_of_others(
    make_model: Callable[..., Path], graphs_on_the_cpu: GraphCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind layers that are captured already: their run for the spare row cannot be launched."""
    folder, calls = make_model("qwen3", num_hidden_layers=1), graphs_on_the_cpu
    capture = graphs.DecodeGraphs._capture_draw

    def fail_once(self: Any, captured: Any, needs: SamplingNeeds) -> Any:
        if not calls.failing and captured in self._graphs.values():
            calls.failing = frozenset({calls.replayed + 1})
        return capture(self, captured, needs)

    monkeypatch.setattr(graphs.DecodeGraphs, "_capture_draw", fail_once)
    found = run(folder, FEW_WAYS)
    assert calls.failing
    same(found, plain(folder, few=True))


def test_as_many_steps_in_flight_as_there_can_be(
    make_model: Callable[..., Path], graphs_on_the_cpu: GraphCalls
) -> None:
    """None takes the letter, or reads the answer, of another, though spare rows take some between them."""
    folder = make_model("qwen3", num_hidden_layers=1)
    params = [{"max_new_tokens": count, "ignore_eos": True, "sampling_seed": count} for count in (72, 66, 9)]

    def tokens(**settings: Any) -> list[list[int]]:
        with sgl.Engine(
            model_path=str(folder), dtype="float32", device="cpu", max_running_requests=4, **settings
        ) as engine:
            outputs = engine.generate(input_ids=[[5, 6, 7], [9, 8], [4] * 20], sampling_params=params)
            return [each["output_ids"] for each in outputs]

    found = tokens(steps_in_flight=MOST_STEPS_IN_FLIGHT)
    assert graphs_on_the_cpu.replayed > 60
    assert found == tokens(disable_cuda_graph=True)


@pytest.mark.parametrize("title", ["the draw", "the logits"])
def test_without_memory_for_an_end_steps_are_plain(
    make_model: Callable[..., Path],
    graphs_on_the_cpu: GraphCalls,
    caplog: pytest.LogCaptureFixture,
    title: str,
) -> None:
    folder = make_model("qwen3", num_hidden_layers=1)
    graphs_on_the_cpu.full_for = title
    with caplog.at_level("WARNING", "tokenmill"):
        found = run(folder, FEW_WAYS, log_level="warning")
    told = [each for each in caplog.messages if "no memory is left to capture" in each and "rows" in each]
    assert len(told) == 1
    same(found, plain(folder, few=True))
