"""Times of Parquet files in JSON: ISO 8601 in one form, to the last digit, in any year."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tokenmill.batch.arrow_values import rows_of
from tokenmill.batch.json_text import json_line
from tokenmill.batch.sources import open_source

pytestmark = pytest.mark.unit

SECOND = 10**9
AT = 1_700_000_000 * SECOND
ZONE = "Europe/Berlin"


def read_back(folder: Path, column: Any) -> list[Any]:
    """The values of a column of a Parquet file as JSON has them."""
    path = folder / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(column)), "time": column}), path)
    rows = [record.fields for record in open_source(path)]
    return [json.loads(json_line(row))["time"] for row in rows if row is not None]


@pytest.mark.parametrize(
    ("values", "type", "texts"),
    [
        ([AT, AT + 1], pyarrow.timestamp("ns"), ["2023-11-14T22:13:20", "2023-11-14T22:13:20.000000001"]),
        (
            [AT, AT + 1, -1],
            pyarrow.timestamp("ns", ZONE),
            [
                "2023-11-14T23:13:20+01:00",
                "2023-11-14T23:13:20.000000001+01:00",
                "1970-01-01T00:59:59.999999999+01:00",
            ],
        ),
        ([SECOND, 1, -1], pyarrow.duration("ns"), ["PT1S", "PT0.000000001S", "-PT0.000000001S"]),
        ([90_000, -1, 2**62], pyarrow.duration("s"), ["PT90000S", "-PT1S", f"PT{2**62}S"]),
        ([SECOND, 1, None], pyarrow.time64("ns"), ["00:00:01", "00:00:00.000000001", None]),
        (
            [[1500, 2000, None]],
            pyarrow.list_(pyarrow.time64("ns"), 3),
            [["00:00:00.000001500", "00:00:00.000002", None]],
        ),
        ([0, 253402300800], pyarrow.timestamp("s"), ["1970-01-01T00:00:00", "+10000-01-01T00:00:00"]),
        ([253402300800], pyarrow.timestamp("s", ZONE), ["+10000-01-01T00:00:00+00:00"]),
        ([-719529, 2**31 - 1], pyarrow.date32(), ["-0001-12-31", "+5881580-07-11"]),
        ([[AT + 1], None], pyarrow.list_(pyarrow.timestamp("ns")), [["2023-11-14T22:13:20.000000001"], None]),
        ([{"at": 1}], pyarrow.struct([("at", pyarrow.duration("ns"))]), [{"at": "PT0.000000001S"}]),
        (
            [[("at", AT + 1)]],
            pyarrow.map_(pyarrow.string(), pyarrow.timestamp("ns")),
            [[["at", "2023-11-14T22:13:20.000000001"]]],
        ),
    ],
)
def test_all_times_are_iso_8601(tmp_path: Path, values: list[Any], type: Any, texts: Any) -> None:
    assert read_back(tmp_path, pyarrow.array(values, type)) == texts


def test_dictionaries_of_times_are_read_as_times(tmp_path: Path) -> None:
    times = pyarrow.array([AT, AT + 1], pyarrow.timestamp("ns")).dictionary_encode()
    assert read_back(tmp_path, times)[1] == "2023-11-14T22:13:20.000000001"


def test_times_in_nanoseconds_inside_of_other_types(tmp_path: Path) -> None:
    times = pyarrow.array([AT, AT + 1], pyarrow.timestamp("ns"))
    kinds = pyarrow.array([0, 0], pyarrow.int8())
    columns = {
        "runs": pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([1, 2]), times),
        "sparse": pyarrow.UnionArray.from_sparse(kinds, [times]),
        "beside": pyarrow.StructArray.from_arrays([times, pyarrow.array([[1.5], [2.5]])], names=["t", "n"]),
    }
    rows = [row for row in rows_of(pyarrow.record_batch(columns)) if isinstance(row, dict)]
    first, second = datetime.datetime(2023, 11, 14, 22, 13, 20), "2023-11-14T22:13:20.000000001"
    assert [[row["runs"], row["sparse"]] for row in rows] == [[first, first], [second, second]]
    assert [row["beside"] for row in rows] == [{"t": first, "n": [1.5]}, {"t": second, "n": [2.5]}]
    assert all(type(row["runs"]).__module__ in ("builtins", "datetime") for row in rows)


@pytest.mark.parametrize(
    ("value", "type", "expected"),
    [
        (AT, pyarrow.timestamp("ns"), datetime.datetime(2023, 11, 14, 22, 13, 20)),
        (AT + 1, pyarrow.timestamp("ns"), "2023-11-14T22:13:20.000000001"),
        (1000, pyarrow.duration("ns"), datetime.timedelta(microseconds=1)),
        (1500, pyarrow.duration("ns"), "PT0.0000015S"),
        (1500, pyarrow.time64("ns"), "00:00:00.000001500"),
    ],
)
def test_times_in_nanoseconds_are_no_objects_of_pandas(
    tmp_path: Path, value: int, type: Any, expected: Any
) -> None:
    """What a template writes, and so the prompt, must not depend on whether pandas is installed."""
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"time": pyarrow.array([value], type)}), path)
    [record] = open_source(path)
    assert record.fields == {"time": expected}
    assert record.fields["time"].__class__.__module__ in ("builtins", "datetime")
