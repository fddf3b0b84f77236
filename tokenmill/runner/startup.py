"""The order in which a runner starts, so that its parts are waited for side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from tokenmill.config import EngineConfig
from tokenmill.models import Model, ModelSpec, load_model
from tokenmill.runner.hardware import Placement, wake


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
def awake(device: torch.device) -> Iterator[None]:
    """Load what a GPU needs in another thread, beside the block, and make it this thread's device."""
    if device.type == "cpu":
        yield
        return
    thread = threading.Thread(target=_wake_quietly, args=(device,), name="tokenmill-wake", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    torch.cuda.set_device(device)


def _wake_quietly(device: torch.device) -> None:
    with suppress(RuntimeError, ImportError):  # it will come again where somebody listens
        wake(device)


def load(
    folder: Path, spec: ModelSpec, config: EngineConfig, placement: Placement, clock: Clock
) -> tuple[Model, Placement, int]:
    """The model, the placement with a step that fits beside it, and the bytes that this step takes.

    On a GPU the kernels are compiled while the weights are loaded.
    """
    load_weights = partial(
        load_model,
        folder,
        spec,
        dtype=placement.dtype,
        device=placement.device,
        load_format=config.load_format,
        progress=bool(config.show_progress),
    )
    if placement.device.type == "cpu":
        model = load_weights()
        clock.lap("weights")
        return model, placement, 0
    from tokenmill.runner.warmup import Scout, fit_step  # needs Triton

    scout = Scout(spec, config=config, placement=placement)
    compilation = scout.compile()
    clock.lap("kernels found")
    model = load_weights()
    torch.cuda.synchronize(placement.device)
    clock.lap("weights")
    compilation.wait()
    clock.lap("kernels compiled")
    placement, step_bytes = fit_step(scout, placement)
    clock.lap("measured")
    return model, placement, step_bytes
