"""`tokenmill bench`: the peers' requests, how they are timed, and the command on the tiny model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

import tokenmill.engine
from tokenmill import bench
from tokenmill.cli import main
from tokenmill.errors import InvalidArgument

ROOT = Path(__file__).parent.parent
GPU = {"device": "cuda", "vocab_size": 151_936, "max_sequence_tokens": 40_960}
TINY = {"device": "cpu", "vocab_size": 6144, "max_sequence_tokens": 2048}


# ── the requests ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The workloads of the peers' runs."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("workloads")


def theirs(workloads: Any, name: str, **numbers: int) -> list[list[Any]]:
    if name == "w7":
        sent: list[list[Any]] = []

        class Engine:
            def generate(self, requests: list[Any]) -> list[Any]:
                sent.append(requests)
                return [workloads.Result([0] * request.max_new_tokens) for request in requests]

            def flush(self) -> None:
                pass

        workloads.run_sweep(Engine())
        return sent[::2]  # it sends each twice
    if name == "w5":
        return [workloads.grammar(False), workloads.grammar(True)]
    made = {
        "w1": lambda: workloads.batch(**numbers),
        "w2": lambda: workloads.latency(6),
        "w3": workloads.shared_prefix,
        "w4": workloads.long_prefill,
    }
    return [made[name]()]


@pytest.mark.unit
@pytest.mark.parametrize("name", bench.WORKLOADS)
def test_requests_are_those_of_the_peers(name: str, workloads: Any) -> None:
    loads = bench.loads_of(bench.Choice(workloads=(name,)), GPU)
    expected = theirs(workloads, name)
    assert [bench.digest(load.requests) for load in loads] == [workloads.digest(r) for r in expected]
    for load, requests in zip(loads, expected, strict=True):
        assert [(r.prompt_ids, r.max_new_tokens, r.temperature) for r in load.requests] == [
            (r.prompt, r.max_new_tokens, r.temperature) for r in requests
        ]
        schemas = [None if r.json_schema is None else json.loads(r.json_schema) for r in load.requests]
        assert schemas == [r.json_schema for r in requests]
    assert bench.notes_on(bench.Choice(), loads, GPU) == []


@pytest.mark.unit
def test_more_requests_are_those_of_the_peers(workloads: Any) -> None:
    (load,) = bench.loads_of(bench.Choice(workloads=("w1",), requests=1024), GPU)
    assert bench.digest(load.requests) == workloads.digest(workloads.batch(1024))


@pytest.mark.unit
def test_smaller_vocabulary_context_and_device() -> None:
    choice = bench.Choice(workloads=("w4", "w3"))
    long, shared = bench.loads_of(choice, TINY | {"max_sequence_tokens": 200})
    assert max(id for r in [*long.requests, *shared.requests] for id in r.prompt_ids) == 6143
    assert {len(r.prompt_ids) for r in long.requests} == {199}  # 8,193 tokens made to fit into 200
    assert long.scale == pytest.approx(200 / 8193)
    prefix = [r.prompt_ids[: int(2048 * shared.scale)] for r in shared.requests]
    assert prefix.count(prefix[0]) == 512
    assert all(len(r.prompt_ids) + r.max_new_tokens <= 200 for r in shared.requests)
    notes = "\n".join(bench.notes_on(choice, [long, shared], TINY | {"max_sequence_tokens": 200}))
    for part in ("times 0.125", "w4: all lengths times 0.0244", "at most 200 tokens", "ids 0 to 6,143"):
        assert part in notes


@pytest.mark.unit
@pytest.mark.parametrize("name", bench.WORKLOADS)
@pytest.mark.parametrize("limit", [64, 100, 1000, 2047])
def test_every_sequence_fits(name: str, limit: int) -> None:
    for load in bench.loads_of(
        bench.Choice(workloads=(name,), scale=1.0), TINY | {"max_sequence_tokens": limit}
    ):
        assert max(len(r.prompt_ids) + r.max_new_tokens for r in load.requests) <= limit


@pytest.mark.unit
def test_a_context_too_small_for_a_workload() -> None:
    with pytest.raises(
        InvalidArgument, match="w3 has sequences of at least 17 tokens, but here one has at most"
    ):
        bench.loads_of(bench.Choice(workloads=("w3",)), TINY | {"max_sequence_tokens": 16})


@pytest.mark.unit
def test_sweep_ends_with_the_number_that_is_wanted() -> None:
    loads = bench.loads_of(bench.Choice(workloads=("w7",), requests=12), TINY)
    assert [len(load.requests) for load in loads] == [1, 2, 4, 8, 12]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"workloads": ["w8"]}, "workloads must be of w1, w2, w3, w4, w5, w6, w7, got 'w8'"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"requests": -3}, "requests must be between 1 and 100000, got -3; leave it out"),
        ({"requests": 10**9}, "requests must be between 1 and 100000, got 1000000000; leave it out"),
        ({"scale": 0.0}, "scale must be a finite number above 0 and at most 1, got 0.0; 1 is full length"),
        ({"scale": 2.0}, "scale must be a finite number above 0 and at most 1, got 2.0"),
    ],
)
def test_wrong_choices(wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        bench.Choice(**wrong)
    assert complaint in str(caught.value)


# ── timing ────────────────────────────────────────────────────────────────────────────────────


class FakeEngine:
    """Takes a made-up time: 2 seconds for a call, and 1 second for each token of its longest request."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[Any] = []

    def flush_cache(self) -> None:
        self.log.append("flush")

    def generate(self, *, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> Any:
        lengths = [params["max_new_tokens"] for params in sampling_params]
        assert all(params["ignore_eos"] != bool(params["json_schema"]) for params in sampling_params)
        self.log.append((len(input_ids), max(lengths)))
        self.now += 2 + max(lengths)
        return [{"output_ids": [0] * n, "meta_info": {"cached_tokens": 3}} for n in lengths]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: fake.now)
    return fake


def runs(engine: Any, name: str, *, requests: int, repeats: int) -> tuple[list[bench.Figures], list[str]]:
    said: list[str] = []
    (load,) = bench.loads_of(bench.Choice(workloads=(name,), requests=requests), TINY)
    return list(bench.runs_of(engine, load, repeats=repeats, report=said.append)), said


@pytest.mark.unit
def test_a_batch_is_timed_from_an_empty_cache_after_an_uncounted_run(engine: FakeEngine) -> None:
    found, said = runs(engine, "w3", requests=4, repeats=2)
    assert engine.log == ["flush", (4, 8)] * 3
    assert [run["run"] for run in found] == [1, 2]
    assert found[0] == found[1] | {"run": 1}
    assert found[0]["seconds"] == 10
    assert found[0]["in_tokens"] == 4 * (256 + 8)
    assert (found[0]["out_tok_s"], found[0]["in_tok_s"]) == (3.2, 105.6)
    assert found[0]["cached_tokens"] == 12
    assert said == [
        "w3, requests: 4, a run that is not counted",
        "w3, requests: 4, run 1 of 2",
        "w3, requests: 4, run 2 of 2",
    ]


@pytest.mark.unit
def test_single_requests_tell_the_first_token_from_the_others(engine: FakeEngine) -> None:
    (run,), _ = runs(engine, "w2", requests=3, repeats=1)
    assert engine.log == ["flush", (1, 1), "flush", (1, 32)] * 4  # the first request is not counted
    assert run["requests"] == 3
    assert run["ttft_ms_all"] == [3000.0] * 3
    assert run["tpot_ms"] == 1000.0
    assert run["seconds"] == 3 * 34


@pytest.mark.unit
def test_the_table_shows_medians() -> None:
    line = bench.row("w1", [{"requests": 2, "seconds": s, "out_tok_s": 1e4 / s} for s in (2.0, 1.0, 8.0)])
    assert line.split() == ["w1", "2", "2.00", "5,000", "-", "-", "-", "-"]
    assert len(line) == len(bench.header())


# ── the command ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.cpu
def test_the_command_on_the_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text('{"there": "before"}\n')
    command = ["bench", "--workloads", "w1", "w2", "w3", "w4", "w7", "--scale", "0.02", "--requests", "3"]
    assert main([*command, "--repeats", "2", "--json", str(records)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].startswith("tiny, ")
    assert "all lengths times 0.02, as --scale says" in lines
    table = lines[lines.index(bench.header()) + 1 :]
    assert [line.split()[:2] for line in table] == [
        ["w6", "1"],
        *([name, "3"] for name in ("w1", "w2", "w3", "w4")),
        *(["w7", str(count)] for count in (1, 2, 3)),
    ]

    first, start, *runs = map(json.loads, records.read_text(encoding="utf-8").splitlines())
    assert first == {"there": "before"}
    assert start["workload"] == "w6"
    assert start["seconds"] > 0
    assert [(run["workload"], run["run"]) for run in runs] == [
        (name, number) for name in ("w1", "w2", "w3", "w4", "w7", "w7", "w7") for number in (1, 2)
    ]
    for run in runs:
        assert run["command"].startswith("tokenmill bench --workloads w1 w2")
        assert (run["model"], run["scale"], run["highest_id"]) == ("tiny", 0.02, 6143)
        assert {"date", "engine", "device", "dtype", "digest"} <= set(run)
        assert {"tokenmill", "python", "torch", "transformers"} <= set(run["versions"])
        assert run["out_tok_s"] == pytest.approx(run["out_tokens"] / run["seconds"], rel=0.1)
        assert ("tpot_ms" in run) == (run["workload"] == "w2")


@pytest.mark.cpu
def test_a_folder_with_nothing_but_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((ROOT / "tokenmill" / "tiny" / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 1, "vocab_size": 20_000, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["bench", "--model", str(tmp_path), "--load-format", "dummy", "--workloads", "w2", "w4"]
    assert main([*command, "--requests", "1", "--repeats", "1", "--show-progress"]) == 0
    captured = capsys.readouterr()
    assert "w4: all lengths times 0.00781, because a sequence has at most 64 tokens here" in captured.out
    assert "token ids 0 to" not in captured.out
    assert "w4, requests: 1, run 1 of 1" in captured.err


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--workloads", "w8"], "workloads must be of w1, w2, w3, w4, w5, w6, w7, got 'w8'"),
        (["--scale", "-1"], "scale must be a finite number above 0"),
        (["--json", "missing/folder/file"], "json: 'missing/folder/file' cannot be written (No such file"),
    ],
)
def test_wrong_values_end_before_anything_is_loaded(
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tokenmill.engine, "Engine", None)  # making one would be a TypeError
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tokenmill: error: {complaint}")
    assert error.count("\n") == 1
