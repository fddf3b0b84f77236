"""What stands in the output for a record and its results: all of it, and nothing of the run."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.batch.records import TIMEOUT, ListSource, failed, record_of, result
from tokenmill.batch.json_text import json_line, prepared
from tokenmill.batch.outputs import RowOutput
from tokenmill.batch.sources import open_source
from tokenmill.batch.tables import write_table

pytestmark = pytest.mark.unit

in_one_folder = settings(
    max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def row(fields: dict[str, Any] | None, *results: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The row of the output for the first row of a file."""
    line, error_line = RowOutput(ListSource([fields]), **options).line(record_of(0, fields), results)
    assert error_line is None
    assert line is not None
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    return json.loads(line)  # type: ignore[no-any-return]


# ── rows ──────────────────────────────────────────────────────────────────────────────────────


def test_the_answer_stands_beside_the_columns() -> None:
    assert row({"id": 7, "prompt": "Hi"}, result()) == {
        "id": 7,
        "prompt": "Hi",
        "text": "Paris.",
        "finish_reason": "length",
        "completion_tokens": 2,
        "prompt_tokens": 5,
        "error": None,
    }


def test_token_ids_and_what_else_was_asked_for() -> None:
    asked = {"output_token_logprobs": [(-0.5, 3, None)], "hidden_states": [np.float32([1.5, np.nan])]}
    made = row({"prompt": "Hi"}, result(**asked), output_ids=True)
    assert made["output_ids"] == [0, 1]
    assert made["output_token_logprobs"] == [[-0.5, 3, None]]
    assert made["hidden_states"] == [[1.5, None]]


def test_without_a_tokenizer_the_token_ids_are_the_answer() -> None:
    answer = result()
    del answer["text"]
    assert row({"input_ids": [1]}, answer)["output_ids"] == [0, 1]


def test_several_samples_are_a_list() -> None:
    made = row({"prompt": "Hi"}, result("a"), result("b", num_tokens=1), failed(TIMEOUT))
    assert [(each["text"], each["completion_tokens"]) for each in made["outputs"]] == [
        ("a", 2),
        ("b", 1),
        ("", 0),
    ]
    assert [each["error"] for each in made["outputs"]] == [None, None, TIMEOUT]
    assert (made["prompt"], made["prompt_tokens"], made["error"]) == ("Hi", 5, TIMEOUT)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"text": "mine"}, "output"),
        ({"prompt": "Hi", "error": 0}, "output"),
        ({"text": "mine", "output": "mine", "output_": "mine"}, "output__"),
    ],
)
def test_no_column_of_the_user_is_overwritten(fields: dict[str, Any], key: str) -> None:
    made = row(fields, result())
    assert {name: made[name] for name in fields} == fields
    assert set(made) == {*fields, key}
    assert made[key]["text"] == "Paris."


def test_the_names_of_the_first_row_count_for_all() -> None:
    output = RowOutput(ListSource([None, {"text": "mine"}]))
    assert "text" in output.row(record_of(2, {"prompt": "Hi"}), [result()])["output"]
    assert output.row(record_of(0, None), [failed(TIMEOUT)])["output"]["error"] == TIMEOUT
    assert "text" in output.row(record_of(3, {"output": 1}), [result()])["output_"]
    flat = RowOutput(ListSource(columns=("prompt",)))
    assert flat.row(record_of(0, {"prompt": "Hi"}), [result()])["text"] == "Paris."
    assert flat.row(record_of(1, {"text": "mine"}), [result()])["text"] == "mine"


def test_a_line_that_cannot_be_read_is_known_by_its_number() -> None:
    made = row(None, failed(TIMEOUT))
    assert (made["line"], made["text"], made["error"]) == (1, "", TIMEOUT)


def test_nothing_of_a_run_is_in_the_output() -> None:
    one = row({"prompt": "Hi"}, result())
    other = row({"prompt": "Hi"}, result(id="other", cached_tokens=0, e2e_latency=9.0, num_retractions=4))
    assert one == other


@given(fields=st.dictionaries(st.text(), json_values, max_size=4), text=st.text())
def test_any_row_comes_out_as_it_came_in(fields: dict[str, Any], text: str) -> None:
    made = row(fields, result(text))
    assert {name: made[name] for name in fields} == fields
    answers = made if "text" not in fields and "text" in made else made[next(reversed(made))]
    assert answers["text"] == text


def test_values_that_json_has_not() -> None:
    value = {
        "nan": float("nan"),
        "deep": [float("inf"), (1, 2)],
        "bytes": b"\xff\0",
        "day": datetime.date(2026, 3, 1),
        "long": datetime.timedelta(days=1, microseconds=1),
        "sum": Decimal("1.10"),
        "half": "\ud800x",
    }
    read = json.loads(json_line(value))
    assert read == {
        "nan": None,
        "deep": [None, [1, 2]],
        "bytes": "/wA=",
        "day": "2026-03-01",
        "long": "PT86400.000001S",
        "sum": "1.10",
        "half": "\ud800x",
    }
    assert json_line({"ü": "日本"}) == '{"ü": "日本"}\n'.encode()


def test_a_line_is_one_for_every_way_to_split() -> None:
    texts = ["a\u2028b", "\u2029\x85", "\v\f\x1c\r\n", "\\u2028"]
    [line] = json_line(texts).decode().splitlines()
    assert json.loads(line) == texts


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=8,
    ),
    options=st.fixed_dictionaries({}, optional={
        "ensure_ascii": st.booleans(), "separators": st.just((",", ":")), "default": st.just(repr),
    }),
)  # fmt: skip
def test_an_encoder_that_was_prepared_writes_the_same_text(value: Any, options: dict[str, Any]) -> None:
    """Journals of earlier versions were written by the encoder itself."""
    encoder = json.JSONEncoder(**options)
    encode = prepared(encoder)
    with contextlib.suppress(TypeError):  # a value that JSON has not leaves nothing behind
        encode([{"a": [object()]}])
    assert encode(value) == encoder.encode(value)


# ── tables ────────────────────────────────────────────────────────────────────────────────────


def again(rows: Iterable[dict[str, Any]]) -> Callable[[], Iterable[dict[str, Any]]]:
    rows = list(rows)
    return lambda: iter(rows)


plain_rows = st.lists(st.fixed_dictionaries({"a": st.text(), "b": st.text(min_size=1)}), max_size=8)


@in_one_folder
@given(rows=plain_rows, format=st.sampled_from(["csv", "tsv"]))
def test_csv_is_read_back_as_it_was_written(tmp_path: Path, rows: list[dict[str, str]], format: str) -> None:
    rows = [{name: text.replace("\0", "0") for name, text in row.items()} for row in rows]
    path = tmp_path / f"out.{format}"
    write_table(path, again(rows), format=format)
    assert [record.fields for record in open_source(path)] == [
        {name: text.encode(errors="backslashreplace").decode() for name, text in row.items()} for row in rows
    ]
    with path.open(encoding="utf-8", newline="") as file:
        assert len(list(csv.reader(file, delimiter="\t" if format == "tsv" else ","))) == len(rows) + bool(
            rows
        )


def test_csv_has_every_column_of_any_row(tmp_path: Path) -> None:
    rows = [{"a": "x", "n": 1}, {"a": None, "error": {"type": "timeout"}, "list": [1, "é"]}]
    write_table(tmp_path / "out.csv", again(rows), format="csv")
    assert (tmp_path / "out.csv").read_bytes().decode().splitlines() == [
        "a,n,error,list",
        "x,1,,",
        ',,"{""type"": ""timeout""}","[1, ""é""]"',
    ]


def test_what_json_has_not_is_a_text_or_nothing_in_csv(tmp_path: Path) -> None:
    rows = [{"date": datetime.date(2020, 1, 2), "bytes": b"ab", "nan": math.nan, "list": [math.nan]}]
    write_table(tmp_path / "out.csv", again(rows), format="csv")
    assert (tmp_path / "out.csv").read_text().splitlines() == [
        "date,bytes,nan,list",
        "2020-01-02,YWI=,,[null]",
    ]


def read_parquet(path: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(path).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_no_rows_make_a_valid_table(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"out.{format}"
    write_table(path, again([]), format=format)
    assert list(open_source(path)) == []
    write_table(path, again([]), format=format, columns=["prompt", "n"])
    assert (open_source(path).columns, list(open_source(path))) == (("prompt", "n"), [])


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_known_columns_are_written_though_no_row_has_them(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"out.{format}"
    write_table(path, again([{"line": 2, "n": None}]), format=format, columns=["n", "prompt"])
    assert open_source(path).columns == ("n", "prompt", "line")


def test_parquet_keeps_types_and_nested_columns(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    day = datetime.datetime(2026, 3, 1, 12)
    rows = [
        {"id": 1, "messages": messages, "score": 1, "day": day, "text": "a", "error": None},
        {"id": 2, "messages": [], "score": 0.5, "day": None, "text": "b", "error": dict(TIMEOUT)},
    ]
    write_table(tmp_path / "out.parquet", again(rows), format="parquet")
    assert read_parquet(tmp_path / "out.parquet") == rows


def test_types_do_not_depend_on_where_a_chunk_ends(tmp_path: Path) -> None:
    rows = [{"n": number, "x": None} for number in range(20_000)] + [{"n": 0.5, "x": "late", "y": 1}]
    write_table(tmp_path / "out.parquet", again(rows), format="parquet")
    read = read_parquet(tmp_path / "out.parquet")
    assert [each["n"] for each in read] == [each["n"] for each in rows]
    assert (read[-1], read[0]) == ({"n": 0.5, "x": "late", "y": 1}, {"n": 0.0, "x": None, "y": None})
    assert pyarrow.parquet.ParquetFile(tmp_path / "out.parquet").num_row_groups > 1


@pytest.mark.parametrize(
    ("values", "type"),
    [
        ([2**64 - 1], pyarrow.uint64()),
        ([1, None, 2**63], pyarrow.uint64()),
        ([1] * 2000 + [2**63], pyarrow.uint64()),
        ([2**63 - 1, -1], pyarrow.int64()),
        ([[1, 2**63], []], pyarrow.list_(pyarrow.uint64())),
        ([{"a": 2**63, "b": "x"}], pyarrow.struct([("a", pyarrow.uint64()), ("b", pyarrow.string())])),
    ],
)
def test_integers_without_a_sign_stay_integers_in_parquet(
    tmp_path: Path, values: list[Any], type: Any
) -> None:
    path = tmp_path / "out.parquet"
    write_table(path, again({"value": value} for value in values), format="parquet")
    assert pyarrow.parquet.read_schema(path).field("value").type == type
    assert [each["value"] for each in read_parquet(path)] == values


@pytest.mark.parametrize(
    "values",
    [
        [1, "one"],
        [2**63, -1],
        [2**63, 0.5],
        [2**64, 2**63],
        [[2**63], "a"],
        [{"a": 1}, [2]],
        [{}, {}],
        [{"a": {}}, None],
        [json.loads("[" * 60 + "]" * 60), None],
        [json.loads('{"a": ' * 100 + "1" + "}" * 100)],
        [2**70, 1],
        [1] * 2000 + ["one"],
        [2**60 + 1] * 1024 + [0.5],
        [[1], ["a"], None],
        [1.5, True],
        [0.5] * 1024 + [True, 0.5],
        [[0.5, None], [True], None],
        [{"a": 1.5, "b": True}, {"a": False}, None],
    ],
)
def test_what_has_no_type_in_parquet_becomes_json(tmp_path: Path, values: list[Any]) -> None:
    rows = [{"id": index, "value": value} for index, value in enumerate(values)]
    write_table(tmp_path / "out.parquet", again(rows), format="parquet")
    read = [each["value"] for each in read_parquet(tmp_path / "out.parquet")]
    assert [None if text is None else json.loads(text) for text in read] == values


@pytest.mark.parametrize("place", [str, lambda text: [text], lambda text: {"a": text, "n": 2**63}])
def test_half_a_surrogate_pair_changes_its_own_text_only_in_parquet(tmp_path: Path, place: Any) -> None:
    """The whole column became JSON."""
    rows = [{"value": place(text)} for text in ("\ud800 hi", "😀")]
    write_table(tmp_path / "out.parquet", again(rows), format="parquet")
    assert read_parquet(tmp_path / "out.parquet") == [{"value": place("\\ud800 hi")}, {"value": place("😀")}]


def test_names_of_columns_in_parquet_are_text(tmp_path: Path) -> None:
    rows = [{"half \ud800": 1, "half \\ud800": 2, "": 3}]
    write_table(tmp_path / "out.parquet", again(rows), format="parquet")
    assert read_parquet(tmp_path / "out.parquet") == [{"half \\ud800": 1, "half \\ud800_": 2, "": 3}]


@in_one_folder
@given(rows=st.lists(st.dictionaries(st.sampled_from("abc"), json_values), max_size=6))
def test_any_rows_make_a_table_without_loss(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    write_table(tmp_path / "out.parquet", again(rows), format="parquet")
    read = read_parquet(tmp_path / "out.parquet")
    for name in {name for row in rows for name in row}:
        for made, given_row in zip(read, rows, strict=True):
            assert holds(made[name], given_row.get(name)), (made[name], given_row.get(name))


def holds(made: Any, wanted: Any) -> bool:
    """Whether a value of a table says what was given: itself, in a struct with more keys, or as JSON."""
    if made == wanted:
        return True
    if isinstance(made, dict) and isinstance(wanted, dict):
        return wanted.keys() <= made.keys() and all(holds(made[key], wanted.get(key)) for key in made)
    if isinstance(made, list) and isinstance(wanted, list) and len(made) == len(wanted):
        return all(map(holds, made, wanted))
    return isinstance(made, str) and json.loads(made) == wanted


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_the_same_rows_give_the_same_bytes(tmp_path: Path, format: str) -> None:
    rows = [RowOutput(ListSource()).row(record_of(i, {"prompt": str(i)}), [result()]) for i in range(50)]
    write_table(tmp_path / "one", again(rows), format=format)
    write_table(tmp_path / "two", again(rows), format=format)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
