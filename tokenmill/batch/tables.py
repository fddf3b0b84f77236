"""Rows of an output as a file of columns: CSV or Parquet, written at the end, a few rows at a time.

Which columns there are is known once all rows were seen, so rows are read twice. Nothing is left out: what
has no one type in its column, and in CSV whatever is no text, becomes JSON.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tokenmill.batch.json_text import json_bytes
from tokenmill.errors import InvalidArgument

Row = Mapping[str, Any]
Rows = Callable[[], Iterable[Row]]

_ROWS_AT_ONCE = 1024
_ROWS_IN_GROUP = 8 * _ROWS_AT_ONCE
_LARGEST_SIGNED = 2**63 - 1


def check_writable(format: str) -> None:
    """Raise `InvalidArgument` for a format of columns whose library is not there, before any work is done."""
    if format == "parquet":
        _pyarrow()


def write_table(path: Path, rows: Rows, *, format: str, columns: Sequence[str] = ()) -> None:
    """Write all rows as `csv`, `tsv` or `parquet`, in their order; `rows()` gives them from the start.

    `columns` come first, and are there whether a row has them or not. The same rows give the same bytes. An
    existing file is overwritten; whoever needs the file whole or not at all gives the path of a new one and
    renames it.
    """
    if format == "parquet":
        _write_parquet(path, rows, columns)
    else:
        _write_csv(path, rows, columns, delimiter="\t" if format == "tsv" else ",")


# ── CSV ───────────────────────────────────────────────────────────────────────────────────────


def _write_csv(path: Path, rows: Rows, columns: Sequence[str], *, delimiter: str) -> None:
    names = list(dict.fromkeys([*columns, *(name for row in rows() for name in row)]))
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        # With this end alone, every field with a carriage return or a line feed in it is quoted.
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\r\n")
        if names:
            writer.writerow(names)
        writer.writerows([_cell(row.get(name)) for name in names] for row in rows())


def _cell(value: Any) -> str:
    """A text as it is, nothing for null, JSON for everything else.

    What JSON tells as a text or as null, such as a date or NaN, is one here as well.
    """
    if isinstance(value, str):
        return value
    told = json_bytes(value).decode()
    if told == "null":
        return ""
    return str(json.loads(told)) if told.startswith('"') else told


# ── Parquet ───────────────────────────────────────────────────────────────────────────────────

# Column -> its type of pyarrow; None: its values have no type in common, and are written as JSON.
_Types = dict[str, Any]


class _Spoiled(Exception):
    """A value does not fit the type of its column."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _write_parquet(path: Path, rows: Rows, columns: Sequence[str]) -> None:
    types = _types(rows, columns)
    while True:
        try:
            return _write_typed(path, rows, types)
        except _Spoiled as spoiled:  # a large integer among floats, for example; rare, so begin anew
            known = types[spoiled.name]
            unsigned = _unsigned(known)
            types[spoiled.name] = None if unsigned == known else unsigned


def _write_typed(path: Path, rows: Rows, types: _Types) -> None:
    pyarrow = _pyarrow()
    kinds = [pyarrow.string() if type is None else type for type in types.values()]
    schema = pyarrow.schema([*zip(_column_names(types), kinds, strict=True)])
    # Of a path pyarrow would take `a:b` for a URI, and refuse what is not UTF-8.
    with path.open("wb") as file, pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for chunk in _chunks(rows(), _ROWS_IN_GROUP):
            columns = []
            for name, type in types.items():
                try:
                    columns.append(_column(pyarrow, chunk, name, type))
                except (pyarrow.ArrowException, ValueError, OverflowError, TypeError):
                    raise _Spoiled(name) from None
            writer.write_table(pyarrow.table(columns, schema=schema))


def _column_names(names: Iterable[str]) -> list[str]:
    """The names in UTF-8, half a surrogate pair by its number, as in JSON; still all distinct."""
    shown: dict[str, None] = {}
    for name in names:
        word = name.encode(errors="backslashreplace").decode()
        while word in shown:
            word += "_"
        shown[word] = None
    return [*shown]


def _types(rows: Rows, columns: Sequence[str]) -> _Types:
    """The type that the values of each column have in common."""
    pyarrow = _pyarrow()
    types: _Types = dict.fromkeys(columns, pyarrow.null())
    for chunk in _chunks(rows(), _ROWS_AT_ONCE):
        for name in dict.fromkeys(name for row in chunk for name in row):
            values = [row.get(name) for row in chunk]
            types[name] = _common_type(pyarrow, types.get(name, pyarrow.null()), values)
    return {name: _storable(pyarrow, type) for name, type in types.items()}


def _common_type(pyarrow: Any, known: Any, values: list[Any]) -> Any:
    """The type that holds both what has the known type and the values; None if there is none."""
    if known is None:
        return None
    try:
        found = _found_type(pyarrow, values)
        schemas = [pyarrow.schema([("value", type)]) for type in (known, found)]
        return pyarrow.unify_schemas(schemas, promote_options="permissive").field("value").type
    except (pyarrow.ArrowException, ValueError, OverflowError, TypeError):
        return None


def _found_type(pyarrow: Any, values: list[Any]) -> Any:
    """The type that pyarrow finds for values; integers beyond 64 bits with a sign count as such with one.

    Raises TypeError for truth values among numbers, which pyarrow would take for numbers.
    """
    try:
        found = _array(pyarrow, values).type
    except OverflowError:
        found = _array(pyarrow, _within_signed(values)).type
    if _have_truth_as_number(values, found):
        raise TypeError("numbers and truth values have no type in common")
    return found


def _array(pyarrow: Any, values: list[Any], type: Any = None) -> Any:
    """The values as an array; half a surrogate pair, which UTF-8 has not, by its number, as in CSV."""
    try:
        return pyarrow.array(values, type)
    except UnicodeEncodeError:
        return pyarrow.array(_in_utf8(values), type)


def _in_utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {name: _in_utf8(item) for name, item in value.items()}
    return [_in_utf8(item) for item in value] if isinstance(value, list | tuple) else value


def _have_truth_as_number(values: Iterable[Any], kind: Any) -> bool:
    """Whether there is a truth value, at any depth, where the type has a number with a fraction."""
    types = _pyarrow().types
    if types.is_floating(kind):
        return bool in map(type, values)
    there = (value for value in values if value is not None)
    if types.is_list(kind) and _has_fractions(kind):
        return _have_truth_as_number(chain.from_iterable(there), kind.value_type)
    if types.is_struct(kind) and _has_fractions(kind):
        rows = list(there)
        return any(_have_truth_as_number([row.get(each.name) for row in rows], each.type) for each in kind)
    return False


@lru_cache(maxsize=1024)
def _has_fractions(kind: Any) -> bool:
    types = _pyarrow().types
    if types.is_list(kind):
        return _has_fractions(kind.value_type)
    if types.is_struct(kind):
        return any(_has_fractions(field.type) for field in kind)
    return bool(types.is_floating(kind))


def _within_signed(value: Any) -> Any:
    """The value with smaller integers in place of those that only 64 bits without a sign may hold."""
    if isinstance(value, dict):
        return {name: _within_signed(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_within_signed(item) for item in value]
    return min(value, _LARGEST_SIGNED) if isinstance(value, int) else value


def _unsigned(type: Any) -> Any:
    """The type with integers of 64 bits without a sign in place of those with one, at any depth."""
    pyarrow = _pyarrow()
    if pyarrow.types.is_list(type):
        return pyarrow.list_(_unsigned(type.value_type))
    if pyarrow.types.is_struct(type):
        return pyarrow.struct([(field.name, _unsigned(field.type)) for field in type])
    return pyarrow.uint64() if pyarrow.types.is_int64(type) else type


def _storable(pyarrow: Any, type: Any) -> Any:
    """The type, or None where it cannot be written (objects without a key) or read (50 nested lists)."""
    if type is None:
        return None
    empty = pyarrow.table({"value": pyarrow.array([], type)})
    file = pyarrow.BufferOutputStream()
    try:
        pyarrow.parquet.write_table(empty, file)
        pyarrow.parquet.read_table(file.getvalue())
    except (pyarrow.ArrowException, OSError):
        return None
    return type


def _column(pyarrow: Any, chunk: list[Row], name: str, type: Any) -> Any:
    values = [row.get(name) for row in chunk]
    if type is not None:
        return _array(pyarrow, values, type)
    texts = [None if value is None else json_bytes(value).decode() for value in values]
    return pyarrow.array(texts, pyarrow.string())


def _chunks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    rows = iter(rows)
    while chunk := list(islice(rows, size)):
        yield chunk


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InvalidArgument(
            "Parquet is written with pyarrow, which is not installed: pip install 'tokenmill[parquet]'"
        ) from None
    return pyarrow
