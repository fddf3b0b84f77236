"""Steps of one row on a CPU, recorded once and replayed, give what the same steps give call by call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenmill as sgl
from tokenmill.kernels import native, packed
from tokenmill.layers.linear import Linear, PackedLinear, can_pack
from tokenmill.runner.few_rows import FewRows
from tokenmill.runner.weights import Weights

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(native.library(torch.bfloat16) is None, reason="there is no C compiler"),
    pytest.mark.skipif(
        not can_pack(torch.bfloat16, torch.device("cpu")), reason="this machine does not pack bfloat16"
    ),
]
Make = Callable[..., Path]
# Large enough that every weight is streamed for one row.
SIZES = {
    "hidden_size": 768,
    "intermediate_size": 832,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 48},
}
PROMPT = list(range(3, 40))


def arguments(num_tokens: int, **more: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, **more}


def told(result: dict[str, Any]) -> tuple[list[int], list[float]]:
    logprobs = [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]
    return result["output_ids"], logprobs


def engine(folder: Path, dtype: str = "bfloat16") -> sgl.Engine:
    return sgl.Engine(model_path=str(folder), device="cpu", dtype=dtype, max_total_tokens=2048, page_size=16)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each pass was recorded or replayed."""
    seen: list[bool] = []
    forward = FewRows.forward

    def watched(self: FewRows, *given: Any) -> torch.Tensor | None:
        made = forward(self, *given)
        seen.append(made is not None)
        return made

    monkeypatch.setattr(FewRows, "forward", watched)
    return seen


def call_by_call(
    monkeypatch: pytest.MonkeyPatch, folder: Path, dtype: str = "bfloat16", **given: Any
) -> dict[str, Any]:
    with monkeypatch.context() as patch:
        patch.setattr(FewRows, "forward", lambda *_: None)
        with engine(folder, dtype) as llm:
            return llm.generate(**given)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, "bfloat16") for family in FAMILIES), ("llama", "float32"), ("qwen3", "float32")],
)
def test_tokens_and_logprobs_are_those_of_the_calls(
    family: str, dtype: str, make_model: Make, monkeypatch: pytest.MonkeyPatch, replays: list[bool]
) -> None:
    """Long enough for the recorded page table to become too narrow twice."""
    folder = make_model(family, dtype="bfloat16", **SIZES, **FAMILIES[family])
    expected = call_by_call(monkeypatch, folder, dtype, **arguments(160))
    with engine(folder, dtype) as llm:
        assert told(llm.generate(**arguments(160))) == told(expected)
        if is_streamed(getattr(torch, dtype)):
            assert sum(replays) >= 159
        llm.flush_cache()
        assert told(llm.generate(**arguments(160))) == told(expected), "with another page table"


def is_streamed(dtype: torch.dtype) -> bool:
    """Whether this machine has a kernel of ours for one row and weights like these, which are bfloat16."""
    plain = Linear(768, 1280, bias=False, dtype=dtype)
    plain.weight.copy_(torch.randn(1280, 768).bfloat16())
    layer = PackedLinear(plain)
    return layer._narrow is not None or layer._columns is not None


def test_rows_that_come_and_go(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is alone, then in company, then alone again; its hidden states are its own."""
    folder = make_model("qwen3", dtype="bfloat16", **SIZES)
    prompts = [PROMPT, PROMPT[::-1], PROMPT[5:]]
    params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in (40, 9, 20)]
    given: dict[str, Any] = {
        "input_ids": prompts, "sampling_params": params, "return_hidden_states": True,
    }  # fmt: skip
    expected = call_by_call(monkeypatch, folder, **given)
    with engine(folder) as llm:
        made = llm.generate(**given)
    assert made["output_ids"] == expected["output_ids"]
    for row in range(3):
        ours, theirs = (each[row]["meta_info"]["hidden_states"] for each in (made, expected))
        assert ours == theirs


@pytest.mark.skipif(not packed.multiplies_any_rows(), reason="small weights are oneDNN's on this machine")
def test_many_rows_with_small_weights_get_what_each_gets_alone(replays: list[bool]) -> None:
    """To the bit, recorded (60 rows) or not (70); oneDNN would cut their sums by how many they are."""
    prompts = [[7 * row + 1, *range(row, row + row % 9)] for row in range(70)]
    given: dict[str, Any] = {"sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}}
    with sgl.Engine(
        model_path="tiny", device="cpu", dtype="bfloat16", disable_radix_cache=True, max_running_requests=70
    ) as llm:

        def outputs(some: list[list[int]]) -> list[Any]:
            return [told(each) for each in llm.generate(input_ids=some, return_logprob=True, **given)]

        alone = [outputs([prompt])[0] for prompt in prompts[:12]]
        replays.clear()
        sixty = outputs(prompts[:60])
        assert sum(replays) >= 4
        replays.clear()
        assert outputs(prompts)[:60] == sixty
        assert not any(replays)
    assert sixty[:12] == alone


def test_new_weights_are_used(make_model: Make) -> None:
    old = make_model("llama", dtype="bfloat16", **SIZES)
    name = "model.layers.1.mlp.down_proj.weight"
    other = torch.randn(768, 832, generator=torch.Generator().manual_seed(3)).bfloat16()
    with engine(old) as llm:
        before = told(llm.generate(**arguments(12)))
        assert llm.get_weights_by_name(name) is not None
        assert told(llm.generate(**arguments(12))) == before
        llm.update_weights_from_tensor([(name, other)])
        llm.flush_cache()
        changed = told(llm.generate(**arguments(12)))
        assert changed != before
    with engine(old) as llm:
        llm.update_weights_from_tensor([(name, other)])
        assert told(llm.generate(**arguments(12))) == changed


def test_an_update_begins_without_recorded_steps(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold every weight that they read, so both models would be in memory until the end."""
    recorded: list[int] = []
    update = Weights.update_from_disk

    def watched(self: Weights, **given: Any) -> Any:
        recorded.append(num_recorded())
        return update(self, **given)

    def all_passes() -> list[FewRows]:
        return [each for each in gc.get_objects() if type(each) is FewRows]

    others = all_passes()  # of engines that other tests left running

    def num_recorded() -> int:
        return sum(len(each._recorded) for each in all_passes() if not any(each is other for other in others))

    monkeypatch.setattr(Weights, "update_from_disk", watched)
    folder = make_model("llama", dtype="bfloat16", **SIZES)
    with engine(folder) as llm:
        llm.generate(**arguments(8))
        assert num_recorded() == int(is_streamed(torch.bfloat16))
        assert llm.update_weights_from_disk(str(folder))[0]
    assert recorded == [0]


def test_memory_given_back_and_taken_again(make_model: Make) -> None:
    with engine(make_model("llama", dtype="bfloat16", **SIZES)) as llm:
        before = told(llm.generate(**arguments(12)))
        llm.release_memory_occupation()
        llm.resume_memory_occupation()
        assert told(llm.generate(**arguments(12))) == before


@pytest.mark.skipif(packed.has_bfloat16(), reason="oneDNN computes with what others are packed for here")
def test_steps_are_recorded_again_after_weights_that_cannot_be(make_model: Make, replays: list[bool]) -> None:
    """Numbers of float32 are oneDNN's, which is not recorded."""
    name = "model.layers.1.mlp.down_proj.weight"
    with engine(make_model("llama", dtype="bfloat16", **SIZES), dtype="float32") as llm:
        for weight, is_recorded in ((torch.rand(768, 832), False), (torch.ones(768, 832), True)):
            assert llm.update_weights_from_tensor([(name, weight)])[0]
            replays.clear()
            llm.generate(**arguments(8))
            assert any(replays) is is_recorded


def test_a_model_that_cannot_be_recorded_runs_as_ever(make_model: Make, replays: list[bool]) -> None:
    """Products with weights of float32 are oneDNN's, and small ones of bfloat16 where ours are slower."""
    is_onednn = packed.has_bfloat16() and not packed.multiplies_any_rows()
    small = {"dtype": "bfloat16" if is_onednn else "float32"}
    for settings in (small, {"dtype": "float32", **SIZES}):
        with sgl.Engine(
            model_path=str(make_model("llama", **settings)),
            device="cpu",
            dtype=settings["dtype"],
            max_total_tokens=512,
        ) as llm:
            assert len(llm.generate(**arguments(8))["output_ids"]) == 8
    assert not any(replays)
