"""What callers' own objects do inside a step or a call: it fails one row or that call, never the engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tokenmill as sgl
from tokenmill.core import process

pytestmark = pytest.mark.cpu

GREEDY = {"max_new_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def llm() -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path="tiny") as engine:
        yield engine


@pytest.fixture(autouse=True)
def _still_answers(llm: sgl.Engine) -> Iterator[None]:
    before = llm.generate("The cat", GREEDY)["output_ids"]
    yield
    assert llm.generate("The cat", GREEDY)["output_ids"] == before


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __str__


def raiser(error: BaseException) -> Callable[..., Any]:
    def process(logits: Any, custom_param_list: Any) -> Any:
        raise error

    return process


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), Unspeakable(), ValueError("x" * 100_000)]
)
def test_a_processor_may_raise_anything(llm: sgl.Engine, error: BaseException) -> None:
    params = [GREEDY, GREEDY]
    processors = [raiser(error), None]
    with pytest.raises(sgl.RequestFailed, match="its logit processor failed") as caught:
        llm.generate(["The cat", "The cat"], params, custom_logit_processor=processors)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("output_before", [0, 1])
def test_a_stream_with_log_probabilities_tells_of_a_failed_row(llm: sgl.Engine, output_before: int) -> None:
    """The void token of the failed step has no log-probability to show."""

    def process(logits: Any, custom_param_list: Any) -> Any:
        if len(custom_param_list[0]["__req__"].output_ids) == output_before:
            raise ValueError("no more")
        return logits

    options: Any = {"return_logprob": True, "top_logprobs_num": 2}
    chunks = list(llm.generate("The cat", GREEDY, stream=True, custom_logit_processor=process, **options))
    assert chunks[-1]["meta_info"]["finish_reason"]["status_code"] == 500
    assert sum(len(chunk["output_ids"]) for chunk in chunks) == output_before
    assert sum(len(chunk["meta_info"]["output_token_logprobs"]) for chunk in chunks) == output_before


@pytest.mark.parametrize("name", ["generate", "flush_cache", "get_server_info"])
def test_a_processor_cannot_call_its_own_engine(llm: sgl.Engine, name: str) -> None:
    """It would wait for its own step to end."""
    arguments = ("The dog", GREEDY) if name == "generate" else ()

    def process(logits: Any, custom_param_list: Any) -> Any:
        getattr(llm, name)(*arguments)
        return logits

    with pytest.raises(sgl.RequestFailed, match="from inside a step"):
        llm.generate("The cat", GREEDY, custom_logit_processor=process)


def test_what_a_masked_array_hides_is_checked(llm: sgl.Engine) -> None:
    with pytest.raises(sgl.InvalidArgument, match=r"input_ids\[0\] is 1000000"):
        llm.generate(input_ids=np.ma.array([10**6, 5], mask=[True, True]))


@pytest.mark.parametrize("seconds", [1e10, 1e300])
def test_time_limits_longer_than_any_clock(llm: sgl.Engine, seconds: float) -> None:
    llm.generate("The cat", GREEDY, timeout=seconds)
    time.sleep(0.05)  # the loop goes to sleep until the deadline


class Leaves:
    """Looks like a sequence; whoever looks closer leaves the program."""

    def __len__(self) -> int:
        raise SystemExit(1)

    __getitem__ = __array__ = __len__


class Stubborn(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *arguments: Any, **keywords: Any) -> Any:
        raise KeyError("not me")


@pytest.mark.parametrize("value", [Leaves(), torch.zeros(3).as_subclass(Stubborn), "text", object()])
def test_objects_that_only_look_like_tensors(llm: sgl.Engine, value: Any) -> None:
    success, message = llm.update_weights_from_tensor([("model.norm.weight", value)])
    assert not success
    assert "model.norm.weight" in message


# ── before any work ──


class Broken:
    """Raises when it is looked at."""

    @property
    def __class__(self) -> Any:
        raise KeyError("what am I")

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise KeyError("what am I")

    def tolist(self) -> Any:
        raise RecursionError

    __len__ = __iter__ = __str__ = __repr__ = __fspath__ = __bool__ = tolist  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("prompt", lambda llm, value: llm.generate(value)),
        ("input_ids", lambda llm, value: llm.generate(input_ids=value)),
        ("sampling_params", lambda llm, value: llm.generate("The cat", value)),
        ("temperature", lambda llm, value: llm.generate("The cat", {"temperature": value})),
        ("stop", lambda llm, value: llm.generate("The cat", {"stop": value})),
        ("json_schema", lambda llm, value: llm.generate("The cat", {"json_schema": value})),
        ("rid", lambda llm, value: llm.generate("The cat", rid=value)),
        ("top_logprobs_num", lambda llm, value: llm.generate("The cat", top_logprobs_num=value)),
        ("image_data", lambda llm, value: llm.generate("The cat", image_data=[value])),
        ("hidden_states_format", lambda llm, value: llm.generate("The cat", hidden_states_format=value)),
        ("session_params", lambda llm, value: llm.generate("The cat", session_params=value)),
        ("messages", lambda llm, value: llm.chat(value)),
        ("tools", lambda llm, value: llm.chat([{"role": "user", "content": "Hi"}], tools=value)),
        ("timeout", lambda llm, value: llm.open_session(9, timeout=value)),
        ("mode", lambda llm, value: llm.pause_generation(value)),
        ("on_error", lambda llm, value: llm.flush_cache(on_error=value)),
        ("tags", lambda llm, value: llm.release_memory_occupation(value)),
        ("activities", lambda llm, value: llm.start_profile(activities=value)),
        ("output_dir", lambda llm, value: llm.start_profile(output_dir=value)),
        ("model_path", lambda llm, value: llm.update_weights_from_disk(value)),
        ("named_tensors", lambda llm, value: llm.update_weights_from_tensor(value)),
        ("quantization", lambda llm, value: sgl.Engine("tiny", quantization=value)),
    ],
)
def test_an_object_that_cannot_be_looked_at_is_refused_by_name(
    llm: sgl.Engine, argument: str, call: Callable[..., Any]
) -> None:
    with pytest.raises(sgl.InvalidArgument, match=argument):
        call(llm, Broken())


def _vast() -> torch.Tensor:
    return torch.ones(1).expand(2**40)


def _tower() -> Any:
    """Short to write down, and long as text."""
    value: Any = "word"
    for _ in range(7):
        value = [value] * 9
    return value


@pytest.mark.parametrize(
    "make",
    [_tower, type("T" * 10_000, (), {}), type("list", (), {}), lambda: 10**5000],
    ids=["tower", "name", "list", "integer"],
)
def test_messages_stay_short_whatever_they_show(llm: sgl.Engine, make: Callable[[], Any]) -> None:
    with pytest.raises(sgl.InvalidArgument, match="must be") as caught:
        llm.generate("The cat", {"top_p": make()})
    assert len(str(caught.value)) < 2000


def test_huge_names_and_ids_are_not_repeated_in_full(llm: sgl.Engine) -> None:
    word = "x" * 1_000_000
    for call in (
        lambda: llm.generate("The cat", **{word: 1}),
        lambda: llm.generate("The cat", session_params={"id": word}),
        lambda: llm.start_profile(**{word: 1}),
        lambda: llm.generate("The cat", {word: 1}),
    ):
        with pytest.raises(sgl.InvalidArgument) as caught:
            call()
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("input_ids", {"input_ids": np.broadcast_to(np.int64(1), (2**40,))}),
        ("input_ids", {"input_ids": np.broadcast_to(np.int64(1), (2**40, 2))}),
        ("input_ids", {"input_ids": torch.ones(1, dtype=torch.int64).expand(2**40)}),
        (r"input_ids\[0\]", {"input_ids": [np.broadcast_to(np.int64(1), (2**40,))]}),
        ("prompt", {"prompt": np.broadcast_to(np.str_("a"), (2**40,))}),
        ("stop_token_ids", {"prompt": "a", "sampling_params": {"stop_token_ids": range(2**30)}}),
        ("custom_params", {"prompt": "a", "sampling_params": {"custom_params": {"a": _vast()}}}),
    ],
)  # fmt: skip
def test_views_that_would_fill_all_memory(llm: sgl.Engine, argument: str, arguments: Any) -> None:
    with pytest.raises(sgl.InvalidArgument, match=f"{argument}.* has [0-9]+ items; at most"):
        llm.generate(**arguments)


def test_a_version_that_is_no_text_keeps_the_old_weights(llm: sgl.Engine) -> None:
    with pytest.raises(sgl.WrongType, match="weight_version"):
        llm.update_weights_from_tensor({"model.norm.weight": torch.zeros(384)}, weight_version=5)  # type: ignore[arg-type]


# ── a core in another process ──


class Spoiled:
    """Crosses to another process as something that cannot be made there."""

    def __reduce__(self) -> Any:
        return getattr, (int, "no_such_name")


class SpoiledThere:
    """Can be pickled and loaded here, in the process that made it, only."""

    def __call__(self, logits: Any, custom_param_list: Any) -> Any:
        return logits

    def __reduce__(self) -> Any:
        return _make_in, (os.getpid(),)


def _make_in(process_id: int) -> SpoiledThere:
    if os.getpid() != process_id:
        raise SystemExit("not in this process")
    return SpoiledThere()


class Text(str):
    """Of a class that only this process knows; so is the next."""

    __reduce_ex__ = None  # type: ignore[assignment]


class Number(int):
    __reduce_ex__ = None  # type: ignore[assignment]


def test_texts_and_numbers_of_classes_of_their_own_are_read_in_the_process_of_the_core() -> None:
    preferred = {"stop": Text("qqq"), "custom_params": {Text("key"): Text("value")}}
    with sgl.Engine(model_path="tiny", core_process=True, preferred_sampling_params=preferred) as llm:
        answer = llm.generate("The cat", GREEDY)["output_ids"]
        params = {**GREEDY, "custom_params": {Text("a"): [Text("b"), Number(5)]}}
        one = llm.generate(Text("The cat"), params, rid=Text("mine"))
        two = llm.generate(["The cat"] * 2, params, rid=[Text("first"), Text("second")])
        assert [each["output_ids"] for each in (one, *two)] == [answer] * 3
        assert [each["meta_info"]["id"] for each in (one, *two)] == ["mine", "first", "second"]


def test_requests_that_cannot_be_read_in_the_process_of_the_core_fail_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Should something reach it that is not known there."""
    with sgl.Engine(model_path="tiny", core_process=True) as llm:
        answer = llm.generate("The cat", GREEDY)["output_ids"]
        with monkeypatch.context() as broken:
            broken.setattr(process, "_pickled", lambda _: b"no pickle")
            with pytest.raises(sgl.RequestFailed, match="cannot cross to the core's process"):
                llm.generate("The cat", GREEDY)
            outputs = llm.generate(["The cat"] * 2, GREEDY, on_error="return")
        assert [each["error"]["status_code"] for each in outputs] == [400, 400]
        assert llm.generate("The cat", GREEDY)["output_ids"] == answer


def test_what_cannot_be_read_in_the_process_of_the_core_fails_alone() -> None:
    with sgl.Engine(model_path="tiny", core_process=True) as llm:
        answer = llm.generate("The cat", GREEDY)["output_ids"]
        with pytest.raises(sgl.RequestFailed, match="cannot be loaded in the process of the core"):
            llm.generate("The cat", GREEDY, custom_logit_processor=SpoiledThere())
        for value in (Spoiled(), lambda: None):
            with pytest.raises(sgl.InvalidArgument, match="cannot cross to the core's process"):
                llm.update_weights_from_tensor([("model.norm.weight", value)])
        assert llm.generate("The cat", GREEDY)["output_ids"] == answer
