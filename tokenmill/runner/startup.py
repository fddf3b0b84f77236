"""The order in which a runner starts, so that its parts are waited for side by side."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tokenmill.config import EngineConfig
from tokenmill.kernels.compilers import Compilers
from tokenmill.models import Model, ModelSpec, load_model, read_spec
from tokenmill.runner.hardware import Placement, place, wake
from tokenmill.runner.lanes import LaneKernels, can_part, decode_processors

if TYPE_CHECKING:  # these need Triton
    from tokenmill.kernels.compilation import ParallelCompilation
    from tokenmill.runner.warmup import Scout

_log = logging.getLogger("tokenmill")


class Clock:
    """What the start of a runner spent its time on."""

    def __init__(self) -> None:
        self._began = self._lap_began = time.perf_counter()
        self.laps: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return time.perf_counter() - self._began

    def lap(self, name: str) -> None:
        """The time since the last lap went to `name`."""
        now = time.perf_counter()
        self.laps[name], self._lap_began = round(now - self._lap_began, 3), now


@contextmanager
def _awake(device: torch.device) -> Iterator[None]:
    """Make a GPU this thread's device, and load what it needs in another thread, beside the block."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.set_device(device)
    thread = threading.Thread(target=_wake_quietly, args=(device,), name="tokenmill-wake", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _wake_quietly(device: torch.device) -> None:
    with suppress(Exception):  # it will come again where somebody listens
        wake(device)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on its device."""

    spec: ModelSpec
    model: Model
    placement: Placement  # with a step that fits beside the weights
    step_bytes: int  # that this step takes; 0 where nobody measured
    kernels: ParallelCompilation | None  # may be under way; None: there is nothing to compile
    lane_kernels: LaneKernels | None = None  # None: prompts have no lane of their own


def load(
    folder: Path, device: torch.device, config: EngineConfig, compilers: Compilers, clock: Clock
) -> Loaded:
    """Read what a model is, and load its weights; to be called in inference mode.

    On a GPU kernels are compiled meanwhile, and afterwards beside the first steps.
    """
    with _awake(device):
        spec = read_spec(
            folder,
            overrides=config.json_model_override_args,
            context_length=config.context_length,
            trust_remote_code=config.trust_remote_code,
        )
        clock.lap("spec")
        placement = place(config, spec)
        scout = _scout(spec, config, placement, compilers)
    load_weights = partial(
        load_model,
        folder,
        spec,
        dtype=placement.dtype,
        device=placement.device,
        load_format=config.load_format,
        progress=bool(config.show_progress),
    )
    if scout is None:
        model = load_weights()
        clock.lap("weights")
        return Loaded(spec, model, placement, 0, None)
    from tokenmill.runner.warmup import fit_step  # needs Triton

    kernels = scout.compile()
    clock.lap("kernels found")
    with kernels.cancelled_by_failure():
        model = load_weights()
        torch.cuda.synchronize(placement.device)
        clock.lap("weights")
        placement, step_bytes = fit_step(scout, placement)
        clock.lap("measured")
        lane_kernels = _lane_kernels(scout, model, placement)
        clock.lap("lanes")
    return Loaded(spec, model, placement, step_bytes, kernels, lane_kernels)


def _scout(spec: ModelSpec, config: EngineConfig, placement: Placement, compilers: Compilers) -> Scout | None:
    """What finds the kernels of a model; None on a CPU, which has none to compile."""
    if placement.device.type == "cpu":
        compilers.close()
        return None
    from tokenmill.runner.warmup import Scout  # needs Triton

    return Scout(spec, config=config, placement=placement, compilers=compilers)


def _lane_kernels(scout: Scout, model: Model, placement: Placement) -> LaneKernels | None:
    """What steps in lanes launch in addition; None: there are no lanes."""
    if not can_part(placement):
        return None
    num_parameters = sum(weight.numel() for weight in model.parameters())
    count = decode_processors(placement.device, num_parameters)
    try:
        return LaneKernels(count, scout.find_beside(count))
    except Exception as error:  # an engine can do without
        _log.warning("prompts are not computed beside rows that decode: %s", error)
    return None
