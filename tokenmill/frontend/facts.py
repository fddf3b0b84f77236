"""What an engine tells of itself: `get_model_info` and `get_server_info`, with the keys of SGLang."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tokenmill.arguments import ServerArgs
from tokenmill.config import EngineConfig
from tokenmill.messages import EngineFacts


def model_info(config: EngineConfig, weight_version: str) -> dict[str, Any]:
    """What is served: path, name, kind and version of the model."""
    return {
        "model_path": config.model_path,
        "served_model_name": config.served_model_name,
        "is_generation": True,
        "weight_version": weight_version,
        "load_format": config.load_format,
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
    }


def server_info(
    config: ServerArgs, facts: EngineFacts, state: Mapping[str, Any] | None, rest: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by our names and SGLang's, facts, and load: `state` of the core, None if it is closed."""
    told, arguments = _fields(facts), {**config.others(), **_fields(config)}
    return {
        **arguments,
        **told,
        "status": "closed" if state is None else "ready",
        "tokenizer_path": config.tokenizer_path or config.model_path,
        "max_total_tokens": facts.max_total_num_tokens,
        "chunked_prefill_size": config.chunked_prefill_size or facts.max_step_tokens,
        "max_req_input_len": facts.max_sequence_tokens - 1,
        "internal_states": [] if state is None else [{**arguments, **_internal_state(told, state)}],
        **rest,
    }


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _internal_state(facts: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "memory_usage": {
            "weight": facts["weight_bytes"] / 2**30,
            "kvcache": state["cache_bytes"] / 2**30,
            "token_capacity": facts["max_total_num_tokens"],
            "graph": state["graph_bytes"] / 2**30,
        },
        "effective_max_running_requests_per_dp": facts["max_running_requests"],
        "last_gen_throughput": state["last_gen_throughput"],
        "device_seconds": state["device_seconds"],
        "num_running_requests": state["running"],
        "num_waiting_requests": state["waiting"],
        "paused": state["paused"],
        "released": state["released"],
    }
