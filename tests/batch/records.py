"""Sources that live in memory, and results as the engine gives them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.batch.input_record import Record, faulty
from tokenmill.errors import RowError


@dataclass
class ListSource:
    """Rows from a list; None stands for a line that cannot be read."""

    rows: Sequence[dict[str, Any] | None] = ()
    format: str = "jsonl"
    columns: tuple[str, ...] | None = None
    num_rows: int | None = field(default=None)

    def __iter__(self) -> Iterator[Record]:
        for index, row in enumerate(self.rows):
            yield record_of(index, row)

    def fingerprint(self) -> str:
        return "memory"


def record_of(index: int, row: dict[str, Any] | None) -> Record:
    return faulty(index, index + 1, "no valid JSON") if row is None else Record(index, index + 1, row, None)


def result(text: str = "Paris.", *, num_tokens: int = 2, num_prompt: int = 5, **facts: Any) -> dict[str, Any]:
    """A result as the engine gives it, with facts that only one run has."""
    meta_info = {
        "id": "b9a0c7",
        "finish_reason": {"type": "length", "length": num_tokens},
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "cached_tokens": 3,
        "e2e_latency": 0.12,
        **facts,
    }
    return {"text": text, "output_ids": [*range(num_tokens)], "meta_info": meta_info, "error": None}


def failed(error: RowError) -> dict[str, Any]:
    facts = {"finish_reason": {"type": "abort", "message": error["message"]}}
    return {**result("", num_tokens=0, num_prompt=0, **facts), "error": error}


TIMEOUT = RowError(type="timeout", message="timed out after 3 seconds", status_code=408)
