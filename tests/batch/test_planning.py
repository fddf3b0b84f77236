"""What a job will take, told before it runs, against what it took."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.batch.records import ListSource
from tokenmill.batch.job import BatchJob
from tokenmill.batch.planning import plan_job, predicted_and_actual, save_plan, saved_plan, subject_of
from tokenmill.batch.rows import ColumnRows, RowForm
from tokenmill.batch.sources import open_source

pytestmark = pytest.mark.cpu

WORDS = ["My", "name", "is", "Alice", "and", "I", "live", "in", "Paris"]


def rows(count: int) -> list[dict[str, Any] | None]:
    draw = random.Random(1)
    system = " ".join(draw.choice(WORDS) for _ in range(40))
    return [
        {"prompt": f"{system} {number}", "sampling_params": {"max_new_tokens": 1 + number % 3}}
        for number in range(count)
    ]


def write(path: Path, records: list[dict[str, Any] | None]) -> Path:
    path.write_text("".join("no json\n" if row is None else f"{json.dumps(row)}\n" for row in records))
    return path


def test_samples_that_draw_nothing_count_once_as_they_are_computed_once(
    tiny_engine: Any, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    params = {"temperature": 0, "n": 8, "max_new_tokens": 5, "ignore_eos": True}
    job = BatchJob(source, engine=tiny_engine, sampling_params=params)
    plan = job.plan()
    job.run()
    assert (plan.rows, plan.requests, plan.output_tokens) == (2, 2, 10)
    assert job.summary()["tokens"]["output"] == 10


@pytest.mark.parametrize("numbers", [(1, 4), (4, 1)])
def test_rows_that_ask_for_more_samples_of_the_same_are_no_duplicates(
    tiny_engine: Any, tmp_path: Path, numbers: tuple[int, int]
) -> None:
    asked = [{"prompt": "a", "sampling_params": {"n": number}} for number in numbers]
    params = {"max_new_tokens": 5, "ignore_eos": True}
    job = BatchJob(write(tmp_path / "in.jsonl", asked), engine=tiny_engine, sampling_params=params)
    plan = job.plan()
    job.run()
    assert (plan.requests, plan.output_tokens) == (4, 20)
    assert job.summary()["tokens"]["output"] == 20


def test_a_plan_says_what_the_run_then_does(tiny_engine: Any, tmp_path: Path) -> None:
    """Of good rows, bad ones, and some that ask for the same."""
    known = rows(60)
    source = write(tmp_path / "in.jsonl", [*known, None, None, *known[:7], {"prompt": "x " * 5000}])
    arguments = {"engine": tiny_engine, "sampling_params": {"ignore_eos": True}}
    plan = BatchJob(source, **arguments).plan()
    assert (plan.rows, plan.requests, plan.sampled_rows) == (70, 60, None)
    assert (plan.invalid_rows, plan.duplicate_rows) == (3, 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "in.out.jsonl.journal.plan"]
    tiny_engine.flush_cache()
    job = BatchJob(source, report=str(tmp_path / "report.html"), **arguments)
    job.run()
    summary = job.summary()
    predicted, actual = summary["plan"]["predicted"], summary["plan"]["actual"]
    for name in ("rows", "prompt_tokens", "output_tokens", "cached_share"):
        assert actual[name] == pytest.approx(predicted[name]), name
    assert actual["seconds"] == summary["seconds"]
    assert summary["job"]["engine"]["model_path"] == "tiny"
    assert "Predicted and actual" in (tmp_path / "report.html").read_text()
    again = BatchJob(source, **arguments)
    again.run()
    assert again.summary()["plan"] == {"predicted": predicted, "actual": {}}, "nothing was left to do"


def test_a_plan_is_of_the_source_as_it_is(tiny_engine: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", rows(3))
    source = open_source(path)
    plan = plan_job(source, ColumnRows(RowForm(), source), tiny_engine)
    kept = tmp_path / "kept.plan"
    subject = subject_of(source, {})
    assert saved_plan(subject, kept) is None
    save_plan(plan, subject, kept)
    assert saved_plan(subject_of(open_source(path), {}), kept) == json.loads(json.dumps(plan.to_dict()))
    write(path, rows(4))
    assert saved_plan(subject_of(open_source(path), {}), kept) is None
    figures = plan.to_dict()
    renamed = json.dumps({"subject": subject, "plan": {**figures, "rows": None}})
    texts = json.dumps({"subject": subject, "plan": {**figures, "seconds": "1"}})
    for damaged in ("", "[]", "{}", '{"subject": 1, "plan": 2}', "\x00", renamed, texts):
        kept.write_text(damaged)
        assert saved_plan(subject, kept) is None


def test_a_plan_of_other_parameters_is_not_compared(tiny_engine: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    planned = {"max_new_tokens": 2, "ignore_eos": True}
    BatchJob(source, engine=tiny_engine, sampling_params=planned).plan()
    for params, is_compared in (({**planned, "max_new_tokens": 3}, False), (planned, True)):
        job = BatchJob(source, engine=tiny_engine, sampling_params=params)
        job.run()
        assert ("plan" in job.summary()) == is_compared


def test_a_plan_of_other_prompts_is_not_compared(tiny_engine: Any, tmp_path: Path) -> None:
    """The same file of a template, in which something else stands now."""
    source, template = write(tmp_path / "in.jsonl", [{"word": "a"}]), tmp_path / "prompt.txt"
    asked = {"template": str(template), "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    template.write_text("{{ word }}")
    BatchJob(source, engine=tiny_engine, **asked).plan()
    for text, is_compared in (("Much longer: {{ word }}", False), ("{{ word }}", True)):
        template.write_text(text)
        job = BatchJob(source, engine=tiny_engine, **asked)
        job.run()
        assert ("plan" in job.summary()) == is_compared


def test_long_jobs_are_guessed_from_groups_of_neighbours(tiny_engine: Any) -> None:
    source = ListSource([None if number % 100 == 0 else row for number, row in enumerate(rows(20_000))])
    plan = plan_job(source, ColumnRows(RowForm(), source), tiny_engine)  # type: ignore[arg-type]
    assert plan.rows == 20_000
    assert plan.sampled_rows is not None
    assert 7000 <= plan.sampled_rows <= 8192
    assert plan.invalid_rows == pytest.approx(200, rel=0.1)
    assert plan.requests == pytest.approx(19_800, rel=0.01)
    assert plan.max_output_tokens == pytest.approx(2 * 19_800, rel=0.01)
    assert plan.cached_share > 0.6


def test_huge_rows_do_not_fill_the_memory(tiny_engine: Any) -> None:
    """They make small groups, of which as many are kept as of others."""
    huge = {"prompt": "Hello", "notes": "x" * 3_000_000}
    source = ListSource([huge] * 200)
    plan = plan_job(source, ColumnRows(RowForm(), source), tiny_engine)  # type: ignore[arg-type]
    assert plan.rows == 200
    assert plan.sampled_rows == 64


def test_a_part_of_a_job_is_not_compared_with_the_plan_of_the_whole() -> None:
    plan = {"rows": 9, "prompt_tokens": 90, "cached_share": 0.5, "output_tokens": 9, "seconds": 1.0}
    summary = {
        "rows": {"done": 9, "replayed": 4},
        "tokens": {"prompt": 50, "output": 5},
        "cached_share": 0.4,
        "seconds": 0.7,
    }
    assert predicted_and_actual(plan, summary) == {"predicted": plan, "actual": {}}
