"""Launch, sample, collect: a plan goes to the device, its tokens come back in the order of launch.

Only what every model needs lives here; the rarer a feature, the further away its code.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument
from tokenmill.hub import resolve
from tokenmill.messages import EngineFacts, IntArray, StepPlan, StepResult
from tokenmill.models import ModelSpec, load_model, read_spec
from tokenmill.runner.batch import Rows, SamplingInputs
from tokenmill.runner.graphs import DecodeGraphs
from tokenmill.runner.hardware import Placement, place
from tokenmill.runner.memory import PoolSize, build_executor
from tokenmill.sampling import mask_stops, sample


@dataclass(slots=True)
class _Forwarded:
    """A launched step whose tokens are not drawn yet, or were drawn by its graph."""

    num_rows: int
    sampling_rows: IntArray
    inputs: SamplingInputs | None = None
    logits: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


@dataclass(slots=True)
class _InFlight:
    """A step whose tokens are on their way to the host."""

    num_rows: int
    sampling_rows: IntArray
    tokens: torch.Tensor | None  # on the host once `ready`
    ready: torch.cuda.Event | None


class LocalRunner:
    """One model on one device of this process."""

    def __init__(self, config: EngineConfig) -> None:
        began = time.perf_counter()
        folder = resolve(config.model_path, revision=config.revision, download_dir=config.download_dir)
        spec = read_spec(
            folder,
            overrides=config.json_model_override_args,
            context_length=config.context_length,
            trust_remote_code=config.trust_remote_code,
        )
        placement = place(config, spec)
        self._device = placement.device
        with torch.inference_mode():
            model = load_model(
                folder,
                spec,
                dtype=placement.dtype,
                device=placement.device,
                load_format=config.load_format,
                progress=bool(config.show_progress),
            )
            weights = list(model.parameters())
            self._executor, size = build_executor(model, spec, config=config, placement=placement)
            self._rows = Rows(
                num_slots=placement.max_running_requests,
                num_columns=-(-spec.context_length // config.page_size),
                num_groups=1 + max(layer.group for layer in spec.attention),
                page_size=config.page_size,
                spare_page=size.num_pages,
                device=placement.device,
            )
            self._graphs = (
                DecodeGraphs(
                    self._executor,
                    self._rows,
                    max_rows=placement.max_running_requests,
                    device=placement.device,
                )
                if placement.cuda_graphs
                else None
            )
        self._forwarded: _Forwarded | None = None
        self._in_flight: deque[_InFlight] = deque()
        self.facts = _facts(config, spec, placement, size, weights, time.perf_counter() - began)

    def launch(self, plan: StepPlan) -> None:
        """Queue the forward pass of a step; nothing is waited for."""
        with torch.inference_mode():
            if len(plan.copy_sources):
                self._copy_pages(plan)
            self._rows.update(plan)
            self._forwarded = self._replay(plan) or self._forward(plan)

    def sample(self, masks: None) -> None:
        """Queue the drawing of the launched step's tokens, and their way to the host."""
        step, self._forwarded = self._forwarded, None
        assert step is not None, "sample() follows launch()"
        with torch.inference_mode():
            self._in_flight.append(self._send(step, self._draw(step)))

    def collect(self) -> StepResult:
        """Wait for the oldest step and return its tokens."""
        step = self._in_flight.popleft()
        token_ids = np.full(step.num_rows, -1, dtype=np.int32)
        if step.tokens is not None:
            if step.ready is not None:
                step.ready.synchronize()
            token_ids[step.sampling_rows] = step.tokens.numpy()
        return StepResult(token_ids)

    def call(self, name: str, **arguments: Any) -> Any:
        """Answer a question about the device: `memory` gives bytes in use and free."""
        if name == "memory":
            return self._memory()
        raise InvalidArgument(f"the runner has no call {name!r}")

    def close(self) -> None:
        """Free the device memory; the runner cannot be used afterwards."""
        self._in_flight.clear()
        self._forwarded = None
        del self._executor, self._rows, self._graphs
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _replay(self, plan: StepPlan) -> _Forwarded | None:
        """Queue the step as a graph; None if the step is not of a kind that has one."""
        every_row_decodes = plan.num_decodes == len(plan.slots)
        if self._graphs is None or not every_row_decodes:
            return None
        if self._rows.hides_stops(plan.slots, plan.starts + 1):
            return None
        needs = self._rows.sampling_needs(plan.slots)
        tokens = self._graphs.replay(plan.slots, plan.starts, needs)
        rows = np.arange(len(plan.slots), dtype=np.int32)
        return _Forwarded(len(rows), rows, tokens=tokens)

    def _forward(self, plan: StepPlan) -> _Forwarded:
        """Queue the step kernel by kernel, up to the logits."""
        step = self._rows.stage(plan)
        inputs = self._rows.sampling_inputs(plan)
        hidden_TD = self._executor.forward(step.token_ids_T, step.layout)
        logits = None if inputs is None else self._executor.logits(hidden_TD[inputs.last_tokens_Q])
        rows = np.flatnonzero(plan.samples).astype(np.int32)
        return _Forwarded(len(plan.slots), rows, inputs=inputs, logits=logits)

    def _draw(self, step: _Forwarded) -> torch.Tensor | None:
        """Queue the drawing of tokens; they are written to the rows and returned."""
        if step.inputs is None or step.logits is None:
            return step.tokens
        inputs, logits = step.inputs, step.logits
        if inputs.masked_stop_ids_QK is not None:
            every_row = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            logits = mask_stops(logits.float(), inputs.masked_stop_ids_QK, every_row)
        tokens = sample(logits, inputs.columns, inputs.needs)
        self._rows.last_token_S[inputs.slots_Q] = tokens
        return tokens

    def _send(self, step: _Forwarded, tokens: torch.Tensor | None) -> _InFlight:
        """Queue the way of the tokens to the host."""
        if tokens is None or self._device.type == "cpu":
            return _InFlight(step.num_rows, step.sampling_rows, tokens, None)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        return _InFlight(step.num_rows, step.sampling_rows, host, ready)

    def _copy_pages(self, plan: StepPlan) -> None:
        sources = torch.from_numpy(plan.copy_sources.astype(np.int64)).to(self._device)
        targets = torch.from_numpy(plan.copy_targets.astype(np.int64)).to(self._device)
        self._executor.pool.copy_pages(sources, targets)

    def _memory(self) -> dict[str, int]:
        if self._device.type == "cpu":
            return {"cache_bytes": self._executor.pool.num_bytes}
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "cache_bytes": self._executor.pool.num_bytes,
            "allocated_bytes": torch.cuda.memory_allocated(self._device),
            "free_bytes": free,
            "total_bytes": total,
        }


def _facts(
    config: EngineConfig,
    spec: ModelSpec,
    placement: Placement,
    size: PoolSize,
    weights: list[torch.Tensor],
    seconds: float,
) -> EngineFacts:
    return EngineFacts(
        architecture=spec.architecture,
        device=str(placement.device),
        device_name=placement.device_name,
        dtype=str(placement.dtype).removeprefix("torch."),
        attention_backend=placement.attention_backend,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_parameters=sum(weight.numel() for weight in weights),
        context_length=spec.context_length,
        max_sequence_tokens=min(spec.context_length, size.num_pages * config.page_size),
        max_total_num_tokens=size.num_pages * config.page_size,
        page_size=config.page_size,
        max_running_requests=placement.max_running_requests,
        max_step_tokens=placement.max_step_tokens,
        steps_in_flight=placement.steps_in_flight,
        eos_token_ids=spec.eos_token_ids,
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
        cache_bytes=size.num_bytes,
        load_seconds=seconds,
    )
