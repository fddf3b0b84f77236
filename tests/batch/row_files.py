"""Files of rows, as jobs read and write them, and what they are run with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
SHORT = {"max_new_tokens": 6}  # as sampling parameters


def write(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> Rows:
    text = path.read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line) for line in text.splitlines()]


def capitals(count: int, **more: Any) -> Rows:
    return [{"id": i, "prompt": f"The capital of country {i} is", **more} for i in range(count)]
