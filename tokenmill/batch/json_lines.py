"""JSONL: a JSON object on each line, blank lines in between, plain or compressed by gzip.

A line that is no such object becomes a record with an error; reading goes on behind it.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from tokenmill.batch.input_record import Record, decoded, faulty, fingerprint_of
from tokenmill.batch.text_lines import DamagedFile, check_encoding, read_lines, too_long
from tokenmill.constraints import MAX_JSON_DEPTH
from tokenmill.sampling_params import brief

_RETURNS_ALONE = "; if lines end by carriage returns alone, convert the file: tr '\\r' '\\n'"
_TOO_DEEP = f"the JSON is nested more than {MAX_JSON_DEPTH} levels deep; make it flatter"


class JsonLines:
    """The objects of a JSONL file."""

    format = "jsonl"
    columns = None
    num_rows = None

    def __init__(self, path: Path) -> None:
        """Raises `InvalidArgument` for a file that cannot be read at all."""
        self._path = path
        check_encoding(path)

    def __iter__(self) -> Iterator[Record]:
        index = 0
        try:
            for number, line in read_lines(self._path):
                if line is None:
                    yield faulty(index, number, too_long())
                elif line.isspace():
                    continue
                else:
                    yield _record(index, number, line)
                index += 1
        except DamagedFile as error:
            yield faulty(index, None, str(error))

    def skim(self) -> Iterator[None]:
        """An item for each record, without reading what it says."""
        with contextlib.suppress(DamagedFile):  # what is behind the damage is one record more
            for _, line in read_lines(self._path):
                if line is None or not line.isspace():
                    yield None
            return
        yield None

    def fingerprint(self) -> str:
        """See `Source`."""
        return fingerprint_of([self._path], self.format)


def parse_json(text: str) -> Any:
    """A JSON value by the letter of the standard; raises ValueError, which tells the fault.

    Python's own reader takes NaN and infinities, and the last of equal keys; neither could be written back.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        place = f"column {error.pos + 1}" if error.lineno == 1 else f"line {error.lineno}"
        raise ValueError(f"no valid JSON: {error.msg.removesuffix(' at')} at {place}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        if "set_int_max_str_digits" not in str(error):
            raise
        most = sys.get_int_max_str_digits()
        raise ValueError(f"a whole number has more than {most} digits; write it as a text") from None
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _is_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def _record(index: int, number: int, line: bytes) -> Record:
    try:
        value = parse_json(decoded(line).strip())
    except ValueError as error:
        hint = _RETURNS_ALONE if b"\r" in line.strip() else ""
        return faulty(index, number, f"{error}{hint}")
    if not isinstance(value, dict):
        return faulty(
            index, number, f'a row must be a JSON object like {{"prompt": "..."}}, got {brief(value)}'
        )
    return Record(index, number, value, None)


def _is_deep(value: Any) -> bool:
    """Whether containers lie in each other deeper than can be written back for certain, level by level."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON value; write null or a number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {brief(twice)} is there twice; keep one of them")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct, parse_float=_finite, parse_constant=_no_constant)
