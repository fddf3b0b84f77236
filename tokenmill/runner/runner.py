"""Launch, sample, collect: a plan goes to the device, its tokens come back in the order of launch.

Only what every model needs lives here; the rarer a feature, the further away its code.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument, WrongState
from tokenmill.hub import resolve
from tokenmill.kernels.compilers import Compilers
from tokenmill.messages import EngineFacts, Lane, Request, StepPlan, StepResult, TokenMasks
from tokenmill.models import ModelSpec
from tokenmill.runner.batch import Rows
from tokenmill.runner.cpu_threads import cpu_threads
from tokenmill.runner.drawing import Sampled, Unsampled
from tokenmill.runner.eager import DrawnPart, EagerSteps, Part
from tokenmill.runner.graph_sets import GraphSets, open_graphs, open_lane_graphs
from tokenmill.runner.hardware import Placement, choose_device
from tokenmill.runner.insight import tokens_of, wishes
from tokenmill.runner.lanes import Lanes
from tokenmill.runner.memory import PoolSize, build_executor, has_room_to_spare, return_freed
from tokenmill.runner.profile import Profiler
from tokenmill.runner.quarantine import Quarantine
from tokenmill.runner.recorder import StepKind, longest_keys
from tokenmill.runner.results import Results
from tokenmill.runner.startup import Clock, Loaded, load
from tokenmill.runner.weights import Weights
from tokenmill.sampling import SamplingNeeds

_log = logging.getLogger("tokenmill")


# Drawn by its graph, up to its logits in a graph, or up to there in parts.
_Work = DrawnPart | Unsampled | list[Part]


@dataclass(slots=True)
class _Launched:
    """A launched step."""

    plan: StepPlan
    runnable: StepPlan  # its rows that can be computed; the plan itself where none of them can
    work: _Work


class LocalRunner:
    """One model on one device of this process."""

    _has_told_of_graphs = False

    def __init__(self, config: EngineConfig, compilers: Compilers) -> None:
        clock = Clock()
        folder = resolve(config.model_path, revision=config.revision, download_dir=config.download_dir)
        self._device = choose_device(config)
        with torch.inference_mode():
            loaded = load(folder, self._device, config, compilers, clock)
        self._kernels = loaded.kernels
        with nullcontext() if self._kernels is None else self._kernels.cancelled_by_failure():
            self._open(loaded, config, clock)

    def _open(self, loaded: Loaded, config: EngineConfig, clock: Clock) -> None:
        spec = loaded.spec
        placement = loaded.placement
        with torch.inference_mode():
            self._weights = Weights(loaded.model, spec, config)
            self._executor, size = build_executor(
                loaded.model, spec, step_bytes=loaded.step_bytes, config=config, placement=placement
            )
            self._rows = Rows(
                num_slots=placement.max_running_requests,
                num_columns=-(-spec.context_length // config.page_size),
                num_groups=1 + max(layer.group for layer in spec.attention),
                page_size=config.page_size,
                spare_page=size.num_pages,
                vocab_size=spec.vocab_size,
                device=placement.device,
                sharing=self._executor.sharing,
                logprobs_ignore_temperature=config.logprobs_ignore_temperature,
            )
        self._quarantine = Quarantine(self._rows, placement.device)
        self._steps = EagerSteps(self._executor, self._rows, self._quarantine)
        num_parameters = self._weights.num_parameters
        self._lanes = Lanes(placement.device, loaded.lane_kernels)
        shared = (self._executor, self._rows, placement, num_parameters)
        self._graphs = GraphSets(
            partial(open_graphs, *shared, spec.vocab_size, self._kernels),
            partial(open_lane_graphs, *shared, self._lanes),
            self._lanes,
            has_room=partial(has_room_to_spare, self._device),
            tell=self._tell_of_graphs,
        )
        self._profiler = Profiler(placement.device)
        self._calls = self._call_table()
        clock.lap("pool")
        follows = self._device.type == "cpu" and not placement.deterministic
        self._threads = cpu_threads() if follows else None
        self._launched: _Launched | None = None
        self._in_flight: deque[Results] = deque()
        self._prompts_in_flight: deque[Results] = deque()  # of the lane for them
        _log.info("ready after %.2f s: %s", clock.seconds, clock.laps)
        has_lanes = loaded.lane_kernels is not None
        self.facts = _facts(
            config, spec, placement, size, self._weights, seconds=clock.seconds, has_lanes=has_lanes
        )

    def _call_table(self) -> dict[str, Callable[..., Any]]:
        return {
            "memory": self._memory,
            "expect_masks": self._expect_masks,
            "start_profile": self._profiler.start,
            "stop_profile": self._profiler.stop,
            "update_weights_from_disk": partial(self._with_weights, self._weights.update_from_disk),
            "update_weights_from_tensor": partial(self._with_weights, self._weights.update_from_tensor),
            "get_weights_by_name": partial(self._with_weights, self._weights.read),
            "release_memory": self._release_memory,
            "resume_memory": self._resume_memory,
            "open_graphs": self._graphs.reopen,
        }

    @property
    def preparation_seconds(self) -> float:
        """See `messages.Runner`."""
        return self._graphs.preparation_seconds

    def rehearse(self) -> None:
        """See `messages.Runner`."""
        self._graphs.rehearse()

    def prepare(self) -> None:
        """See `messages.Runner`."""
        self._graphs.prepare()

    def put_off(self) -> None:
        """See `messages.Runner`."""
        self._graphs.put_off()

    def prepare_more(self, num_rows: int) -> bool:
        """See `messages.Runner`."""
        return self._graphs.prepare_more(num_rows)

    def launch(self, plan: StepPlan) -> None:
        """Queue the forward pass of a step; nothing is waited for but kernels that are being compiled."""
        if self._threads is not None:
            self._threads.follow()
        with torch.inference_mode(), self._awaited_kernels(), self._lanes.within(plan.lane):
            self._lanes.order(plan)
            runnable = self._quarantine.start(plan)
            if runnable is None:
                self._launched = _Launched(plan, plan, [])
                return
            if runnable is not plan:
                self._rows.write_pages(plan)
            replayed = self._try_replay(runnable)
            work = self._steps.forward(runnable) if replayed is None else replayed
            self._launched = _Launched(plan, runnable, work)

    def sample(self, masks: TokenMasks | None) -> None:
        """Queue the drawing of the launched step's tokens, and their way to the host."""
        step, self._launched = self._launched, None
        assert step is not None, "sample() follows launch()"
        with torch.inference_mode(), self._awaited_kernels(), self._lanes.within(step.plan.lane):
            match step.work:
                case DrawnPart():
                    drawn = [step.work]
                case Unsampled():
                    drawn = self._draw_late(step.runnable, step.work, masks)
                case list():
                    drawn = self._steps.draw(step.work, step.runnable, masks)
            self._results_of(step.plan.lane).append(self._send(step.plan, drawn))

    def part(self, num_rows: int) -> bool:
        """See `messages.Runner`."""
        return self._graphs.part(num_rows)

    def has_prompts(self) -> bool:
        """See `messages.Runner`."""
        return self._prompts_in_flight[0].is_done

    def collect(self, lane: Lane = Lane.WHOLE) -> StepResult:
        """Wait for the oldest step and return its tokens, and what else its rows asked for."""
        results = self._results_of(lane).popleft()
        self._quarantine.collected(results.losses)
        try:
            seconds = results.wait()
            if self._graphs.whole is not None:
                self._graphs.whole.draws.note_wait(seconds)
            return results.result()
        except Exception as error:
            results.losses.fail_all(results.plan, self._quarantine.judge(error))
        return Results(results.plan, [], results.losses, self._device).result()

    def call(self, name: str, **arguments: Any) -> Any:
        """Answer a call between two steps; see `_calls` for their names."""
        if name not in self._calls:
            raise InvalidArgument(f"the runner has no call {name!r}")
        try:
            return self._calls[name](**arguments)
        finally:
            self._lanes.note_other_work()

    def close(self) -> None:
        """Free the device memory; the runner cannot be used afterwards."""
        if self._kernels is not None:
            self._kernels.cancel()
        self._graphs.close()
        self._lanes.close()
        self._profiler.close()
        self._in_flight.clear()
        self._prompts_in_flight.clear()
        self._launched = None
        del (
            self._executor,
            self._rows,
            self._quarantine,
            self._steps,
            self._graphs,
            self._weights,
            self._calls,
        )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _awaited_kernels(self) -> AbstractContextManager[object]:
        """What is launched within may be in need of kernels that are under way."""
        return nullcontext() if self._kernels is None else self._kernels.awaited()

    def _results_of(self, lane: Lane) -> deque[Results]:
        """Of steps in flight, those of a lane, the oldest first."""
        return self._prompts_in_flight if lane is Lane.PROMPTS else self._in_flight

    def _send(self, plan: StepPlan, drawn: list[DrawnPart]) -> Results:
        """Queue the way of a step's results to the host; if they cannot be sent, its rows fail."""
        losses = self._quarantine.losses
        try:
            return Results(plan, drawn, losses, self._device)
        except Exception as error:
            losses.fail_all(plan, self._quarantine.judge(error))
        return Results(plan, [], losses, self._device)

    def _try_replay(self, plan: StepPlan) -> _Work | None:
        """As `_replay`, which may also fail."""
        try:
            return self._replay(plan)
        except Exception as error:
            self._tell_of_graphs(error)
        self._rows.write_pages(plan)
        return None

    def _tell_of_graphs(self, error: Exception) -> None:
        """Say why steps take longer, once: a larger graph serves, if there is one. Must be called where the
        error is handled."""
        failure = self._quarantine.judge(error)
        if not self._has_told_of_graphs:
            self._has_told_of_graphs = True
            _log.warning(
                "a graph failed, so steps are padded or launched kernel by kernel: %s", failure.message
            )

    def _replay(self, plan: StepPlan) -> _Work | None:
        """Queue the step as a graph; None if none fits it: its page-table entries are written, then."""
        graphs = self._graphs.of(plan.lane)
        late = self._rows.extras.are_late(plan.slots) or self._rows.hides_stops(plan)
        only_decodes = plan.num_decodes == len(plan.slots)
        if graphs is not None and only_decodes:
            made = graphs.decodes.replay(plan, late=late)
            if made is not None:
                return _part(plan, made) if isinstance(made, Sampled) else made
        self._rows.write_pages(plan)
        if graphs is None or only_decodes:
            return None
        late = late or self._rows.extras.exist(plan.slots)
        asked = wishes(self._rows, plan) if late else []
        if asked and self._steps.lack_memory:  # what is shown would not fit either, as a whole
            return None
        replayed = graphs.prompts.replay(plan, late=late, shows_all=bool(asked))
        if replayed is None:
            return None
        made_N, places = replayed
        if late:
            needed = np.concatenate([places, tokens_of(asked)]) if asked else places
            hidden_ND = made_N[self._rows.to_device(needed)]
            return [self._steps.part(plan, self._rows.sampling_inputs(plan), asked, hidden_ND)]
        return DrawnPart(plan, Sampled(made_N, None), None, [], {}, places)

    def _draw_late(self, plan: StepPlan, made: Unsampled, masks: TokenMasks | None) -> list[DrawnPart]:
        """Draw for the plan's rows of what a graph made; if that fails, the step begins anew without it."""
        try:
            return self._draw_made(plan, made, masks)
        except Exception as error:
            self._quarantine.judge(error)
        return self._steps.draw(self._steps.forward(plan), plan, masks)

    def _draw_made(self, plan: StepPlan, made: Unsampled, masks: TokenMasks | None) -> list[DrawnPart]:
        """Draw from the logits of a graph, whose rows after the plan's are spare ones."""
        needs, graphs = self._rows.masked_needs(plan.slots), self._graphs.whole
        if graphs is not None and needs is not None and not self._rows.hides_stops(plan):
            sampled = graphs.draws.replay(made, needs, plan.slots, masks)
            if sampled is not None:
                return [_part(plan, sampled)]
        inputs, count = self._rows.sampling_inputs(plan), len(plan.slots)
        assert inputs is not None, "every row draws"
        rows = Unsampled(made.logits_QV[:count], made.hidden_QD[:count], inputs.slots_Q, inputs.columns)
        return self._steps.draw([Part(plan, inputs, rows, [])], plan, masks)

    def _expect_masks(self, *, requests: Sequence[Request]) -> None:
        """Capture what the first steps of requests that wait for grammars are likely to replay."""
        waits_for_more = any(each.logprobs or each.hidden_states or each.processor for each in requests)
        graphs = self._graphs.whole
        if graphs is None or waits_for_more:
            return
        random = [each.params for each in requests if not each.params.is_greedy]
        is_filtered = any(each.top_k != -1 or each.top_p < 1 or each.min_p > 0 for each in random)
        needs = SamplingNeeds(random=bool(random), filters=is_filtered)
        num_rows = min(len(requests), self.facts.max_running_requests)
        longest = max(len(request.prompt_ids) for request in requests) + 1
        try:
            with torch.inference_mode():
                made = graphs.decodes.expect_late(num_rows, StepKind(longest_keys(longest)))
                if made is not None:
                    graphs.draws.expect(made, needs)
        except Exception as error:  # a step will tell
            self._quarantine.judge(error)

    def _with_weights(self, work: Callable[..., Any], **arguments: Any) -> Any:
        """Do something to the weights, which on a CPU puts them elsewhere."""
        self._executor.weights_moved()  # recorded steps would hold every weight that is replaced
        try:
            return work(**arguments)
        finally:
            self._executor.weights_moved()
            return_freed()

    def _release_memory(self, *, tags: Collection[str]) -> None:
        """Give up what the tags name, and the graphs, which hold addresses of everything."""
        self._graphs.close()
        if "kv_cache" in tags:
            self._executor.release_pool()
        if "weights" in tags:
            self._weights.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _resume_memory(self, *, tag: str) -> None:
        """Take back what one tag names; graphs wait for "open_graphs"."""
        problem = self._take_back(tag)
        if problem is not None:
            raise WrongState(
                f"there is no memory to take {tag} back on {self._device}: {problem}; free the device and "
                "call resume_memory_occupation() again"
            )

    def _take_back(self, tag: str) -> str | None:
        """Why it cannot be done; nobody keeps the error itself, whose frames hold what was taken so far."""
        try:
            if tag == "kv_cache":
                self._executor.restore_pool()
            elif tag == "weights":
                self._weights.restore()
        except torch.OutOfMemoryError as error:
            return str(error)
        return None

    def _memory(self) -> dict[str, int]:
        """Bytes in use and free; `graph_bytes` is what captured steps hold."""
        if self._device.type == "cpu":
            return {"cache_bytes": self._executor.pool.num_bytes, "graph_bytes": 0}
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "cache_bytes": self._executor.pool.num_bytes,
            "graph_bytes": self._graphs.num_bytes,
            "allocated_bytes": torch.cuda.memory_allocated(self._device),
            "free_bytes": free,
            "total_bytes": total,
        }


def _part(plan: StepPlan, sampled: Sampled) -> DrawnPart:
    """What a graph drew; the plan's rows are its first ones."""
    return DrawnPart(plan, sampled, None, [], {}, slice(len(plan.slots)))


def _facts(
    config: EngineConfig,
    spec: ModelSpec,
    placement: Placement,
    size: PoolSize,
    weights: Weights,
    *,
    seconds: float,
    has_lanes: bool,
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
        num_parameters=weights.num_parameters,
        context_length=spec.context_length,
        max_sequence_tokens=min(spec.context_length, size.num_pages * config.page_size),
        max_total_num_tokens=size.num_pages * config.page_size,
        page_size=config.page_size,
        max_running_requests=placement.max_running_requests,
        max_step_tokens=placement.max_step_tokens,
        steps_in_flight=placement.steps_in_flight,
        eos_token_ids=spec.eos_token_ids,
        weight_bytes=weights.num_bytes,
        cache_bytes=size.num_bytes,
        load_seconds=seconds,
        has_lanes=has_lanes,
    )
