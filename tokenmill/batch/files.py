"""The files of a job: where they are, that they may be written, and that an output is the job's own."""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

from tokenmill.batch.config import JobConfig
from tokenmill.batch.journal import Journal
from tokenmill.batch.key_table import KEY_BYTES
from tokenmill.errors import InvalidArgument

# Outputs that are files of columns, by the end of their names; everything else is lines of JSON.
TABLES = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The paths of a job."""

    input: Path
    output: Path
    error_file: Path | None
    journal: Path
    report: Path | None

    @classmethod
    def of(
        cls, source: Path, output: str | os.PathLike[str] | None, config: JobConfig, *, has_error_file: bool
    ) -> JobFiles:
        """All paths, those that nobody named beside the others. Raises `InvalidArgument` as `_check`."""
        target = _beside_input(source) if output is None else Path(output)
        errors = None if config.error_file is None else Path(config.error_file)
        if errors is None and has_error_file:
            errors = target.with_name(f"{target.stem}.errors.jsonl")
        files = cls(
            source,
            target,
            errors,
            target.with_name(f"{target.name}.journal") if config.journal is None else Path(config.journal),
            None if config.report is None else Path(config.report),
        )
        files._check()
        return files

    @property
    def table_format(self) -> str | None:
        """The format of the output if it is a file of columns."""
        return TABLES.get(self.output.suffix.lower())

    @property
    def plan(self) -> Path:
        """Where a plan waits for the run that it is about."""
        return self.journal.with_name(f"{self.journal.name}.plan")

    @property
    def written(self) -> list[Path]:
        """Where rows go."""
        return [self.output] if self.error_file is None else [self.output, self.error_file]

    def to_dict(self) -> dict[str, str | None]:
        """The paths as texts, by their names."""
        paths = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: None if path is None else str(path) for name, path in paths.items()}

    def open_journal(self, *, overwrite: bool) -> Journal:
        """The journal, locked; from now on it knows the outputs.

        Raises `JobStopped` if it is in use, and `InvalidArgument` for an output that is there and that it
        does not know, unless that may be replaced.
        """
        if not overwrite and not self.journal.exists():
            self._refuse(self.written)
        journal = Journal(self.journal)
        try:
            unknown = [path for path in self.written if journal.find(self._claim(path)) is None]
            if not overwrite:
                self._refuse(unknown)
            for path in unknown:
                journal.add(self._claim(path), {"output": path.name})
            journal.commit()
        except BaseException:
            journal.close()
            raise
        _tell_of_damage(journal)
        return journal

    def _refuse(self, paths: list[Path]) -> None:
        for path in paths:
            if path.exists() and path.stat().st_size:
                raise InvalidArgument(
                    f"the output {str(path)!r} is there already, and the journal {str(self.journal)!r} does "
                    "not know it; name another output, or replace it with overwrite=True (--overwrite)"
                )

    def _claim(self, path: Path) -> bytes:
        """The key under which the journal knows an output; folders that move together keep it."""
        place = os.path.relpath(path.resolve(), self.journal.resolve().parent)
        return hashlib.blake2b(b"output " + os.fsencode(place), digest_size=KEY_BYTES).digest()

    def _check(self) -> None:
        """Raise `InvalidArgument` for a path that cannot be written, or that is that of two files."""
        taken = {self.input.resolve(): "input"}
        for each in fields(self)[1:]:
            path: Path | None = getattr(self, each.name)
            if path is None:
                continue
            if path.resolve() in taken:
                raise InvalidArgument(
                    f"{each.name}: {str(path)!r} is the {taken[path.resolve()]}, too; name another file"
                )
            taken[path.resolve()] = each.name
            _check_writable(each.name, path)


def _beside_input(source: Path) -> Path:
    """`in.jsonl` gives `in.out.jsonl`."""
    suffix = source.suffix if source.suffix in TABLES else ".jsonl"
    stem = source.name.removesuffix(".gz")
    return source.with_name(f"{Path(stem).stem}.out{suffix}")


def _check_writable(name: str, path: Path) -> None:
    if path.suffix == ".gz":
        raise InvalidArgument(
            f"{name}: {str(path)!r} would be compressed, but it grows row by row; leave .gz out"
        )
    if path.exists() and not path.is_file():
        raise InvalidArgument(f"{name}: {str(path)!r} is no plain file; name another one")
    if not path.parent.is_dir():
        raise InvalidArgument(
            f"{name}: there is no folder {str(path.parent)!r}; make it, or name another one"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidArgument(f"{name}: {str(path)!r} cannot be written; you have no permission")


def _tell_of_damage(journal: Journal) -> None:
    """Warn of what was lost in the file; those rows are computed once more."""
    if journal.damaged_bytes or journal.cut_bytes:
        warnings.warn(
            f"the journal {str(journal.path)!r} was damaged: {journal.damaged_bytes} bytes in it cannot be "
            f"read and {journal.cut_bytes} at its end were cut off; {len(journal)} records are good, and "
            "what is missing is computed once more",
            stacklevel=2,
        )
