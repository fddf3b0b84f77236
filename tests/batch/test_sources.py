"""Every row of a file comes out once: as its fields, or as an error that names its place and fault."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.batch import csv_rows, text_lines
from tokenmill.batch.sources import Record, Source, open_source
from tokenmill.errors import InvalidArgument, WrongType

pytestmark = pytest.mark.unit


# One folder serves all examples of a property; each writes its file anew.
in_one_folder = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
good = {"prompt": "Hi"}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def written(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def fields_of(source: Source) -> list[Any]:
    """Fields of all records, which must be free of errors and counted without a gap."""
    records = list(source)
    assert [record.error for record in records] == [None] * len(records)
    assert [record.index for record in records] == list(range(len(records)))
    return [record.fields for record in records]


def message_of(record: Record) -> str:
    assert record.fields is None
    assert record.error is not None
    assert record.error["type"] == "bad_parameters"
    assert record.error["status_code"] == 400
    return record.error["message"]


# ── JSONL ─────────────────────────────────────────────────────────────────────────────────────


@in_one_folder
@given(rows=st.lists(st.dictionaries(st.text(), json_values, max_size=4)), ascii=st.booleans())
def test_jsonl_gives_back_what_was_written(tmp_path: Path, rows: list[dict[str, Any]], ascii: bool) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii) for row in rows]
    source = open_source(written(tmp_path, "in.jsonl", "\n".join(lines).encode(errors="surrogatepass")))
    assert [record.fields for record in source] == rows
    assert [record.line for record in source] == list(range(1, len(rows) + 1))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"prompt": "Hi"', "no valid JSON: Expecting ',' delimiter at column 16"),
        (b"prompt: Hi", "no valid JSON"),
        (b'{"prompt": "Hi"} {"prompt": "Ho"}', "no valid JSON: Extra data at column 18"),
        (b'["Hi"]', "a row must be a JSON object like"),
        (b'"Hi"', "got 'Hi'"),
        (b'{"x": NaN}', "NaN is no JSON value"),
        (b'{"x": [-Infinity]}', "-Infinity is no JSON value"),
        (b'{"x": 1e999}', "the number 1e999 is too large"),
        (b'{"x": ' + b"9" * 5000 + b"}", "a whole number has more than 4300 digits; write it as a text"),
        (b'{"prompt": "a", "y": 1, "prompt": "b"}', "the key 'prompt' is there twice"),
        (b'{"prompt": "caf\xe9"}', "byte 16 (0xe9) is no UTF-8"),
        (b'{"prompt": "a\0b"}', "Invalid control character at column 14"),
        (b"\0" * 64, "no valid JSON"),
        (b'{"prompt": "Hi"}\r{"prompt": "Ho"}\r', "carriage returns alone, convert"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than 128 levels deep"),
        (b'{"x": ' + b"[" * 500 + b"]" * 500 + b"}", "nested more than 128 levels deep"),
        (b'{"x":' * 130 + b"1" + b"}" * 130, "nested more than 128 levels deep"),
    ],
)
def test_a_bad_line_is_a_row_with_an_error(tmp_path: Path, line: bytes, told: str) -> None:
    content = b'{"prompt": "Hi"}\n\n' + line + b'\n{"prompt": "Hi"}\n'
    first, bad, last = open_source(written(tmp_path, "in.jsonl", content))
    assert (first.fields, last.fields, last.line) == (good, good, 4)
    assert (bad.index, bad.line) == (1, 3)
    assert message_of(bad).startswith("line 3: ")
    assert told in message_of(bad)
    assert len(message_of(bad)) < 2000


@in_one_folder
@given(
    pieces=st.lists(
        st.binary(max_size=6)
        | st.sampled_from([b"\n", b"\r\n", b'{"a":1}', b'"', b",", b"\0", b"\xef\xbb\xbf"])
    )
)
def test_of_any_bytes_no_line_is_lost(tmp_path: Path, pieces: list[bytes]) -> None:
    content = b'{"a":1}\n' + b"".join(pieces)
    records = list(open_source(written(tmp_path, "in.jsonl", content)))
    assert [record.line for record in records] == [
        number for number, line in enumerate(content.split(b"\n"), 1) if line.strip()
    ]
    for record in open_source(written(tmp_path, "in.csv", b"a,b\n" + b"".join(pieces))):
        assert (record.fields is None) != (record.error is None)


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "Hi"}\n{"prompt": "Hi"}',
        b'{"prompt": "Hi"}\r\n{"prompt": "Hi"}\r\n',
        b'\xef\xbb\xbf{"prompt": "Hi"}\n{"prompt": "Hi"}\n',
        b'\n \t\n{"prompt": "Hi"}\n\r\n\n  {"prompt": "Hi"}  \n\n',
    ],
    ids=["no last newline", "CRLF", "byte order mark", "blank lines"],
)
def test_line_ends_marks_and_blank_lines(tmp_path: Path, content: bytes) -> None:
    assert fields_of(open_source(written(tmp_path, "in.ndjson", content))) == [good, good]


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.tsv"])
@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str, content: bytes) -> None:
    assert fields_of(open_source(written(tmp_path, name, content))) == []


def test_a_line_of_ten_megabytes_is_read(tmp_path: Path) -> None:
    text = "x" * 10_000_000
    path = written(tmp_path, "in.jsonl", json.dumps({"prompt": text}) + "\n" + json.dumps(good))
    assert fields_of(open_source(path)) == [{"prompt": text}, good]


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.jsonl.gz"])
def test_a_row_beyond_the_limit_is_passed_over(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (text_lines, csv_rows):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 50)
    wrap = '{{"prompt": "{}"}}\n' if "jsonl" in name else "{}\n"
    head = "" if "jsonl" in name else "prompt\n"
    content = (head + wrap.format("Hi") + wrap.format("x" * 5_000_000) + wrap.format("Hi")).encode()
    path = written(tmp_path, name, gzip.compress(content) if name.endswith(".gz") else content)
    first, bad, last = open_source(path)
    assert first.fields == last.fields == good
    assert "longer than 50 bytes" in message_of(bad)


def test_lines_are_read_with_little_memory(tmp_path: Path) -> None:
    """Three hundred times the memory that reading may take."""
    with (tmp_path / "in.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{number}" * 100}) + "\n" for number in range(20_000))
    source = open_source(tmp_path / "in.jsonl")
    tracemalloc.start()
    try:
        assert sum(1 for _ in source) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.csv"])
def test_a_file_in_another_unicode_encoding_is_refused(tmp_path: Path, name: str, encoding: str) -> None:
    path = written(tmp_path, name, '{"prompt": "Hi"}\n'.encode(encoding))
    with pytest.raises(InvalidArgument, match=rf"written in {encoding[:6].upper()}, but only UTF-8.*iconv"):
        open_source(path)


def test_compressed_lines_under_a_plain_name_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "in.jsonl", gzip.compress(b'{"prompt": "Hi"}\n'))
    with pytest.raises(InvalidArgument, match=r"compressed by gzip.*rename it to in\.jsonl\.gz"):
        open_source(path)


def test_a_key_among_very_many_that_is_there_twice_is_told_soon(tmp_path: Path) -> None:
    pairs = ", ".join(f'"k{number}": 1' for number in range(100_000))
    [row] = open_source(written(tmp_path, "in.jsonl", f'{{{pairs}, "k99999": 2}}'))
    assert "the key 'k99999' is there twice" in message_of(row)


def test_what_is_compressed_twice_is_told_so(tmp_path: Path) -> None:
    path = written(tmp_path, "in.jsonl.gz", gzip.compress(gzip.compress(b'{"prompt": "Hi"}\n')))
    with pytest.raises(InvalidArgument, match="is compressed twice"):
        open_source(path)


def test_compressed_lines(tmp_path: Path) -> None:
    content = gzip.compress(b'{"prompt": "Hi"}\n' * 3)
    assert fields_of(open_source(written(tmp_path, "in.jsonl.gz", content))) == [good] * 3
    assert fields_of(open_source(written(tmp_path, "IN.JSONL.GZ", content))) == [good] * 3


def test_a_compressed_file_that_breaks_off_keeps_its_first_rows(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": str(number * 7919)}) for number in range(20_000)]
    content = gzip.compress("\n".join(lines).encode())
    *rows, last = open_source(written(tmp_path, "in.jsonl.gz", content[: len(content) // 2]))
    assert [row.fields for row in rows] == [json.loads(line) for line in lines[: len(rows)]]
    assert 0 < len(rows) < 20_000
    assert f"from line {len(rows) + 1} on the file cannot be read" in message_of(last)


def test_what_only_claims_to_be_compressed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        open_source(written(tmp_path, "in.jsonl.gz", b'{"prompt": "Hi"}\n'))


# ── CSV ───────────────────────────────────────────────────────────────────────────────────────

# No NUL, which is an error of its own; and nothing that no file can hold.
cells = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
awkward = st.sampled_from(['"', '""', ",", "\t", "\n", "\r\n", "\r", " ", '","', '"\n"', "ä", "日"])
texts = st.lists(awkward | cells, max_size=5).map("".join)


@in_one_folder
@given(
    rows=st.lists(st.tuples(texts, texts), max_size=6),
    delimiter=st.sampled_from([",", "\t"]),
    # With line feeds alone, the library leaves fields with a carriage return in them without quotes.
    style=st.sampled_from([("\r\n", csv.QUOTE_MINIMAL), ("\r\n", csv.QUOTE_ALL), ("\n", csv.QUOTE_ALL)]),
)
def test_csv_gives_back_what_the_standard_library_wrote(
    tmp_path: Path, rows: list[tuple[str, str]], delimiter: str, style: tuple[str, Any]
) -> None:
    file = io.StringIO(newline="")
    end, quoting = style
    writer = csv.writer(file, delimiter=delimiter, lineterminator=end, quoting=quoting)
    writer.writerows([("a", "b"), *rows])
    path = written(tmp_path, "in.tsv" if delimiter == "\t" else "in.csv", file.getvalue())
    source = open_source(path)
    assert source.columns == ("a", "b")
    assert fields_of(source) == [{"a": a, "b": b} for a, b in rows]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (b"one", "the row has 1 fields, but the header has 2"),
        (b"one,two,three", "the row has 3 fields"),
        (b'"one"x,two', "field 1 goes on behind its closing quote"),
        (b"caf\xe9,two", "byte 4 (0xe9) is no UTF-8"),
        (b"o\0ne,two", "byte 2 is NUL"),
    ],
)
def test_a_bad_csv_row_is_a_row_with_an_error(tmp_path: Path, row: bytes, told: str) -> None:
    content = b'a,b\n"1\n2",3\n\n' + row + b"\n5,6\n"
    first, bad, last = open_source(written(tmp_path, "in.csv", content))
    assert (first.fields, first.line) == ({"a": "1\n2", "b": "3"}, 2)
    assert (last.fields, last.index, last.line) == ({"a": "5", "b": "6"}, 2, 6)
    assert message_of(bad).startswith("line 5: ")
    assert told in message_of(bad)


def test_a_quote_that_nothing_closes_costs_its_row_only(tmp_path: Path) -> None:
    first, bad, second, third = open_source(written(tmp_path, "in.csv", 'a,b\n1,"x"\n2,"\n3,y\n4,z\n'))
    assert first.fields == {"a": "1", "b": "x"}
    assert message_of(bad).startswith("line 3: a quote is opened that nothing closes")
    assert (second.fields, second.line) == ({"a": "3", "b": "y"}, 4)
    assert (third.fields, third.index) == ({"a": "4", "b": "z"}, 3)


def test_quotes_that_nothing_closes_are_told_soon(tmp_path: Path) -> None:
    """Looking for the end of each down to the end of the file took minutes for a megabyte."""
    rows = list(open_source(written(tmp_path, "in.csv", "a,b,c\n" + 'x",b,"\n' * 50_000)))
    assert len(rows) == 50_000
    assert all("a quote is opened that nothing closes" in message_of(row) for row in rows)


@pytest.mark.parametrize("limit", [None, 100])
def test_a_stray_quote_costs_its_row_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """Another one, 1,490 rows on, would close it; also where the rows between are too long for one."""
    if limit is not None:
        for module in (text_lines, csv_rows):
            monkeypatch.setattr(module, "MAX_ROW_BYTES", limit)
    rows = [f"{number},Tell me {number}" for number in range(2000)]
    rows[10], rows[1500] = '10,"Tell me', '1500,"Tell, me"'
    records = list(open_source(written(tmp_path, "in.csv", "\n".join(["id,prompt", *rows]))))
    assert [record.index for record in records] == list(range(2000))
    assert [record.index for record in records if record.error is not None] == [10]
    assert message_of(records[10]).startswith("line 12: a quote is opened that nothing closes")
    assert records[11].fields == {"id": "11", "prompt": "Tell me 11"}
    assert records[1500].fields == {"id": "1500", "prompt": "Tell, me"}


def test_stray_quotes_far_from_their_end_are_told_soon(tmp_path: Path) -> None:
    """Each meets the fault in the last line; looking for it 50,000 times would take minutes."""
    content = "a,b,c\n" + 'x",b,"\n' * 50_000 + 'x"y,b,c\n'
    *bad, last = open_source(written(tmp_path, "in.csv", content))
    assert len(bad) == 50_000
    assert all("a quote is opened that nothing closes" in message_of(row) for row in bad)
    assert last.fields == {"a": 'x"y', "b": "b", "c": "c"}


def test_a_field_of_many_lines_takes_little_memory(tmp_path: Path) -> None:
    """A list of its lines took 70 times its size."""
    field = "x\n" * 500_000
    source = open_source(written(tmp_path, "in.csv", f'prompt\n"{field}"\n'))
    tracemalloc.start()
    try:
        assert fields_of(source) == [{"prompt": field}]
        assert tracemalloc.get_traced_memory()[1] < 8 * len(field)
    finally:
        tracemalloc.stop()


def test_line_ends_in_a_name_of_a_header(tmp_path: Path) -> None:
    assert open_source(written(tmp_path, "in.csv", 'x,"a\r\nb"\r\n1,2\r\n')).columns == ("x", "a\r\nb")


def test_quotes_inside_of_a_plain_field_are_text(tmp_path: Path) -> None:
    path = written(tmp_path, "in.csv", 'a,b\n5" pipe,x\ny,5"\n')
    assert fields_of(open_source(path)) == [{"a": '5" pipe', "b": "x"}, {"a": "y", "b": '5"'}]


def test_huge_csv_fields_change_nothing_global(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    text = 'line "one"\n' * 100_000
    file = io.StringIO(newline="")
    csv.writer(file).writerows([("a", "b"), (text, "x" * 1_000_000)])
    path = written(tmp_path, "in.csv", file.getvalue())
    assert fields_of(open_source(path)) == [{"a": text, "b": "x" * 1_000_000}]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"a,b,a\n", "'a' twice in column 3"),
        (b"a,,b\n", "no name in column 2"),
        (b"caf\xe9\n", "byte 4"),
        (b"a\r1\r2\r", "carriage returns alone"),
        (b'"a', "a quote is opened"),
    ],
)
def test_a_header_that_names_no_columns(tmp_path: Path, header: bytes, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        open_source(written(tmp_path, "in.csv", header))


# ── Parquet ───────────────────────────────────────────────────────────────────────────────────


def parquet_file(folder: Path, table: Any, **options: Any) -> Path:
    path = folder / "in.parquet"
    pyarrow.parquet.write_table(table, path, **options)
    return path


@in_one_folder
@given(rows=st.lists(st.fixed_dictionaries({"id": st.integers(-9, 9), "text": texts}), max_size=20))
@pytest.mark.parametrize("group", [1, 3, 100])
def test_parquet_gives_back_what_was_written(tmp_path: Path, rows: list[dict[str, Any]], group: int) -> None:
    schema = pyarrow.schema([("id", pyarrow.int64()), ("text", pyarrow.string())])
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    source = open_source(parquet_file(tmp_path, table, row_group_size=group))
    assert (source.columns, source.num_rows) == (("id", "text"), len(rows))
    assert fields_of(source) == rows == fields_of(source)


def test_nested_columns_and_nulls_become_python_values(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}], "ids": [1, 2], "params": {"top_k": 4}},
        {"messages": None, "ids": [], "params": None},
    ]
    assert fields_of(open_source(parquet_file(tmp_path, pyarrow.Table.from_pylist(rows)))) == rows


def test_a_damaged_part_of_a_parquet_file_costs_its_rows_only(tmp_path: Path) -> None:
    table = pyarrow.table({"text": [f"{number} {number * number}" for number in range(3000)]})
    path = parquet_file(tmp_path, table, row_group_size=1000, compression="snappy", use_dictionary=False)
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = group.data_page_offset
    content[start : start + group.total_compressed_size] = b"\xff" * group.total_compressed_size
    path.write_bytes(content)
    records = list(open_source(path))
    assert [record.index for record in records] == list(range(3000))
    assert [record.index for record in records if record.error] == list(range(1000, 2000))
    assert message_of(records[1234]).startswith("row 1234: this part of the file is damaged: ")
    assert records[2999].fields == {"text": "2999 8994001"}


def test_a_value_without_a_python_counterpart_costs_its_row_only(tmp_path: Path) -> None:
    words = pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
    first, bad, last = open_source(parquet_file(tmp_path, pyarrow.table({"word": words})))
    assert (first.error, last.error) == (None, None)
    assert "row 1: a value cannot be read" in message_of(bad)


def test_times_in_nanoseconds_are_text_where_python_has_none(tmp_path: Path) -> None:
    times = pyarrow.array([1000, 1001, None], pyarrow.timestamp("ns"))
    rows = fields_of(open_source(parquet_file(tmp_path, pyarrow.table({"id": [1, 2, 3], "time": times}))))
    assert [row["id"] for row in rows] == [1, 2, 3]
    assert rows[0]["time"].isoformat() == "1970-01-01T00:00:00.000001"
    assert rows[1]["time"] == "1970-01-01T00:00:00.000001001"
    assert rows[2]["time"] is None


def test_fields_of_the_same_name_are_refused(tmp_path: Path) -> None:
    pairs = pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([4])], names=["a", "a"])
    table = pyarrow.table({"prompt": ["A"], "x": pyarrow.ListArray.from_arrays([0, 1], pairs)})
    with pytest.raises(InvalidArgument, match="two fields of the name 'a' in its column 'x'"):
        open_source(parquet_file(tmp_path, table))


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"hello world, this is text", b"PAR1" + b"x" * 99 + b"PAR1"]
)
def test_what_is_no_parquet_is_refused_at_once(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read as Parquet"):
        open_source(written(tmp_path, "in.parquet", content))


def test_columns_of_the_same_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    with pytest.raises(InvalidArgument, match="two columns of the name 'a'"):
        open_source(parquet_file(tmp_path, table))


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet_file(tmp_path, pyarrow.table({"a": [1]}))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'tokenmill\[parquet\]'"):
        open_source(path)


# ── data sets on disk ─────────────────────────────────────────────────────────────────────────


def saved_dataset(folder: Path, *parts: Sequence[dict[str, Any]]) -> Path:
    """A folder as `Dataset.save_to_disk` of the package `datasets` (4.x) leaves it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(parts):05}.arrow" for number in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        table = pyarrow.Table.from_pylist(list(rows))
        with pyarrow.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "5b1a3c",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}, "splits": {}}))
    return folder


def numbered(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"id": number, "prompt": f"Count to {number}."} for number in range(start, stop)]


def test_a_saved_dataset_is_read_file_by_file(tmp_path: Path) -> None:
    source = open_source(saved_dataset(tmp_path / "set", numbered(0, 5), numbered(5, 8)))
    assert (source.format, source.columns, source.num_rows) == ("datasets", ("id", "prompt"), 8)
    assert fields_of(source) == numbered(0, 8) == fields_of(source)


def test_a_dataset_dict_needs_a_split(tmp_path: Path) -> None:
    saved_dataset(tmp_path / "train", numbered(0, 3))
    saved_dataset(tmp_path / "test", numbered(3, 4))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert fields_of(open_source(tmp_path, split="test")) == numbered(3, 4)
    assert fields_of(open_source(tmp_path / "train")) == numbered(0, 3)
    with pytest.raises(InvalidArgument, match=r"has the splits \['train', 'test'\]; choose one as split"):
        open_source(tmp_path)
    with pytest.raises(InvalidArgument, match="Did you mean 'train'"):
        open_source(tmp_path, split="trian")
    with pytest.raises(InvalidArgument, match="single split"):
        open_source(tmp_path / "train", split="train")


def test_a_damaged_part_of_a_saved_dataset_costs_its_rows_only(tmp_path: Path) -> None:
    """Offsets of texts that lead out of the file would end the process if anybody followed them."""
    folder = saved_dataset(tmp_path / "set", [{"text": "four"}] * 6)
    path = folder / "data-00000-of-00001.arrow"
    good, bad = struct.pack("<3i", 0, 4, 8), struct.pack("<3i", 0, 2**30, 8)
    first, second, third, fourth = path.read_bytes().split(good)
    path.write_bytes(first + good + second + bad + third + good + fourth)
    records = list(open_source(folder))
    assert [record.fields for record in records if record.fields] == [{"text": "four"}] * 4
    assert [record.index for record in records if record.error] == [2, 3]
    assert "row 2: a value cannot be read" in message_of(records[2])


def test_a_bad_value_of_a_saved_dataset_costs_its_row_only(tmp_path: Path) -> None:
    folder = saved_dataset(tmp_path / "set", [{"text": "four"}] * 6)
    path = folder / "data-00000-of-00001.arrow"
    words = pyarrow.array([*[b"ok"] * 700, b"\xff", *[b"ok"] * 300]).view(pyarrow.string())
    table = pyarrow.table({"text": words})
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    records = list(open_source(folder))
    assert [record.fields for record in records if record.fields] == [{"text": "ok"}] * 1000
    assert [record.index for record in records if record.error] == [700]


def test_a_saved_dataset_under_any_name(tmp_path: Path) -> None:
    folder = saved_dataset(tmp_path / "set", numbered(0, 2)).rename(tmp_path / os.fsdecode(b"caf\xe9"))
    assert [row["id"] for row in fields_of(open_source(folder))] == [0, 1]


def lose_state(folder: Path) -> None:
    (folder / "state.json").unlink()


def cut_file(folder: Path) -> None:
    path = folder / "data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:-300])


def lose_file(folder: Path) -> None:
    (folder / "data-00000-of-00001.arrow").unlink()


def keep_indices(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_indices_files": [{"filename": "i.arrow"}]}))


def spoil_state(folder: Path) -> None:
    (folder / "state.json").write_text("{")


def forget_files(folder: Path) -> None:
    (folder / "state.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lose_state, "has no state.json"),
        (cut_file, "cannot be read as an Arrow file"),
        (lose_file, "is missing, which state.json names"),
        (keep_indices, "flatten_indices"),
        (spoil_state, "state.json cannot be read"),
        (forget_files, "names no files"),
    ],
)
def test_a_damaged_dataset_is_refused_at_once(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    folder = saved_dataset(tmp_path / "set", numbered(0, 9))
    damage(folder)
    with pytest.raises(InvalidArgument, match=told):
        open_source(folder)


# ── which file it is ──────────────────────────────────────────────────────────────────────────


def test_a_format_given_by_name_goes_before_the_suffix(tmp_path: Path) -> None:
    path = written(tmp_path, "in.json", '{"prompt": "Hi"}\n')
    assert fields_of(open_source(path, format="jsonl")) == [good]
    assert fields_of(open_source(written(tmp_path, "in.JSONL", '{"prompt": "Hi"}\n'))) == [good]


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("in.json", {}, r"a single JSON array cannot be read row by row.*jq -c"),
        ("in.txt", {}, r"ends in none of \.jsonl"),
        ("in", {}, "give format"),
        ("in.parquet.gz", {}, "ends in none of"),
        ("in.jsonl", {"format": "jsnl"}, "Did you mean 'jsonl'"),
        ("in.jsonl", {"split": "train"}, "split is for folders"),
    ],
)
def test_files_of_no_known_format(tmp_path: Path, name: str, arguments: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        open_source(written(tmp_path, name, b""), **arguments)


def test_what_is_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not exist"):
        open_source(tmp_path / "in.jsonl")
    with pytest.raises(InvalidArgument, match="no data set that `save_to_disk`"):
        open_source(tmp_path)
    with pytest.raises(InvalidArgument, match="is a folder, but format='csv' is for files"):
        open_source(tmp_path, format="csv")
    with pytest.raises(InvalidArgument, match="is no plain file, but a job reads its input more than once"):
        open_source("/dev/null", format="jsonl")
    with pytest.raises(InvalidArgument, match=r"'in\\x00.jsonl' does not exist"):
        open_source("in\0.jsonl")
    with pytest.raises(WrongType, match="must be the path of a file"):
        open_source(["in.jsonl"])


def test_a_source_can_be_read_again_and_from_two_sides_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "in.csv", "a\n1\n2\n3\n")
    source = open_source(path)
    first, second = iter(source), iter(source)
    next(first)
    assert [record.fields for record in second] == [{"a": "1"}, {"a": "2"}, {"a": "3"}]
    assert [record.fields for record in first] == [{"a": "2"}, {"a": "3"}]


def test_the_fingerprint_changes_with_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "in.jsonl", '{"prompt": "Hi"}\n')
    before = open_source(path).fingerprint()
    assert open_source(path).fingerprint() == before
    written(tmp_path, "in.jsonl", '{"prompt": "Ho"}\n')
    assert open_source(path).fingerprint() != before
