"""Where the rows of a job come from: opens a file or folder in the format that its name or the caller says.

Each format is a module of its own; this one only chooses among them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokenmill.batch.arrow_rows import ParquetRows, SavedDataset, is_saved_dataset
from tokenmill.batch.csv_rows import CsvRows
from tokenmill.batch.input_record import Record, Source
from tokenmill.batch.json_lines import JsonLines
from tokenmill.errors import InvalidArgument, WrongType, did_you_mean
from tokenmill.sampling_params import show

__all__ = ["FORMATS", "Record", "Source", "open_source"]

FORMATS = ("jsonl", "parquet", "csv", "tsv", "datasets")
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
}
_COMPRESSED = {"jsonl", "csv", "tsv"}


def open_source(path: Any, *, format: str | None = None, split: str | None = None) -> Source:
    """The rows of a file, or of a folder that `datasets` saved; it can be iterated as often as wanted.

    Without `format` (one of `FORMATS`) the end of the name says what it is: .jsonl, .ndjson, .parquet, .csv
    or .tsv, the texts also with .gz behind. `split` names a part of a saved `DatasetDict`. Rows that cannot
    be read become records with an error. Raises `InvalidArgument` for what cannot be read as a whole.
    """
    if not isinstance(path, str | os.PathLike):
        raise WrongType(f"the input must be the path of a file or folder, got {show(path)}")
    place = Path(path)
    if format is not None and format not in FORMATS:
        hint = did_you_mean(str(format), FORMATS)
        raise InvalidArgument(f"format must be one of {', '.join(FORMATS)}, got {show(format)}.{hint}")
    chosen = _format_of_folder(place, format) if _is_folder(place) else format or _format_of_name(place)
    if split is not None and chosen != "datasets":
        raise InvalidArgument(
            f"split is for folders that datasets saved, but {place} is {chosen}; leave it out"
        )
    match chosen:
        case "jsonl":
            return JsonLines(place)
        case "parquet":
            return ParquetRows(place)
        case "datasets":
            return SavedDataset(place, split=split)
        case _:
            return CsvRows(place, format=chosen, delimiter="\t" if chosen == "tsv" else ",")


def _is_folder(path: Path) -> bool:
    """Whether the path is a folder; raises for what is neither a folder nor a plain file."""
    try:
        if path.is_dir():
            return True
        if path.is_file():
            return False
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"the input {str(path)!r} cannot be read: {error}") from None
    if exists:
        raise InvalidArgument(
            f"the input {path} is no plain file, but a job reads its input more than once; save it as one"
        )
    raise InvalidArgument(f"the input {str(path)!r} does not exist")


def _format_of_folder(path: Path, format: str | None) -> str:
    if format not in (None, "datasets"):
        raise InvalidArgument(f"{path} is a folder, but format={format!r} is for files; name a file in it")
    if not is_saved_dataset(path):
        raise InvalidArgument(
            f"{path} is a folder, but no data set that `save_to_disk` of datasets wrote (it has no "
            "state.json); name a file in it"
        )
    return "datasets"


def _format_of_name(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    found = _SUFFIXES.get(suffixes[-1]) if suffixes else None
    if suffixes[-1:] == [".gz"] and len(suffixes) > 1:
        inner = _SUFFIXES.get(suffixes[-2])
        found = inner if inner in _COMPRESSED else None
    if found is not None:
        return found
    if suffixes[-1:] == [".json"]:
        raise InvalidArgument(
            f"{path} ends in .json: if it holds an object on each line, give format='jsonl'; a single JSON "
            f"array cannot be read row by row, so convert it: jq -c '.[]' {path.name} > {path.stem}.jsonl"
        )
    raise InvalidArgument(
        f"{path} ends in none of {', '.join(_SUFFIXES)}; give format, one of {', '.join(FORMATS)}"
    )
