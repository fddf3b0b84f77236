"""Jobs from a file of each format to one of each, with the bundled model: the same bytes every time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tokenmill import batch
from tokenmill.batch.sources import open_source

pytestmark = pytest.mark.cpu

GREEDY = {"temperature": 0, "max_new_tokens": 3}
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid"}


def answered(engine: Any, source: Path, name: str, **arguments: Any) -> Path:
    """The output of a job; it is run twice from nothing and must write the same bytes."""
    written = []
    for attempt in ("one", "two"):
        folder = source.parent / attempt
        folder.mkdir()
        batch.run(source, folder / name, engine=engine, **arguments)
        written.append(
            {path.name: path.read_bytes() for path in folder.iterdir() if "journal" not in path.name}
        )
    assert written[0] == written[1]
    return source.parent / "one" / name


def texts_of(path: Path) -> dict[str, str]:
    return {record.fields["country"]: record.fields["text"] for record in open_source(path) if record.fields}


def write_parquet(folder: Path) -> Path:
    table = pyarrow.table(
        {
            "country": list(CAPITALS),
            "messages": [
                [{"role": "user", "content": f"What is the capital of {country}?", "name": None}]
                for country in CAPITALS
            ],
            "sampling_params": [
                {"max_new_tokens": None, "stop": None},
                None,
                {"max_new_tokens": 8, "stop": ["."]},
            ],
        }
    )
    pyarrow.parquet.write_table(table, folder / "in.parquet")
    return folder / "in.parquet"


def write_csv(folder: Path) -> Path:
    lines = ["country,prompt", *(f'{country},"The capital of {country} is"' for country in CAPITALS)]
    (folder / "in.csv").write_text("\r\n".join(lines))
    return folder / "in.csv"


@pytest.mark.parametrize("write", [write_parquet, write_csv])
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "parquet"])
def test_from_any_format_to_any_format(
    tiny_engine: Any, tmp_path: Path, write: Callable[[Path], Path], suffix: str
) -> None:
    path = answered(
        tiny_engine, write(tmp_path), f"out.{suffix}", sampling_params=GREEDY | {"max_new_tokens": 8}
    )
    texts = texts_of(path)
    assert list(texts) == list(CAPITALS)
    assert all(capital in texts[country] for country, capital in CAPITALS.items())


def test_a_batch_file_runs_unchanged(tiny_engine: Any, tmp_path: Path) -> None:
    def request(country: str, **body: Any) -> dict[str, Any]:
        body = {"model": "gpt-4o", "prompt": f"The capital of {country} is", "temperature": 0, **body}
        return {"custom_id": country, "method": "POST", "url": "/v1/completions", "body": body}

    prompts = [f"The capital of {country} is" for country in CAPITALS]
    requests = [
        request("France", logprobs=1),
        request("Peru", echo=True),
        request("all", prompt=prompts, n=2),
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in requests))
    path = answered(tiny_engine, tmp_path / "in.jsonl", "out.jsonl")
    france, every = map(json.loads, path.read_text().splitlines())
    assert "Paris" in france["response"]["body"]["choices"][0]["text"]
    logprobs = france["response"]["body"]["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]).startswith(" Paris")
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 16
    choices = every["response"]["body"]["choices"]
    expected = [capital for capital in CAPITALS.values() for _ in range(2)]
    assert [capital in choice["text"] for capital, choice in zip(expected, choices, strict=True)] == [
        True
    ] * 6
    [error] = (path.parent / "out.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["custom_id"] == "Peru"
