"""Sampling parameters: names, defaults, ranges, types, dialects, and that nothing else ever comes out."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import InvalidArgument, UnknownArgument, WrongType
from tokenmill.sampling_params import SamplingParams

pytestmark = pytest.mark.unit

DEFAULTS = {
    "max_new_tokens": 128,
    "min_new_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "penalize_prompt": False,
    "stop": (),
    "stop_token_ids": (),
    "stop_regex": (),
    "n": 1,
    "ignore_eos": False,
    "max_repetitions": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": (),
    "sampling_seed": None,
    "custom_params": None,
    "stream_interval": None,
    "beam_width": None,
    "watermark": None,
}
LATER = {
    "beam_width",
    "watermark",
}
FLAGS = [
    "ignore_eos",
    "penalize_prompt",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
]
WHOLE = ["max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed", "stream_interval", "beam_width"]
REAL = ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"]


def make(**values: Any) -> SamplingParams:
    """Parameters from values of any type."""
    return SamplingParams(**values)


def test_names_and_defaults() -> None:
    assert dataclasses.asdict(SamplingParams()) == DEFAULTS


def test_every_field_is_described_and_tells_whether_it_is_supported() -> None:
    for entry in dataclasses.fields(SamplingParams):
        assert entry.metadata["help"]
        assert entry.metadata["supported"] == (entry.name not in LATER)


def test_hashable_picklable_replaceable_frozen() -> None:
    params = make(stop=["a", "b"], stop_token_ids=[5], sampling_seed=3)
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=2).stop == ("a", "b")
    with pytest.raises(InvalidArgument, match="top_p"):
        dataclasses.replace(params, top_p=2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3  # type: ignore[misc]


# ── ranges ──


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("max_new_tokens", [0, 1, 10**9, None]),
        ("min_new_tokens", [0, 1, 128]),
        ("temperature", [0, 0.0, 1e-7, 0.5, 1, 2.0, 100, 1e300]),
        ("top_p", [1e-300, 0.1, 1, 1.0]),
        ("top_k", [-1, 1, 50, 2**30, 10**30]),
        ("min_p", [0, 0.5, 1]),
        ("n", [1, 2, 1000]),
        ("sampling_seed", [0, 1, -1, -(2**63), 2**64 - 1, None]),
        ("stream_interval", [1, 100, None]),
        ("max_repetitions", [2, 100, None]),
        ("frequency_penalty", [0, 0.0, -0.0, None]),
        ("presence_penalty", [0, 0.0, None]),
        ("repetition_penalty", [1, 1.0, None]),
        ("stop_regex", [None, "", [], "a+", ["a", r"\d{3}\b"], "x" * 1024, ["y"] * 100]),
        ("json_schema", [None, ""]),
        ("regex", [None, ""]),
        ("ebnf", [None, ""]),
        ("structural_tag", [None, ""]),
        ("logit_bias", [None, {}]),
        ("custom_params", [None, {}, {"a": 1, "b": [1, "x", None], "c": {"d": 0.5}}]),
        ("beam_width", [None, 1]),
        ("watermark", [None, False]),
    ],
)
def test_accepted_values(name: str, accepted: list[Any]) -> None:
    for value in accepted:
        make(**{name: value})


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("max_new_tokens", [-1, -(10**30)]),
        ("min_new_tokens", [-1]),
        ("temperature", [-1.0, -1e-9, math.nan, math.inf, -math.inf, 10**400]),
        ("top_p", [0, 0.0, -0.1, 1.0001, math.nan, math.inf]),
        ("top_k", [0, -2, -100]),
        ("min_p", [-0.01, 1.01, math.nan]),
        ("n", [0, -1, 10**9]),
        ("sampling_seed", [2**64, -(2**63) - 1]),
        ("stream_interval", [0, -1]),
        ("frequency_penalty", [2.1, -2.1, math.nan]),
        ("presence_penalty", [2.1, -2.1, math.inf]),
        ("repetition_penalty", [0, -1, 2.1, math.nan]),
        ("beam_width", [0, -1]),
    ],
)
def test_values_out_of_range_name_field_and_value(name: str, refused: list[Any]) -> None:
    for value in refused:
        with pytest.raises(InvalidArgument, match=name) as caught:
            make(**{name: value})
        assert isinstance(caught.value, ValueError)
        assert not isinstance(caught.value, WrongType)
        if abs(value) < 1e6:
            assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 2),
        ("watermark", True),
    ],
)
def test_features_of_later_are_refused_and_say_so(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}.*not supported yet"):
        make(**{name: value})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("a(b", r"stop_regex 'a\(b' is not a regular expression: missing \), unterminated subpattern"),
        (["ok", "*"], r"stop_regex '\*' is not a regular expression: nothing to repeat"),
        ("a{99999999999}", "is not a regular expression"),
        ("a*", r"stop_regex 'a\*' matches the empty text"),
        ("$", "matches the empty text"),
        (r"(?a:\w)?\w", r"it has \(\?a:\.\.\.\) or \(\?u:\.\.\.\), flags for a part"),
        (r"é(?iu-s:b)", "flags for a part"),
        ("x" * 1025, "a pattern of 1025 bytes.*at most 1024"),
        (["ab"[i % 2] * (i + 1) for i in range(33)], "33 strings; at most 32"),
    ],
)
def test_patterns_that_cannot_stop_anything(given: Any, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        make(stop_regex=given)


def test_patterns_that_only_look_as_if_they_had_flags_for_a_part() -> None:
    for pattern in (r"(?a)\w\w", r"[(?a:]", r"\(?a:", "(?i:a)", "(?P<a>a)", "(?#a:)a"):
        assert make(stop_regex=pattern).stop_regex == (pattern,)


def test_patterns_are_a_tuple_each_of_them_once() -> None:
    assert make(stop_regex="a+").stop_regex == ("a+",)
    assert make(stop_regex=["a+", "", "b", "a+"]).stop_regex == ("a+", "b")
    with pytest.raises(WrongType, match=r"stop_regex\[1\] must be a string"):
        make(stop_regex=["a", 5])


def test_custom_params_are_copied_as_plain_values() -> None:
    given = {"ids": (1, 2), "scale": np.float32(0.5), "flags": np.array([True, False]), "names": {"a": None}}
    stored = make(custom_params=given).custom_params
    assert stored == {"ids": [1, 2], "scale": 0.5, "flags": [True, False], "names": {"a": None}}
    given["names"]["b"] = 1  # type: ignore[index]
    assert stored["names"] == {"a": None}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([1], "custom_params must be a dict"),
        ({1: 2}, "custom_params has the key 1"),
        ({"a": {2: 3}}, r"custom_params\['a'\] has the key 2"),
        ({"a": [0, object()]}, r"custom_params\['a'\]\[1\] must be a number"),
        ({"f": len}, r"custom_params\['f'\] must be a number"),
        ({"__req__": 1}, "'__req__', which stands for the request"),
        ({"a": [[[[[[[[1]]]]]]]]}, "at most 8 dicts and lists"),
    ],
)
def test_custom_params_that_are_no_plain_data(given: Any, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        make(custom_params=given)


def test_min_above_max_new_tokens() -> None:
    assert make(min_new_tokens=7, max_new_tokens=7).min_new_tokens == 7
    assert make(min_new_tokens=10**6, max_new_tokens=None).min_new_tokens == 10**6
    with pytest.raises(InvalidArgument, match=r"min_new_tokens is 8.*max_new_tokens is only 7"):
        make(min_new_tokens=8, max_new_tokens=7)
    with pytest.raises(InvalidArgument, match=r"min_new_tokens is 129.*128"):
        make(min_new_tokens=129)


# ── types ──


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    "value", ["1", 1.0, 1.5, True, False, [1], {}, b"1", 1j, np.float32(1), np.bool_(True)]
)
def test_whole_numbers_take_no_other_type(name: str, value: Any) -> None:
    with pytest.raises(WrongType, match=name) as caught:
        make(**{name: value})
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("value", ["0.5", True, [0.5], {}, b"1", 1j, np.ones(2), Fraction(1, 2)])
def test_real_numbers_take_no_other_type(name: str, value: Any) -> None:
    with pytest.raises(WrongType, match=name):
        make(**{name: value})


@pytest.mark.parametrize("name", FLAGS)
def test_flags_take_only_bools(name: str) -> None:
    assert getattr(make(**{name: np.bool_(True)}), name) is True
    for value in (0, 1, "true", 1.0, [True]):
        with pytest.raises(WrongType, match=name):
            make(**{name: value})


def test_numbers_of_numpy_become_python_numbers() -> None:
    params = make(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        max_new_tokens=np.array(9),
        min_p=np.float16(0.25),
        n=np.uint8(2),
    )
    for name, value in {"temperature": 0.5, "top_k": 5, "max_new_tokens": 9, "min_p": 0.25, "n": 2}.items():
        assert getattr(params, name) == value
        assert type(getattr(params, name)) is type(value)


def test_none_is_the_default_but_for_max_new_tokens_and_n() -> None:
    values = dict.fromkeys(DEFAULTS.keys() - {"n"})
    assert make(**values) == make(max_new_tokens=None)
    with pytest.raises(WrongType, match="n must be an integer, got None"):
        make(n=None)


# ── what is stored ──


def test_tiny_temperatures_are_greedy() -> None:
    assert make(temperature=9e-7).temperature == 0.0
    assert make(temperature=9e-7).is_greedy
    assert make(top_k=1).is_greedy
    assert not make(temperature=2e-6).is_greedy
    assert not SamplingParams().is_greedy


def test_stored_numbers_fit_float32_and_int32() -> None:
    with np.errstate(all="raise"):
        assert np.isfinite(np.float32(make(temperature=1e300).temperature))
        assert np.float32(make(top_p=1e-300).top_p) > 0
        assert make(top_k=10**30).top_k == -1
        assert make(top_k=2**30).top_k == -1  # as SGLang stores "all"


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("END", ("END",)),
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        ("", ()),
        ([], ()),
        (["", "x", ""], ("x",)),
        (["x", "y", "x"], ("x", "y")),
        (None, ()),
        (np.array(["a", "b"]), ("a", "b")),
        (["s"] * 100, ("s",)),
        ([str(i) for i in range(32)], tuple(str(i) for i in range(32))),
    ],
)
def test_stop_becomes_a_tuple_of_texts(value: Any, stored: tuple[str, ...]) -> None:
    assert make(stop=value).stop == stored


def test_wrong_stops() -> None:
    with pytest.raises(InvalidArgument, match="33 strings; at most 32"):
        make(stop=[str(i) for i in range(33)])
    with pytest.raises(WrongType, match=r"stop\[1\] must be a string, got 5"):
        make(stop=["a", 5])
    for value in (5, b"end", {"a": 1}, iter("a"), True):
        with pytest.raises(WrongType, match="stop must be a list"):
            make(stop=value)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ([3, 4], (3, 4)),
        ((3,), (3,)),
        ({7}, (7,)),
        (range(3), (0, 1, 2)),
        (range(0, 2**31 - 1, 2**30), (0, 2**30)),
        ([None, 5, None], (5,)),
        ([None], ()),
        ([], ()),
        (np.array([1, 2]), (1, 2)),
        ([np.int64(4), 4], (4,)),
    ],
)
def test_stop_token_ids_become_a_tuple(value: Any, stored: tuple[int, ...]) -> None:
    assert make(stop_token_ids=value).stop_token_ids == stored


@pytest.mark.parametrize("value", [range(6), range(6, 0, -1), range(0, 60, 10)])
def test_a_range_counts_by_its_items(monkeypatch: pytest.MonkeyPatch, value: range) -> None:
    monkeypatch.setattr("tokenmill.sampling_params.MAX_ITEMS", 5)
    with pytest.raises(InvalidArgument, match="stop_token_ids has 6 items; at most 5 are allowed"):
        make(stop_token_ids=value)


@pytest.mark.parametrize("value", [5, "5", ["5"], [1.0], [True], [[1]], {1: 2}])
def test_wrong_stop_token_ids(value: Any) -> None:
    with pytest.raises(WrongType, match="stop_token_ids"):
        make(stop_token_ids=value)
    with pytest.raises(InvalidArgument, match=r"stop_token_ids\[1\].*-1"):
        make(stop_token_ids=[0, -1])


# ── from_value ──


def test_from_value_takes_every_dialect() -> None:
    expected = make(temperature=0.5, stop=("x",))
    given = {"temperature": 0.5, "stop": "x"}
    assert SamplingParams.from_value(given) == expected
    assert SamplingParams.from_value(expected) is expected
    assert SamplingParams.from_value(SimpleNamespace(**given)) == expected
    assert SamplingParams.from_value(None) == SamplingParams()
    assert SamplingParams.from_value({}) == SamplingParams()
    slotted = dataclasses.make_dataclass("Slotted", ["temperature", "stop"], slots=True)
    assert SamplingParams.from_value(slotted(**given)) == expected
    of_class = type("OfClass", (), {**given, "unheard_of": 1})()  # of a class nobody asks for all it has
    assert SamplingParams.from_value(of_class) == expected
    of_class.temperature = 0.25
    assert SamplingParams.from_value(of_class) == dataclasses.replace(expected, temperature=0.25)


def test_from_value_reads_the_notes_of_a_normalized_foreign_object() -> None:
    foreign = SimpleNamespace(
        temperature=1.0, top_k=1 << 30, stop_strs=["x"], stop_regex_strs=["y"], is_normalized=True, _private=1
    )
    assert SamplingParams.from_value(foreign) == make(stop=("x",), stop_regex=("y",))


def test_from_value_never_changes_the_callers_dict() -> None:
    given = {"stop": ["a", ""], "stop_token_ids": [None, 3], "temperature": 0, "max_new_tokens": None}
    before = copy.deepcopy(given)
    SamplingParams.from_value(given, defaults={"top_p": 0.5})
    assert given == before


def test_defaults_lie_below_a_mapping_key_by_key() -> None:
    defaults = {"temperature": 0.3, "max_new_tokens": 40}
    assert SamplingParams.from_value(None, defaults=defaults).temperature == 0.3
    mixed = SamplingParams.from_value({"temperature": 0.7}, defaults=defaults)
    assert (mixed.temperature, mixed.max_new_tokens) == (0.7, 40)
    assert SamplingParams.from_value({"max_new_tokens": None}, defaults=defaults).max_new_tokens is None
    assert SamplingParams.from_value(SamplingParams(), defaults=defaults).temperature == 1.0


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("temprature", "temperature"),
        ("max_tokens", "max_new_tokens"),
        ("seed", "sampling_seed"),
        ("topp", "top_p"),
        ("best_of", "n"),
    ],
)
def test_unknown_names_come_with_a_suggestion(name: str, suggestion: str) -> None:
    with pytest.raises(UnknownArgument, match=rf"sampling_params\[4\].*{name}.*Did you mean '{suggestion}'"):
        SamplingParams.from_value({name: 1}, index=4)
    with pytest.raises(TypeError):
        SamplingParams.from_value(SimpleNamespace(**{name: 1}))


class Word(str):
    """Has a dictionary of attributes, unlike a plain string, as a tensor has."""


@pytest.mark.parametrize("value", [SimpleNamespace(), Word("temperature"), SimpleNamespace(_top_k=1)])
def test_objects_that_hold_no_parameter_are_refused(value: object) -> None:
    with pytest.raises(WrongType, match="must be a dict, SamplingParams or None"):
        SamplingParams.from_value(value)


def test_errors_name_the_item() -> None:
    with pytest.raises(InvalidArgument, match=r"^sampling_params\[2\]: temperature .* got -1.0"):
        SamplingParams.from_value({"temperature": -1.0}, index=2)
    with pytest.raises(InvalidArgument, match=r"^sampling_params: top_k"):
        SamplingParams.from_value({"top_k": 0})
    with pytest.raises(WrongType, match="names of parameters must be strings"):
        SamplingParams.from_value({1: 2})


@pytest.mark.parametrize("value", ["greedy", 5, [1], b"x", SamplingParams, print, object(), True, np.ones(2)])
def test_from_value_takes_no_other_type(value: Any) -> None:
    with pytest.raises(WrongType, match="must be a dict"):
        SamplingParams.from_value(value)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.complex_numbers()
    | st.sampled_from([np.float64(math.nan), np.int8(-1), np.ones(2), np.array([[1]]), object(), int])
    | st.integers(4000, 5000).map(lambda digits: 10**digits),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=5,
)


def test_equal_parameters_have_equal_hashes() -> None:
    one, same, other = (make(custom_params={"a": value}) for value in (1, 1, 2))
    assert one == same != other
    assert hash(one) == hash(same)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(DEFAULTS)) | st.text(max_size=4), JUNK, max_size=4) | JUNK)
def test_junk_gives_parameters_or_our_error(value: Any) -> None:
    outcome = read(value)
    if isinstance(outcome, SamplingParams):
        assert read(dataclasses.asdict(outcome)) == outcome
        hash(outcome)
    else:
        assert "sampling_params[0]" in str(outcome)
        assert len(str(outcome)) < 400


def read(value: Any) -> SamplingParams | InvalidArgument:
    try:
        return SamplingParams.from_value(value, index=0)
    except InvalidArgument as error:
        return error


@pytest.mark.parametrize("pattern", ["(?:(?:(?:|a){1000}){1000}){1000}", "(?:a{0,1000}){400000}{0,9}x*"])
def test_a_pattern_that_would_take_all_memory_in_an_empty_text(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match="stop_regex"):
        SamplingParams(stop_regex=pattern)


def test_a_pattern_with_too_many_ways_through_an_empty_text_is_judged_soon() -> None:
    assert SamplingParams(stop_regex="(?:a?|b?){60}(?=c)").stop_regex
