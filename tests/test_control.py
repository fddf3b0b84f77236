"""Insight and control as users of `Engine` meet them: profiles, timings, figures, log lines, pauses."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import gc
import gzip
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tokenmill as sgl
from tokenmill.metrics import Metrics
from tokenmill.runner import profile

pytestmark = pytest.mark.cpu

PROMPT = "The capital of France is"
SHORT = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[sgl.Engine]:
    with sgl.Engine(device="cpu", enable_metrics=True, max_total_tokens=4096) as engine:
        yield engine


# ── profiles ──────────────────────────────────────────────────────────────────────────────────


def names_in(trace: Path) -> set[str]:
    """Names of the events of a chrome trace, the format that Perfetto reads."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    assert all("ph" in event for event in events)
    return {event["name"] for event in events}


def shows_steps(trace: Path) -> bool:
    """Whether products with weights are in a trace, by whichever kernel this machine has for them."""
    ours = {f"tokenmill::product_{how}" for how in ("of_floats", "of_rows", "in_tiles")}
    return not names_in(trace).isdisjoint({"mkldnn::_linear_pointwise", "aten::linear", *ours})


@pytest.mark.parametrize("core_process", [False, True])
def test_a_profile_shows_the_steps(tmp_path: Path, core_process: bool) -> None:
    with sgl.Engine(device="cpu", core_process=core_process) as engine:
        folder = str(tmp_path / "new")
        # A process has stacks as a thread has; writing them takes long.
        assert (
            engine.start_profile(profile_name="mine", profile_dir=folder, with_stack=not core_process) is None
        )
        engine.generate(PROMPT, {**SHORT, "max_new_tokens": 1})
        with pytest.raises(RuntimeError, match="running already"):
            engine.start_profile()
        assert engine.stop_profile() is None
        with pytest.raises(RuntimeError, match="no profile is running"):
            engine.stop_profile()
    (trace,) = (tmp_path / "new").iterdir()
    assert trace.name.startswith("mine-")
    assert trace.name.endswith("-TP-0.trace.json.gz")
    assert shows_steps(trace)


def test_a_profile_stops_by_itself(llm: sgl.Engine, tmp_path: Path) -> None:
    llm.start_profile(
        output_dir=tmp_path, profile_id="id", num_steps=2, with_stack=False, activities=["CPU"], start_step=0
    )
    llm.generate(PROMPT, SHORT)
    assert shows_steps(tmp_path / "id-TP-0.trace.json.gz")
    with pytest.raises(sgl.WrongState, match="no profile"):
        llm.stop_profile()


def test_the_folder_of_traces_by_default(
    llm: sgl.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", str(tmp_path))
    llm.start_profile(profile_id="x", profile_prefix="p", merge_profiles=False, profile_by_stage=None)
    llm.stop_profile()
    assert (tmp_path / "p-x-TP-0.trace.json.gz").exists()


def test_one_engine_of_a_process_at_a_time(llm: sgl.Engine, tmp_path: Path) -> None:
    """torch has one profiler; a second use of it would end the process."""
    with sgl.Engine(device="cpu") as other:
        other.start_profile(output_dir=tmp_path, profile_id="left", with_stack=False)
        with pytest.raises(RuntimeError, match="another engine"):
            llm.start_profile(output_dir=tmp_path, with_stack=False)
        other.generate(PROMPT, SHORT)
    # Nobody stopped it, but what it saw is not lost.
    assert shows_steps(tmp_path / "left-TP-0.trace.json.gz")
    llm.start_profile(output_dir=tmp_path, with_stack=False)
    llm.stop_profile()


def test_a_folder_that_cannot_be_made(llm: sgl.Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    llm.start_profile(output_dir=tmp_path / "file" / "folder", with_stack=False)
    with pytest.raises(RuntimeError, match="cannot be written to"):
        llm.stop_profile()
    llm.start_profile(output_dir=tmp_path, with_stack=False)
    llm.stop_profile()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"outputdir": "x"}, TypeError, "no argument 'outputdir'. Did you mean 'output_dir'?"),
        ({"profile_dir": "x", "output_dir": "y"}, ValueError, "output_dir was given twice"),
        ({"num_steps": 0}, ValueError, "num_steps must be"),
        ({"activities": ["CPU", "RPD"]}, ValueError, "activities has 'RPD'; known are 'CPU', 'GPU', 'MEM'"),
        ({"activities": ["MEM"]}, ValueError, "'MEM' needs a GPU"),
        ({"activities": ["GPU"]}, ValueError, "trace nothing on cpu"),
        ({"profile_by_stage": True}, ValueError, "profile_by_stage is not supported"),
        ({"merge_profiles": True}, ValueError, "merge_profiles is not supported"),
        ({"activities": ["MEM"], "start_step": 10**6}, ValueError, "'MEM' needs a GPU"),
        ({"activities": ["GPU"], "start_step": 10**6}, ValueError, "trace nothing on cpu"),
        ({"profile_prefix": "a/b"}, ValueError, "profile_prefix: a trace cannot be called 'a/b'"),
        ({"profile_id": "a\0", "num_steps": 1}, ValueError, "profile_id must be the name of a file"),
        ({"profile_prefix": "a\0", "num_steps": 1}, ValueError, "profile_prefix must be the name of a file"),
        ({"output_dir": "a\0", "num_steps": 1}, ValueError, "output_dir must be"),
        ({"profile_id": "a\ud800", "num_steps": 1}, ValueError, "profile_id has half a surrogate pair"),
        (
            {"profile_prefix": "\udc80", "num_steps": 1},
            ValueError,
            "profile_prefix has half a surrogate pair",
        ),
        ({"output_dir": "a/\ud800", "num_steps": 1}, ValueError, "output_dir has half a surrogate pair"),
        ({"profile_id": "a" * 300, "num_steps": 1}, ValueError, "profile_id cannot be read: OSError"),
        ({"profile_prefix": "a" * 300}, ValueError, "profile_prefix and profile_id cannot be read: OSError"),
        ({"output_dir": "missing/" + "a" * 300}, ValueError, "output_dir cannot be read: OSError"),
    ],
)
def test_wrong_profile_options(
    llm: sgl.Engine, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        llm.start_profile(**options)
    assert message in str(caught.value)
    assert isinstance(caught.value, sgl.InvalidArgument)
    with pytest.raises(sgl.WrongState):  # nothing was started
        llm.stop_profile()
    assert llm.generate(PROMPT, SHORT)["meta_info"]["completion_tokens"] == 4


@pytest.mark.parametrize("num_steps", [None, 2])
def test_a_trace_that_cannot_be_written_for_any_reason(
    llm: sgl.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int | None
) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("embedded null byte")

    monkeypatch.setattr(profile, "_export", fail)
    llm.start_profile(output_dir=tmp_path, with_stack=False, num_steps=num_steps)
    assert llm.generate(PROMPT, SHORT)["meta_info"]["completion_tokens"] == 4
    with pytest.raises(RuntimeError, match="embedded null byte" if num_steps is None else "no profile"):
        llm.stop_profile()
    monkeypatch.undo()
    llm.start_profile(output_dir=tmp_path, with_stack=False)  # torch's profiler is free again
    llm.stop_profile()


def test_writing_a_trace_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = profile._export

    def export_slowly(*arguments: Any) -> None:
        time.sleep(1.5)
        export(*arguments)

    monkeypatch.setattr(profile, "_export", export_slowly)
    with sgl.Engine(device="cpu", watchdog_timeout=0.5) as engine:
        engine.start_profile(output_dir=tmp_path, profile_id="id", num_steps=8, with_stack=False)
        result = engine.generate(PROMPT, {**SHORT, "max_new_tokens": 16})
    assert result["meta_info"]["completion_tokens"] == 16
    assert shows_steps(tmp_path / "id-TP-0.trace.json.gz")


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for its figures")
def test_the_memory_of_a_trace_is_given_back(llm: sgl.Engine, tmp_path: Path) -> None:
    """Its 20 steps take 240 MB to be written."""
    llm.start_profile(output_dir=tmp_path)
    llm.generate(PROMPT, {**SHORT, "max_new_tokens": 20})
    before = resident_bytes()
    llm.stop_profile()
    assert resident_bytes() - before < 80e6


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ── timings and server info ───────────────────────────────────────────────────────────────────


def test_timings_of_a_request(llm: sgl.Engine) -> None:
    before = time.time()
    meta = llm.generate(PROMPT, {**SHORT, "max_new_tokens": 16})["meta_info"]
    after = time.time()
    points = [
        "request_received_ts",
        "api_server_dispatch_finish_ts",
        "forward_entry_time",
        "prefill_finished_time",
        "request_finished_ts",
    ]
    moments = [before - 0.05, *(meta[point] for point in points), after + 0.05]
    assert moments == sorted(moments)
    assert meta["queue_time"] == pytest.approx(
        meta["forward_entry_time"] - meta["api_server_dispatch_finish_ts"], abs=1e-3
    )
    assert 0 < meta["first_token_latency"] < meta["e2e_latency"]
    decoding = meta["e2e_latency"] - meta["first_token_latency"]
    assert meta["decode_throughput"] == pytest.approx(15 / decoding, rel=1e-3)


def test_timings_of_streams_and_of_requests_for_nothing(llm: sgl.Engine) -> None:
    *chunks, last = llm.generate(PROMPT, SHORT, stream=True)
    assert all("queue_time" not in chunk["meta_info"] for chunk in chunks)
    assert last["meta_info"]["first_token_latency"] > 0
    stopped = llm.generate(PROMPT, {**LONG, "stop": " Paris"})["meta_info"]
    assert 0 < stopped["first_token_latency"] <= stopped["e2e_latency"] + 1e-3
    nothing = llm.generate(PROMPT, {"max_new_tokens": 0})["meta_info"]
    assert nothing["queue_time"] >= 0
    assert nothing["first_token_latency"] is None
    assert nothing["decode_throughput"] is None


def test_server_info(llm: sgl.Engine) -> None:
    llm.generate([PROMPT] * 8, {**SHORT, "max_new_tokens": 60})
    info = llm.get_server_info()
    assert info["status"] == "ready"
    assert info["max_total_tokens"] == info["max_total_num_tokens"] == 4096
    assert 0 < info["max_req_input_len"] < 4096
    assert info["chunked_prefill_size"] == info["max_step_tokens"] > 0
    assert info["startup_time"] > info["load_seconds"] * 0.5 > 0
    assert info["version"] == sgl.__version__
    (state,) = info["internal_states"]
    assert state["last_gen_throughput"] > 0
    assert state["memory_usage"]["weight"] == pytest.approx(info["weight_bytes"] / 2**30)
    assert state["memory_usage"]["kvcache"] == pytest.approx(info["cache_bytes"] / 2**30, rel=0.01)
    assert state["memory_usage"]["token_capacity"] == 4096
    assert state["effective_max_running_requests_per_dp"] == info["max_running_requests"]


def test_the_processes_of_an_engine(llm: sgl.Engine) -> None:
    assert llm.get_all_child_pids() == []
    with sgl.Engine(device="cpu", core_process=True) as engine:
        (child,) = engine.get_all_child_pids()
        assert child != os.getpid()
        os.kill(child, 0)  # it is there
    assert engine.get_all_child_pids() == []


def test_methods_of_features_to_come_say_so(llm: sgl.Engine) -> None:
    for name, feature in (("encode", "embeddings"), ("load_lora_adapter", "LoRA adapters")):
        assert not hasattr(llm, name)
        for kind in (AttributeError, sgl.InvalidArgument, ValueError):
            with pytest.raises(kind, match=rf"Engine.{name} is not supported yet \({feature}\)"):
                getattr(llm, name)("a")
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'generat'"):
        _ = llm.generat  # type: ignore[attr-defined]


# ── figures ───────────────────────────────────────────────────────────────────────────────────


def figures(engine: sgl.Engine) -> dict[str, float]:
    families = text_string_to_metric_families(engine.get_metrics())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_metrics_count_what_happened() -> None:
    with sgl.Engine(device="cpu", enable_metrics=True, served_model_name="the model") as engine:
        assert figures(engine)["tokenmill:num_requests_total"] == 0
        outputs = engine.generate([PROMPT] * 3, SHORT)
        list(engine.generate(PROMPT, SHORT, stream=True))
        stream = engine.generate(PROMPT, LONG, stream=True, rid="long")
        next(stream)
        assert figures(engine)["tokenmill:num_running_requests"] == 1
        engine.abort("long")
        list(stream)
        found = figures(engine)
        assert 'model_name="the model"' in engine.get_metrics()
    prompt_tokens = outputs[0]["meta_info"]["prompt_tokens"]
    assert found["tokenmill:num_requests_total"] == 5
    assert found["tokenmill:num_aborted_requests_total"] == 1
    assert found["tokenmill:prompt_tokens_total"] == 5 * prompt_tokens
    assert found["tokenmill:generation_tokens_total"] > 16
    assert found["tokenmill:time_to_first_token_seconds_count"] == 5
    assert found["tokenmill:e2e_request_latency_seconds_count"] == 5
    assert found["tokenmill:e2e_request_latency_seconds_sum"] > found["tokenmill:queue_time_seconds_sum"]
    assert found["tokenmill:inter_token_latency_seconds_count"] >= 4
    assert found["tokenmill:num_running_requests"] == 0


def test_requests_that_nobody_waits_for_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fails(logits: Any, params: Any) -> Any:
        raise ValueError("no")

    async def leave() -> None:
        stream = await engine.async_generate(PROMPT, LONG, stream=True)
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(engine.async_generate([PROMPT] * 2, LONG))
        await asyncio.sleep(0.2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with sgl.Engine(device="cpu", enable_metrics=True, log_requests=True) as engine:
        closed = engine.generate(PROMPT, LONG, stream=True)
        next(closed)
        closed.close()
        closed.close()
        forgotten = engine.generate([PROMPT] * 2, LONG, stream=True)
        next(forgotten)
        del forgotten
        asyncio.run(leave())
        rows = engine.iter([PROMPT] * 3, sampling_params=LONG)
        threading.Timer(0.3, rows.close).start()
        assert not list(rows)
        with pytest.raises(sgl.RequestFailed):  # the others of the call are given up
            engine.generate([PROMPT] * 2, LONG, custom_logit_processor=[fails, None])
        found = figures(engine)
    assert found["tokenmill:num_requests_total"] == 1 + 2 + 1 + 2 + 3 + 2
    assert found["tokenmill:num_aborted_requests_total"] == 11
    lines = [record.getMessage() for record in caplog.records if record.name == "tokenmill.requests"]
    received, finished = (
        [line for line in lines if line.startswith(word)] for word in ("received", "finished")
    )
    assert len(received) == len(finished) == 11
    assert sum("nobody waited for it any more" in line for line in finished) == 10


@pytest.mark.parametrize("place", ["figures", "log"])
def test_the_garbage_collector_and_signals_may_come_while_somebody_is_told(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run anywhere, also where the thread holds a lock: of the library that counts, of a log's queue."""
    lock = threading.Lock()

    def interrupted() -> None:
        with lock:  # which nobody can have twice
            gc.collect()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            interrupted()
            engine.get_metrics()  # as a handler for signals may

    with sgl.Engine(device="cpu", enable_metrics=True, log_requests=place == "log") as engine:
        cycle: list[Any] = [engine.generate(PROMPT, LONG, stream=True)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        if place == "figures":
            count = Metrics.finished

            def collects(self: Metrics, facts: Any) -> None:
                interrupted()
                engine.get_metrics()
                count(self, facts)

            monkeypatch.setattr(Metrics, "finished", collects)
        else:
            monkeypatch.setattr(logging.getLogger("tokenmill.requests"), "handlers", [Handler()])
        thread = threading.Thread(target=lambda: engine.generate(PROMPT, SHORT), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "it waits for itself"
        assert figures(engine)["tokenmill:num_requests_total"] == 2
        assert figures(engine)["tokenmill:num_aborted_requests_total"] == 1


def test_engines_count_apart_and_need_to_be_asked(llm: sgl.Engine) -> None:
    with sgl.Engine(device="cpu", enable_metrics=True) as other:
        assert figures(other)["tokenmill:num_requests_total"] == 0
    with sgl.Engine(device="cpu") as plain:
        assert "queue_time" not in plain.generate(PROMPT, SHORT)["meta_info"]
        with pytest.raises(ValueError, match="enable_metrics=True"):
            plain.get_metrics()


def test_metrics_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "prometheus_client":
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(sgl.InvalidArgument, match=r"tokenmill\[metrics\]"):
        sgl.Engine(device="cpu", enable_metrics=True)


# ── log lines ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_requests_are_logged(level: int, caplog: pytest.LogCaptureFixture) -> None:
    prompt = " ".join([PROMPT] * 100)
    with sgl.Engine(device="cpu", log_requests=True, log_requests_level=level) as engine:
        output = engine.generate(prompt, {**SHORT, "top_p": 0.75}, rid="mine")
    lines = [record.getMessage() for record in caplog.records if record.name == "tokenmill.requests"]
    received, finished = lines
    assert received.startswith("received: rid='mine', prompt_tokens=")
    assert finished.startswith("finished: rid='mine', finish_reason={'type': 'length', 'length': 4}")
    assert "completion_tokens=4" in finished
    assert ("'top_p': 0.75" in received) == (level >= 1)
    assert "'min_p'" not in received  # it is as always
    assert (repr(output["text"]) in finished) == (level >= 2)
    assert ("ids)'" in received) == (level == 2)
    assert (f"{len(engine.get_tokenizer()(prompt)['input_ids'])} ids" in received) == (level == 2)


def test_no_log_lines_by_default(llm: sgl.Engine, caplog: pytest.LogCaptureFixture) -> None:
    llm.generate(PROMPT, SHORT)
    assert not caplog.records


def test_log_lines_reach_standard_error_of_a_program_without_logging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("tokenmill"), "handlers", [])
    with sgl.Engine(device="cpu", log_requests=True) as engine:
        list(engine.generate(PROMPT, SHORT, stream=True, rid="streamed"))
    lines = capsys.readouterr().err.splitlines()
    assert ["received" in line or "finished" in line for line in lines if "rid='streamed'" in line] == [
        True
    ] * 2


# ── pauses, aborts, garbage ───────────────────────────────────────────────────────────────────


def test_a_pause_and_what_goes_on_after_it(llm: sgl.Engine) -> None:
    expected = llm.generate(PROMPT, {**SHORT, "max_new_tokens": 200})["output_ids"]
    stream = llm.generate(PROMPT, {**SHORT, "max_new_tokens": 200}, stream=True)
    ids = list(next(stream)["output_ids"])
    llm.pause_generation("retract")
    assert llm.get_server_info()["internal_states"][0]["paused"]
    assert not llm.flush_cache()
    llm.continue_generation()
    for chunk in stream:
        ids += chunk["output_ids"]
    assert ids == expected
    with pytest.raises(ValueError, match="'abort', 'retract', 'in_place'"):
        llm.pause_generation("later")  # type: ignore[arg-type]


def test_what_users_reach_as_tokenizer_manager(llm: sgl.Engine) -> None:
    manager = llm.tokenizer_manager
    assert manager.tokenizer is llm.get_tokenizer()
    assert manager.server_args == llm.server_args
    assert manager.model_config.vocab_size == llm.get_server_info()["vocab_size"]
    assert manager.context_len == manager.model_config.context_len == llm.get_server_info()["context_length"]
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(llm.generate(PROMPT, LONG, rid="long")))
    thread.start()
    while thread.is_alive() and not llm.get_server_info()["internal_states"][0]["num_running_requests"]:
        time.sleep(0.001)
    manager.abort_request("long")
    thread.join(30)
    assert results[0]["meta_info"]["finish_reason"]["type"] == "abort"

    async def pause() -> None:
        await manager.pause_generation(type("Request", (), {"mode": "in_place"})())
        assert llm.get_server_info()["internal_states"][0]["paused"]
        await manager.continue_generation(None)
        assert not llm.get_server_info()["internal_states"][0]["paused"]

    asyncio.run(pause())

    async def release() -> None:
        assert (await manager.flush_cache()).success
        await manager.release_memory_occupation(type("Request", (), {"tags": ["kv_cache"]})(), None)
        assert llm.get_server_info()["internal_states"][0]["released"] == ["kv_cache"]
        await manager.resume_memory_occupation(None, None)
        assert llm.get_server_info()["internal_states"][0]["released"] == []

    asyncio.run(release())
    assert manager.model_path == manager.served_model_name == llm.server_args.model_path
    assert manager.is_generation


def test_freeze_gc(llm: sgl.Engine) -> None:
    try:
        assert llm.freeze_gc() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
