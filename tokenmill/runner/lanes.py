"""Prompts beside rows that decode, each on multiprocessors of their own.

A partition of the device (CUDA calls it a green context) has a stream whose kernels run on its
multiprocessors only. How many programs such kernels have is decided within `kernels.launching.on_processors`,
so each lane has graphs of its own.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tokenmill.kernels.launching import on_processors
from tokenmill.messages import Lane, StepPlan
from tokenmill.runner.hardware import Placement

if TYPE_CHECKING:
    from tokenmill.kernels.compilation import ParallelCompilation  # needs Triton

_log = logging.getLogger("tokenmill")

# Of the multiprocessors, the share of rows that decode. The steps of small models wait for one kernel after
# the other more than for memory, and want more programs at once.
_SHARE, _SHARE_OF_SMALL = 0.3, 0.48
_SMALL = 1_000_000_000  # parameters
_GROUP = 8  # multiprocessors that are parted from each other together
_FEWEST = 64  # a device with fewer is not worth parting
_FIRST_GENERATION = 9  # of devices that can be parted as finely


def can_part(placement: Placement) -> bool:
    """Whether a device that is used like this is worth parting. Nothing is created yet."""
    device = placement.device
    if device.type != "cuda" or not placement.cuda_graphs or placement.deterministic:
        return False
    if placement.steps_in_flight < 2 or torch.version.cuda is None:
        return False
    properties = torch.cuda.get_device_properties(device)
    if properties.major < _FIRST_GENERATION or properties.multi_processor_count < _FEWEST:
        return False
    return all(importlib.util.find_spec(name) for name in ("cuda", "cuda.bindings"))


def decode_processors(device: torch.device, num_parameters: int) -> int:
    """Multiprocessors for rows that decode beside prompts."""
    share = _SHARE_OF_SMALL if num_parameters < _SMALL else _SHARE
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return round(share * count / _GROUP) * _GROUP


@dataclass(frozen=True, slots=True)
class Partition:
    """Some multiprocessors of a device."""

    stream: torch.cuda.Stream
    num_processors: int


@dataclass(frozen=True, slots=True)
class LaneKernels:
    """What steps of rows launch in addition that have only so many multiprocessors, to be compiled yet."""

    num_processors: int
    compilation: ParallelCompilation


class Lanes:
    """The partitions of a device, and the order between what runs on them and on all of it."""

    def __init__(self, device: torch.device, kernels: LaneKernels | None) -> None:
        """`kernels`: those of `DECODES`; None: there are no lanes."""
        self._device = device
        self._kernels = kernels
        self._opening: threading.Thread | None = None
        self._opened: GreenContexts | None = None
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        # Of each lane: the others with steps that it was not made to wait for yet.
        self._unawaited: dict[Lane, set[Lane]] = {lane: set() for lane in Lane}

    @property
    def partitions(self) -> dict[Lane, Partition]:
        """Those of `DECODES` and `PROMPTS`; empty until they `are_open`."""
        return {} if self._opened is None else self._opened.partitions

    def are_open(self) -> bool:
        """Whether the device is parted by now.

        That begins when this is asked for the first time, in a thread, for it takes a fifth of a second, and
        longer where kernels are to be compiled.
        """
        if self._opening is None and self._kernels is not None:
            self._opening = threading.Thread(target=self._open, name="tokenmill-lanes", daemon=True)
            self._opening.start()
        if self._opened is None:
            return False
        if not self._streams:
            self._streams = {lane: each.stream for lane, each in self.partitions.items()}
            self._streams[Lane.WHOLE] = torch.cuda.current_stream(self._device)
            self.note_other_work()  # whatever runs now
        return True

    def _open(self) -> None:
        assert self._kernels is not None
        opened = None
        try:
            torch.cuda.set_device(self._device)
            opened = take_contexts(self._device, self._kernels.num_processors)
            self._kernels.compilation.start()
            self._kernels.compilation.wait()
        except Exception as error:
            _log.info("prompts are not computed beside rows that decode: %s", error)
            if opened is not None:
                give_back(opened)
            return
        sizes = {lane.value: each.num_processors for lane, each in opened.partitions.items()}
        _log.info("multiprocessors where prompts are computed beside rows that decode: %s", sizes)
        self._opened = opened

    @contextmanager
    def within(self, lane: Lane) -> Iterator[None]:
        """What is launched inside belongs to a step of that lane."""
        if lane is Lane.WHOLE:
            yield
            return
        partition = self.partitions[lane]
        with torch.cuda.stream(partition.stream), on_processors(partition.num_processors):
            yield

    def catch_up(self) -> None:
        """What is launched in lanes from now on runs behind all that was launched on the whole device, whose
        memory it may have been given."""
        for lane in (Lane.DECODES, Lane.PROMPTS):
            self._streams[lane].wait_stream(self._streams[Lane.WHOLE])

    def note_other_work(self) -> None:
        """Something other than a step was launched on the whole device: steps in lanes run behind it, too."""
        for lane in (Lane.DECODES, Lane.PROMPTS):
            self._unawaited[lane].add(Lane.WHOLE)

    def order(self, plan: StepPlan) -> None:
        """Let the step that is launched next, within its lane, run behind what it has to come after."""
        if not self._streams:
            return
        lane, others = plan.lane, set(Lane) - {plan.lane}
        awaited = others & self._unawaited[lane]
        if lane is Lane.DECODES and not plan.awaits_prompts:
            awaited.discard(Lane.PROMPTS)
        for other in awaited:
            self._streams[lane].wait_stream(self._streams[other])
        self._unawaited[lane] -= awaited
        for other in others:
            self._unawaited[other].add(lane)

    def close(self) -> None:
        """Give the multiprocessors back; nothing may be left that was captured there."""
        if self._opening is not None:
            if self._kernels is not None:
                self._kernels.compilation.cancel()
            self._opening.join()
        self._streams = {}
        if self._opened is not None:
            give_back(self._opened)
            self._opened = None


class GreenContexts:
    """Two partitions of a device, as CUDA's driver makes them: its manual, "Green Contexts".

    They stay until the process ends.
    """

    def __init__(self, device: torch.device, num_decode_processors: int) -> None:
        from cuda.bindings import driver  # torch depends on it, where it is built for CUDA

        self._driver = driver
        self.device = device
        self.num_decode_processors = num_decode_processors
        self.partitions: dict[Lane, Partition] = {}
        number = self._checked(driver.cuDeviceGet(device.index or 0))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        every = self._checked(driver.cuDeviceGetDevResource(number, kind))
        split = driver.cuDevSmResourceSplitByCount(1, every, 0, num_decode_processors)
        (first,), _, rest = self._checked(split)
        # Steps of rows that decode are short: whatever both wait for goes to them first.
        for lane, resource, priority in ((Lane.DECODES, first, -1), (Lane.PROMPTS, rest, 0)):
            description = self._checked(driver.cuDevResourceGenerateDesc([resource], 1))
            flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            context = self._checked(driver.cuGreenCtxCreate(description, number, flags))
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            stream = self._checked(driver.cuGreenCtxStreamCreate(context, flags, priority))
            self.partitions[lane] = Partition(
                torch.cuda.ExternalStream(int(stream), device=device), int(resource.sm.smCount)
            )

    def _checked(self, returned: tuple[Any, ...]) -> Any:
        """What a call of the driver returns: one thing, or several."""
        code, *made = returned
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA does not part the device ({code})")
        return made[0] if len(made) == 1 else made


# Of engines that are closed, for those to come: torch and cuBLAS keep memory for every stream that was used.
_spare: list[GreenContexts] = []
_lock = threading.Lock()


def take_contexts(device: torch.device, num_decode_processors: int) -> GreenContexts:
    """Partitions that nobody else in the process uses. Raises RuntimeError where CUDA cannot make any."""
    with _lock:
        for at, spare in enumerate(_spare):
            if (spare.device, spare.num_decode_processors) == (device, num_decode_processors):
                return _spare.pop(at)
    return GreenContexts(device, num_decode_processors)


def give_back(contexts: GreenContexts) -> None:
    """Leave partitions to others; what was launched there may be under way."""
    with _lock:
        _spare.append(contexts)
