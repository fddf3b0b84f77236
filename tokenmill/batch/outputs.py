"""What becomes of a record and its results: a row of the output, as a dict and as a line of JSON.

Rows depend on the record and on what was generated, on nothing of the run: no times, no ids, no cache hits.
Files of columns are made of rows by `tables.py`; OpenAI's lines are `openai_format.py`'s matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from tokenmill.batch.input_record import Record, Source
from tokenmill.batch.json_text import json_line

# Keys of `meta_info` that were asked for by name, and so belong into the output.
_SHOWN = (
    "input_token_logprobs",
    "input_top_logprobs",
    "input_token_ids_logprobs",
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "hidden_states",
)
# Names that the answer may use beside the columns of the record.
ANSWER_KEYS = frozenset(
    {"text", "output_ids", "finish_reason", "prompt_tokens", "completion_tokens", "error", "outputs", "line"}
).union(_SHOWN)
_NESTED_KEY = "output"
_ROWS_TO_PEEK = 100

Result = Mapping[str, Any]


class OutputFormat(Protocol):
    """How a record and its results are written."""

    def line(self, record: Record, results: Sequence[Result]) -> tuple[bytes | None, bytes | None]:
        """A line for the output file and one for the error file, each with its line end; None: none.

        `results` are those of all samples in their order, or the one of a row that never ran.
        """
        ...


class RowOutput:
    """The columns of the record, and beside them the answer; where names collide, the answer in one object.

    Errors stand in the row like everything else, so each row of the input is in the output once.
    """

    def __init__(self, source: Source, *, output_ids: bool = False) -> None:
        """`output_ids` adds the token ids. The first row of the source tells which names it uses."""
        self._has_ids = output_ids
        names = _first_names(source)
        self._key = None if names.isdisjoint(ANSWER_KEYS) else _free_key(names)

    def line(self, record: Record, results: Sequence[Result]) -> tuple[bytes | None, bytes | None]:
        """See `OutputFormat`; there is no error file."""
        return json_line(self.row(record, results)), None

    def row(self, record: Record, results: Sequence[Result]) -> dict[str, Any]:
        """The row as a dict."""
        answer = self._answer(results)
        fields = record.fields
        if fields is None:  # of a row that cannot be read nothing is known but its place
            fields, answer = {}, {"line": record.line, **answer}
        key = self._key
        if key in fields or (key is None and not ANSWER_KEYS.isdisjoint(fields)):
            key = _free_key(fields)  # of a row unlike those before it
        return {**fields, **(answer if key is None else {key: answer})}

    def _answer(self, results: Sequence[Result]) -> dict[str, Any]:
        prompt_tokens = results[0]["meta_info"].get("prompt_tokens", 0)
        if len(results) == 1:
            sample = self._sample(results[0])
            return {**sample, "prompt_tokens": prompt_tokens, "error": results[0].get("error")}
        error = next((result["error"] for result in results if result.get("error") is not None), None)
        samples = [{**self._sample(result), "error": result.get("error")} for result in results]
        return {"outputs": samples, "prompt_tokens": prompt_tokens, "error": error}

    def _sample(self, result: Result) -> dict[str, Any]:
        facts = result["meta_info"]
        sample: dict[str, Any] = {"text": result["text"]} if "text" in result else {}
        if self._has_ids or "text" not in result:
            sample["output_ids"] = list(result["output_ids"])
        finish = facts.get("finish_reason")
        return {
            **sample,
            "finish_reason": None if finish is None else finish["type"],
            "completion_tokens": facts.get("completion_tokens", 0),
            **{name: facts[name] for name in _SHOWN if name in facts},
        }


def _first_names(source: Source) -> set[str]:
    """The columns of a source, or of its first row that can be read where each has its own."""
    if source.columns is not None:
        return set(source.columns)
    for record in islice(source, _ROWS_TO_PEEK):
        if record.fields is not None:
            return set(record.fields)
    return set()


def _free_key(names: Mapping[str, Any] | set[str]) -> str:
    key = _NESTED_KEY
    while key in names:
        key += "_"
    return key
