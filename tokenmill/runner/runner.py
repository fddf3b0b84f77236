"""Launch, sample, collect: a plan goes to the device, its tokens come back in the order of launch.

Only what every model needs lives here; the rarer a feature, the further away its code.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument, WrongState
from tokenmill.hub import resolve
from tokenmill.messages import BoolArray, EngineFacts, StepPlan, StepResult
from tokenmill.models import ModelSpec, read_spec
from tokenmill.runner.batch import Drawn, Rows
from tokenmill.runner.capture import CapturePolicy, row_seconds
from tokenmill.runner.eager import EagerSteps, Part
from tokenmill.runner.executor import Executor
from tokenmill.runner.graphs import DecodeGraphs
from tokenmill.runner.hardware import Placement, choose_device, place
from tokenmill.runner.memory import PoolSize, build_executor
from tokenmill.runner.profile import Profiler
from tokenmill.runner.prompt_graphs import PromptGraphs
from tokenmill.runner.recorder import Recorder
from tokenmill.runner.startup import Clock, awake, load
from tokenmill.runner.weights import Weights

_log = logging.getLogger("tokenmill")


@dataclass(frozen=True, slots=True)
class _Graphs:
    decodes: DecodeGraphs
    prompts: PromptGraphs
    recorder: Recorder


@dataclass(slots=True)
class _Launched:
    """A launched step: drawn by its graph, or in parts that are not drawn yet."""

    plan: StepPlan
    parts: list[Part]
    drawn: Drawn | None


@dataclass(slots=True)
class _InFlight:
    """A step whose tokens are on their way to the host."""

    samples: BoolArray
    drawn: Drawn | None  # on the host once `ready`
    ready: torch.cuda.Event | None


class LocalRunner:
    """One model on one device of this process."""

    def __init__(self, config: EngineConfig) -> None:
        clock = Clock()
        folder = resolve(config.model_path, revision=config.revision, download_dir=config.download_dir)
        self._device = choose_device(config)
        with awake(self._device):
            spec = read_spec(
                folder,
                overrides=config.json_model_override_args,
                context_length=config.context_length,
                trust_remote_code=config.trust_remote_code,
            )
        clock.lap("spec")
        placement = place(config, spec)
        with torch.inference_mode():
            model, placement, step_bytes = load(folder, spec, config, placement, clock)
            weights = list(model.parameters())
            self._weights = Weights(model, spec, config)
            self._executor, size = build_executor(
                model, spec, step_bytes=step_bytes, config=config, placement=placement
            )
            self._rows = Rows(
                num_slots=placement.max_running_requests,
                num_columns=-(-spec.context_length // config.page_size),
                num_groups=1 + max(layer.group for layer in spec.attention),
                page_size=config.page_size,
                spare_page=size.num_pages,
                device=placement.device,
                sharing=self._executor.sharing,
            )
        self._steps = EagerSteps(self._executor, self._rows)
        self._open_graphs = partial(_graphs, self._executor, self._rows, placement, weights)
        self._graphs = self._open_graphs()
        self._profiler = Profiler(placement.device)
        self._calls: dict[str, Callable[..., Any]] = {
            "memory": self._memory,
            "start_profile": self._profiler.start,
            "stop_profile": self._profiler.stop,
            "update_weights_from_disk": self._weights.update_from_disk,
            "update_weights_from_tensor": self._weights.update_from_tensor,
            "get_weights_by_name": self._weights.read,
            "release_memory": self._release_memory,
            "resume_memory": self._resume_memory,
        }
        clock.lap("pool")
        self._launched: _Launched | None = None
        self._in_flight: deque[_InFlight] = deque()
        _log.info("ready after %.2f s: %s", clock.seconds, clock.laps)
        self.facts = _facts(config, spec, placement, size, weights, clock.seconds)

    def launch(self, plan: StepPlan) -> None:
        """Queue the forward pass of a step; nothing is waited for."""
        with torch.inference_mode():
            if len(plan.copy_sources):
                self._copy_pages(plan)
            self._rows.update(plan)
            drawn = self._replay(plan)
            parts = self._steps.forward(plan) if drawn is None else []
            self._launched = _Launched(plan, parts, drawn)

    def sample(self, masks: None) -> None:
        """Queue the drawing of the launched step's tokens, and their way to the host."""
        step, self._launched = self._launched, None
        assert step is not None, "sample() follows launch()"
        with torch.inference_mode():
            drawn = step.drawn
            if drawn is None and (tokens := self._steps.draw(step.parts)) is not None:
                drawn = Drawn(tokens, np.arange(len(tokens)))
            self._in_flight.append(self._send(step.plan, drawn))

    def collect(self) -> StepResult:
        """Wait for the oldest step and return its tokens."""
        step = self._in_flight.popleft()
        token_ids = np.full(len(step.samples), -1, dtype=np.int32)
        if step.drawn is not None:
            if step.ready is not None:
                step.ready.synchronize()
            token_ids[step.samples] = step.drawn.tokens.numpy()[step.drawn.places]
        return StepResult(token_ids)

    def call(self, name: str, **arguments: Any) -> Any:
        """Answer a call between two steps; see `_calls` for their names."""
        if name not in self._calls:
            raise InvalidArgument(f"the runner has no call {name!r}")
        return self._calls[name](**arguments)

    def close(self) -> None:
        """Free the device memory; the runner cannot be used afterwards."""
        self._in_flight.clear()
        self._launched = None
        del (
            self._executor,
            self._rows,
            self._steps,
            self._graphs,
            self._open_graphs,
            self._weights,
            self._calls,
        )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _replay(self, plan: StepPlan) -> Drawn | None:
        """Queue the step as a graph; None if none fits it: its page-table entries are written, then."""
        graphs, ends = self._graphs, plan.starts + plan.counts
        if self._rows.hides_stops(plan.slots[plan.samples], ends[plan.samples]):
            graphs = None
        if graphs is not None and plan.num_decodes == len(plan.slots):
            drawn = graphs.decodes.replay(plan)
            if drawn is None:
                self._rows.write_pages(plan)
            return drawn
        self._rows.write_pages(plan)
        return None if graphs is None else graphs.prompts.replay(plan)

    def _send(self, plan: StepPlan, drawn: Drawn | None) -> _InFlight:
        """Queue the way of the tokens to the host."""
        if drawn is None or self._device.type == "cpu":
            return _InFlight(plan.samples, drawn, None)
        host = torch.empty(drawn.tokens.shape, dtype=drawn.tokens.dtype, pin_memory=True)
        host.copy_(drawn.tokens, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        return _InFlight(plan.samples, Drawn(host, drawn.places), ready)

    def _copy_pages(self, plan: StepPlan) -> None:
        sources = torch.from_numpy(plan.copy_sources.astype(np.int64)).to(self._device)
        targets = torch.from_numpy(plan.copy_targets.astype(np.int64)).to(self._device)
        self._executor.pool.copy_pages(sources, targets)

    def _release_memory(self, *, tags: Collection[str]) -> None:
        """Give up what the tags name, and the graphs, which hold addresses of everything."""
        self._graphs = None
        if "kv_cache" in tags:
            self._executor.release_pool()
        if "weights" in tags:
            self._weights.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _resume_memory(self, *, tag: str) -> None:
        """Take back what one tag names; `cuda_graph`, when everything else is back."""
        try:
            if tag == "kv_cache":
                self._executor.restore_pool()
            elif tag == "weights":
                self._weights.restore()
            else:
                self._graphs = self._open_graphs()
        except torch.OutOfMemoryError as error:
            raise WrongState(
                f"there is no memory to take {tag} back on {self._device}: {error}; free the device and call "
                "resume_memory_occupation() again"
            ) from None

    def _memory(self) -> dict[str, int]:
        """Bytes in use and free; `graph_bytes` is what captured steps hold."""
        if self._device.type == "cpu":
            return {"cache_bytes": self._executor.pool.num_bytes, "graph_bytes": 0}
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "cache_bytes": self._executor.pool.num_bytes,
            "graph_bytes": 0 if self._graphs is None else self._graphs.recorder.num_bytes,
            "allocated_bytes": torch.cuda.memory_allocated(self._device),
            "free_bytes": free,
            "total_bytes": total,
        }


def _graphs(
    executor: Executor, rows: Rows, placement: Placement, weights: list[torch.Tensor]
) -> _Graphs | None:
    if not placement.cuda_graphs:
        return None
    recorder = Recorder(placement.device)
    most_rows = placement.max_running_requests
    seconds = row_seconds(sum(weight.numel() for weight in weights))
    return _Graphs(
        DecodeGraphs(executor, rows, policy=CapturePolicy(most_rows, row_seconds=seconds), recorder=recorder),
        PromptGraphs(executor, rows, row_seconds=seconds, most_rows=most_rows, recorder=recorder),
        recorder,
    )


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
