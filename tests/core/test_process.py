"""The core in a process of its own: what becomes of rows, calls and state when it is killed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tokenmill as sgl
from tokenmill import batch
from tokenmill.hub import resolve

ROOT = Path(__file__).parents[2]
PROMPT = "The capital of France is"
LONG = {"temperature": 0, "max_new_tokens": 800, "ignore_eos": True}
SHORT = {"temperature": 0, "max_new_tokens": 4}


def child_of(parent: int) -> int:
    """The process id of the only child that runs a core."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and is_core_of(entry, parent):
                return int(entry.name)
        time.sleep(0.05)
    raise AssertionError("no core process")


def is_core_of(entry: Path, parent: int) -> bool:
    try:
        command = (entry / "cmdline").read_text()
        status = (entry / "stat").read_text()
    except OSError:  # it ended meanwhile
        return False
    return "tokenmill.core.process" in command and int(status.rsplit(")", 1)[1].split()[1]) == parent


def wait_gone(process_id: int) -> None:
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process_id}").exists():
        assert time.monotonic() < deadline, "the core process lives on"
        time.sleep(0.05)


def kill_core() -> None:
    os.kill(child_of(os.getpid()), signal.SIGKILL)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def engine() -> Any:
    with sgl.Engine(model_path="tiny", device="cpu", dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def mortal() -> Any:
    """An engine whose core can be killed; it is back before the next test."""
    with sgl.Engine(model_path="tiny", device="cpu", dtype="float32", core_process=True) as mortal:
        yield mortal


# ── rows ──────────────────────────────────────────────────────────────────────────────────────

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "Name three colors.",
    "1 2 3 4",
    "Dear Sir,",
    "Why?",
]
DRAWN = {"temperature": 0.9, "max_new_tokens": 60, "ignore_eos": True}
PARAMS = [
    {**DRAWN, "sampling_seed": 1},
    {
        **DRAWN,
        "sampling_seed": 2,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    {**DRAWN, "sampling_seed": 3, "regex": "[a-z ]{50,55}", "ignore_eos": False},
    {**DRAWN, "sampling_seed": 4, "min_new_tokens": 40, "ignore_eos": False},
    {**DRAWN, "sampling_seed": 5, "logit_bias": {"5": 2.0}, "top_k": 20, "min_p": 0.01},
    {**DRAWN, "sampling_seed": 6, "stop": ["e", " the"], "min_new_tokens": 30},
]
EVERYTHING = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "return_hidden_states": True,
}


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Token for token; numbers as near as another batch makes them."""
    assert result["output_ids"] == expected["output_ids"]
    assert result["text"] == expected["text"]
    mine, theirs = result["meta_info"], expected["meta_info"]
    assert mine["finish_reason"] == theirs["finish_reason"]
    for key in ("input_token_logprobs", "output_token_logprobs"):
        assert [entry[1] for entry in mine[key]] == [entry[1] for entry in theirs[key]]
        for entry, other in zip(mine[key], theirs[key], strict=True):
            assert entry[0] == pytest.approx(other[0], abs=1e-3)
    for entries, others in zip(mine["output_top_logprobs"], theirs["output_top_logprobs"], strict=True):
        assert [entry[0] for entry in entries] == pytest.approx([other[0] for other in others], abs=1e-3)
    if "hidden_states" in theirs:
        states, others = map(_rows, (mine["hidden_states"], theirs["hidden_states"]))
        np.testing.assert_allclose(states, others, atol=1e-2)


def _rows(hidden_states: list[Any]) -> Any:
    """One row for each position; those of the prompt come together."""
    return np.concatenate([np.atleast_2d(part) for part in hidden_states])


def merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """One result, of the chunks of a stream."""
    last = chunks[-1]["meta_info"]
    columns = ("output_token_logprobs", "output_top_logprobs", "hidden_states")
    shown = {key: [item for chunk in chunks for item in chunk["meta_info"].get(key) or []] for key in columns}
    return {
        "text": "".join(chunk["text"] for chunk in chunks),
        "output_ids": [token for chunk in chunks for token in chunk["output_ids"]],
        "meta_info": {**last, **shown},
    }


def test_streams_go_on_exactly_where_they_were(engine: sgl.Engine, mortal: sgl.Engine) -> None:
    expected = engine.generate(PROMPTS, PARAMS, **EVERYTHING)
    chunks: list[list[dict[str, Any]]] = [[] for _ in PROMPTS]
    for count, chunk in enumerate(mortal.generate(PROMPTS, PARAMS, stream=True, **EVERYTHING)):
        chunks[chunk["index"]].append(chunk)
        if count in (1, 150):
            kill_core()
    for parts, other in zip(chunks, expected, strict=True):
        assert len(parts) > 1
        assert_same(merged(parts), other)
        assert parts[-1]["meta_info"]["cached_tokens"] == parts[0]["meta_info"]["cached_tokens"]


def test_every_row_and_sample_comes_back(
    engine: sgl.Engine, mortal: sgl.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("tokenmill").setLevel("WARNING")
    long = {**DRAWN, "max_new_tokens": 150, "sampling_seed": 9}
    params = [*({**each, "n": 2} for each in PARAMS[:3]), *({**long, "n": 2} for _ in PARAMS[3:])]
    shown = EVERYTHING | {"return_hidden_states": False}
    expected = engine.generate(PROMPTS, params, **shown)
    killer = threading.Timer(0.2, kill_core)
    killer.start()
    results = mortal.generate(PROMPTS, params, **shown)
    killer.join()
    for result, other in zip(results, expected, strict=True):
        assert_same(result, other)
    assert re.search(r"killed by signal 9; another takes its place and replays [1-9]", caplog.text)


def test_async_calls_streams_and_sessions_go_on(engine: sgl.Engine, mortal: sgl.Engine) -> None:
    async def ask(llm: sgl.Engine, *, kills: bool) -> list[Any]:
        session = llm.open_session(10_000)
        turn = {"session_params": {"id": session}}
        greedy = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        first = await llm.async_generate(PROMPT, greedy, **turn)
        batch = asyncio.create_task(llm.async_generate(PROMPTS, LONG | {"max_new_tokens": 100}))
        chat = asyncio.create_task(llm.async_chat([{"role": "user", "content": "Hello"}], greedy))
        pieces = []
        async for chunk in await llm.async_generate(" and", greedy, stream=True, **turn):
            pieces.append(chunk["text"])
            if kills and len(pieces) == 5:
                kill_core()
        third = await llm.async_generate(" then", greedy, **turn)
        rows = [*await batch, await chat, first, third]
        return ["".join(pieces), *((row["text"], row["meta_info"]["prompt_tokens"]) for row in rows)]

    expected = asyncio.run(ask(engine, kills=False))
    assert asyncio.run(ask(mortal, kills=True)) == expected


def test_an_aborted_row_and_a_late_one_end_although_no_core_is_there(mortal: sgl.Engine) -> None:
    results: dict[str, Any] = {}

    def ask(name: str, **options: Any) -> None:
        try:
            results[name] = mortal.generate(PROMPT, LONG, rid=name, **options)["meta_info"]["finish_reason"]
        except sgl.RequestTimeout as error:
            results[name] = error

    rows: tuple[tuple[str, dict[str, Any]], ...] = (("aborted", {}), ("late", {"timeout": 0.4}))
    threads = [threading.Thread(target=ask, args=[name], kwargs=options) for name, options in rows]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    kill_core()
    time.sleep(0.1)
    mortal.abort("aborted")
    threads[0].join(10)
    assert results["aborted"]["type"] == "abort"
    threads[1].join(20)
    assert "late" in results
    assert mortal.generate(PROMPT, SHORT)["text"].startswith(" Paris")


class Deadly:
    """A logit processor that ends its process, as a kernel with a bug would."""

    def __call__(self, logits: Any, custom_param_list: Any) -> Any:
        os._exit(3)


def test_a_row_that_kills_every_core_fails_alone(
    engine: sgl.Engine, mortal: sgl.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.core.replay._MOST_DEATHS_ALONE", 1)  # three take longer

    few = {**LONG, "max_new_tokens": 60}

    async def ask() -> list[Any]:
        return await asyncio.gather(
            mortal.async_generate(PROMPT, few),
            mortal.async_generate(PROMPT, SHORT, custom_logit_processor=Deadly()),
            return_exceptions=True,
        )

    good, bad = asyncio.run(ask())
    assert good["output_ids"] == engine.generate(PROMPT, few)["output_ids"]
    assert isinstance(bad, sgl.RequestFailed)
    assert bad.error_type == "internal"
    assert "the core's process died" in str(bad)


# ── calls and state ───────────────────────────────────────────────────────────────────────────


def test_a_pause_and_released_memory_outlive_the_core(mortal: sgl.Engine) -> None:
    mortal.pause_generation("retract")
    mortal.release_memory_occupation(["kv_cache"])
    kill_core()
    state = mortal.get_server_info()["internal_states"][0]
    assert (state["paused"], state["released"]) == (True, ["kv_cache"])
    mortal.resume_memory_occupation()
    mortal.continue_generation()
    assert mortal.flush_cache().success
    assert mortal.generate(PROMPT, SHORT)["text"].startswith(" Paris")


def test_weights_from_disk_outlive_the_core_and_tensors_cannot(mortal: sgl.Engine, tmp_path: Path) -> None:
    name = "model.norm.weight"
    folder = changed_checkpoint(tmp_path, name)
    before = mortal.get_weights_by_name(name)
    assert mortal.update_weights_from_disk(folder, weight_version="changed", on_error="raise")[0]
    after = mortal.get_weights_by_name(name)
    assert after != before
    kill_core()
    assert mortal.get_weights_by_name(name) == after
    result = mortal.generate(PROMPT, SHORT)
    assert result["meta_info"]["weight_version"] == "changed"
    weight = load_file(Path(folder) / "model.safetensors")[name]
    assert mortal.update_weights_from_tensor({name: weight}, on_error="raise")[0]
    kill_core()
    with pytest.raises(sgl.EngineDead, match="update_weights_from_tensor are lost"):
        mortal.generate(PROMPT, LONG)


def changed_checkpoint(folder: Path, name: str) -> str:
    """The bundled model with one of its weights doubled."""
    source = resolve("tiny")
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name:
            shutil.copy(file, folder)
    weights: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        weights |= load_file(file)
    weights[name] = 2 * weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_folders_stay_where_they_are_after_a_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that is replaced, a job and new weights find the model by the name it had at first."""
    first, second, elsewhere = (tmp_path / name for name in ("first", "second", "elsewhere"))
    shutil.copytree(resolve("tiny"), first)
    second.mkdir()
    elsewhere.mkdir()
    norm = "model.norm.weight"
    changed_checkpoint(second, norm)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": PROMPT}))
    monkeypatch.chdir(tmp_path)
    with sgl.Engine("first", device="cpu", core_process=True, max_total_tokens=4096) as engine:
        assert engine.get_model_info()["served_model_name"] == "first"
        monkeypatch.chdir(elsewhere)
        kill_core()
        assert engine.generate(PROMPT, SHORT)["text"].startswith(" Paris")
        assert batch.run(rows, tmp_path / "out.jsonl", engine=engine)["rows"]["done"] == 1
        monkeypatch.chdir(tmp_path)
        assert engine.update_weights_from_disk("second", on_error="raise")[0]
        weights = engine.get_weights_by_name(norm)
        monkeypatch.chdir(elsewhere)
        kill_core()
        assert engine.get_weights_by_name(norm) == weights
        assert batch.run(rows, tmp_path / "again.jsonl", engine=engine)["rows"]["done"] == 1
        info = engine.get_model_info()
        assert (info["model_path"], info["served_model_name"]) == (str(second), "second")


def test_errors_of_loading_come_out_of_the_process() -> None:
    with pytest.raises(ValueError, match="context_length"):
        sgl.Engine(model_path="tiny", device="cpu", core_process=True, context_length=1_000_000)


class Failing:
    def __call__(self, logits: torch.Tensor, params: Any) -> torch.Tensor:
        raise ValueError("this one never works")


@pytest.mark.parametrize(("level", "is_told"), [("error", False), ("warning", True)])
def test_the_core_tells_as_much_as_it_should(
    level: str, is_told: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with sgl.Engine(model_path="tiny", core_process=True, log_level=level) as engine:
        result = engine.generate(PROMPT, SHORT, custom_logit_processor=Failing(), on_error="return")
    assert result["error"]["type"] == "internal"
    assert ("this one never works" in capfd.readouterr().err) == is_told


def test_threads_loops_and_a_second_engine_share_the_process(engine: sgl.Engine) -> None:
    expected = engine.generate(PROMPT, SHORT)["text"]
    answers: list[str] = []

    def ask() -> None:
        answers.append(engine.generate(PROMPT, SHORT)["text"])

    async def ask_async() -> None:
        batch = await engine.async_generate([PROMPT] * 3, SHORT)
        answers.extend(batch["text"])
        answers.append(engine.generate(PROMPT, SHORT)["text"])  # sync inside a running loop
        pieces = [chunk["text"] async for chunk in await engine.async_generate(PROMPT, SHORT, stream=True)]
        answers.append("".join(pieces))

    with sgl.Engine(model_path="tiny", device="cpu") as second:
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        asyncio.run(ask_async())
        asyncio.run(ask_async())  # another loop, the same engine
        answers.append(second.generate(PROMPT, SHORT)["text"])
        for thread in threads:
            thread.join()
    ask()  # the first engine does not mind that the second is shut down
    assert answers == [expected] * 20


def test_a_stream_that_is_left_early_is_aborted(engine: sgl.Engine) -> None:
    stream = engine.generate(PROMPT, LONG, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while not engine.flush_cache().success:  # refused while anything runs
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.01)
