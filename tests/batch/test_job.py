"""Jobs with the bundled model: every row once, in order, whatever ended the runs before."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.batch.row_files import SHORT, Rows, capitals, read, write
from tokenmill import Engine, InvalidArgument, JobStopped, UnknownArgument, batch
from tokenmill.batch.engine_facts import engine_facts
from tokenmill.batch.job import BatchJob
from tokenmill.batch.journal import Journal
from tokenmill.batch.line_file import LineFile
from tokenmill.batch.sources import open_source
from tokenmill.cli import main

pytestmark = pytest.mark.cpu


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def interrupt(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, at: int) -> None:
    """Let the job be interrupted when it writes so many lines."""
    plain, count = LineFile.add, itertools.count(1)

    def add(file: LineFile, index: int, line: bytes) -> None:
        if next(count) >= at:
            raise error
        plain(file, index, line)

    monkeypatch.setattr(LineFile, "add", add)


# ── rows in, rows out ─────────────────────────────────────────────────────────────────────────


def test_answers_are_those_of_generate_in_the_order_of_the_input(
    do: Callable[..., Any], out: Path, tiny_engine: Engine
) -> None:
    rows = capitals(40, sampling_params={"sampling_seed": 7})
    summary = do(rows)
    answers = read(out)
    assert [answer["id"] for answer in answers] == list(range(40))
    expected = tiny_engine.generate([row["prompt"] for row in rows], {**SHORT, "sampling_seed": 7})
    assert [answer["text"] for answer in answers] == expected["text"]
    assert (summary["rows"]["total"], summary["rows"]["computed"]) == (40, 40)
    assert summary["tokens"]["output"] == sum(answer["completion_tokens"] for answer in answers)


def test_a_second_run_computes_nothing_and_changes_nothing(do: Callable[..., Any], out: Path) -> None:
    do(capitals(12))
    before = out.read_bytes()
    summary = do()
    assert summary["rows"] == {
        "total": 12, "done": 12, "computed": 0, "replayed": 12, "duplicates": 0, "failed": 0,
    }  # fmt: skip
    assert summary["job"]["resumed"]
    assert out.read_bytes() == before


def test_answers_depend_on_the_row_and_the_seed_alone(do: Callable[..., Any], tmp_path: Path) -> None:
    """Not on neighbours, order, or place; rows without temperature not even on the seed."""
    rows = [
        *capitals(10),
        {"id": 10, "prompt": "The capital of Peru is", "sampling_params": {"temperature": 0}},
    ]
    do(rows, "a.jsonl")
    do(list(reversed(rows)), "b.jsonl")
    first, second = read(tmp_path / "a.jsonl"), read(tmp_path / "b.jsonl")
    assert first == second[::-1]
    summary = do(rows, "c.jsonl", seed=1, journal=tmp_path / "a.jsonl.journal")
    third = read(tmp_path / "c.jsonl")
    assert summary["rows"]["replayed"] == 1
    assert third[10] == first[10]
    assert third != first


def test_rows_alike_are_computed_once(do: Callable[..., Any], out: Path) -> None:
    rows = [{"id": i, "prompt": f"The capital of country {i % 4} is"} for i in range(600)]
    summary = do(rows)
    assert summary["samples"] == 4
    assert summary["rows"]["duplicates"] == 596
    answers = read(out)
    assert [answer["id"] for answer in answers] == list(range(600))
    assert len({(answer["id"] % 4, answer["text"]) for answer in answers}) == 4


def test_more_samples_compute_only_the_new_ones(do: Callable[..., Any], tmp_path: Path) -> None:
    rows = capitals(5)
    journal = tmp_path / "journal"
    do(rows, "four.jsonl", sampling_params={**SHORT, "n": 4}, journal=journal)
    summary = do(rows, "eight.jsonl", sampling_params={**SHORT, "n": 8}, journal=journal)
    assert summary["samples"] == 20
    fresh = do(rows, "fresh.jsonl", sampling_params={**SHORT, "n": 8})
    assert fresh["samples"] == 40
    assert (tmp_path / "eight.jsonl").read_bytes() == (tmp_path / "fresh.jsonl").read_bytes()
    four, eight = read(tmp_path / "four.jsonl"), read(tmp_path / "eight.jsonl")
    assert [row["outputs"] for row in four] == [row["outputs"][:4] for row in eight]
    assert len({sample["text"] for sample in eight[0]["outputs"]}) > 1


def test_samples_of_a_greedy_row_are_computed_once(do: Callable[..., Any], out: Path) -> None:
    summary = do(capitals(2), sampling_params={**SHORT, "temperature": 0, "n": 5})
    assert summary["samples"] == 2
    assert all(len(row["outputs"]) == 5 for row in read(out))


def test_one_changed_row_computes_one_row(do: Callable[..., Any], out: Path) -> None:
    rows = capitals(9)
    do(rows)
    before = read(out)
    rows[4]["prompt"] = "The capital of Chile is"
    assert do(rows)["rows"]["computed"] == 1
    after = read(out)
    assert [row["id"] for row in after if row != before[row["id"]]] == [4]


@pytest.mark.parametrize(
    ("change", "num_computed"),
    [
        ({"sampling_params": {**SHORT, "top_p": 0.5}}, 6),
        ({"sampling_params": {"max_new_tokens": 7}}, 6),
        ({"sampling_params": {**SHORT, "stop": "x"}}, 6),
        ({"options": {"priority": 3}}, 0),
        ({"timeout": 100.0}, 0),
        ({"output_ids": True}, 0),
    ],
)
def test_what_changes_answers_computes_them_anew_and_nothing_else_does(
    do: Callable[..., Any], change: dict[str, Any], num_computed: int
) -> None:
    do(capitals(6))
    assert do(**change)["rows"]["computed"] == num_computed


def test_log_probabilities_asked_for_are_in_the_output_and_replayed(
    do: Callable[..., Any], out: Path
) -> None:
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    params = {**SHORT, "n": 3}
    do(capitals(3), sampling_params=params, options=options)
    before = out.read_bytes()
    sample = read(out)[0]["outputs"][2]
    assert len(sample["output_token_logprobs"]) == sample["completion_tokens"]
    assert do(sampling_params=params, options=options)["rows"]["replayed"] == 3
    assert out.read_bytes() == before


# ── errors ────────────────────────────────────────────────────────────────────────────────────


def test_rows_that_fail_have_their_line_and_are_tried_again(do: Callable[..., Any], out: Path) -> None:
    rows: Rows = [
        {"id": 0, "prompt": "Hello"},
        {"id": 1, "prompt": "word " * 4000},
        {"id": 2, "prompt": "Hello", "sampling_params": {"temperature": -1}},
        {"id": 3, "nothing": 1},
        {"id": 4, "prompt": "Hello", "sampling_params": {"ebnf": "root ::= ("}},
    ]
    summary = do(rows)
    errors = [row["error"] and row["error"]["type"] for row in read(out)]
    assert errors == [None, "too_long", "bad_parameters", "bad_parameters", "bad_grammar"]
    assert summary["rows"]["failed"] == 4
    before = out.read_bytes()
    again = do()
    assert (again["rows"]["replayed"], again["rows"]["failed"]) == (1, 4)
    assert out.read_bytes() == before


def test_hostile_lines_are_rows_with_errors(do: Callable[..., Any], tmp_path: Path, out: Path) -> None:
    big = "\u00e4" * 5_000_000
    lines = [
        b'{"prompt": "Hello"}',
        b'{"prompt": "Hello"',
        b'{"prompt": "caf\xe9"}',
        b"[1, 2]",
        json.dumps({"prompt": big[:100_000]}).encode(),
        json.dumps({"prompt": "Hello", "note": big}).encode(),
        b'{"prompt": "\\ud800"}',
        b"",
        b'{"prompt": "Hello again"}',
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    summary = do()
    answers = read(out)
    assert [row["error"] is None for row in answers] == [True, *[False] * 4, True, False, True]
    assert answers[5]["note"] == big
    assert answers[5]["text"] == answers[0]["text"]
    assert summary["rows"]["failed"] == 5


def test_a_row_that_takes_too_long_is_given_up_and_tried_again(do: Callable[..., Any], out: Path) -> None:
    slow = {"max_new_tokens": 1500, "ignore_eos": True}
    do([{"prompt": "Hello"}], sampling_params=slow, timeout=0.05)
    assert read(out)[0]["error"]["type"] == "timeout"
    assert do(sampling_params={**slow, "max_new_tokens": 5})["rows"]["failed"] == 0
    assert read(out)[0]["error"] is None


# ── interrupted ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("whatever")])
def test_what_was_finished_is_kept_whatever_ends_the_run(
    do: Callable[..., Any],
    out: Path,
    tmp_path: Path,
    tiny_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    do(capitals(100), "calm.jsonl")
    with monkeypatch.context() as patch:
        interrupt(patch, error, at=60)
        with pytest.raises(type(error)):
            do()
    partial = read(out)
    assert len({row["id"] for row in partial}) == len(partial) == 59
    assert tiny_engine.generate("Hello", SHORT)["text"]  # the engine is as good as before
    assert do()["rows"]["replayed"] >= 59
    assert out.read_bytes() == (tmp_path / "calm.jsonl").read_bytes()


def test_a_full_disk_ends_the_job_and_loses_nothing(
    do: Callable[..., Any], out: Path, tmp_path: Path
) -> None:
    do(capitals(120), "calm.jsonl")
    room = (tmp_path / "calm.jsonl.journal").stat().st_size // 2
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for share in (1, 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (share * room // 2, limits[1]))
        try:
            with pytest.raises(JobStopped, match=r"out.jsonl.*cannot be written.*MiB are free"):
                do()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert all("text" in row for row in read(out))
    summary = do()
    assert summary["rows"]["replayed"] > 0
    assert out.read_bytes() == (tmp_path / "calm.jsonl").read_bytes()


def test_a_damaged_journal_is_told_of_and_computed_anew(do: Callable[..., Any], out: Path) -> None:
    do(capitals(10))
    before = out.read_bytes()
    journal = out.with_name("out.jsonl.journal")
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 0x40
    journal.write_bytes(data + b"half a rec")
    with pytest.warns(UserWarning, match=r"was damaged: \d+ bytes in it .* 10 at its end were cut off"):
        summary = do()
    assert summary["rows"]["computed"] == 1
    assert out.read_bytes() == before


# ── refused before any work ───────────────────────────────────────────────────────────────────


def test_an_output_of_somebody_else_is_refused_and_left_alone(do: Callable[..., Any], out: Path) -> None:
    out.write_text("precious\n")
    with pytest.raises(InvalidArgument, match=r"out.jsonl.* is there already.*overwrite"):
        do(capitals(3))
    assert out.read_text() == "precious\n"
    assert not out.with_name("out.jsonl.journal").exists()
    do(overwrite=True)
    assert len(read(out)) == 3


def test_the_journal_of_another_output_does_not_own_this_one(
    do: Callable[..., Any], out: Path, tmp_path: Path
) -> None:
    do(capitals(3), "other.jsonl")
    out.write_text("precious\n")
    with pytest.raises(InvalidArgument, match="is there already"):
        do(journal=tmp_path / "other.jsonl.journal")
    assert out.read_text() == "precious\n"


def test_a_journal_in_use_is_refused_at_once(do: Callable[..., Any], out: Path) -> None:
    do(capitals(3))
    before = out.read_bytes()
    journal = Journal(out.with_name("out.jsonl.journal"))
    with pytest.raises(JobStopped, match=rf"out.jsonl.journal.*in use.*pid {os.getpid()}"):
        do()
    journal.close()
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": "in.jsonl"}, r"output: .*in.jsonl' is the input, too"),
        ({"output": "nowhere/out.jsonl"}, r"output: there is no folder"),
        ({"output": "out.jsonl.gz"}, r"leave .gz out"),
        ({"error_file": "errors.jsonl"}, r"error_file is for OpenAI"),
        ({"prompt_column": "promt"}, r"promt"),
        ({"seed": "one"}, r"seed must be an integer"),
        ({"sampling_params": {"temperatur": 1}}, r"temperatur.*Did you mean 'temperature'"),
    ],
)
def test_faults_are_told_before_any_work(
    do: Callable[..., Any], tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    rows = capitals(3) if "prompt_column" not in arguments else None
    if rows is None:
        (tmp_path / "in.jsonl").unlink(missing_ok=True)
        (tmp_path / "in.csv").write_text("prompt\nHello\n")
        with pytest.raises(InvalidArgument, match=message):
            batch.run(tmp_path / "in.csv", tmp_path / "out.jsonl", **arguments)
    else:
        with pytest.raises(InvalidArgument, match=message):
            do(rows, **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) in (["in.jsonl"], ["in.csv"])


def test_unknown_arguments_are_named(tmp_path: Path, tiny_engine: Engine) -> None:
    source = write(tmp_path / "in.jsonl", capitals(1))
    with pytest.raises(UnknownArgument, match=r"'overwrit' .*Did you mean 'overwrite'"):
        batch.run(source, overwrit=True)
    with pytest.raises(UnknownArgument, match="'model_path' is no argument of a job whose engine is given"):
        batch.run(source, engine=tiny_engine, model_path="tiny")
    with pytest.raises(InvalidArgument, match="does not exist"):
        batch.run(tmp_path / "no.jsonl", engine=tiny_engine)


# ── other formats ─────────────────────────────────────────────────────────────────────────────


def test_files_of_columns_are_written_at_the_end_and_replayed(do: Callable[..., Any], tmp_path: Path) -> None:
    do(capitals(5), "out.csv")
    before = (tmp_path / "out.csv").read_bytes()
    assert before.count(b"The capital of country") == 5
    assert do(output="out.csv")["rows"]["replayed"] == 5
    assert (tmp_path / "out.csv").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.csv", "out.csv.journal"}


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_file_without_rows_keeps_its_columns(tmp_path: Path, tiny_engine: Engine, format: str) -> None:
    (tmp_path / "in.csv").write_text("id,prompt\n")
    out = tmp_path / f"out.{format}"
    batch.run(tmp_path / "in.csv", out, engine=tiny_engine)
    assert open_source(out).columns == ("id", "prompt")


def test_a_batch_file_of_openai_gets_its_two_files(do: Callable[..., Any], out: Path, tmp_path: Path) -> None:
    def line(number: int, **body: Any) -> dict[str, Any]:
        asked = {"model": "any", "prompt": "The capital of Peru is", "max_tokens": 4, **body}
        return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": asked}

    do([line(0), line(1, temperature=-3), line(2)], sampling_params={})
    assert [row["custom_id"] for row in read(out)] == ["r0", "r2"]
    assert [row["custom_id"] for row in read(tmp_path / "out.errors.jsonl")] == ["r1"]
    before = out.read_bytes()
    assert do(sampling_params={})["rows"]["replayed"] == 2
    assert out.read_bytes() == before


def test_the_summary_tells_sampling_parameters_as_they_are(do: Callable[..., Any]) -> None:
    params = {"max_new_tokens": 3, "temperature": 0.5, "stop": ["\n", "."], "ignore_eos": True}
    schema = json.dumps({"type": "object", "properties": {f"name{i}": {"type": "string"} for i in range(40)}})
    told = do(capitals(1), sampling_params={**params, "json_schema": schema})["job"]["sampling_params"]
    assert {name: told[name] for name in params} == params
    assert told["json_schema"].endswith("...")
    assert len(told["json_schema"]) < 300
    odd = {**params, "logit_bias": {np.int64(5): 1.0}}  # whose name JSON has not
    told = do(capitals(1), "odd.jsonl", sampling_params=odd)["job"]["sampling_params"]
    assert "5" in told["logit_bias"]


def test_a_name_is_made_where_none_is_given(tmp_path: Path, tiny_engine: Engine) -> None:
    source = write(tmp_path / "in.jsonl", capitals(2))
    summary = batch.run(source, engine=tiny_engine, sampling_params=SHORT)
    assert summary["job"]["output"] == str(tmp_path / "in.out.jsonl")
    assert len(read(tmp_path / "in.out.jsonl")) == 2


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("in.csv", "in.out.csv"),
        ("in.csv.gz", "in.out.csv"),
        ("in.TSV.gz", "in.out.TSV"),
        ("in.jsonl.gz", "in.out.jsonl"),
        ("a.b.ndjson", "a.b.out.jsonl"),
    ],
)
def test_the_name_that_is_made_has_the_end_of_the_input(tmp_path: Path, name: str, made: str) -> None:
    text = b"prompt\nHi\n" if "sv" in name.lower() else b'{"prompt": "Hi"}\n'
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert BatchJob(tmp_path / name).files.output == tmp_path / made


# ── the command ───────────────────────────────────────────────────────────────────────────────


def test_help_tells_what_holds_for_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["batch", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--stream-interval" not in shown
    assert "--random-seed" not in shown
    assert "longest outputs first" not in shown
    assert "order of waiting requests (default: lpm, those with the same beginning together" in shown
    assert "instead of a thread (default: on)" in shown
    assert "'tokenmill' logger (default: error, but info for how far the job is)" in shown
    source = write(tmp_path / "in.jsonl", capitals(1))
    assert main(["batch", str(source), "--random-seed", "3"]) == 2
    assert "give seed (--seed)" in capsys.readouterr().err


def test_the_command_prints_a_summary_and_tells_of_errors_by_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [*capitals(3), {"id": 3}])
    report = tmp_path / "report.html"
    command = ["batch", str(source), "-o", str(tmp_path / "out.jsonl"), "--max-new-tokens", "4"]
    assert main([*command, "--report", str(report)]) == 3
    printed = json.loads(capsys.readouterr().out)
    assert (printed["rows"]["computed"], printed["rows"]["failed"]) == (4, 1)
    assert report.read_text().startswith("<!")
    assert main([*command, "--journal", str(tmp_path)]) == 2
    assert "journal" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "order"),
    [
        ({}, "longest outputs first"),
        ({"enable_priority_scheduling": True}, "fcfs"),
        ({"schedule_policy": "random"}, "random"),
    ],
)
def test_a_job_tells_the_order_of_an_engine_that_chose_it(arguments: dict[str, Any], order: str) -> None:
    with Engine(model_path="tiny", **arguments) as engine:
        assert engine_facts(engine)["schedule_policy"] == order
