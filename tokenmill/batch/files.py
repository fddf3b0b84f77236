"""The files of a job: where they are, that they may be written, and that an output is the job's own."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Hashable
from dataclasses import dataclass, fields
from pathlib import Path

from tokenmill.batch.config import JobConfig
from tokenmill.batch.journal import Journal
from tokenmill.batch.key_table import KEY_BYTES
from tokenmill.batch.line_file import beside
from tokenmill.batch.text_lines import is_gzip
from tokenmill.errors import InvalidArgument, WrongType
from tokenmill.sampling_params import brief, show

# Outputs that are files of columns, by the end of their names; everything else is lines of JSON.
TABLES = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
_HEAD_BYTES = 1024  # of a page, which says there who has made it


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
        """All paths, those that nobody named beside the others; of links, what they lead to.

        Raises `InvalidArgument` for a path that is none, and as `_check`.
        """
        target = _real("output", _beside_input(source) if output is None else output)
        errors: Path | str | None = config.error_file
        if errors is None and has_error_file:
            errors = target.with_name(f"{target.stem}.errors.jsonl")
        journal = _journal_of(target) if config.journal is None else config.journal
        files = cls(
            source,
            target,
            None if errors is None else _real("error_file", errors),
            _real("journal", journal),
            None if config.report is None else _real("report", config.report),
        )
        files._check()
        if output is not None and _table_format(Path(output)) != files.table_format:
            raise InvalidArgument(
                f"output: {str(output)!r} is a link to {str(target)!r}, whose name says another format; name "
                "the file itself"
            )
        return files

    @property
    def table_format(self) -> str | None:
        """The format of the output if it is a file of columns."""
        return _table_format(self.output)

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

    def open_journal(self, *, overwrite: bool) -> tuple[Journal, list[Path]]:
        """The journal, locked, and outputs of others, to be replaced.

        Raises `JobStopped` if it is in use, and `InvalidArgument` for an output that is there and that it
        does not know, unless that may be replaced.
        """
        if not overwrite and not self.journal.exists():
            self._refuse(self.written)
        if not overwrite and self.report is not None and not _is_report(self.report):
            raise InvalidArgument(
                f"the report {str(self.report)!r} is there already, and is none of a job; name another "
                "file, or replace it with overwrite=True (--overwrite)"
            )
        journal = Journal(self.journal)
        try:
            unknown = [path for path in self.written if journal.find(self._claim(path)) is None]
            if not overwrite:
                self._check_own(unknown, journal)
            _tell_of_damage(journal)
        except BaseException:
            journal.close()
            raise
        return journal, [path for path in unknown if overwrite and _has_content(path)]

    def claim(self, journal: Journal) -> None:
        """Let the journal know the outputs: from now on they are this job's. Raises `JobStopped`."""
        for path in self.written:
            if journal.find(self._claim(path)) is None:
                journal.add(self._claim(path), {"output": path.name})
        journal.commit()

    def appeared(self, before: list[Path]) -> list[Path]:
        """The outputs that are there now, and were not among these."""
        return [path for path in self.there if path not in before]

    @property
    def there(self) -> list[Path]:
        """The outputs that hold something."""
        return list(filter(_has_content, self.written))

    def _check_own(self, unknown: list[Path], journal: Journal) -> None:
        """Raise for outputs that the journal does not know, unless damage may have made it forget them."""
        is_damaged = bool(journal.damaged_bytes or journal.cut_bytes)
        if self.journal != _journal_of(self.output) or not (is_damaged or len(journal) == 0):
            self._refuse(unknown, ", which is damaged," if is_damaged else "")
        elif not is_damaged and any(map(_has_content, unknown)):
            warnings.warn(
                f"the journal {str(self.journal)!r} is empty, which is damage: the output beside it is there "
                "already; all rows are computed once more",
                stacklevel=2,
            )

    def _refuse(self, paths: list[Path], state: str = "") -> None:
        for path in paths:
            if _has_content(path):
                raise InvalidArgument(
                    f"the output {str(path)!r} is there already, and the journal {str(self.journal)!r}"
                    f"{state} does not know it; name another output, or replace it with overwrite=True "
                    "(--overwrite)"
                )

    def _claim(self, path: Path) -> bytes:
        """The key under which the journal knows an output; folders that move together keep it."""
        place = os.path.relpath(path.resolve(), self.journal.resolve().parent)
        return hashlib.blake2b(b"output " + os.fsencode(place), digest_size=KEY_BYTES).digest()

    @property
    def _working(self) -> list[Path]:
        """What is there only while the job runs."""
        return [beside(path, stage) for path in self.written for stage in ("ordered", "partial", "rows")]

    def _check(self) -> None:
        """Raise `InvalidArgument` for a path that cannot be written, or that is that of two files."""
        taken: dict[Hashable, str] = {_identity(self.input): "input"}
        for each in fields(self)[1:]:
            path: Path | None = getattr(self, each.name)
            if path is None:
                continue
            if _identity(path) in taken:
                raise InvalidArgument(
                    f"{each.name}: {str(path)!r} is the {taken[_identity(path)]}, too; name another file"
                )
            taken[_identity(path)] = each.name
            _check_writable(each.name, path)
        for path in self._working:
            if _identity(path) in taken:
                raise InvalidArgument(
                    f"the {taken[_identity(path)]} {str(path)!r} has the name of a file that the job makes "
                    "and removes; name another output"
                )
        # Files beside them have longer names.
        for name, path in (
            ("output", beside(self.output, "ordered")),
            ("error_file", beside(self.error_file or self.output, "ordered")),
            ("journal", self.plan),
        ):
            _look_at(name, path)


def _real(name: str, value: object) -> Path:
    """The path of a file to write, through links to where it is: a link is not to be replaced by the file.

    Raises `InvalidArgument` for what can be no path of a file.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise WrongType(f"{name} must be the path of a file, got {show(value)}")
    if os.fspath(value) == "-":
        raise InvalidArgument(
            f"{name}: '-' is no file, and a job needs one that can be read again; name it, or write ./- for "
            "a file of that name"
        )
    path = Path(value)
    if not path.name:
        raise InvalidArgument(f"{name} must be the path of a file, got {str(value)!r}, which names none")
    _look_at(name, path)
    return path.resolve() if path.is_symlink() else path


def _look_at(name: str, path: Path) -> None:
    """Raise `InvalidArgument` for a path that no file can have."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # a name that is too long or has NUL in it, a circle of links
        fault = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(
            f"{name}: {brief(str(path))} cannot be used: {fault}; name another file"
        ) from None


def _identity(path: Path) -> Hashable:
    """Equal for paths of one file, whatever names lead to it."""
    try:
        facts = path.stat()
    except OSError:
        return path.resolve()
    return facts.st_dev, facts.st_ino


def _journal_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.journal")


def _table_format(path: Path) -> str | None:
    return TABLES.get(path.suffix.lower())


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _is_report(path: Path) -> bool:
    """Whether a page of ours is there, or nothing."""
    if not _has_content(path):
        return True
    try:
        with path.open("rb") as file:
            return b'content="tokenmill"' in file.read(_HEAD_BYTES)
    except OSError:
        return False


def _beside_input(source: Path) -> Path:
    """`in.csv` gives `in.out.csv`, and so does `in.csv.gz`; what is no file of columns gives a `.jsonl`."""
    source = source if source.name else source.resolve()  # "."
    plain = source.with_suffix("") if is_gzip(source) else source
    suffix = plain.suffix if plain.suffix.lower() in TABLES else ".jsonl"
    return plain.with_name(f"{plain.stem}.out{suffix}")


def _check_writable(name: str, path: Path) -> None:
    if is_gzip(path):
        raise InvalidArgument(
            f"{name}: {str(path)!r} would be compressed, but it grows row by row; leave .gz out"
        )
    if path.exists() and not path.is_file():
        raise InvalidArgument(f"{name}: {str(path)!r} is no plain file; name another one")
    if not path.parent.is_dir():
        raise InvalidArgument(
            f"{name}: there is no folder {str(path.parent)!r}; make it, or name another one"
        )
    can_be_written = not path.exists() or os.access(path, os.R_OK | os.W_OK)
    if not (path.exists() and name == "journal"):  # it grows in place, others are replaced by a file beside
        can_be_written &= os.access(path.parent, os.W_OK)
    if not can_be_written:
        raise InvalidArgument(
            f"{name}: {str(path)!r} cannot be written; you have no permission for it or for its folder"
        )


def _tell_of_damage(journal: Journal) -> None:
    """Warn of what was lost in the file; those rows are computed once more."""
    if journal.damaged_bytes or journal.cut_bytes:
        warnings.warn(
            f"the journal {str(journal.path)!r} was damaged: {journal.damaged_bytes} bytes in it cannot be "
            f"read and {journal.cut_bytes} at its end were cut off; {len(journal)} records are good, and "
            "what is missing is computed once more",
            stacklevel=2,
        )
