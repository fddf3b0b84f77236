"""Ready-made logit processors on plain tensors, the ways to name a processor, and some in the engine."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as sgl
from tokenmill.logit_processors import (
    AllowedTokens,
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DeepSeekR1ThinkingBudgetLogitProcessor,
    DisallowedTokensLogitsProcessor,
    ForbiddenTokens,
    Glm4MoeThinkingBudgetLogitProcessor,
    NoRepeatNgram,
    Qwen3ThinkingBudgetLogitProcessor,
    ThinkingBudget,
    register_logit_processor,
    resolve_processor,
)

pytestmark = pytest.mark.cpu

VOCAB = 12


def row(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> dict[str, Any]:
    return {**params, "__req__": SimpleNamespace(origin_input_ids=prompt or [], output_ids=output or [])}


def left_of(processor: Any, rows: list[dict[str, Any]]) -> list[set[int]]:
    """The tokens of each row that are still possible; logits that are left are as they were."""
    logits = torch.randn(len(rows), VOCAB)
    before = logits.clone()
    after = processor(logits, rows)
    assert after.shape == before.shape
    possible = after > float("-inf")
    assert torch.equal(after[possible], before[possible]) or isinstance(processor, ThinkingBudget)
    return [set(torch.nonzero(each).flatten().tolist()) for each in possible]


# ── ready-made ──


@settings(max_examples=50, deadline=None)
@given(lists=st.lists(st.lists(st.integers(0, VOCAB - 1)), min_size=1, max_size=4))
def test_allowed_and_forbidden_tokens(lists: list[list[int]]) -> None:
    rows = [row(token_ids=ids) for ids in lists]
    everything = set(range(VOCAB))
    assert left_of(AllowedTokens(), rows) == [set(ids) for ids in lists]
    assert left_of(ForbiddenTokens(), rows) == [everything - set(ids) for ids in lists]


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=14),
    cut=st.integers(0, 14),
    size=st.integers(1, 4),
    window=st.none() | st.integers(1, 16),
    kept=st.sets(st.integers(0, 3)),
)
def test_no_token_completes_a_run_that_was_there(
    tokens: list[int], cut: int, size: int, window: int | None, kept: set[int]
) -> None:
    seen = tokens[-window:] if window else tokens
    runs = {tuple(seen[i : i + size]) for i in range(len(seen) - size + 1)}
    expected = {
        token
        for token in range(VOCAB)
        if token in kept or (*seen[len(seen) - size + 1 :], token)[-size:] not in runs
    }
    params = {"ngram_size": size, "window_size": window, "whitelist_token_ids": sorted(kept)}
    assert left_of(NoRepeatNgram(), [row(tokens[:cut], tokens[cut:], **params)]) == [expected]


def test_thinking_ends_when_its_budget_is_spent() -> None:
    markers = {"start_token_id": 8, "end_token_id": 9}
    everything = set(range(VOCAB))

    def left(prompt: list[int], output: list[int], budget: int, **more: int) -> set[int]:
        request = row(prompt, output, thinking_budget=budget, **markers, **more)
        (possible,) = left_of(ThinkingBudget(), [request])
        return possible

    assert left([1], [2, 3], 0) == everything  # no thought has begun
    assert left([1], [8, 3], 2) == everything
    assert left([1], [8, 3, 4], 2) == {9}
    assert left([1, 8], [3, 4], 2) == {9}  # it begins in the prompt
    assert left([1], [8, 3, 4, 9, 5, 5, 5], 2) == everything
    assert left([8, 3, 9, 1], [8, 4, 4], 2) == {9}  # the thought of an earlier turn is over
    assert left([1], [8, 3, 4], 2, newline_token_id=7) == {7}
    assert left([1], [8, 3, 4, 7], 2, newline_token_id=7) == {9}


def test_thinking_markers_as_attributes_of_a_class() -> None:
    class Mine(ThinkingBudget):
        THINKING_START_TOKEN_ID = 8
        THINKING_END_TOKEN_ID = 9

    rows = [row([8], [1], thinking_budget=1), row([8], [1], thinking_budget=5)]
    assert left_of(Mine(), rows) == [{9}, set(range(VOCAB))]


@pytest.mark.parametrize(
    ("processor", "start", "end", "newline"),
    [
        (Qwen3ThinkingBudgetLogitProcessor, 151667, 151668, 198),
        (DeepSeekR1ThinkingBudgetLogitProcessor, 128798, 128799, 201),
        (Glm4MoeThinkingBudgetLogitProcessor, 151350, 151351, 198),
    ],
)
def test_thinking_budgets_by_sglangs_names(processor: Any, start: int, end: int, newline: int) -> None:
    rows = [
        row([1, start], [5, 6], thinking_budget=2),
        row([1, start], [5, 6, newline], thinking_budget=2),
        row([1, start], [5, 6, newline, end, 7], thinking_budget=2),
    ]
    logits = processor()(torch.zeros(3, 152_000), rows)
    assert (logits > float("-inf")).sum(1).tolist() == [1, 1, 152_000]
    assert logits[:2].argmax(1).tolist() == [newline, end]


def test_other_processors_by_sglangs_names(llm: sgl.Engine) -> None:
    prompt, limits = "The capital of France is", {"temperature": 0, "max_new_tokens": 3}
    usual = llm.generate(prompt, limits)["output_ids"]
    output = llm.generate(
        prompt,
        {**limits, "custom_params": {"token_ids": usual[:1]}},
        custom_logit_processor=DisallowedTokensLogitsProcessor.to_str(),
    )
    assert usual[0] not in output["output_ids"]
    repeating = row([1, 2, 3, 1, 2], ngram_size=3, window_size=9)
    assert left_of(DeepseekOCRNoRepeatNGramLogitProcessor(), [repeating]) == [set(range(VOCAB)) - {3}]


@pytest.mark.parametrize(
    ("processor", "params", "complaint"),
    [
        (ForbiddenTokens, {}, "custom_params has no 'token_ids'"),
        (AllowedTokens, {"token_ids": 5}, "token_ids must be a list"),
        (AllowedTokens, {"token_ids": [1, VOCAB]}, r"token_ids\[1\] must be between 0 and 11, got 12"),
        (ForbiddenTokens, {"token_ids": [-1]}, r"token_ids\[0\] must be between"),
        (NoRepeatNgram, {}, "no 'ngram_size'"),
        (NoRepeatNgram, {"ngram_size": 0}, "ngram_size must be at least 1"),
        (ThinkingBudget, {"thinking_budget": 3}, "no 'start_token_id'"),
    ],
)
def test_params_that_a_processor_cannot_use(processor: Any, params: dict[str, Any], complaint: str) -> None:
    with pytest.raises(sgl.InvalidArgument, match=complaint):
        processor()(torch.zeros(1, VOCAB), [row([1], [2], **params)])


def test_params_that_a_processor_cannot_use_are_the_fault_of_their_row(llm: sgl.Engine) -> None:
    good, bad = {"max_new_tokens": 2}, {"max_new_tokens": 2, "custom_params": {"token_ids": [10**6]}}
    call = partial(llm.generate, ["The cat"] * 2, [good, bad], custom_logit_processor=[None, AllowedTokens])
    with pytest.raises(ValueError, match=r"token_ids\[0\] must be between 0 and"):
        call()
    fine, failed = call(on_error="return")
    assert fine["error"] is None
    assert (failed["error"]["type"], failed["error"]["status_code"]) == ("bad_parameters", 400)


# ── naming one ──


class Nothing(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any) -> Any:
        return logits


def plain_function(logits: Any, custom_param_list: Any) -> Any:
    return logits


def test_the_same_value_is_the_same_processor() -> None:
    resolve = partial(resolve_processor, "custom_logit_processor")
    instance = Nothing()
    for value in (Nothing, instance, plain_function, Nothing.to_str(), "forbidden_tokens"):
        assert resolve(value) is resolve(value)
    values = (Nothing, instance, plain_function, Nothing.to_str(), "forbidden_tokens")
    assert len({resolve(value).key for value in values}) == len(values)
    assert isinstance(resolve(Nothing).call, Nothing)
    assert resolve(instance).call is instance
    register_logit_processor("mine", plain_function)
    assert resolve("mine") is resolve(plain_function)


def test_a_class_as_text() -> None:
    text = ForbiddenTokens.to_str()
    assert bytes.fromhex(json.loads(text)["callable"])
    assert left_of(CustomLogitProcessor.from_str(text), [row(token_ids=[3])]) == [set(range(VOCAB)) - {3}]

    class Local(CustomLogitProcessor):  # dill writes out what no module has
        def __call__(self, logits: Any, custom_param_list: Any) -> Any:
            return logits + 1

    read = resolve_processor("custom_logit_processor", Local.to_str())
    assert read(torch.zeros(1, 2), [{}]).tolist() == [[1, 1]]


def test_texts_that_sglang_wrote_are_read_without_it(tmp_path: Path) -> None:
    folder = tmp_path / "sglang" / "srt" / "sampling"
    folder.mkdir(parents=True)
    (folder / "custom_logit_processor.py").write_text(
        "class CustomLogitProcessor: pass\n"
        "class DisallowedTokensLogitsProcessor(CustomLogitProcessor): pass\n"
        "class Newer(CustomLogitProcessor): pass\n"
    )
    program = (
        "import dill, json\n"
        "from sglang.srt.sampling.custom_logit_processor import *\n"
        "class Mine(CustomLogitProcessor):\n"
        "    def __call__(self, logits, custom_param_list=None):\n"
        "        return logits + 1\n"
        "classes = [DisallowedTokensLogitsProcessor, Mine, Newer]\n"
        "print(json.dumps([json.dumps({'callable': dill.dumps(each).hex()}) for each in classes]))\n"
    )
    written = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=True)
    disallowed, mine, newer = json.loads(written.stdout)
    assert left_of(resolve_processor("p", disallowed), [row(token_ids=[3])]) == [set(range(VOCAB)) - {3}]
    assert resolve_processor("p", mine)(torch.zeros(1, 2), [{}]).tolist() == [[1, 1]]
    with pytest.raises(sgl.InvalidArgument, match="No module named 'sglang'"):
        resolve_processor("p", newer)


class NeedsAnArgument:
    def __init__(self, argument: int) -> None:
        self.argument = argument


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("forbiden_tokens", "neither a registered logit processor.*Did you mean 'forbidden_tokens'"),
        ("", "neither a registered"),
        ("{}", r"must be the text of to_str\(\)"),
        ('{"callable": "zz"}', r"must be the text of to_str\(\)"),
        ('{"callable": 5}', r"must be the text of to_str\(\)"),
        ('{"callable": "8004"}', "the class in the text cannot be loaded"),
        (5, "must be a callable, a class of such, a registered name"),
        (NeedsAnArgument, r"NeedsAnArgument\(\) fails.*give an instance"),
        (object, "must be a callable"),
        (lambda logits: logits, "cannot be called as processor"),
    ],
)
def test_what_is_no_processor(value: Any, complaint: str) -> None:
    with pytest.raises(sgl.InvalidArgument, match=complaint) as caught:
        resolve_processor("custom_logit_processor", value)
    assert "custom_logit_processor" in str(caught.value)


def test_without_dill_text_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Nothing.to_str()
    monkeypatch.setitem(sys.modules, "dill", None)
    for use in (Nothing.to_str, lambda: CustomLogitProcessor.from_str(text)):
        with pytest.raises(sgl.InvalidArgument, match=r"tokenmill\[processors\]"):
            use()


def test_it_crosses_to_another_process() -> None:
    """There it is one object however many requests carry it."""
    processor = resolve_processor("custom_logit_processor", ForbiddenTokens)
    code = (
        "import pickle, sys; from tokenmill.logit_processors import ForbiddenTokens;"
        "a, b = (pickle.loads(bytes.fromhex(line)) for line in sys.stdin);"
        "print(a is b, a.key, type(a.call) is ForbiddenTokens)"
    )
    lines = "\n".join(pickle.dumps(processor).hex() for _ in range(2))
    done = subprocess.run(
        [sys.executable, "-c", code], input=lines, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", processor.key, "True"]
    processor.check_crosses("custom_logit_processor")


def test_what_cannot_cross_says_why() -> None:
    stuck = Nothing()
    stuck.stream = (number for number in range(3))  # type: ignore[attr-defined]
    with pytest.raises(sgl.InvalidArgument, match=r"custom_logit_processor.*cannot be pickled.*core_process"):
        resolve_processor("custom_logit_processor", stuck).check_crosses("custom_logit_processor")


# ── in the engine ──


@pytest.fixture(scope="module")
def llm() -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path="tiny", enable_custom_logit_processor=True) as engine:
        yield engine


def test_a_forbidden_token_never_comes(llm: sgl.Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 8}
    prompts = ["The capital of France is", "The capital of Italy is"]
    plain = llm.generate(prompts, params)
    banned = plain[0]["output_ids"][:1]
    limited = {**params, "custom_params": {"token_ids": banned}}
    outputs = llm.generate(
        prompts, [limited, params], custom_logit_processor=["forbidden_tokens", None], return_logprob=True
    )
    assert plain[0]["output_ids"][0] == banned[0]
    assert banned[0] not in outputs[0]["output_ids"]
    assert outputs[1]["output_ids"] == plain[1]["output_ids"]
    streamed = llm.generate(prompts[0], limited, custom_logit_processor=ForbiddenTokens.to_str(), stream=True)
    assert "".join(chunk["text"] for chunk in streamed) == outputs[0]["text"]


def test_a_processor_sees_its_rows_and_their_requests(llm: sgl.Engine) -> None:
    """Each row is forced along a list of its own; all rows of a step come in one call."""
    calls: list[int] = []

    def follow(logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        assert logits.dtype == torch.float32
        calls.append(len(custom_param_list))
        for logits_V, params in zip(logits, custom_param_list, strict=True):
            wanted = params["path"][len(params["__req__"].output_ids)]
            logits_V[:] = float("-inf")
            logits_V[wanted] = 0
        return logits

    paths = [[40 + row, 50 + row, 60 + row] for row in range(4)]
    outputs = llm.generate(
        input_ids=[[5, 6]] * 4,
        sampling_params=[
            {"max_new_tokens": 3, "ignore_eos": True, "custom_params": {"path": p}} for p in paths
        ],
        custom_logit_processor=follow,
    )
    assert outputs["output_ids"] == paths
    assert max(calls) == 4


def test_a_processor_knows_requests_by_the_ids_of_their_results(llm: sgl.Engine) -> None:
    seen: set[str] = set()

    def note(logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        seen.update(params["__req__"].rid for params in custom_param_list)
        return logits

    params = {"max_new_tokens": 2, "n": 2}
    named = llm.generate(["a", "b"], params, rid=["mine", "yours"], custom_logit_processor=note)
    unnamed = llm.generate("a", params, custom_logit_processor=note)
    iterated = llm.iter([{"prompt": "a", "rid": "theirs"}], params, custom_logit_processor=note)
    assert seen == {result["meta_info"]["id"] for result in [*named, *unnamed, *iterated]}


def test_what_must_not_be_drawn_cannot_be_brought_back(llm: sgl.Engine) -> None:
    """Neither what a grammar forbids, nor ends of the text that come too early."""
    end = llm.get_tokenizer().eos_token_id

    def overwrite(logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        logits[:] = 0
        logits[:, end] = 50
        return logits

    def force(logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        logits[:] = float("-inf")
        logits[:, end] = 0
        return logits

    params = [{"regex": "[ab]{9}", "sampling_seed": 1}, {"min_new_tokens": 5}]
    drawn, long = llm.generate(["x", "y"], params, custom_logit_processor=overwrite)
    assert re.fullmatch("[ab]{9}", drawn["text"])
    assert len(long["output_ids"]) == 6
    for result in llm.generate(["x", "y"], params, custom_logit_processor=force, on_error="return"):
        assert "a grammar and min_new_tokens leave" in result["error"]["message"]


def test_logits_of_another_shape_are_told(llm: sgl.Engine) -> None:
    """Also where a processor has changed what it was given."""

    def resize(logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        return logits.resize_(1)

    params = {"max_new_tokens": 2}
    result = llm.generate("a", params, custom_logit_processor=resize, on_error="return")
    assert "it must return logits of shape (1, " in result["error"]["message"]


def test_a_failing_row_fails_alone(llm: sgl.Engine) -> None:
    """Its neighbour in the same call of the processor goes on."""
    good = {"max_new_tokens": 4, "custom_params": {"token_ids": [1]}}
    bad = {"max_new_tokens": 4, "custom_params": {"token_ids": [10**6]}}
    ends = {}
    for chunk in llm.generate(
        ["a", "b"], [good, bad], custom_logit_processor="forbidden_tokens", stream=True
    ):
        ends[chunk["index"]] = chunk["meta_info"]["finish_reason"]
    assert ends[0]["type"] in ("length", "stop")
    assert ends[1]["type"] == "abort"
    assert "token_ids[0] must be between 0" in ends[1]["message"]


def test_mistakes_are_told_before_any_work(llm: sgl.Engine) -> None:
    with pytest.raises(sgl.InvalidArgument, match=r"custom_logit_processor\[1\] is 'forbiden_tokens'"):
        llm.generate(["a", "b"], custom_logit_processor=[None, "forbiden_tokens"])


def test_with_the_core_in_a_process_of_its_own() -> None:
    with sgl.Engine(model_path="tiny", core_process=True) as engine:
        params = {"temperature": 0, "max_new_tokens": 4, "custom_params": {"token_ids": [70]}}
        outputs = engine.generate(["a", "b"], params, custom_logit_processor=AllowedTokens)
        assert outputs["output_ids"] == [[70] * 4] * 2
        stuck = Nothing()
        stuck.stream = (number for number in range(3))  # type: ignore[attr-defined]
        with pytest.raises(sgl.InvalidArgument, match="cannot be pickled"):
            engine.generate("a", custom_logit_processor=stuck)


SCRIPT = """
import beside
import tokenmill as sgl
from tokenmill.logit_processors import CustomLogitProcessor

FIRST = 70


class Counting(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        for row, params in enumerate(custom_param_list):
            logits[row] = float("-inf")
            logits[row, FIRST + len(params["__req__"].output_ids)] = 0
        return logits


if __name__ == "__main__":
    with sgl.Engine(model_path="tiny", core_process=True) as llm:
        params = {"max_new_tokens": 3, "ignore_eos": True}
        print(llm.generate(["a", "b"], params, custom_logit_processor=Counting)["output_ids"])
        print(llm.generate("a", params, custom_logit_processor=beside.Always)["output_ids"])
"""

BESIDE = """
from tokenmill.logit_processors import CustomLogitProcessor


class Always(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        logits[:, :80] = logits[:, 81:] = float("-inf")
        return logits
"""


def test_from_a_script_to_a_core_in_another_process(tmp_path: Path) -> None:
    """One class is there in the script only, with what it uses of it, the other in a module beside it.

    What lies in the current folder is nobody's, also if it has the name of a module of Python's.
    """
    script = tmp_path / "script" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT, encoding="utf-8")
    script.with_name("beside.py").write_text(BESIDE, encoding="utf-8")
    (tmp_path / "queue.py").write_text("raise RuntimeError")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(sgl.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split("\n")[0] == "[[70, 71, 72], [70, 71, 72]]", done.stderr
    assert done.stdout.split("\n")[1] == "[80, 80, 80]", done.stderr
