"""The one frozen configuration of an engine; the command line and the docs table are made from it.

SGLang's argument names enter through `tokenmill/arguments.py`; nothing here knows of hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
SchedulePolicy = Literal["fcfs", "lpm", "lof", "random"]
GrammarBackend = Literal["llguidance", "xgrammar", "none"]

# Steps that may be launched before the oldest is taken in, whatever is asked for.
MOST_STEPS_IN_FLIGHT = 64


def _arg(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field with its one-line meaning, from which the command line and the docs are made."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All arguments of `Engine`, in our names. Unset (None) means that the engine decides."""

    # Model
    model_path: str = _arg("tiny", "checkpoint folder, hub repository id, or 'tiny' (bundled)")
    tokenizer_path: str | None = _arg(None, "folder or hub id of the tokenizer (default: model_path)")
    skip_tokenizer_init: bool = _arg(False, "no tokenizer: input_ids in, output_ids out, no text")
    chat_template: str | None = _arg(None, "Jinja template of chat(), or its file (default: the model's)")
    trust_remote_code: bool = _arg(False, "allow tokenizer and config code shipped with the checkpoint")
    revision: str | None = _arg(None, "branch, tag or commit of the hub repository")
    download_dir: str | None = _arg(None, "cache folder for hub downloads")
    load_format: LoadFormat = _arg("auto", "where weights come from", ("auto", "safetensors", "dummy"))
    dtype: Dtype = _arg("auto", "type of weights and activations", ("auto", "float32", "bfloat16", "float16"))
    context_length: int | None = _arg(None, "longest sequence, prompt and output together")
    json_model_override_args: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={"help": "JSON object merged over the model's config.json", "choices": None},
    )
    served_model_name: str | None = _arg(
        None, "name of the model in reports, metrics and OpenAI rows (default: model_path)"
    )
    weight_version: str = _arg("default", "label echoed in meta_info['weight_version']")

    # Where it runs
    device: Device = _arg("auto", "device of the model", ("auto", "cpu", "cuda"))
    base_gpu_id: int = _arg(0, "index of the GPU to use")
    core_process: bool = _arg(False, "run the core in a process of its own instead of a thread")
    attention_backend: str = _arg("auto", "attention kernels", ("auto", "native", "torch", "triton"))

    # Memory and scheduling
    max_total_tokens: int | None = _arg(None, "tokens the key/value pool holds")
    mem_fraction_static: float | None = _arg(
        None, "share of a GPU's memory for weights and pool; on a CPU, of free memory for the pool alone"
    )
    page_size: int = _arg(16, "tokens per key/value page")
    max_running_requests: int | None = _arg(None, "requests decoded at the same time")
    chunked_prefill_size: int | None = _arg(None, "tokens computed in one step; -1: no chunks")
    schedule_policy: SchedulePolicy | None = _arg(
        None, "order of waiting requests (default: longest outputs first)", ("fcfs", "lpm", "lof", "random")
    )
    max_queued_requests: int | None = _arg(None, "requests that may wait while no row is free")
    enable_priority_scheduling: bool = _arg(False, "serve requests in the order of their `priority`")
    schedule_low_priority_values_first: bool = _arg(False, "the smaller a priority, the more urgent")
    default_priority_value: int | None = _arg(
        None, "priority of requests without one (default: less urgent than any)"
    )
    disable_priority_preemption: bool = _arg(False, "priorities order the queue and push nobody back")
    priority_scheduling_preemption_threshold: int = _arg(
        10, "a waiting request pushes back running ones that are less urgent by more than this"
    )
    abort_on_priority_when_disabled: bool = _arg(
        False, "abort requests with a priority while priorities are off"
    )
    allow_auto_truncate: bool = _arg(
        False, "cut prompts that are too long to their first tokens, lower `max_new_tokens`: refuse none"
    )
    disable_radix_cache: bool = _arg(False, "do not reuse keys and values of shared prefixes")
    steps_in_flight: int | None = _arg(None, "steps launched before the first is read (depth)")

    enable_deterministic_inference: bool = _arg(
        False, "equal bits for a request whatever is computed beside or was computed before it; slower"
    )
    disable_cuda_graph: bool = _arg(False, "launch every kernel of a decode step by itself")
    watchdog_timeout: float | None = _arg(
        300.0, "seconds of running time without a step after which the engine counts as stalled; 0: never"
    )

    # Requests
    preferred_sampling_params: Mapping[str, Any] | None = _arg(
        None, "sampling parameters used where a request sets none"
    )
    random_seed: int | None = _arg(None, "seed from which requests without one draw theirs (default: drawn)")
    logprobs_ignore_temperature: bool = _arg(
        False, "tell the log-probabilities of outputs at temperature 1, whatever they were drawn with"
    )
    cumulative_stream: bool = _arg(False, "stream chunks repeat the whole text so far")
    stream_interval: int = _arg(1, "tokens between two chunks of a stream")
    grammar_backend: GrammarBackend = _arg(
        "llguidance", "library behind structured output", ("llguidance", "xgrammar", "none")
    )
    constrained_json_disable_any_whitespace: bool = _arg(
        False, "write JSON that follows a schema without white space"
    )
    constrained_json_whitespace_pattern: str | None = _arg(
        None, "regular expression of the white space in JSON that follows a schema"
    )

    # Messages
    log_level: str = _arg(
        "error", "level of the 'tokenmill' logger", ("debug", "info", "warning", "error", "critical")
    )
    log_requests: bool = _arg(False, "a log line for every request received and finished")
    log_requests_level: int = _arg(
        2, "0: counts; 1: and parameters; 2: and text and ids, shortened; 3: everything"
    )
    enable_metrics: bool = _arg(False, "Prometheus metrics, and timings in meta_info")
    show_progress: bool | None = _arg(
        None, "progress bars for loading and long batches (default: on a terminal)"
    )
