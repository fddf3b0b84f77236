"""Reading the arguments of `generate`: shapes, ids, lengths, seeds, and errors that name item and limit."""

from __future__ import annotations

import array
import copy
import dataclasses
import math
import random
import re
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill import logs
from tokenmill.errors import InvalidArgument, UnknownArgument, WrongType
from tokenmill.frontend.failures import Faults
from tokenmill.frontend.inputs import InputReader, Job
from tokenmill.messages import EngineFacts
from tokenmill.sampling_params import SamplingParams

pytestmark = pytest.mark.unit

VOCAB = 300
MOST = 100


class Letters:
    """A tokenizer of bytes; spaces vanish, so that some texts have no tokens."""

    eos_token_ids = (257, 256)
    vocab_size = 260
    most_tokens: int | None = None

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.calls.append(list(texts))
        return [list(text.replace(" ", "").encode()) for text in texts]


def make_facts(**changes: Any) -> EngineFacts:
    kinds: dict[str, Any] = {"int": 1, "str": "x", "float": 0.0, "bool": False, "tuple[int, ...]": ()}
    values = {entry.name: kinds[str(entry.type)] for entry in dataclasses.fields(EngineFacts)}
    values |= {
        "vocab_size": VOCAB,
        "context_length": MOST,
        "max_sequence_tokens": MOST,
        "eos_token_ids": (257, 258, VOCAB + 5),
    }
    return EngineFacts(**values | changes)


def make_reader(tokenizer: Letters | str | None = "letters", **changes: Any) -> InputReader:
    options = {"defaults": None, "random_seed": 1, "stream_interval": 3}
    options |= {name: changes.pop(name) for name in list(changes) if name in options}
    chosen = Letters() if tokenizer == "letters" else tokenizer
    return InputReader(make_facts(**changes), tokenizer=chosen, **options)  # type: ignore[arg-type]


def read(*args: Any, **kwargs: Any) -> Job:
    return make_reader().read(*args, **kwargs)


def ids_of(job: Job) -> list[list[int]]:
    return [request.prompt_ids.tolist() for request in job.requests]


def raises(kind: type[Exception], *words: str) -> Any:
    """`pytest.raises` for a message that holds all the words in order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, words)))


# ── single or batch ──


@pytest.mark.parametrize(
    ("arguments", "single", "rows"),
    [
        ({"prompt": "ab"}, True, [[97, 98]]),
        ({"prompt": ["ab"]}, False, [[97, 98]]),
        ({"prompt": ["a", "b"]}, False, [[97], [98]]),
        ({"prompt": ("a", "b")}, False, [[97], [98]]),
        ({"prompt": np.array(["a", "b"])}, False, [[97], [98]]),
        ({"prompt": np.str_("a")}, True, [[97]]),
        ({"prompt": []}, False, []),
        ({"prompt": [], "sampling_params": []}, False, []),
        ({"prompt": [], "rid": "r"}, False, []),
        ({"input_ids": [1, 2]}, True, [[1, 2]]),
        ({"input_ids": (1, 2)}, True, [[1, 2]]),
        ({"input_ids": range(3)}, True, [[0, 1, 2]]),
        ({"input_ids": [[1, 2]]}, False, [[1, 2]]),
        ({"input_ids": [[1, 2], (3,), range(4, 6)]}, False, [[1, 2], [3], [4, 5]]),
        ({"input_ids": np.array([1, 2])}, True, [[1, 2]]),
        ({"input_ids": np.array([[1, 2], [3, 4]])}, False, [[1, 2], [3, 4]]),
        ({"input_ids": np.array([1, 2], dtype=np.uint64)}, True, [[1, 2]]),
        ({"input_ids": np.array([1, 2], dtype=object)}, True, [[1, 2]]),
        ({"input_ids": [np.array([1, 2]), np.array([3], dtype=np.uint8)]}, False, [[1, 2], [3]]),
        ({"input_ids": [np.int64(1), np.int32(2)]}, True, [[1, 2]]),
        ({"input_ids": [[np.int64(1), 2]]}, False, [[1, 2]]),
        ({"input_ids": array.array("i", [1, 2])}, True, [[1, 2]]),
        ({"prompt": "long text", "input_ids": [7]}, True, [[7]]),
        ({"prompt": ["x", "y"], "input_ids": [[7], [8]]}, False, [[7], [8]]),
    ],
)
def test_shapes(arguments: dict[str, Any], single: bool, rows: list[list[int]]) -> None:
    job = read(**arguments)
    assert (job.single, ids_of(job)) == (single, rows)
    assert all(request.prompt_ids.dtype == np.int32 for request in job.requests)


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    assert ids_of(read(input_ids=torch.tensor([1, 2]))) == [[1, 2]]
    assert ids_of(read(input_ids=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))) == [[1, 2], [3, 4]]
    assert ids_of(read(input_ids=[torch.tensor([1]), torch.tensor([2, 3])])) == [[1], [2, 3]]
    assert ids_of(read(input_ids=list(torch.tensor([4, 5])))) == [[4, 5]]
    for wrong in (torch.tensor([1.0]), torch.tensor([True]), [torch.tensor([0.5])], torch.tensor(3)):
        with pytest.raises(WrongType, match="input_ids"):
            read(input_ids=wrong)


def test_what_tokenizers_of_transformers_give() -> None:
    BatchEncoding = pytest.importorskip("transformers").BatchEncoding
    pytest.importorskip("torch")
    single, batch = {"input_ids": [1, 2], "attention_mask": [1, 1]}, {"input_ids": [[1, 2], [3]]}
    assert ids_of(read(input_ids=BatchEncoding(single))) == [[1, 2]]
    assert read(input_ids=BatchEncoding(single)).single
    assert ids_of(read(input_ids=BatchEncoding(batch))) == [[1, 2], [3]]
    assert ids_of(read(input_ids=[BatchEncoding(single), {"input_ids": [3]}])) == [[1, 2], [3]]
    tensors = BatchEncoding({"input_ids": [[4, 5]], "attention_mask": [[1, 1]]}, tensor_type="pt")
    assert ids_of(read(input_ids=tensors)) == [[4, 5]]
    padded = {"input_ids": [[1, 2], [3, 0]], "attention_mask": [[1, 1], [1, 0]]}
    for wrong in (BatchEncoding(padded), BatchEncoding(padded, tensor_type="pt")):
        with pytest.raises(InvalidArgument, match="has padding"):
            read(input_ids=wrong)
    with pytest.raises(InvalidArgument, match="has padding"):
        read(input_ids=[single, {"input_ids": [3, 0], "attention_mask": [1, 0]}])


def test_given_ids_are_copied() -> None:
    given_ids = np.array([1, 2], dtype=np.int32)
    job = read(input_ids=given_ids)
    given_ids[0] = 9
    assert ids_of(job) == [[1, 2]]


def test_a_batch_is_tokenized_in_one_call_and_not_at_all_when_ids_are_given() -> None:
    tokenizer = Letters()
    reader = make_reader(tokenizer)
    reader.read(["a", "b", "c"])
    reader.read(["a"], input_ids=[[1]])
    reader.read([])
    assert tokenizer.calls == [["a", "b", "c"]]


def test_samples_of_a_prompt_stand_together_and_make_a_list() -> None:
    job = read(["a", "b"], {"n": 3})
    assert ids_of(job) == [[97]] * 3 + [[98]] * 3
    assert not job.single
    assert not read("a", {"n": 2}).single
    assert len({request.id for request in job.requests}) == 6


# ── wrong shapes ──


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({}, InvalidArgument, ["give prompt or input_ids"]),
        ({"prompt": 5}, WrongType, ["prompt must be a string", "5 (int)"]),
        ({"prompt": b"abc"}, WrongType, ["prompt must be", "bytes"]),
        ({"prompt": {"a": 1}}, WrongType, ["prompt must be"]),
        ({"prompt": {"a", "b"}}, WrongType, ["prompt must be"]),
        ({"prompt": iter("ab")}, WrongType, ["prompt must be"]),
        ({"prompt": ["a", None]}, WrongType, ["prompt[1]", "None"]),
        ({"prompt": ["a", b"b"]}, WrongType, ["prompt[1]", "bytes"]),
        ({"prompt": [1, 2]}, WrongType, ["prompt[0]", "input_ids"]),
        ({"prompt": ["a", ["b"]]}, WrongType, ["prompt[1]"]),
        ({"prompt": "   "}, InvalidArgument, ["prompt is empty"]),
        ({"prompt": ["a", ""]}, InvalidArgument, ["prompt[1] is empty"]),
        ({"prompt": "a\ud800b"}, InvalidArgument, ["prompt has half a surrogate pair at character 1"]),
        ({"prompt": ["ok", "\ud800"]}, InvalidArgument, ["prompt[1]", "character 0"]),
        ({"input_ids": []}, InvalidArgument, ["input_ids is empty"]),
        ({"input_ids": np.array([])}, InvalidArgument, ["input_ids is empty"]),
        ({"input_ids": [[]]}, InvalidArgument, ["input_ids[0] is empty"]),
        ({"input_ids": [[1], []]}, InvalidArgument, ["input_ids[1] is empty"]),
        ({"input_ids": np.empty((0, 3), dtype=int)}, InvalidArgument, ["input_ids is empty"]),
        ({"input_ids": np.empty((2, 0), dtype=int)}, InvalidArgument, ["input_ids[0] is empty"]),
        ({"input_ids": np.zeros((1, 1, 1), dtype=int)}, InvalidArgument, ["3 dimensions"]),
        ({"input_ids": [np.zeros((1, 1), dtype=int)]}, InvalidArgument, ["input_ids[0]", "2 dimensions"]),
        ({"input_ids": 5}, WrongType, ["input_ids must be a list"]),
        ({"input_ids": "12"}, WrongType, ["input_ids must be a list"]),
        ({"input_ids": b"ab"}, WrongType, ["input_ids must be a list"]),
        ({"input_ids": {"token_ids": [1]}}, WrongType, ["input_ids must be a list"]),
        ({"input_ids": {"input_ids": "1"}}, WrongType, ["input_ids must be a list"]),
        ({"input_ids": [[1], 2]}, WrongType, ["input_ids[1] must be a list"]),
        ({"input_ids": [[1], None]}, WrongType, ["input_ids[1] must be a list"]),
        ({"input_ids": [[1], "ab"]}, WrongType, ["input_ids[1] must be a list"]),
        ({"input_ids": [1, [2]]}, WrongType, ["input_ids[0] must be a list"]),
        ({"input_ids": [1, None]}, WrongType, ["input_ids[1]", "None"]),
        ({"input_ids": [None, 1]}, WrongType, ["input_ids[0]", "None"]),
        ({"input_ids": [1, True]}, WrongType, ["input_ids[1]", "True"]),
        ({"input_ids": [[0, 1], [2, False]]}, WrongType, ["input_ids[1][1]", "False"]),
        ({"input_ids": [1, 2.0]}, WrongType, ["input_ids[1]", "2.0"]),
        ({"input_ids": [1, math.nan]}, WrongType, ["input_ids[1]", "nan"]),
        ({"input_ids": [1, "2"]}, WrongType, ["input_ids[1]", "'2'"]),
        ({"input_ids": np.array([1.0])}, WrongType, ["input_ids", "float64"]),
        ({"input_ids": np.array([True])}, WrongType, ["input_ids", "bool"]),
        ({"input_ids": [[1], np.array([0.5])]}, WrongType, ["input_ids[1]", "float64"]),
        ({"prompt": "a", "input_ids": [[1]]}, InvalidArgument, ["a batch of 1", "a single string"]),
        ({"prompt": ["a"], "input_ids": [1]}, InvalidArgument, ["one row", "a batch of 1"]),
        ({"prompt": ["a", "b"], "input_ids": [[1]]}, InvalidArgument, ["a batch of 1", "a batch of 2"]),
        ({"prompt": 5, "input_ids": [1]}, WrongType, ["prompt must be"]),
    ],
)
def test_wrong_shapes(arguments: dict[str, Any], kind: type[Exception], words: list[str]) -> None:
    with raises(kind, *words):
        read(**arguments)


@pytest.mark.parametrize("bad", [-1, VOCAB, 10**6, 2**40, 2**70, -(2**70)])
def test_ids_outside_the_vocabulary_name_place_value_and_limit(bad: int) -> None:
    with raises(InvalidArgument, "input_ids[2] is", f"{VOCAB} ids (0 to {VOCAB - 1})"):
        read(input_ids=[0, VOCAB - 1, bad])
    with raises(InvalidArgument, "input_ids[1][0] is", str(VOCAB)):
        read(input_ids=[[5], [bad, 5]])
    if abs(bad) < 2**60:
        with raises(InvalidArgument, f"input_ids[1][2] is {bad}", str(VOCAB)):
            read(input_ids=[[1], np.array([1, 2, bad])])
        with raises(InvalidArgument, f"input_ids[0] is {bad}"):
            read(input_ids=[np.int64(bad)])


@pytest.mark.parametrize("odd", [True, False, np.bool_(True), 1.0, "1", None])
@pytest.mark.parametrize("place", [0, 5, 9])
def test_what_is_no_integer_is_found_anywhere(odd: Any, place: int) -> None:
    row: list[Any] = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    row[place] = odd
    with raises(WrongType, f"input_ids[1][{place}] must be an integer"):
        read(input_ids=[[0, 1], row])


def test_many_rows_are_read_as_they_are_one_by_one() -> None:
    draw = random.Random(3)
    rows = [[draw.randrange(VOCAB) for _ in range(draw.randrange(1, 9))] for _ in range(2500)]
    assert ids_of(read(input_ids=rows)) == rows
    assert ids_of(read(input_ids=[*rows, (1, 2)])) == [*rows, [1, 2]]
    job = read(input_ids=rows)
    rows[2000][0] += 1  # the caller's list is read once
    assert job.requests[2000].prompt_ids[0] == rows[2000][0] - 1


def test_plain_rows_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(*_: Any, **__: Any) -> Any:
        raise AssertionError("row by row takes four times as long")

    monkeypatch.setattr("tokenmill.frontend.inputs.token_ids", one_by_one)
    monkeypatch.setattr(InputReader, "check_tokens", one_by_one)
    assert ids_of(read(input_ids=[[1, 2], [3]])) == [[1, 2], [3]]
    assert ids_of(read(["ab", "c"])) == [[97, 98], [99]]


def test_rows_that_change_while_they_are_read_do_not_get_each_others_ids() -> None:
    """An id of one row takes an id from the row before: who reads them together would be off by one."""
    first = [1, 2]

    class Taking:
        def __index__(self) -> int:
            del first[1:]
            return 5

    assert ids_of(read(input_ids=[first, [Taking(), 6], [7, 8]])) == [[1], [5, 6], [7, 8]]


@pytest.mark.parametrize("odd", [True, VOCAB, -1, 2**40, "1", None, 1.0])
def test_among_many_rows_the_one_at_fault_is_named(odd: Any) -> None:
    rows: list[list[Any]] = [[1, 0] for _ in range(2500)]
    rows[2100] = [1, 0, odd]
    with raises(InvalidArgument, "input_ids[2100][2]", str(odd)):
        read(input_ids=rows)


def test_an_id_that_raises_something_else_fails_its_row_alone() -> None:
    class Odd:
        def __index__(self) -> int:
            raise ValueError("odd")

    faults = Faults(returned=True)
    job = read(input_ids=[[1, 2], [1, Odd()]], faults=faults)
    assert list(job.errors) == [1]
    assert "odd" in job.errors[1]["message"]


def test_other_integers_count_as_what_they_are() -> None:
    class Index:
        def __index__(self) -> int:
            return 1

    assert ids_of(read(input_ids=[[np.int64(1), 0, np.uint8(2)], [Index(), 5]])) == [[1, 0, 2], [1, 5]]


def test_endless_ranges_are_refused_at_once() -> None:
    for endless in (range(10**30), range(-(10**12), 5), range(0, 10**12, 7)):
        with raises(InvalidArgument, "input_ids[", str(VOCAB)):
            read(input_ids=endless)


def test_a_tokenizer_of_another_model_is_noticed() -> None:
    with raises(InvalidArgument, "prompt[1] holds token 98", "98 ids", "another model"):
        make_reader(vocab_size=98).read(["a", "b"])


def test_without_a_tokenizer() -> None:
    reader = make_reader(None)
    assert ids_of(reader.read(input_ids=[1])) == [[1]]
    with raises(InvalidArgument, "prompt needs a tokenizer", "input_ids"):
        reader.read("a")
    with raises(InvalidArgument, "sampling_params[1]: stop needs a tokenizer", "stop_token_ids"):
        reader.read(input_ids=[[1], [2]], sampling_params=[None, {"stop": "x"}])
    with raises(InvalidArgument, "sampling_params: stop_regex needs a tokenizer", "stop_token_ids"):
        reader.read(input_ids=[1], sampling_params={"stop_regex": "x"})
    (request,) = reader.read(input_ids=[1], sampling_params={"min_new_tokens": 4}).requests
    assert request.params.min_new_tokens == 4
    assert request.stop_ids == (257, 258)


# ── sampling parameters ──


def test_one_for_all_or_one_each() -> None:
    job = read(["a", "b"], {"temperature": 0.5})
    assert [request.params.temperature for request in job.requests] == [0.5, 0.5]
    job = read(["a", "b", "c"], [{"temperature": 0.5}, None, SamplingParams(temperature=0)])
    assert [request.params.temperature for request in job.requests] == [0.5, 1.0, 0.0]
    job = read("a", SimpleNamespace(top_k=4))
    assert job.requests[0].params.top_k == 4


def test_equal_parameters_are_read_once() -> None:
    same, other, again = read(["a"] * 3, [{"top_k": 4}, {"top_k": 5}, {"top_k": 4}]).requests
    assert same.params is again.params
    assert (same.params.top_k, other.params.top_k) == (4, 5)
    with raises(ValueError, "sampling_params[1]", "top_k"):  # although True == 1
        read(["a", "b"], [{"top_k": 1}, {"top_k": True}])
    texts = read(["a", "b"], [{"stop_token_ids": [1]}, {"stop_token_ids": [2]}]).requests
    assert [request.params.stop_token_ids for request in texts] == [(1,), (2,)]
    schema: dict[str, Any] = {"type": "string"}
    given = [{"json_schema": schema, "n": n} for n in (1, 1)] + [{"json_schema": {"type": "null"}, "n": 1}]
    shared, too, own = (request.params for request in read(["a"] * 3, given).requests)
    assert shared is too
    assert (shared.json_schema, own.json_schema) == ('{"type":"string"}', '{"type":"null"}')


LENGTHS = st.sampled_from([0, 1, 2, 3, 7, -1, None, True, 2.0, "4"])
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.5},
    {"temperature": 0.5, "min_new_tokens": 2},
    {"min_new_tokens": 0, "stop_token_ids": [1]},
    {"ignore_eos": True, "top_k": 5},
    {"top_k": 0},
)


def told(request: Any) -> tuple[Any, ...]:
    return (
        dataclasses.asdict(request.params),
        request.max_new_tokens,
        request.stop_ids,
        request.held_ids,
        request.report_interval,
    )


@given(st.lists(st.tuples(st.sampled_from(OTHERS), LENGTHS, st.booleans()), min_size=1, max_size=8))
def test_parameters_that_differ_in_their_length_are_read_as_if_alone(items: Any) -> None:
    """So are those that are wrong: the first of them is named."""
    params = [others | {"max_new_tokens": length} if given else others for others, length, given in items]
    alone: list[Any] = []
    fault: Exception | None = None
    for each in params:
        try:
            alone.append(told(read("a", each).requests[0]))
        except InvalidArgument as error:
            fault = error
            break
    if fault is None:
        assert [told(each) for each in read(["a"] * len(params), params).requests] == alone
        return
    with pytest.raises(InvalidArgument) as raised:
        read(["a"] * len(params), params)
    assert type(raised.value) is type(fault)
    assert str(raised.value) == str(fault).replace("sampling_params", f"sampling_params[{len(alone)}]", 1)


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "words"),
    [
        (["a", "b"], [{}], InvalidArgument, ["sampling_params has length 1", "prompt has length 2"]),
        (["a"], [{}, {}], InvalidArgument, ["sampling_params has length 2", "prompt has length 1"]),
        ([], [{}], InvalidArgument, ["sampling_params has length 1", "prompt has length 0"]),
        ("a", [{}], InvalidArgument, ["list of 1", "prompt is a single one"]),
        (["a", "b"], [{"n": 1}, {"n": 2}], InvalidArgument, ["sampling_params[1]: n is 2, but 1"]),
        (["a", "b"], [{}, {"top_p": 0}], InvalidArgument, ["sampling_params[1]: top_p", "0"]),
        (["a", "b"], [{}, {"topp": 0}], UnknownArgument, ["sampling_params[1]: 'topp'", "'top_p'"]),
        (["a", "b"], [{}, 5], WrongType, ["sampling_params[1]: must be a dict"]),
        ("a", {"temperature": -1.0}, InvalidArgument, ["sampling_params: temperature", "-1.0"]),
        ("a", "greedy", WrongType, ["sampling_params: must be a dict"]),
        ([], {"temperature": -1.0}, InvalidArgument, ["temperature"]),
    ],
)
def test_wrong_sampling_params(prompt: Any, params: Any, kind: type[Exception], words: list[str]) -> None:
    with raises(kind, *words):
        read(prompt, params)


def test_nothing_of_the_caller_is_changed() -> None:
    arguments = {
        "prompt": ["a", "b"],
        "sampling_params": [{"max_new_tokens": None, "stop": ["x", ""]}, {"stop_token_ids": [None, 2]}],
        "rid": ["r", None],
    }
    before = copy.deepcopy(arguments)
    read(**arguments)
    assert arguments == before


def test_defaults_of_the_engine_lie_below() -> None:
    reader = make_reader(defaults={"temperature": 0.2, "max_new_tokens": 10})
    plain, other, whole = reader.read(
        ["a", "b", "c"], [None, {"temperature": 0.9}, SamplingParams()]
    ).requests
    assert (plain.params.temperature, plain.max_new_tokens) == (0.2, 10)
    assert (other.params.temperature, other.max_new_tokens) == (0.9, 10)
    assert (whole.params.temperature, whole.max_new_tokens) == (1.0, MOST - 1)


# ── lengths ──


@pytest.mark.parametrize(
    ("length", "params", "expected"),
    [
        (10, {"max_new_tokens": 5}, 5),
        (10, {"max_new_tokens": 0}, 0),
        (10, {"max_new_tokens": 90}, 90),
        (10, None, 90),  # the default of 128 is clipped
        (10, {}, 90),
        (10, {"max_new_tokens": None}, 90),
        (99, {"max_new_tokens": None}, 1),
        (99, {"max_new_tokens": 1}, 1),
        (10, SamplingParams(), 90),
        (10, SamplingParams(max_new_tokens=None), 90),
        (10, SamplingParams(max_new_tokens=90), 90),
    ],
)
def test_most_tokens_to_generate(length: int, params: Any, expected: int) -> None:
    (request,) = read(input_ids=[1] * length, sampling_params=params).requests
    assert request.max_new_tokens == expected


def test_a_default_that_fits_is_128() -> None:
    (request,) = make_reader(max_sequence_tokens=1000).read("abc").requests
    assert request.max_new_tokens == 128


@pytest.mark.parametrize(
    "params", [{"max_new_tokens": 91}, {"max_new_tokens": 128}, SamplingParams(max_new_tokens=91)]
)
def test_an_explicit_length_that_does_not_fit(params: Any) -> None:
    asked = params["max_new_tokens"] if isinstance(params, dict) else params.max_new_tokens
    with raises(
        InvalidArgument, "input_ids has 10 tokens", f"{asked}", "at most 100", "to 90", "context_length"
    ):
        read(input_ids=[1] * 10, sampling_params=params)
    with raises(InvalidArgument, "input_ids[1] has 10 tokens"):
        read(input_ids=[[1], [1] * 10], sampling_params=params if asked == 91 else {"max_new_tokens": 95})


@pytest.mark.parametrize("length", [100, 101, 5000])
def test_prompts_that_are_too_long(length: int) -> None:
    with raises(InvalidArgument, "input_ids[1]", f"{length} tokens", "at most 100", "context_length"):
        read(input_ids=[[1], [1] * length])
    with raises(InvalidArgument, "prompt has", f"{length} tokens", "max_total_tokens"):
        make_reader(context_length=200).read("a" * length, {"max_new_tokens": 2})


def test_tokens_of_a_text_that_may_be_counted_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "most_tokens", MOST)
    with raises(InvalidArgument, "prompt has at least 200 tokens, but"):
        read("a" * 200)
    with raises(InvalidArgument, "prompt has 199 tokens, but"):
        read("a" * 199)
    with raises(InvalidArgument, "input_ids has 5000 tokens, but"):
        read(input_ids=[1] * 5000)


def test_min_new_tokens_is_lowered_to_what_fits() -> None:
    for params in ({"min_new_tokens": 95}, {"min_new_tokens": 10**12, "max_new_tokens": None}):
        (request,) = read(input_ids=[1] * 10, sampling_params=params).requests
        assert (request.params.min_new_tokens, request.max_new_tokens) == (90, 90)
    (request,) = read("a", {"min_new_tokens": 5, "max_new_tokens": 7}).requests
    assert (request.params.min_new_tokens, request.max_new_tokens) == (5, 7)


# ── stopping and reporting ──


def test_stop_ids(caplog: pytest.LogCaptureFixture) -> None:
    assert read("a").requests[0].stop_ids == (257, 258, 256)  # the model's, then the tokenizer's
    assert read("a", {"stop_token_ids": [4, 257, None]}).requests[0].stop_ids == (257, 258, 256, 4)
    assert read("a", {"ignore_eos": True}).requests[0].stop_ids == ()
    assert read("a", {"ignore_eos": True, "stop_token_ids": [4]}).requests[0].stop_ids == (4,)
    # Of another model; one warning says so.
    logs.warn_once.cache_clear()
    for _ in range(2):
        assert read("a", {"stop_token_ids": [4, 300, 128009]}).requests[0].stop_ids == (257, 258, 256, 4)
    assert ["they end nothing" in each.getMessage() for each in caplog.records] == [True]


def test_all_ends_are_held_back_until_enough_tokens_are_out() -> None:
    """Also those that `ignore_eos` lets pass; a grammar says itself where an end may stand."""
    least = {"min_new_tokens": 2}
    assert read("a").requests[0].held_ids == ()
    assert read("a", least).requests[0].held_ids == (257, 258, 256)
    ignoring = least | {"ignore_eos": True, "stop_token_ids": [4]}
    assert read("a", ignoring).requests[0].held_ids == (257, 258, 256, 4)
    assert read("a", ignoring | {"regex": "a*"}).requests[0].held_ids == (4,)


def test_a_vocabulary_of_stops_leaves_nothing_to_draw() -> None:
    everything = {"stop_token_ids": range(VOCAB)}
    assert len(read("a", everything).requests[0].stop_ids) == VOCAB
    with raises(InvalidArgument, "every id", "min_new_tokens=2"):
        read("a", everything | {"min_new_tokens": 2})


def test_how_often_a_request_reports() -> None:
    def interval(params: Any, **options: Any) -> int:
        return read("a", params, **options).requests[0].report_interval

    assert interval(None) == 0
    assert interval({"stop": ""}) == 0
    assert interval({"stream_interval": 7}) == 0
    assert 1 <= interval({"stop": "x"}) <= 8
    assert 1 <= interval({"stop_regex": "x"}) <= 8
    assert interval(None, stream=True) == 3
    assert interval({"stream_interval": 7}, stream=True) == 7
    assert interval({"stream_interval": 7, "stop": "x"}, stream=True) == 7


# ── request ids ──


@pytest.mark.parametrize(
    ("prompt", "rid", "n", "expected"),
    [
        ("a", "r", 1, ["r"]),
        ("a", "r", 2, ["r_0", "r_1"]),
        (["a"], "r", 1, ["r_0"]),
        (["a", "b"], "r", 1, ["r_0", "r_1"]),
        (["a", "b"], ["x", "y"], 1, ["x", "y"]),
        (["a", "b"], ("x", "y"), 2, ["x_0", "x_1", "y_0", "y_1"]),
        (["a", "b"], "r", 2, ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]),
    ],
)
def test_given_ids(prompt: Any, rid: Any, n: int, expected: list[str]) -> None:
    assert [request.id for request in read(prompt, {"n": n}, rid=rid).requests] == expected


def test_random_ids_are_distinct_hex() -> None:
    reader = make_reader()
    ids = [request.id for _ in range(20) for request in reader.read(["a"] * 10, {"n": 3}).requests]
    assert len(set(ids)) == len(ids) == 600
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)
    first, second = read(["a", "b"], rid=["x", None]).requests
    assert first.id == "x"
    assert re.fullmatch("[0-9a-f]{32}", second.id)


@pytest.mark.parametrize(
    ("prompt", "rid", "kind", "words"),
    [
        ("a", "", InvalidArgument, ["rid is empty"]),
        ("a", 5, WrongType, ["rid must be a string", "5"]),
        ("a", ["r"], InvalidArgument, ["rid is a list of 1", "a single one"]),
        (["a", "b"], ["x"], InvalidArgument, ["rid is a list of 1", "2"]),
        (["a", "b"], ["x", "y", "z"], InvalidArgument, ["rid is a list of 3", "2"]),
        (["a", "b"], ["x", "x"], InvalidArgument, ["rid 'x'", "twice"]),
        (["a", "b"], ["x", 5], WrongType, ["rid[1] must be a string"]),
        (["a", "b"], ["x", ""], InvalidArgument, ["rid[1] is empty"]),
    ],
)
def test_wrong_ids(prompt: Any, rid: Any, kind: type[Exception], words: list[str]) -> None:
    with raises(kind, *words):
        read(prompt, rid=rid)


# ── priority, time and salt ──


def test_what_is_asked_beside_the_prompt_reaches_each_request() -> None:
    job = read(
        ["a", "b"], {"n": 2}, options={"priority": [3, None], "timeout": 1.5, "cache_salt": ["s", None]}
    )
    assert [request.priority for request in job.requests] == [3, 3, None, None]
    assert [request.timeout_seconds for request in job.requests] == [1.5] * 4
    assert [request.cache_namespace for request in job.requests] == [b"s", b"s", b"", b""]
    (one,) = read("a", options={"timeout": math.inf, "priority": -(2**63), "cache_salt": "ü"}).requests
    assert (one.timeout_seconds, one.priority, one.cache_namespace) == (None, -(2**63), "ü".encode())


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"priority": 2**63}, InvalidArgument, ["priority must be between"]),
        ({"priority": "high"}, WrongType, ["priority must be an integer", "'high'"]),
        ({"priority": [1, 2.5]}, WrongType, ["priority[1] must be an integer"]),
        ({"timeout": 0}, InvalidArgument, ["timeout must be", "above 0", "seconds"]),
        ({"timeout": -math.inf}, InvalidArgument, ["timeout must be"]),
        ({"timeout": np.ones(2)}, WrongType, ["timeout must be a number"]),
        ({"cache_salt": b"s"}, WrongType, ["cache_salt must be a string"]),
        ({"cache_salt": ["s"]}, InvalidArgument, ["cache_salt has length 1", "2 prompts"]),
    ],
)
def test_wrong_priorities_times_and_salts(
    options: dict[str, Any], kind: type[Exception], words: list[str]
) -> None:
    with raises(kind, *words):
        read(["a", "b"], options=options)


# ── seeds ──


def seeds_of(job: Job) -> list[int]:
    return [request.seed for request in job.requests]


def test_given_seeds() -> None:
    assert seeds_of(read("a", {"sampling_seed": 7})) == [7]
    assert seeds_of(read("a", {"sampling_seed": -1})) == [2**64 - 1]
    assert seeds_of(read("a", {"sampling_seed": 2**64 - 1})) == [2**64 - 1]
    samples = seeds_of(read("a", {"sampling_seed": 7, "n": 4}))
    assert samples[0] == 7
    assert len(set(samples)) == 4
    assert all(0 <= seed < 2**64 for seed in samples)
    # A row's seeds do not depend on its neighbours, nor on the state of the engine.
    batch = seeds_of(make_reader(random_seed=9).read(["b", "a"], [{"n": 4}, {"sampling_seed": 7, "n": 4}]))
    assert batch[4:] == samples


def test_samples_of_neighbouring_seeds_share_nothing() -> None:
    reader = make_reader()
    seeds = [s for seed in range(200) for s in seeds_of(reader.read("a", {"sampling_seed": seed, "n": 10}))]
    assert len(set(seeds)) == 2000
    mixed = [seed for index, seed in enumerate(seeds) if index % 10]
    ones = np.array([[seed >> bit & 1 for bit in range(64)] for seed in mixed]).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / math.sqrt(len(mixed))


def test_drawn_seeds_follow_the_engines_seed() -> None:
    def three(random_seed: int | None) -> list[int]:
        reader = make_reader(random_seed=random_seed)
        return [*seeds_of(reader.read(["a", "b"])), *seeds_of(reader.read("c"))]

    assert three(5) == three(5)
    assert len({*three(5), *three(6), *three(-5), *three(None), *three(None)}) == 15


def test_a_seed_of_one_row_changes_none_of_the_others() -> None:
    def drawn(**first: Any) -> list[int]:
        reader = make_reader(random_seed=5)
        return [
            *seeds_of(reader.read(["a", "b"], [{"n": 3, **first}, {"n": 3}])),
            *seeds_of(reader.read("c")),
        ]

    plain, seeded = drawn(), drawn(sampling_seed=7)
    assert plain[3:] == seeded[3:]
    assert not set(plain[:3]) & set(seeded[:3])


def test_a_failed_call_draws_no_seed() -> None:
    calm, upset = make_reader(), make_reader()
    with pytest.raises(InvalidArgument):
        upset.read(["a", ""])
    assert seeds_of(upset.read("a")) == seeds_of(calm.read("a"))


def test_threads_draw_each_seed_once() -> None:
    reader = make_reader()
    drawn: list[int] = []
    threads = [
        threading.Thread(target=lambda: drawn.extend(seeds_of(reader.read(["a"] * 50)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = random.Random(1)
    assert sorted(drawn) == sorted(expected.getrandbits(64) for _ in range(400))


# ── all or nothing, and nothing else ever comes out ──

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=4)
    | st.binary(max_size=3)
    | st.sampled_from(
        [np.ones(2), np.arange(3), np.zeros((2, 2), int), np.int8(3), np.float32(1), object(), int, "\ud800"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)
IDS = st.lists(st.integers(-1, VOCAB), max_size=5)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(0, 3),
        "max_new_tokens": st.integers(0, 120) | st.none(),
        "stop": st.lists(st.text(max_size=2), max_size=2),
        "sampling_seed": st.integers(),
    },
)


@settings(deadline=None)
@given(
    prompt=st.none() | st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3) | JUNK,
    params=st.none() | PARAMS | st.lists(PARAMS, max_size=3) | JUNK,
    input_ids=st.none() | IDS | st.lists(IDS, max_size=3) | JUNK,
    rid=st.none() | st.text(max_size=2) | st.lists(st.text(max_size=1), max_size=3) | JUNK,
    stream=st.booleans(),
)
def test_junk_gives_a_job_or_our_error(
    prompt: Any, params: Any, input_ids: Any, rid: Any, stream: bool
) -> None:
    try:
        job = read(prompt, params, input_ids, rid=rid, stream=stream)
    except InvalidArgument as error:
        message = str(error)
    else:
        message = ""
        check_job(job)
    assert len(message) < 500


def check_job(job: Job) -> None:
    """What the core may rely on."""
    assert len({request.id for request in job.requests}) == len(job.requests)
    if job.single:
        assert len(job.requests) == 1
    for request in job.requests:
        assert request.prompt_ids.dtype == np.int32
        assert 0 <= request.prompt_ids.min() <= request.prompt_ids.max() < VOCAB
        assert request.max_new_tokens >= 0
        assert len(request.prompt_ids) + request.max_new_tokens <= MOST
        assert 0 <= request.params.min_new_tokens <= request.max_new_tokens
        assert 0 <= request.seed < 2**64
        assert all(0 <= token < VOCAB for token in request.stop_ids)
        assert request.report_interval >= 0


def test_large_batches_are_read_quickly_and_right() -> None:
    rows = np.random.default_rng(0).integers(0, VOCAB, (5000, 50))
    job = read(input_ids=rows.tolist(), sampling_params={"max_new_tokens": 1})
    assert np.array_equal(np.stack([request.prompt_ids for request in job.requests]), rows)
    rows[4321, 17] = VOCAB
    with raises(InvalidArgument, "input_ids[4321][17] is 300"):
        read(input_ids=rows.tolist())


# ── rows at fault ──


class Picky(Letters):
    """Fails on a batch with a `!` in it, as the code of a model's own tokenizer may."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        rows = super().encode_batch(texts)
        if any("!" in text for text in texts):
            raise ZeroDivisionError("odd")
        return rows


def test_texts_are_tokenized_in_one_call_unless_that_fails() -> None:
    letters, picky = Letters(), Picky()
    job = make_reader(letters).read(["a", "", "b", 5, "c"], faults=Faults(returned=True))
    assert letters.calls == [["a", "", "b", "c"]]
    assert (ids_of(job), sorted(job.errors)) == ([[97], [], [98], [], [99]], [1, 3])
    job = make_reader(picky).read(["a", "!", "b"], faults=Faults(returned=True))
    assert picky.calls == [["a", "!", "b"], ["a"], ["!"], ["b"]]
    assert (ids_of(job), list(job.errors)) == ([[97], [], [98]], [1])
    assert job.errors[1]["message"] == "prompt cannot be read: ZeroDivisionError: odd"


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.booleans(), st.sampled_from(["", "params", "n", "rid"]), st.booleans())),
    n=st.integers(1, 3),
)
def test_rows_beside_bad_ones_are_read_as_beside_sound_ones(
    rows: list[tuple[bool, str, bool]], n: int
) -> None:
    """Same requests in the same places, with the same seeds; the bad rows, and only they, have errors."""
    texts = ["ok" if sound or fault else " " for sound, fault, _ in rows]
    params: list[dict[str, Any]] = [
        {"n": n, **({"sampling_seed": 5} if seeded else {})} for *_, seeded in rows
    ]
    rids: list[Any] = [f"r{place}" for place in range(len(rows))]
    bad_params, bad_rids = copy.deepcopy(params), list(rids)
    for place, (sound, fault, _) in enumerate(rows):
        if not sound and fault == "params":
            bad_params[place]["top_p"] = 7
        elif not sound and fault == "n":
            bad_params[place]["n"] = 0
        elif not sound and fault == "rid":
            bad_rids[place] = 5
    good = make_reader().read(["ok"] * len(rows), params, rid=rids)
    read = make_reader().read(texts, bad_params, rid=bad_rids, faults=Faults(returned=True))
    bad = [place for place, (sound, *_) in enumerate(rows) if not sound]
    if len(bad) == len(rows) and all(fault == "n" for _, fault, _ in rows):
        n = 1  # nobody says how many samples there are
    assert sorted(read.errors) == [place * n + sample for place in bad for sample in range(n)]
    for place, request in enumerate(read.requests):
        if place not in read.errors:
            other = good.requests[place]
            assert (request.id, request.seed) == (other.id, other.seed)
            assert request.prompt_ids.tolist() == other.prompt_ids.tolist()


def test_a_first_row_that_is_none_does_not_make_a_batch_a_single_one() -> None:
    job = make_reader().read(input_ids=[None, [1, 2]], faults=Faults(returned=True))
    assert (job.single, len(job.requests), list(job.errors)) == (False, 2, [0])
