"""Requests with several prompts in one line of a batch file: each prompt is run as a row of its own.

Owns how such a line falls into parts, and how their results come together again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenmill.batch.input_record import Record, Source
from tokenmill.errors import InvalidArgument
from tokenmill.frontend.openai import COMPLETIONS_URL, read_prompts
from tokenmill.frozen import lightly_frozen

Results = Sequence[Mapping[str, Any]]


@lightly_frozen(kw_only=True)
class Part(Record):
    """A line with one of its prompts."""

    whole: Record
    number: int  # of the prompt, from 0
    count: int  # of prompts


class PromptRows:
    """The lines of a batch file, those with several prompts as so many rows."""

    columns = None
    num_rows = None

    def __init__(self, source: Source) -> None:
        self._source = source
        self.format = source.format

    def __iter__(self) -> Iterator[Record]:
        index = 0
        for record in self._source:
            for part in _parts(replace(record, index=index)):
                yield part
                index += 1

    def fingerprint(self) -> str:
        """See `Source`."""
        return self._source.fingerprint()


class PartResults:
    """Results of parts whose lines are not complete yet."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, Results]] = {}

    def take(self, record: Record, results: Results) -> tuple[Record, Results, int] | None:
        """The whole line, the results of all its prompts, and their number; None while parts are missing."""
        if not isinstance(record, Part):
            return record, results, 1
        known = self._waiting.setdefault(record.whole.index, {})
        known[record.number] = results
        if len(known) < record.count:
            return None
        del self._waiting[record.whole.index]
        return record.whole, [each for number in range(record.count) for each in known[number]], record.count


def whole_of(record: Record) -> Record:
    """The line that a part belongs to; any other record itself."""
    return record.whole if isinstance(record, Part) else record


def _parts(record: Record) -> list[Record]:
    fields = record.fields or {}
    body = fields.get("body")
    if fields.get("url") != COMPLETIONS_URL or not isinstance(body, dict):
        return [record]
    prompts = body.get("prompt")
    if not isinstance(prompts, list):
        return [record]
    try:
        count = len(read_prompts(prompts))
    except InvalidArgument:  # what is wrong with them is told where the whole line is read
        return [record]
    if count == 1:
        return [record]
    return [
        Part(
            record.index + number,
            record.line,
            {**fields, "body": {**body, "prompt": prompt}},
            None,
            whole=record,
            number=number,
            count=count,
        )
        for number, prompt in enumerate(prompts)
    ]
