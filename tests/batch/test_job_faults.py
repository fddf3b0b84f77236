"""What may go wrong around a job: its files, its arguments, and what others do to them meanwhile."""

from __future__ import annotations

import contextlib
import csv
import errno
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.batch.row_files import capitals, read, write
from tokenmill import Engine, InvalidArgument, JobStopped, WrongType, batch
from tokenmill.batch import job
from tokenmill.batch.line_file import LineFile
from tokenmill.batch.work import Work

pytestmark = pytest.mark.cpu

GREEDY = {"temperature": 0, "max_new_tokens": 2}


@pytest.fixture
def do(do: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """As for all tests of jobs, but greedy."""
    return partial(do, sampling_params=GREEDY)


# ── paths ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("", "output must be the path of a file, got '', which names none"),
        (".", "is no plain file"),
        (Path("/"), "which names none"),
        (5, "output must be the path of a file, got 5"),
        (b"out.jsonl", "output must be the path of a file, got b'out.jsonl'"),
        ("a\0b", "cannot be used: embedded null byte"),
        ("circle", "cannot be used: Too many levels of symbolic links"),
        ("x" * 300, "cannot be used: File name too long"),
        ("x" * 250, "cannot be used: File name too long"),  # with what stands beside it
        ("in.jsonl/out.jsonl", "there is no folder"),
    ],
)
def test_outputs_that_no_file_can_be_are_told_before_any_work(
    do: Callable[..., Any], tmp_path: Path, output: Any, told: str
) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(InvalidArgument) as raised:
        do(capitals(1), output)
    assert told in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "circle"}


@pytest.mark.parametrize("name", ["journal", "report"])
def test_other_paths_are_looked_at_as_well(do: Callable[..., Any], name: str) -> None:
    with pytest.raises(WrongType, match=f"{name} must be the path of a file, got 5"):
        do(capitals(1), **{name: 5})
    with pytest.raises(InvalidArgument, match=name):
        do(capitals(1), **{name: "x" * 300})


def test_an_output_that_is_the_input_by_another_name(do: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", capitals(2))
    os.link(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(InvalidArgument, match=r"out\.jsonl' is the input, too"):
        do(overwrite=True)
    assert read(tmp_path / "in.jsonl") == capitals(2)


def test_other_links_to_an_output_that_is_replaced_keep_it(do: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("of somebody else\n")
    os.link(tmp_path / "out.jsonl", tmp_path / "kept.jsonl")
    do(capitals(2), overwrite=True)
    assert len(read(tmp_path / "out.jsonl")) == 2
    assert (tmp_path / "kept.jsonl").read_text() == "of somebody else\n"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"options": {"retrun_logprob": True}}, "Did you mean 'return_logprob'"),
        ({"options": {"return_logprob": True, "top_logprobs_num": 5000}}, "top_logprobs_num must be"),
        ({"options": {"custom_logit_processor": "nope"}}, "custom_logit_processor is 'nope'"),
        ({"sampling_params": {"logit_bias": {999_999: 1}}}, "logit_bias has 999999"),
    ],
)
def test_what_the_engine_would_refuse_for_every_row_changes_no_file(
    do: Callable[..., Any], tmp_path: Path, wrong: dict[str, Any], told: str
) -> None:
    (tmp_path / "out.jsonl").write_text("of somebody else\n")
    with pytest.raises(InvalidArgument, match=told):
        do(capitals(2), overwrite=True, **wrong)
    assert (tmp_path / "out.jsonl").read_text() == "of somebody else\n"
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


@pytest.mark.parametrize("stage", ["ordered", "partial", "rows"])
def test_an_input_with_the_name_of_a_working_file_is_kept(
    tiny_engine: Engine, tmp_path: Path, stage: str
) -> None:
    source = write(tmp_path / f"out.jsonl.tokenmill-{stage}", capitals(2))
    with pytest.raises(InvalidArgument, match="the name of a file that the job makes and removes"):
        batch.run(source, tmp_path / "out.jsonl", engine=tiny_engine, format="jsonl")
    assert read(source) == capitals(2)


@pytest.mark.parametrize("name", ["file:1.parquet", os.fsdecode(b"\xfe.parquet")])
def test_parquet_files_may_have_any_name(
    do: Callable[..., Any], tmp_path: Path, tiny_engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    do(capitals(2), Path(name))
    summary = batch.run(name, "again.jsonl", engine=tiny_engine, sampling_params=GREEDY, prompt_column="text")
    assert summary["rows"]["total"] == 2


@pytest.mark.skipif(os.name == "nt", reason="files have no such permissions there")
@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_an_output_that_is_replaced_keeps_its_permissions(
    do: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    output = tmp_path / name
    output.touch()
    output.chmod(0o600)
    do(capitals(3), name, overwrite=True)
    assert output.stat().st_size > 0
    assert output.stat().st_mode & 0o777 == 0o600


def test_a_link_stays_and_leads_to_the_output(do: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "out.jsonl"
    link.symlink_to("real/answers.jsonl")
    do(capitals(3))
    assert do()["rows"]["replayed"] == 3
    assert link.is_symlink()
    assert len(read(tmp_path / "real" / "answers.jsonl")) == 3
    (tmp_path / "out.csv").symlink_to("real/answers.jsonl")
    with pytest.raises(InvalidArgument, match="whose name says another format"):
        do(output="out.csv", overwrite=True)


# ── arguments ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"sampling_params": None}, "sampling_params must be a dict, got None"),
        ({"options": None}, "options must be a dict, got None"),
        ({"options": [1]}, "options must be a dict"),
        ({"options": {1: 2}}, "options: names must be strings, got 1"),
        ({"options": {"stream": True}}, "options: stream is no keyword of all rows of a job"),
        ({"options": {"prompt": "Hi"}}, "options: prompt is no keyword of all rows of a job"),
        ({"options": {"hidden_states_format": "numpy"}}, "hidden_states_format must be 'list' in a job"),
        ({"prompt_column": 5}, "prompt_column must be a string, got 5"),
        ({"params_column": 5}, "params_column must be a string"),
        ({"tools_column": 5}, "tools_column must be a string"),
        ({"system": 5}, "system must be a string"),
        ({"template": 5}, "template must be a string"),
        ({"as_chat": "yes"}, "as_chat must be True or False"),
        ({"overwrite": "no"}, "overwrite must be True or False"),
        ({"timeout": 0}, "timeout must be a finite number above 0"),
        ({"timeout": "soon"}, "timeout must be a number"),
        ({"format": 5}, "format must be one of"),
    ],
)
def test_arguments_of_the_wrong_type_are_told_before_any_work(
    do: Callable[..., Any], tmp_path: Path, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        do(capitals(1), **arguments)
    assert told in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_what_is_no_engine_is_told_before_any_work(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", capitals(1))
    name: Any = "tiny"
    with pytest.raises(
        WrongType, match=r"engine must be an Engine, got 'tiny' .*; name a model as model_path"
    ):
        batch.run(source, engine=name)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


REQUEST = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"options": {"return_logprob": True}}, "return_logprob says what results show"),
        ({"options": {"return_hidden_states": True}}, "return_hidden_states says what results show"),
        ({"output_ids": True}, "output_ids: answers of OpenAI's batch API have no token ids"),
        ({"output": "out.csv"}, "is a file of columns, but answers of OpenAI's batch API are lines"),
        ({"output": "out.parquet"}, "name a .jsonl"),
    ],
)
def test_what_answers_in_the_shape_of_openai_cannot_hold_is_refused(
    do: Callable[..., Any], tmp_path: Path, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        do([REQUEST], **arguments)
    assert told in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


# ── damage ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("damage", ["emptied", "cut", "flipped", "header only"])
def test_a_journal_that_lost_its_first_record_lets_the_job_go_on(
    do: Callable[..., Any], tmp_path: Path, damage: str
) -> None:
    do(capitals(4))
    journal, output = tmp_path / "out.jsonl.journal", tmp_path / "out.jsonl"
    data, before = journal.read_bytes(), output.read_bytes()
    cases = {
        "emptied": b"",
        "cut": data[:80],
        "flipped": data[:70] + bytes([data[70] ^ 0x40]) + data[71:],
        "header only": data[:64],
    }
    journal.write_bytes(cases[damage])
    with pytest.warns(UserWarning, match="damage"):
        summary = do()
    assert summary["rows"]["done"] == 4
    assert summary["rows"]["replayed"] == (4 if damage == "flipped" else 0)
    assert output.read_bytes() == before


def test_a_shared_journal_that_forgot_an_output_by_damage_says_so(
    do: Callable[..., Any], tmp_path: Path
) -> None:
    """Two jobs may have one journal, so it cannot be told whose output that is; its rows are kept."""
    journal = tmp_path / "both.journal"
    do(capitals(4), journal=journal)
    data = journal.read_bytes()
    journal.write_bytes(data[:70] + bytes([data[70] ^ 0x40]) + data[71:])
    with pytest.raises(InvalidArgument, match="which is damaged, does not know it"):
        do(journal=journal)
    with pytest.warns(UserWarning, match="damage"):
        summary = do(journal=journal, overwrite=True)
    assert summary["rows"]["replayed"] == 4


@pytest.mark.parametrize("change", ["appended", "cut", "deleted", "replaced"])
@pytest.mark.parametrize("output", ["out.csv", "out.parquet"])
def test_an_input_that_changes_meanwhile_stops_the_job(
    do: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, change: str
) -> None:
    """The columns of an output of columns are read at the end; another row must not get the answer."""
    source, plain = tmp_path / "in.jsonl", Work.run

    def run(work: Work) -> None:
        plain(work)
        match change:
            case "deleted":
                source.unlink()
            case "replaced":
                write(source, [{"prompt": "something else"}] * 3)
            case _:
                write(source, capitals(4 if change == "appended" else 2))

    monkeypatch.setattr(Work, "run", run)
    with pytest.raises(JobStopped, match="the input changed while the job ran"):
        do(capitals(3), output)
    assert not (tmp_path / output).exists()
    monkeypatch.setattr(Work, "run", plain)
    assert do(capitals(3), output)["rows"]["replayed"] == 3


def test_lines_of_an_input_that_is_cut_meanwhile_come_with_a_warning(
    do: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Work.run

    def run(work: Work) -> None:
        write(tmp_path / "in.jsonl", capitals(2))
        plain(work)

    with monkeypatch.context() as patch:
        patch.setattr(Work, "run", run)
        with pytest.warns(UserWarning, match="in.jsonl' changed while the job ran, so that rows may be"):
            assert do(capitals(3))["rows"]["done"] == 2
    assert do(capitals(3))["rows"]["replayed"] == 2
    assert len(read(tmp_path / "out.jsonl")) == 3


@pytest.mark.parametrize("full", ["report", "plan"])
def test_a_job_is_done_though_its_report_or_plan_has_no_room(
    tmp_path: Path, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    def write_nothing(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(job, f"write_{full}" if full == "report" else f"save_{full}", write_nothing)
    source = write(tmp_path / "in.jsonl", capitals(2))
    made = job.BatchJob(source, engine=tiny_engine, sampling_params=GREEDY, report=tmp_path / "report.html")
    act = made.run if full == "report" else made.plan
    with pytest.warns(UserWarning, match="cannot be written: No space left on device"):
        act()
    assert made.summary()["rows"]["done"] == (2 if full == "report" else 0)


def test_a_job_that_is_interrupted_has_its_report(
    do: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Work.run

    def run(work: Work) -> None:
        plain(work)
        raise KeyboardInterrupt

    monkeypatch.setattr(Work, "run", run)
    with pytest.raises(KeyboardInterrupt):
        do(capitals(3), report=tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().startswith("<!")


# ── rows alike ────────────────────────────────────────────────────────────────────────────────


def test_a_row_that_ran_out_of_time_takes_none_along_that_waited_for_it(
    do: Callable[..., Any], tmp_path: Path
) -> None:
    def line(number: int, **body: Any) -> dict[str, Any]:
        asked = {"prompt": "Hi", "max_tokens": 60, "ignore_eos": True, **body}
        return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": asked}

    rows = [line(0, timeout=1e-6), *(line(number, n=1 + number % 3) for number in range(1, 7))]
    summary = do(rows, sampling_params={})
    assert [row["custom_id"] for row in read(tmp_path / "out.errors.jsonl")] == ["r0"]
    answers = read(tmp_path / "out.jsonl")
    assert [row["custom_id"] for row in answers] == [f"r{number}" for number in range(1, 7)]
    assert {choice["text"] for row in answers for choice in row["response"]["body"]["choices"][:1]} == {
        answers[0]["response"]["body"]["choices"][0]["text"]
    }
    assert summary["rows"]["done"] == 7
    assert summary["rows"]["failed"] == 1


def test_rows_alike_share_a_fault_of_what_they_ask_for(do: Callable[..., Any], tmp_path: Path) -> None:
    summary = do([{"prompt": "Hi", "sampling_params": {"regex": "(?=a)"}}] * 5)
    assert {row["error"]["type"] for row in read(tmp_path / "out.jsonl")} == {"bad_grammar"}
    assert summary["rows"]["done"] == 5


def test_replaced_weights_replay_nothing_of_the_old_ones(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", capitals(2))
    with Engine(model_path="tiny") as engine:

        def replayed() -> int:
            summary = batch.run(source, tmp_path / "out.jsonl", engine=engine, sampling_params=GREEDY)
            return int(summary["rows"]["replayed"])

        assert (replayed(), replayed()) == (0, 2)
        before = read(tmp_path / "out.jsonl")
        norm = engine.get_weights_by_name("model.norm.weight", truncate_size=10_000)
        assert norm is not None
        negated = -torch.tensor(norm)
        assert engine.update_weights_from_tensor({"model.norm.weight": negated})[0]
        assert (replayed(), replayed()) == (0, 2)
        assert [row["text"] for row in read(tmp_path / "out.jsonl")] != [row["text"] for row in before]
        engine.update_weights_from_disk("tiny")
        assert replayed() == 2
        assert read(tmp_path / "out.jsonl") == before


@pytest.mark.parametrize("before", [b"", b"precious"])
def test_a_job_whose_engine_does_not_start_leaves_nothing(tmp_path: Path, before: bytes) -> None:
    """Its journal would say that the output is this job's, whoever writes it meanwhile."""
    source, output = write(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    with pytest.raises(InvalidArgument, match="context_length"):
        batch.run(source, output, model_path="tiny", context_length=-5)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    output.write_bytes(before)
    if before:
        with pytest.raises(InvalidArgument, match="is there already"):
            batch.run(source, output, model_path="tiny")
    assert output.read_bytes() == before


def test_a_table_that_is_not_finished_leaves_no_rows_behind(
    tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": letter} for letter in "abcd"])

    def interrupted(work: Work, *arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Work, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.run(source, tmp_path / "out.csv", engine=tiny_engine, sampling_params=GREEDY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.csv.journal"]
    batch.run(source, tmp_path / "out.csv", engine=tiny_engine, sampling_params=GREEDY)
    with (tmp_path / "out.csv").open(newline="") as file:
        assert len([*csv.reader(file)]) == 5


def test_a_short_queue_turns_no_row_of_a_job_away(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{number}", "sampling_params": {"n": 1 + number % 3, "temperature": 1}}
        for number in range(40)
    ]
    source = write(tmp_path / "in.jsonl", rows)
    with Engine(model_path="tiny", max_queued_requests=4, max_running_requests=2) as engine:
        summary = batch.run(source, engine=engine, sampling_params=GREEDY)
        found = list(engine.iter((row["prompt"] for row in rows), {**GREEDY, "n": 3}))
    assert summary["errors"] == []
    assert summary["samples"] == sum(row["sampling_params"]["n"] for row in rows)
    assert [result["error"] for result in found] == [None] * 120


# ── files of others ───────────────────────────────────────────────────────────────────────────


def test_an_output_that_another_job_writes_is_left_to_it(
    do: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a journal of its own, whose lock does not keep them apart."""
    plain, refused = Work.run, []

    def run(work: Work) -> None:
        monkeypatch.setattr(Work, "run", plain)
        with pytest.raises(JobStopped, match=r"out.jsonl.* is being written by another job") as raised:
            do(journal=tmp_path / "second.journal", overwrite=True)
        refused.append(raised.value)
        plain(work)

    monkeypatch.setattr(Work, "run", run)
    do(capitals(4), journal=tmp_path / "first.journal")
    assert len(read(tmp_path / "out.jsonl")) == 4
    assert refused
    assert not (tmp_path / "second.journal").exists()


def test_an_output_that_appears_while_the_engine_starts_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_engine: Engine
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, capitals(2))

    @contextlib.contextmanager
    def start(arguments: dict[str, Any]) -> Iterator[Engine]:
        output.write_text("of another job\n")
        yield tiny_engine

    monkeypatch.setattr(job, "_new_engine", start)
    with pytest.raises(JobStopped, match="another job has written"):
        batch.run(source, output, sampling_params=GREEDY)
    assert output.read_text() == "of another job\n"
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_rows_take_the_place_of_a_larger_file_at_once(
    do: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, plain = tmp_path / "out.jsonl", Work.run
    output.write_text("of somebody else\n" * 10_000)
    output.chmod(0o600)

    def run(work: Work) -> None:
        plain(work)
        raise KeyboardInterrupt

    monkeypatch.setattr(Work, "run", run)
    with pytest.raises(KeyboardInterrupt):
        do(capitals(3), overwrite=True)
    assert len(read(output)) == 3
    assert output.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("output", ["out.jsonl", "out.csv"])
def test_an_output_that_somebody_shortens_stops_the_job(
    do: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    plain = Work.run

    def run(work: Work) -> None:
        plain(work)
        while work._output.num_waiting_bytes:
            time.sleep(0.01)
        os.truncate(work._output.path, 10)

    with monkeypatch.context() as patch:
        patch.setattr(Work, "run", run)
        with pytest.raises(JobStopped, match=rf"the output '.*{output}' was changed by somebody else"):
            do(capitals(3), output)
    assert do(capitals(3), output)["rows"]["replayed"] == 3
    assert len((tmp_path / output).read_text().splitlines()) == (3 if output == "out.jsonl" else 4)


@pytest.mark.parametrize(
    ("output", "is_again", "replaced"),
    [
        ("out.jsonl", False, False),
        ("out.jsonl", False, True),
        ("out.jsonl", True, False),
        ("out.jsonl", True, True),
        ("out.csv", False, True),
        ("out.csv", True, False),
        ("out.csv", True, True),
    ],
)
def test_a_file_that_somebody_puts_in_the_place_of_an_output_stays(
    do: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    is_again: bool,
    replaced: bool,
) -> None:
    """The job ended as if nothing had been, and the file was gone."""
    plain, path, rows = Work.run, tmp_path / output, capitals(3)
    if is_again:
        do(rows, output)
        rows = rows[:2]  # of which the output becomes no larger: what is there stays until the end

    def run(work: Work) -> None:
        plain(work)
        while work._output.num_waiting_bytes:
            time.sleep(0.01)
        path.unlink(missing_ok=True)
        if replaced:
            path.write_text("of somebody else")

    monkeypatch.setattr(Work, "run", run)
    with pytest.raises(JobStopped, match=rf"the output '.*{output}' was changed by .* removed or replaced"):
        do(rows, output)
    assert path.exists() == replaced
    assert not replaced or path.read_text() == "of somebody else"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_journal_that_somebody_removes_stops_the_job(
    do: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    plain, path = Work.run, tmp_path / "out.jsonl.journal"

    def run(work: Work) -> None:
        path.unlink()
        if replaced:
            path.write_text("of somebody else")
        plain(work)

    monkeypatch.setattr(Work, "run", run)
    with pytest.raises(JobStopped, match="was removed or replaced while the job ran"):
        do(capitals(3))


def test_an_output_of_others_that_is_removed_meanwhile(tmp_path: Path) -> None:
    """The job was to replace it; its lines went into a file without a name."""
    file = LineFile(tmp_path / "out.jsonl")
    file.replace_foreign()
    file.add(0, b"a\n")
    file.write(file.take())
    assert file.path.read_bytes() == b"a\n"
    file.close()


def test_a_job_that_is_refused_replaces_nothing(do: Callable[..., Any], tmp_path: Path) -> None:
    """Though it may replace its output: its error file is another job's."""
    write(tmp_path / "in.jsonl", [REQUEST])
    (tmp_path / "out.jsonl").write_text("precious\n")
    errors = LineFile(tmp_path / "errors.jsonl")
    with pytest.raises(JobStopped, match=r"errors.jsonl.* is being written by another job"):
        do(error_file=tmp_path / "errors.jsonl", overwrite=True)
    errors.close()
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"
    assert not (tmp_path / "out.jsonl.journal").exists()


@pytest.mark.parametrize("may_overwrite", [False, True])
def test_a_job_that_did_not_start_owns_no_output_of_a_journal(
    do: Callable[..., Any], tmp_path: Path, may_overwrite: bool
) -> None:
    source, shared, mine = tmp_path / "in.jsonl", tmp_path / "shared.journal", tmp_path / "mine.jsonl"
    do(capitals(2), journal=shared)
    if may_overwrite:
        mine.write_text("precious\n")
    with pytest.raises(InvalidArgument, match="context_length"):
        batch.run(source, mine, journal=shared, overwrite=may_overwrite, model_path="tiny", context_length=-5)
    mine.write_text("precious\n")
    with pytest.raises(InvalidArgument, match=r"mine.jsonl.* is there already"):
        do(output=mine, journal=shared)
    assert mine.read_text() == "precious\n"


def test_a_report_replaces_reports_only(do: Callable[..., Any], tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text("<html>my page</html>")
    with pytest.raises(InvalidArgument, match=r"report.html.* is none of a job"):
        do(capitals(2), report=report)
    assert report.read_text() == "<html>my page</html>"
    do(report=report, overwrite=True)
    assert "my page" not in report.read_text()
    do(report=report)


@pytest.mark.filterwarnings("ignore:the journal .* was damaged")
@pytest.mark.parametrize("size", [64, 64 + 9000, 2**21])
def test_a_file_that_begins_with_zeros_is_no_journal(
    do: Callable[..., Any], tmp_path: Path, size: int
) -> None:
    journal = tmp_path / "disk.img"
    data = bytes(size) + b"data"
    journal.write_bytes(data)
    with pytest.raises(InvalidArgument, match="no journal"):
        do(capitals(2), journal=journal)
    assert journal.read_bytes() == data
    journal.write_bytes(bytes(size))  # what a power loss may leave of one
    assert do(journal=journal)["rows"]["done"] == 2


def test_arguments_without_effect_are_refused(do: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="timeout is given, and so is"):
        do(capitals(1), timeout=6, options={"timeout": 5})
    with pytest.raises(InvalidArgument, match=r"random_seed has no effect .* give seed"):
        batch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", random_seed=1)
    with pytest.raises(InvalidArgument, match="'-' is no file"):
        do(capitals(1), Path("-"))


def test_a_row_of_many_megabytes_is_told_to_be_too_long(do: Callable[..., Any], tmp_path: Path) -> None:
    """It is not encoded to its end, which would take gigabytes."""
    long = [{"prompt": "word " * 4_000_000}, {"messages": [{"role": "user", "content": "a" * 10**7}]}]
    summary = do([{"prompt": "Hi"}, *long])
    assert (summary["rows"]["done"], summary["rows"]["failed"]) == (3, 2)
    for row in read(tmp_path / "out.jsonl")[1:]:
        assert row["error"]["type"] == "too_long"
        assert "at least 4096 tokens, but a sequence has at most 2048" in row["error"]["message"]


def test_a_row_that_fails_is_counted_once_and_each_that_is_like_it_as_well(do: Callable[..., Any]) -> None:
    endless = {"ebnf": "root ::= root"}
    alike = [{"prompt": "a", "sampling_params": endless}] * 3 + [{"prompt": "b"}]
    summary = do(alike)
    assert summary["rows"]["failed"] == 3
    assert summary["errors"][0]["count"] == 3


def test_a_row_that_runs_in_two_parts_fails_once(do: Callable[..., Any]) -> None:
    long = {"prompt": "a", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    rows = [long, {**long, "sampling_params": {**long["sampling_params"], "n": 3}}]
    summary = do(rows, timeout=0.2)
    assert summary["rows"]["total"] == summary["rows"]["failed"] == 2
