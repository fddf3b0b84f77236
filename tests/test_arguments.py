"""Constructor arguments: our fields, every name of SGLang's engine, and that nothing else is let through."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import runpy
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokenmill as sgl
from tokenmill import logs
from tokenmill.arguments import argument_names, other_names, resolve_arguments
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument, UnknownArgument, WrongType

pytestmark = pytest.mark.unit

HERE = Path(__file__).parent
# The names of SGLang's constructor with their defaults, as release 0.5.7 prints them; those of later
# releases; and what 0.5.7 puts in the place of some defaults when it starts.
SGLANG: dict[str, dict[str, Any]] = json.loads((HERE / "data" / "sglang_arguments.json").read_text())


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    logs.warn_once.cache_clear()
    yield
    logs.warn_once.cache_clear()


def resolve(**values: Any) -> EngineConfig:
    return resolve_arguments(values)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.name == "tokenmill.arguments" for record in caplog.records)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# ── SGLang's names ──


def test_every_name_of_sglang_is_known() -> None:
    known = set(argument_names())
    assert len(SGLANG["defaults"]) >= 315
    assert set(SGLANG["defaults"]) | set(SGLANG["newer_defaults"]) <= known
    assert len(argument_names()) == len(known)
    assert {"model", "tp", "tensor_parallel_size", "model_path", "stream_output"} <= known


def test_defaults_of_sglang_are_accepted_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    config = resolve(model_path="a/b", **SGLANG["defaults"] | SGLANG["newer_defaults"])
    assert warnings_of(caplog) == []
    # False given explicitly asks for cumulative chunks; log_level's default there is "info", and the order
    # of requests is the one they come in.
    assert config == EngineConfig(
        model_path="a/b", cumulative_stream=True, log_level="info", schedule_policy="fcfs"
    )


@pytest.mark.parametrize("name", sorted(SGLANG["defaults"] | SGLANG["newer_defaults"]))
def test_each_default_and_none_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    resolve(**{name: (SGLANG["defaults"] | SGLANG["newer_defaults"])[name]})
    assert resolve(**{name: None}) == EngineConfig()
    assert warnings_of(caplog) == []


def test_resolved_values_of_sglang_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    config = resolve(model_path="a/b", **SGLANG["defaults"] | SGLANG["resolved"])
    assert (config.device, config.page_size, config.attention_backend) == ("cuda", 1, "auto")
    assert (config.max_total_tokens, config.mem_fraction_static) == (20480, 0.835)
    warned = warnings_of(caplog)
    assert {line.split()[0].split("=")[0] for line in warned} == {
        "attention_backend",
        "cuda_graph_max_bs",
        "cuda_graph_bs",
        "piecewise_cuda_graph_tokens",
    }


def test_an_ignored_name_warns_once_per_process_and_gives_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert resolve(cuda_graph_max_bs=256) == EngineConfig()
    resolve(cuda_graph_max_bs=128)
    resolve(show_time_cost=True)
    first, second = warnings_of(caplog)
    assert first.startswith("cuda_graph_max_bs is ignored: the engine decides")
    assert second.startswith("show_time_cost is ignored: ")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("tp_size", 2, "use 1"),
        ("tp", 4, "use 1"),
        ("tensor_parallel_size", 2, "use 1"),
        ("dp_size", 2, "use 1"),
        ("pp_size", 8, "use 1"),
        ("ep_size", 2, "use 1"),
        ("nnodes", 2, "use 1"),
        ("quantization", "awq", "use None"),
        ("kv_cache_dtype", "fp8_e4m3", "use 'auto'"),
        ("is_embedding", True, "use False"),
        ("lora_paths", ["./adapters/math"], r"use \[\]"),
        ("lora_paths", {"math": "./adapters/math"}, r"use \[\]"),
        ("enable_lora", True, "use False"),
        ("speculative_algorithm", "EAGLE", "use None"),
        ("disaggregation_mode", "prefill", "use 'null'"),
        ("torchao_config", "int8wo", "use ''"),
        ("forward_hooks", [{}], "use None"),
        ("enable_multimodal", True, "use False"),
    ],
)
def test_what_changes_results_and_is_missing_is_refused(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"{name}=.*not supported yet.*{remedy}") as caught:
        resolve(**{name: value})
    assert not isinstance(caught.value, UnknownArgument)


@pytest.mark.parametrize("name", ["tp_size", "tp", "dp", "pp_size", "ep", "nnodes"])
def test_one_gpu_given_explicitly_is_fine(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve(**{name: 1}) == resolve(**{name: np.int64(1)}) == EngineConfig()
    assert warnings_of(caplog) == []


def test_every_other_name_is_mapped_ignored_or_refused() -> None:
    """No name of the tables may pass a foreign value in silence."""
    foreign = object()
    for row in other_names():
        if row.fate == "ignored":
            assert resolve(**{row.name: foreign}) == EngineConfig()
            assert logs.warn_once.cache_info().currsize > 0
            logs.warn_once.cache_clear()
        else:
            with pytest.raises(InvalidArgument):
                resolve(**{row.name: foreign})


# ── mapped names ──


def test_stream_modes() -> None:
    assert resolve().cumulative_stream is False
    for name in ("stream_output", "incremental_streaming_output"):
        assert resolve(**{name: False}).cumulative_stream is True
        assert resolve(**{name: True}).cumulative_stream is False
        assert resolve(**{name: None}).cumulative_stream is False
        with pytest.raises(WrongType, match=name):
            resolve(**{name: 1})
    assert resolve(stream_output=False, incremental_streaming_output=False).cumulative_stream is True


def test_contradictions_name_both() -> None:
    with pytest.raises(InvalidArgument, match="stream_output and incremental_streaming_output contradict"):
        resolve(stream_output=False, incremental_streaming_output=True)
    with pytest.raises(InvalidArgument, match="model_path and model contradict"):
        resolve(model_path="a", model="b")
    assert resolve(model_path="a", model="a").model_path == "a"


def test_the_environment_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (("1", True), ("True", True), ("0", False), ("", False)):
        monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", value)
        assert resolve().logprobs_ignore_temperature is wanted
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    assert resolve(logprobs_ignore_temperature=False).logprobs_ignore_temperature is False
    assert resolve(server_args={"logprobs_ignore_temperature": False}).logprobs_ignore_temperature is False


def test_no_overlap_is_one_step_in_flight() -> None:
    assert resolve(disable_overlap_schedule=True).steps_in_flight == 1
    assert resolve(disable_overlap_schedule=False).steps_in_flight is None


def test_model_spellings() -> None:
    assert resolve(model="x").model_path == "x"
    assert resolve(model_path=Path("/a/b")).model_path == "/a/b"
    assert resolve().model_path == "tiny"
    for name in ("model", "model_path"):
        with pytest.raises(WrongType, match=f"{name} must be a path"):
            resolve(**{name: None})


@pytest.mark.parametrize("name", ["model_path", "tokenizer_path", "download_dir"])
@pytest.mark.parametrize("value", ["", " ", "a\0b", "a" * 5000, "~nobody-of-that-name/model"])
def test_paths_that_no_system_can_look_for(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        resolve(**{name: value})


# ── unknown names ──


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("model_pth", "model_path"),
        ("tp_sise", "tp_size"),
        ("max_running_request", "max_running_requests"),
        ("cuda_graph_maxbs", "cuda_graph_max_bs"),
        ("max_model_len", "context_length"),
        ("gpu_memory_utilization", "mem_fraction_static"),
        ("seed", "random_seed"),
    ],
)
def test_unknown_names_come_with_a_suggestion(name: str, suggestion: str) -> None:
    for value in (1, None):
        with pytest.raises(UnknownArgument, match=rf"{name}.*Did you mean '{suggestion}'"):
            resolve(**{name: value})
    with pytest.raises(TypeError, match="no argument 'zzzz'"):
        resolve(zzzz=1)


# ── values of our fields ──


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("dtype", "half", "float16"),
        ("dtype", "bf16", "bfloat16"),
        ("dtype", "float", "float32"),
        ("dtype", "Float32", "float32"),
        ("device", "CPU", "cpu"),
        ("device", "cpu:0", "cpu"),
        ("device", None, "auto"),
        ("log_level", "INFO", "info"),
        ("log_level", "warn", "warning"),
        ("attention_backend", "torch_native", "torch"),
        ("attention_backend", "triton", "triton"),
        ("schedule_policy", "lpm", "lpm"),
        ("json_model_override_args", '{"a": {"b": 1}}', {"a": {"b": 1}}),
        ("json_model_override_args", {"a": 1}, {"a": 1}),
        ("json_model_override_args", "", {}),
        ("preferred_sampling_params", '{"temperature": 0}', {"temperature": 0}),
        ("preferred_sampling_params", {"top_p": 0.5}, {"top_p": 0.5}),
        ("chunked_prefill_size", -1, -1),
        ("mem_fraction_static", np.float32(0.5), 0.5),
        ("max_total_tokens", np.int32(77), 77),
        ("random_seed", 0, 0),
        ("tokenizer_path", Path("t"), "t"),
        ("page_size", None, 16),
        ("show_progress", True, True),
    ],
)
def test_values_become_ours(name: str, given: Any, expected: Any) -> None:
    value = getattr(resolve(**{name: given}), name)
    assert value == expected
    assert type(value) is type(expected)


def test_dtypes_and_devices_of_torch() -> None:
    torch = pytest.importorskip("torch")
    assert resolve(dtype=torch.bfloat16).dtype == "bfloat16"
    assert resolve(dtype=torch.float16).dtype == "float16"
    assert resolve(device=torch.device("cuda:2")).base_gpu_id == 2
    with pytest.raises(InvalidArgument, match="dtype must be one of"):
        resolve(dtype=torch.int8)


def test_a_device_may_carry_its_index() -> None:
    config = resolve(device="cuda:3")
    assert (config.device, config.base_gpu_id) == ("cuda", 3)
    assert resolve(device="cuda:3", base_gpu_id=3) == resolve(device="cuda:3", base_gpu_id=0) == config
    with pytest.raises(InvalidArgument, match="GPU 3, but base_gpu_id is 1"):
        resolve(device="cuda:3", base_gpu_id=1)
    for wrong in ("cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cuda:²", "xpu", "mps", "", "cuda:99999"):
        with pytest.raises(InvalidArgument, match="device"):
            resolve(device=wrong)


def test_choices_we_do_not_offer_are_replaced_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve(attention_backend="flashinfer").attention_backend == "auto"
    assert resolve(schedule_policy="dfs-weight").schedule_policy == "lpm"
    assert resolve(schedule_policy="hrrn").schedule_policy == "fcfs"
    assert len(warnings_of(caplog)) == 3
    with pytest.raises(
        InvalidArgument, match="attention_backend must be one of 'auto', 'native', 'torch', 'triton'"
    ):
        resolve(attention_backend="magic")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_length", 0),
        ("context_length", -5),
        ("context_length", 10**12),
        ("max_total_tokens", 0),
        ("mem_fraction_static", 0),
        ("mem_fraction_static", 1),
        ("mem_fraction_static", 1.5),
        ("mem_fraction_static", float("nan")),
        ("page_size", 0),
        ("page_size", 10**6),
        ("max_running_requests", 0),
        ("chunked_prefill_size", 0),
        ("chunked_prefill_size", -2),
        ("base_gpu_id", -1),
        ("steps_in_flight", 0),
        ("stream_interval", 0),
        ("random_seed", 2**64),
        ("max_queued_requests", -1),
        ("default_priority_value", 2**63),
        ("priority_scheduling_preemption_threshold", -1),
        ("dtype", "int8"),
        ("load_format", "gguf"),
        ("schedule_policy", "shortest"),
        ("log_level", "loud"),
        ("model_path", ""),
        ("model_path", " "),
        ("model_path", "a\0b"),
        ("json_model_override_args", "{"),
        ("json_model_override_args", "nope"),
        ("preferred_sampling_params", {"temperature": -1}),
        ("preferred_sampling_params", '{"temprature": 1}'),
    ],
)
def test_values_out_of_range_name_the_argument(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=name):
        resolve(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_length", "2048"),
        ("context_length", True),
        ("context_length", 2048.0),
        ("mem_fraction_static", "0.8"),
        ("trust_remote_code", 1),
        ("trust_remote_code", "yes"),
        ("model_path", b"a"),
        ("model_path", 5),
        ("dtype", 16),
        ("device", 0),
        ("json_model_override_args", [1]),
        ("json_model_override_args", {"a": {"b": np.ones(2)}}),
        ("json_model_override_args", "[1]"),
        ("preferred_sampling_params", 5),
        ("preferred_sampling_params", {"top_k": "5"}),
        ("random_seed", 1.0),
        ("log_level", 10),
    ],
)
def test_values_of_the_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(WrongType, match=name):
        resolve(**{name: value})


def test_every_field_has_a_check() -> None:
    """Nothing reaches the configuration unchecked."""
    for entry in dataclasses.fields(EngineConfig):
        with pytest.raises(WrongType):
            resolve(**{entry.name: object()})


def test_given_dicts_are_copied() -> None:
    overrides = {"a": 1}
    config = resolve(json_model_override_args=overrides)
    overrides["b"] = 2
    assert config.json_model_override_args == {"a": 1}


def test_priorities_need_an_order_that_they_can_refine() -> None:
    for policy in ("fcfs", "lof"):
        config = resolve(enable_priority_scheduling=True, schedule_policy=policy)
        assert config.schedule_policy == policy
    for policy in ("lpm", "random", "dfs-weight"):
        with pytest.raises(InvalidArgument, match=r"enable_priority_scheduling needs .*'fcfs' or 'lof'"):
            resolve(enable_priority_scheduling=True, schedule_policy=policy)
        # The two may come from different places.
        with pytest.raises(InvalidArgument, match="enable_priority_scheduling"):
            resolve(server_args={"schedule_policy": policy}, enable_priority_scheduling=True)


def test_what_has_no_effect_without_priorities_is_said(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"default_priority_value": 5, "disable_priority_preemption": True}
    resolve(**settings, priority_scheduling_preemption_threshold=3, enable_priority_scheduling=True)
    assert warnings_of(caplog) == []
    resolve(**settings)
    resolve(**settings)
    assert [line.split()[0] for line in warnings_of(caplog)] == sorted(settings)
    assert all("enable_priority_scheduling=True" in line for line in warnings_of(caplog))


# ── server_args ──


def test_server_args_as_dict_object_and_dataclass() -> None:
    values = {"model_path": "m", "context_length": 64, "tp_size": 1, "host": "127.0.0.1"}
    expected = EngineConfig(model_path="m", context_length=64)
    made = dataclasses.make_dataclass("ServerArgs", list(values))
    for source in (values, SimpleNamespace(**values), made(**values), expected):
        assert resolve(server_args=source) == expected
    assert resolve(server_args=None) == EngineConfig()
    assert resolve(server_args=resolve(device="cuda:1", cumulative_stream=True)) == EngineConfig(
        device="cuda", base_gpu_id=1, cumulative_stream=True
    )


def test_the_whole_dict_idiom() -> None:
    config = EngineConfig(model_path="m", context_length=64)
    assert resolve(**dataclasses.asdict(config)) == config


def test_keywords_beside_server_args_win() -> None:
    source = {"model_path": "m", "context_length": 64}
    assert resolve(server_args=source, context_length=32, model="n") == EngineConfig(
        model_path="n", context_length=32
    )


def test_faults_inside_server_args(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnknownArgument, match="context_lenght"):
        resolve(server_args={"context_lenght": 5})
    with pytest.raises(InvalidArgument, match="tp_size"):
        resolve(server_args=SimpleNamespace(tp_size=2))
    # Attributes that a release of SGLang has and we do not know: silent when unset, else a warning.
    resolve(server_args=SimpleNamespace(new_switch=False, new_path=None, new_mode="fast", _hidden=5))
    assert warnings_of(caplog) == ["server_args.new_mode is ignored: the argument is not known"]
    for wrong in (5, "model", EngineConfig, [1]):
        with pytest.raises(WrongType, match="server_args"):
            resolve(server_args=wrong)


# ── nothing else ever comes out ──


class Color(Enum):
    RED = 1


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.sampled_from([np.ones(2), np.int8(3), np.str_("x"), object(), int, Color.RED, {1}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from([*argument_names(), "server_args"]) | st.text(max_size=5), JUNK, max_size=4
    )
)
def test_junk_gives_a_configuration_or_our_error(values: dict[str, Any]) -> None:
    try:
        config = resolve_arguments(values)
    except InvalidArgument:
        return
    assert resolve_arguments(dataclasses.asdict(config)) == config


# ── documents ──


def test_the_documents_are_up_to_date() -> None:
    written = (HERE.parent / "docs" / "arguments.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(HERE.parent / "scripts" / "write-argument-docs"))
    assert written == script["document"](), "run scripts/write-argument-docs"
    for name in argument_names():
        assert f"`{name}`" in written


def test_words_that_the_documents_tell_mean_what_they_say(caplog: pytest.LogCaptureFixture) -> None:
    script = runpy.run_path(str(HERE.parent / "scripts" / "write-argument-docs"))
    for tables, num_warnings in ((script["SYNONYMS"], 0), (script["REPLACEMENTS"], 1)):
        for name, words in tables.items():
            for word, choice in words.items():
                caplog.clear()
                assert getattr(resolve(**{name: word}), name) == choice
                assert len(warnings_of(caplog)) == num_warnings, (name, word)
    assert resolve(device="cuda:1") == EngineConfig(device="cuda", base_gpu_id=1)
    assert resolve(dtype="torch.bfloat16").dtype == "bfloat16"


def test_server_args_as_scripts_for_sglang_make_them() -> None:
    parser = argparse.ArgumentParser()
    sgl.ServerArgs.add_cli_args(parser)
    parser.add_argument("--rows", type=int, default=3)
    line = (
        "--model-path tiny --dtype float32 --skip-tokenizer-init --tp 1 --dp-size 1 --cuda-graph-max-bs 8 "
        "--disable-overlap-schedule --enable-custom-logit-processor --schedule-conservativeness 0.5 "
        "--cuda-graph-bs 1 2 4 --bucket-e2e-request-latency 0.5"
    )
    options = parser.parse_args(line.split())
    made = sgl.ServerArgs.from_cli_args(options)
    assert (made.model_path, made.dtype, made.skip_tokenizer_init) == ("tiny", "float32", True)
    assert (made.tp_size, made.steps_in_flight) == (1, 1)
    with pytest.raises(InvalidArgument, match="tp_size"):
        sgl.ServerArgs.from_cli_args(parser.parse_args(["--tp-size", "2"]))
    with pytest.raises(InvalidArgument, match="lora_paths"):
        sgl.ServerArgs.from_cli_args(parser.parse_args(["--lora-paths", "one", "two"]))
    assert "--tp-size" not in parser.format_help()
    assert resolve(**dataclasses.asdict(made)) == resolve(server_args=made)
    assert sgl.ServerArgs(model="tiny", tp_size=1, context_length=64).context_length == 64
    with pytest.raises(UnknownArgument, match="context_length"):
        sgl.ServerArgs(contxt_length=64)
    with pytest.raises(InvalidArgument, match="tp_size"):
        sgl.ServerArgs(tp_size=2)


def test_server_args_are_changed_by_any_name_before_an_engine_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: Any = sgl.ServerArgs(model_path="tiny", context_length=64, stream_interval=2)
    made.model, made.dtype, made.device = "m", "half", "cuda:1"
    made.disable_overlap_schedule = True
    made.stream_output = False
    made.context_length = None
    made.tp_size, made.cuda_graph_max_bs = 1, 4
    expected = EngineConfig(
        model_path="m",
        dtype="float16",
        device="cuda",
        base_gpu_id=1,
        steps_in_flight=1,
        cumulative_stream=True,
        stream_interval=2,
        random_seed=made.random_seed,
    )
    assert resolve(**dataclasses.asdict(made)) == resolve(server_args=made) == expected
    assert [line.split()[0] for line in warnings_of(caplog)] == ["cuda_graph_max_bs"]
    with pytest.raises(InvalidArgument, match="tp_size"):
        made.tp_size = 2
    with pytest.raises(WrongType, match="stream_interval"):
        made.stream_interval = "often"
    with pytest.raises(UnknownArgument, match="'context_length'"):
        made.contxt_length = 64
    assert resolve(server_args=made) == expected


@pytest.mark.parametrize(
    ("name", "given", "otherwise"),
    [
        ("stream_output", {"cumulative_stream": True}, True),
        ("incremental_streaming_output", {"incremental_streaming_output": False}, True),
        ("disable_decode_cuda_graph", {"disable_cuda_graph": True}, False),
        ("disable_overlap_schedule", {"steps_in_flight": 1}, False),
    ],
)
def test_flags_that_set_an_argument_of_ours_are_read_from_it(
    name: str, given: dict[str, Any], otherwise: bool
) -> None:
    assert getattr(sgl.ServerArgs(model="tiny"), name) is otherwise
    assert getattr(sgl.ServerArgs(model="tiny", **given), name) is not otherwise
