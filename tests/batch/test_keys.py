"""What a sample is known by: everything that changes its answer, and nothing else."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenmill import Engine, EngineConfig
from tokenmill.batch.keys import CHANGING_ARGUMENTS, Keys, RowKey, fingerprint, seeded
from tokenmill.hub import BUNDLED

pytestmark = pytest.mark.cpu

# Arguments that say where and how fast an engine runs, or that act through the requests.
HARMLESS = {
    "model_path", "tokenizer_path", "chat_template", "trust_remote_code", "revision", "download_dir",
    "context_length", "served_model_name", "device", "base_gpu_id", "core_process", "attention_backend",
    "max_total_tokens", "mem_fraction_static", "page_size", "max_running_requests", "chunked_prefill_size",
    "schedule_policy", "max_queued_requests", "enable_priority_scheduling",
    "schedule_low_priority_values_first", "default_priority_value", "disable_priority_preemption",
    "priority_scheduling_preemption_threshold", "abort_on_priority_when_disabled", "disable_radix_cache",
    "steps_in_flight", "disable_cuda_graph", "preferred_sampling_params", "random_seed", "cumulative_stream",
    "stream_interval", "watchdog_timeout", "log_level", "log_requests", "log_requests_level",
    "enable_metrics", "show_progress", "allow_auto_truncate",
}  # fmt: skip

Key = Callable[..., RowKey]


@pytest.fixture
def key(tiny_engine: Engine) -> Key:
    """The key of a row as a job with this seed reads it."""

    def of(prompt: str = "Hello", job_seed: int = 0, model: bytes = b"m", **asked: Any) -> RowKey:
        params = {"max_new_tokens": 5, **asked.pop("params", {})}
        [entry] = tiny_engine.open_rows().read([{"prompt": prompt, "sampling_params": params, **asked}])
        assert entry.job is not None
        return Keys(model, seed=job_seed).of(entry.job.requests)

    return of


def test_every_argument_of_the_engine_is_known_to_change_answers_or_not() -> None:
    """A new argument must be put into one of the two tables."""
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert fields == HARMLESS | set(CHANGING_ARGUMENTS)
    assert not HARMLESS & set(CHANGING_ARGUMENTS)


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "hello"},
        {"job_seed": 1},
        {"model": b"other"},
        {"params": {"max_new_tokens": 6}},
        {"params": {"temperature": 0.5}},
        {"params": {"temperature": 0}},
        {"params": {"stop": "x"}},
        {"params": {"stop_token_ids": [9]}},
        {"params": {"ignore_eos": True}},
        {"params": {"logit_bias": {"5": 1.0}}},
        {"params": {"json_schema": "{}"}},
        {"params": {"skip_special_tokens": False}},
        {"params": {"sampling_seed": 0}},
        {"return_logprob": True},
        {"return_hidden_states": True},
        {"custom_logit_processor": "no_repeat_ngram"},
    ],
)
def test_whatever_changes_the_answer_changes_the_key(key: Key, asked: dict[str, Any]) -> None:
    assert key(**asked).digest != key().digest


@pytest.mark.parametrize(
    "asked",
    [
        {"params": {"n": 7}},
        {"params": {"stream_interval": 3}},
        {"rid": "mine"},
        {"priority": 5},
        {"timeout": 9.0},
        {"params": {"top_p": 1.0}},  # as it would be without
    ],
)
def test_whatever_changes_nothing_does_not(key: Key, asked: dict[str, Any]) -> None:
    assert key(**asked) == key()


def test_biases_count_in_any_order(key: Key) -> None:
    given = {"7": 1.0, "12": -2.0}
    turned = dict(reversed(given.items()))
    assert key(params={"logit_bias": given}) == key(params={"logit_bias": turned})
    assert key(params={"logit_bias": given}) != key(params={"logit_bias": {"7": -2.0, "12": 1.0}})


def test_any_json_for_a_processor_counts_as_it_is_written(key: Key) -> None:
    """Whatever was read before: 1 is not True, and an object has no order."""

    def of(**custom: Any) -> RowKey:
        return key(params={"custom_params": custom})

    keys = {of(a=value).digest for value in (1, True, 1.0, "1", None)}
    assert len(keys) == 5
    assert of(a=1, b=[{"c": 2, "d": 3}]) == of(b=[{"d": 3, "c": 2}], a=1)


def test_keys_do_not_depend_on_the_row_before(tiny_engine: Engine) -> None:
    params = [{"custom_params": {"a": value}} for value in (1, True, 1)]
    items = [{"prompt": "Hello", "sampling_params": each} for each in params]
    entries = tiny_engine.open_rows().read(items)
    keys = Keys(b"m", seed=0)
    digests = [keys.of(entry.job.requests).digest for entry in entries if entry.job is not None]
    assert digests[0] == digests[2] != digests[1]


def test_samples_differ_and_stay_the_same_for_more_of_them(key: Key) -> None:
    few, many = key(params={"n": 2}), key(params={"n": 9})
    keys = [many.sample(number) for number in range(9)]
    assert len(set(keys)) == 9
    assert [few.sample(0), few.sample(1)] == keys[:2]


def test_nothing_drawn_means_one_key_whatever_the_seed(key: Key) -> None:
    greedy = {"temperature": 0}
    first, second = key(params={**greedy, "sampling_seed": 3}), key(params=greedy, job_seed=8)
    assert first.sample(0) == first.sample(4) == second.sample(0)


def test_a_seed_that_was_given_is_the_one_of_generate(tiny_engine: Engine, key: Key) -> None:
    params = {"n": 3, "sampling_seed": 11}
    [entry] = tiny_engine.open_rows().read([{"prompt": "Hello", "sampling_params": params}])
    assert entry.job is not None
    assert seeded(entry.job.requests, key(params=params)) == entry.job.requests


def test_the_fingerprint_knows_weights_tokenizer_and_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED["tiny"], folder)

    def now(**arguments: Any) -> bytes:
        return fingerprint(EngineConfig(model_path=str(folder), **arguments), dtype="float32")

    first = now()
    assert (
        now() == now(page_size=32) == fingerprint(EngineConfig(model_path="tiny"), dtype="float32") == first
    )
    (folder / "notes.txt").write_text("nothing of the model")
    assert now() == first
    seen = {first, now(weight_version="2"), fingerprint(EngineConfig(), dtype="bfloat16")}
    for name, place in (
        ("tokenizer.json", 2000),
        ("config.json", -3),
        ("model-00001-of-00002.safetensors", 20),
    ):
        content = (folder / name).read_bytes()
        changed = bytearray(content)
        changed[place] ^= 1
        (folder / name).write_bytes(changed)
        seen.add(now())
        (folder / name).write_bytes(content)
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("arguments", "asked_for"),
    [
        ({}, [("owner/model", "v1")]),
        ({"tokenizer_path": "owner/tokenizer"}, [("owner/model", "v1"), ("owner/tokenizer", None)]),
    ],
)
def test_the_revision_is_that_of_the_model(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], asked_for: list[tuple[str, str | None]]
) -> None:
    """A tokenizer of another repository, which has no such revision, is loaded without one."""
    asked: list[tuple[str, str | None]] = []

    def resolve(name: str, *, revision: str | None, **rest: Any) -> Path:
        asked.append((name, revision))
        return BUNDLED["tiny"]

    monkeypatch.setattr("tokenmill.hub.resolve", resolve)
    fingerprint(EngineConfig(model_path="owner/model", revision="v1", **arguments), dtype="float32")
    assert asked == asked_for


def test_a_tensor_that_was_trained_on_changes_the_fingerprint(tmp_path: Path) -> None:
    """Of the same names, shapes and sizes: all of its numbers a little different, as training makes them."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED["tiny"], folder)
    config = EngineConfig(model_path=str(folder))
    first = fingerprint(config, dtype="float32")
    path = folder / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-4000:] = bytes(byte ^ 1 for byte in data[-4000:])  # within the last tensor
    path.write_bytes(data)
    assert fingerprint(config, dtype="float32") != first
