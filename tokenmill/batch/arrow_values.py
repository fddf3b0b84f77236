"""Rows of Arrow's columns as Python values: the same ones whatever else is installed.

pyarrow makes objects of pandas of times in nanoseconds where pandas is there, some of them with fewer digits,
and refuses them where it is not. So those never come out of pyarrow itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from tokenmill.batch.times import arrow_time

Row = dict[str, Any] | Exception  # fields, or why they cannot be had


def rows_of(batch: Any) -> Iterator[Row]:
    """The rows of a record batch, column by column where not all values have a counterpart in Python."""
    try:
        rows: list[Row] | None = None if _holds_nanoseconds(batch.schema) else batch.to_pylist()
    except Exception:
        rows = None
    if rows is None:
        names = batch.schema.names
        columns = [_values(column) for column in batch.columns]
        rows = [_row(names, values) for values in zip(*columns, strict=True)]
    yield from rows


def field_twice(kind: Any) -> str | None:
    """The name that two fields of one object of the type share, at any depth; None if there is none."""
    import pyarrow

    if pyarrow.types.is_struct(kind):
        names: list[str] = [field.name for field in kind]
        if len(set(names)) < len(names):
            return next(name for position, name in enumerate(names) if name in names[:position])
    found = (field_twice(inner) for inner in _inner_types(kind))
    return next((name for name in found if name is not None), None)


def _row(names: Sequence[str], values: Sequence[Any]) -> Row:
    """The row, or what is wrong with one of its values."""
    fault = next((value for value in values if isinstance(value, Exception)), None)
    return fault or dict(zip(names, values, strict=True))


def _values(column: Any) -> list[Any]:
    """The values of a column, one by one where not all of them can be had at once."""
    if not _type_holds_nanoseconds(column.type):
        try:
            values: list[Any] = column.to_pylist()
            return values
        except Exception:
            pass  # one by one, then: some of them can be had
    return [_value_or_fault(scalar) for scalar in column]


def _value_or_fault(scalar: Any) -> Any:
    try:
        return _value(scalar)
    except Exception as error:
        return error


def _value(scalar: Any) -> Any:
    """A value as Python has it; times that it has not are text, at any depth. Raises what pyarrow raises."""
    import pyarrow

    kind, types = scalar.type, pyarrow.types
    if not scalar.is_valid:
        return None
    if not _type_holds_nanoseconds(kind):
        with contextlib.suppress(Exception):  # a time in a far year may be in it
            return scalar.as_py()
    if types.is_struct(kind):
        return {name: _value(item) for name, item in scalar.items()}
    if types.is_map(kind):
        return [tuple(_value(pair).values()) for pair in scalar.values]
    if types.is_dictionary(kind) or types.is_union(kind) or types.is_run_end_encoded(kind):
        return _value(scalar.value)
    if isinstance(kind, pyarrow.BaseExtensionType) and _type_holds_nanoseconds(kind):
        return _value(scalar.value)
    if types.is_nested(kind) and hasattr(scalar, "values"):  # a list of whatever kind
        return [_value(item) for item in scalar.values]
    return arrow_time(scalar) if types.is_temporal(kind) else scalar.as_py()


def _holds_nanoseconds(schema: Any) -> bool:
    return any(_type_holds_nanoseconds(kind) for kind in schema.types)


@lru_cache(maxsize=1024)
def _type_holds_nanoseconds(kind: Any) -> bool:
    """Whether times in nanoseconds are among the values of a type, at any depth."""
    if getattr(kind, "unit", None) == "ns":
        return True
    return any(_type_holds_nanoseconds(inner) for inner in _inner_types(kind))


def _inner_types(kind: Any) -> list[Any]:
    """The types of which the values of a type are made."""
    import pyarrow

    types = pyarrow.types
    if types.is_struct(kind) or types.is_union(kind):
        return [kind.field(number).type for number in range(kind.num_fields)]
    if types.is_map(kind):
        return [kind.key_type, kind.item_type]
    if isinstance(kind, pyarrow.BaseExtensionType):
        return [kind.storage_type]
    return [kind.value_type] if hasattr(kind, "value_type") else []
