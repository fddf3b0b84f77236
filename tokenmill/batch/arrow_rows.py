"""Parquet files and folders saved by Hugging Face's `datasets`, read through pyarrow, a few rows at a time.

Owns what is told of damaged parts; what values become is `arrow_values.py`'s matter. pyarrow is imported when
a file is opened.
"""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenmill.batch.arrow_values import Row, field_twice, rows_of
from tokenmill.batch.input_record import Record, faulty, fingerprint_of
from tokenmill.errors import InvalidArgument, did_you_mean, told
from tokenmill.sampling_params import brief, show

# Rows become Python objects in pieces of about so many bytes of columns, and never more rows than that.
_PIECE_BYTES = 8 * 2**20
_PIECE_ROWS = 1024


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
            schema = file.schema_arrow
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            # Rows of each group, and how many of them are read at once.
            self._groups = [
                (group.num_rows, _rows_at_once(group.total_byte_size, group.num_rows)) for group in groups
            ]
        self.columns: tuple[str, ...] | None = _distinct_names(path, schema)
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
        names: tuple[str, ...] = ()
        for arrow_file in self._paths:
            schema, count = self._measure(arrow_file)
            its_names = _distinct_names(arrow_file, schema)
            if self._counts and its_names != names:
                raise InvalidArgument(f"{arrow_file} has other columns than the first file of its data set")
            names = its_names
            self._counts.append(count)
        self.columns: tuple[str, ...] | None = names
        self.num_rows: int | None = sum(self._counts)

    def __iter__(self) -> Iterator[Record]:
        index = 0
        for path, count in zip(self._paths, self._counts, strict=True):
            yield from _records(_stream_rows(path), index, count)
            index += count

    def fingerprint(self) -> str:
        """See `Source`."""
        return fingerprint_of(self._paths, self.format)

    def _measure(self, path: Path) -> tuple[Any, int]:
        """Schema and number of rows of a file; the columns themselves are not read for it."""
        pyarrow = _pyarrow(path)
        with (
            _telling_damage(path, "an Arrow file"),
            _mapped(path) as source,
            pyarrow.ipc.open_stream(source) as stream,
        ):
            return stream.schema, sum(batch.num_rows for batch in stream)


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


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[Any]:
    """A file in memory, read where it is asked for; pyarrow's own mapping takes no name that is not UTF-8."""
    pyarrow = _pyarrow(path)
    with path.open("rb") as file:
        yield pyarrow.BufferReader(pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


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


def _group_rows(file: Any, group: int, at_once: int) -> Iterator[Row]:
    for batch in file.iter_batches(batch_size=at_once, row_groups=[group], use_threads=False):
        yield from rows_of(batch)


def _stream_rows(path: Path) -> Iterator[Row]:
    pyarrow = _pyarrow(path)
    with _mapped(path) as source, pyarrow.ipc.open_stream(source) as stream:
        for batch in stream:
            for piece in _sound_pieces(batch):
                if isinstance(piece, Exception):
                    yield piece
                    continue
                at_once = _rows_at_once(_num_bytes(piece), piece.num_rows)
                for start in range(0, piece.num_rows, at_once):
                    yield from rows_of(piece.slice(start, at_once))


def _sound_pieces(batch: Any) -> Iterator[Any]:
    """The rows in their order: pieces that can be read, and for each row that is damaged what is wrong.

    Offsets that damage has changed would be followed into nowhere.
    """
    import pyarrow

    try:
        batch.validate(full=True)
    except pyarrow.ArrowException as error:
        if batch.num_rows == 1:
            yield error
        elif batch.num_rows:
            half = batch.num_rows // 2
            yield from _sound_pieces(batch.slice(0, half))
            yield from _sound_pieces(batch.slice(half))
    else:
        yield batch


def _records(rows: Iterator[Row], index: int, count: int) -> Iterator[Record]:
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


def _num_bytes(batch: Any) -> int:
    """About how large a batch is; 0 where pyarrow cannot tell: views, before its version 18."""
    try:
        return int(batch.nbytes)
    except Exception:
        return 0


def _rows_at_once(num_bytes: int, num_rows: int) -> int:
    return max(1, min(_PIECE_ROWS, _PIECE_BYTES * num_rows // max(1, num_bytes)))


def _distinct_names(path: Path, schema: Any) -> tuple[str, ...]:
    """The names of the columns; raises `InvalidArgument` where two, or two fields of one, share a name."""
    seen: set[str] = set()
    for field in schema:
        if field.name in seen:
            raise InvalidArgument(
                f"{path} has two columns of the name {brief(field.name)}; rename one of them"
            )
        seen.add(field.name)
        if (twice := field_twice(field.type)) is not None:
            raise InvalidArgument(
                f"{path} has two fields of the name {brief(twice)} in its column {brief(field.name)}; rename "
                "one of them"
            )
    return tuple(schema.names)


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
