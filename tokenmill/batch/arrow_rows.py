"""Parquet files and folders saved by Hugging Face's `datasets`, read through pyarrow, a few rows at a time.

Owns how columns become Python values and what is told of damaged parts. pyarrow is imported when a file is
opened.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenmill.batch.input_record import Record, faulty, fingerprint_of
from tokenmill.batch.times import arrow_text
from tokenmill.errors import InvalidArgument, did_you_mean, told
from tokenmill.sampling_params import brief, show

# Rows become Python objects in pieces of about so many bytes of columns, and never more rows than that.
_PIECE_BYTES = 8 * 2**20
_PIECE_ROWS = 1024

_Row = dict[str, Any] | Exception  # fields, or why they cannot be had


class ParquetRows:
    """The rows of one Parquet file."""

    format = "parquet"

    def __init__(self, path: Path) -> None:
        """Raises `InvalidArgument` for a file that is no Parquet, and where pyarrow is not installed."""
        self._path = path
        pyarrow = _pyarrow(path)
        with (
            _telling_damage(path, "Parquet"),
            path.open("rb") as opened,
            pyarrow.parquet.ParquetFile(opened) as file,
        ):
            names = file.schema_arrow.names
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            # Rows of each group, and how many of them are read at once.
            self._groups = [
                (group.num_rows, _rows_at_once(group.total_byte_size, group.num_rows)) for group in groups
            ]
        self.columns: tuple[str, ...] | None = _distinct_names(path, names)
        self.num_rows: int | None = sum(count for count, _ in self._groups)

    def __iter__(self) -> Iterator[Record]:
        pyarrow = _pyarrow(self._path)
        with (
            self._path.open("rb") as opened,
            pyarrow.parquet.ParquetFile(opened, pre_buffer=False, buffer_size=2**20) as file,
        ):
            index = 0
            for group, (count, at_once) in enumerate(self._groups):
                yield from _records(_group_rows(file, group, at_once), index, count)
                index += count

    def fingerprint(self) -> str:
        """See `Source`."""
        return fingerprint_of([self._path], self.format)


class SavedDataset:
    """The rows of one split that `Dataset.save_to_disk` wrote."""

    format = "datasets"

    def __init__(self, path: Path, *, split: str | None) -> None:
        """`split` names one of a `DatasetDict`. Raises `InvalidArgument` for a folder that holds none."""
        folder = _split_folder(path, split)
        self._paths = _arrow_files(folder)
        self._counts: list[int] = []
        names: Sequence[str] = ()
        for arrow_file in self._paths:
            schema_names, count = self._measure(arrow_file)
            if self._counts and list(schema_names) != list(names):
                raise InvalidArgument(f"{arrow_file} has other columns than the first file of its data set")
            names = schema_names
            self._counts.append(count)
        self.columns: tuple[str, ...] | None = _distinct_names(folder, names)
        self.num_rows: int | None = sum(self._counts)

    def __iter__(self) -> Iterator[Record]:
        index = 0
        for path, count in zip(self._paths, self._counts, strict=True):
            yield from _records(_stream_rows(path), index, count)
            index += count

    def fingerprint(self) -> str:
        """See `Source`."""
        return fingerprint_of(self._paths, self.format)

    def _measure(self, path: Path) -> tuple[Sequence[str], int]:
        """Columns and rows of a file; the columns themselves are not read for it."""
        pyarrow = _pyarrow(path)
        with (
            _telling_damage(path, "an Arrow file"),
            pyarrow.memory_map(str(path)) as source,
            pyarrow.ipc.open_stream(source) as stream,
        ):
            return stream.schema.names, sum(batch.num_rows for batch in stream)


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder is what `save_to_disk` writes."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json", "dataset_info.json"))


@contextlib.contextmanager
def _telling_damage(path: Path, format: str) -> Iterator[None]:
    """Raises `InvalidArgument` for a file that is damaged as a whole, in whatever way pyarrow finds it so."""
    try:
        yield
    except Exception as error:
        raise InvalidArgument(f"{path} cannot be read as {format}: {told(error)}") from None


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InvalidArgument(
            f"{path} can be read with pyarrow only, which is not installed: pip install 'tokenmill[parquet]'"
        ) from None
    return pyarrow


# ── rows of columns ───────────────────────────────────────────────────────────────────────────


def _group_rows(file: Any, group: int, at_once: int) -> Iterator[_Row]:
    for batch in file.iter_batches(batch_size=at_once, row_groups=[group], use_threads=False):
        yield from _batch_rows(batch)


def _stream_rows(path: Path) -> Iterator[_Row]:
    pyarrow = _pyarrow(path)
    with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
        for batch in stream:
            try:
                batch.validate(full=True)  # offsets that damage has changed would be followed into nowhere
            except pyarrow.ArrowException as error:
                yield from [error] * batch.num_rows
                continue
            at_once = _rows_at_once(batch.nbytes, batch.num_rows)
            for start in range(0, batch.num_rows, at_once):
                yield from _batch_rows(batch.slice(start, at_once))


def _batch_rows(batch: Any) -> Iterator[_Row]:
    """The rows of a piece, column by column where not all values have a counterpart in Python."""
    try:
        rows: list[_Row] = batch.to_pylist()
    except Exception:
        names = batch.schema.names
        columns = [_values(column) for column in batch.columns]
        rows = [_row(names, values) for values in zip(*columns, strict=True)]
    yield from rows


def _values(column: Any) -> list[Any]:
    """The values of a column, one by one where not all of them can be had at once."""
    try:
        values: list[Any] = column.to_pylist()
        return values
    except Exception:
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
    try:
        return scalar.as_py()
    except Exception:
        if types.is_struct(kind):
            return {name: _value(item) for name, item in scalar.items()}
        if types.is_map(kind):
            return [tuple(_value(pair).values()) for pair in scalar.values]
        if types.is_dictionary(kind):
            return _value(scalar.value)
        if types.is_nested(kind) and hasattr(scalar, "values"):  # a list of whatever kind
            return [_value(item) for item in scalar.values]
        if (text := arrow_text(scalar)) is None:
            raise
        return text


def _row(names: Sequence[str], values: Sequence[Any]) -> _Row:
    """The row, or what is wrong with one of its values."""
    fault = next((value for value in values if isinstance(value, Exception)), None)
    return fault or dict(zip(names, values, strict=True))


def _records(rows: Iterator[_Row], index: int, count: int) -> Iterator[Record]:
    """Records of `count` rows from `index` on; where reading breaks off, the others are errors, not lost."""
    end = index + count
    fault = "the file ends before it"
    while index < end:
        try:
            row = next(rows)
        except StopIteration:
            break
        except Exception as error:  # whatever damage makes of decompression and decoding
            fault = f"this part of the file is damaged: {told(error)}"
            break
        if isinstance(row, Exception):
            yield faulty(index, None, f"a value cannot be read: {told(row)}")
        else:
            yield Record(index, None, row, None)
        index += 1
    for lost in range(index, end):
        yield faulty(lost, None, fault)


def _rows_at_once(num_bytes: int, num_rows: int) -> int:
    return max(1, min(_PIECE_ROWS, _PIECE_BYTES * num_rows // max(1, num_bytes)))


def _distinct_names(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"{path} has two columns of the name {brief(name)}; rename one of them")
    return tuple(names)


# ── folders of `datasets` ─────────────────────────────────────────────────────────────────────


def _split_folder(path: Path, split: str | None) -> Path:
    """The folder of the split: the path itself, or one below a `DatasetDict`."""
    if not (path / "dataset_dict.json").is_file():
        if split is not None:
            raise InvalidArgument(f"{path} is a single split, so split={split!r} names nothing; leave it out")
        return path
    splits = _read_json(path / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise InvalidArgument(f"{path / 'dataset_dict.json'} names no splits; save the data set again")
    if split is None:
        raise InvalidArgument(f"{path} has the splits {splits}; choose one as split")
    if split not in splits:
        hint = did_you_mean(split, splits)
        raise InvalidArgument(f"{path} has no split {show(split)}, but {splits}.{hint}")
    return path / split


def _arrow_files(folder: Path) -> list[Path]:
    """The files of a split in their order, as its state.json names them."""
    if not (folder / "state.json").is_file():
        raise InvalidArgument(
            f"{folder} has no state.json, so it is no data set that save_to_disk wrote, or only a part of one"
        )
    state = _read_json(folder / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise InvalidArgument(
            f"{folder} keeps the order of its rows in a file of indices; call flatten_indices() and save it "
            "again"
        )
    entries = state.get("_data_files")
    names = [entry.get("filename") for entry in entries or [] if isinstance(entry, dict)]
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"{folder / 'state.json'} names no files; save the data set again")
    paths = [folder / str(name) for name in names]
    for path in paths:
        if not path.is_file():
            raise InvalidArgument(f"{path} is missing, which state.json names; the data set is incomplete")
    return paths


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} holds no JSON object; save the data set again")
    return value
