"""Traces of what a runner does, by torch's profiler; which steps are traced is decided in the core."""

from __future__ import annotations

import gzip
import logging
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tokenmill.errors import WrongState, told
from tokenmill.runner.memory import return_freed

_log = logging.getLogger("tokenmill")
_MOST_ALLOCATIONS = 100_000  # that a record of memory keeps
_PACKED_BYTES = 1 << 20  # at a time
# torch has one profiler for the whole process, and two engines that use it at once would bring that down.
_in_use = threading.Lock()


class Profiler:
    """Traces the thread that starts it, and the device. At most one trace runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._file: Path | None = None
        self._trace: profile | None = None
        self._records_memory = False

    def start(
        self, *, folder: str, title: str, activities: Sequence[str], with_stack: bool, record_shapes: bool
    ) -> None:
        """Begin a trace, to be written to `folder/title.trace.json.gz`.

        `activities` are some of "CPU", "GPU" and "MEM" (allocations on the GPU, in
        `folder/title-memory.pickle`), and trace something on this device; without a GPU "GPU" adds nothing.
        """
        wanted = [ProfilerActivity.CPU] * ("CPU" in activities)
        wanted += [ProfilerActivity.CUDA] * ("GPU" in activities and self._device.type == "cuda")
        if not _in_use.acquire(blocking=False):
            raise WrongState("another engine of this process runs a profile; torch can take one at a time")
        self._records_memory = "MEM" in activities
        try:
            if self._records_memory:
                torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
            if wanted:
                trace = profile(
                    activities=wanted, with_stack=with_stack, record_shapes=record_shapes, acc_events=True
                )
                trace.start()
                self._trace = trace
        except Exception as error:  # some other part of this process is at it, for example
            if self._records_memory:
                torch.cuda.memory._record_memory_history(enabled=None)
            _in_use.release()
            raise WrongState(f"torch cannot start a trace: {told(error)}") from error
        self._file = Path(folder) / title

    def stop(self) -> None:
        """End the trace and write it; the folder is made if it is missing. `WrongState` if that fails."""
        file, trace = self._file, self._trace
        assert file is not None, "start() comes before stop()"
        self._file = self._trace = None
        try:
            self._write(file, trace)
        except Exception as error:
            raise WrongState(f"the trace cannot be written to {file.parent}: {told(error)}") from error
        finally:
            _in_use.release()
            if trace is not None:
                trace.profiler = None  # its events, some kilobytes each; `trace` itself is part of a cycle
            return_freed()
        _log.info("a trace was written to %s.trace.json.gz", file)

    def _write(self, file: Path, trace: profile | None) -> None:
        try:
            self._write_files(file, trace)
        finally:
            if self._records_memory:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write_files(self, file: Path, trace: profile | None) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if trace is not None:
            # Without it torch 2.11 warns of traces in several parts; with it, it would now read all events
            # into Python, in ten times the time, for tables that nobody asks for.
            assert trace.profiler is not None, "the trace was started"
            trace.profiler.acc_events = False
            trace.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        if trace is not None:
            _export(trace, Path(f"{file}.trace.json.gz"))
        if self._records_memory:
            torch.cuda.memory._dump_snapshot(f"{file}-memory.pickle")

    def close(self) -> None:
        """Write a trace that nobody stopped."""
        if self._file is not None:
            try:
                self.stop()
            except WrongState as error:
                _log.error("%s", error)


def _export(trace: profile, file: Path) -> None:
    """Write a trace, packed quickly: a second of steps may be a hundred megabytes of text."""
    with tempfile.NamedTemporaryFile(suffix=".json", dir=file.parent) as plain:
        trace.export_chrome_trace(plain.name)
        with open(plain.name, "rb") as text, gzip.open(file, "wb", compresslevel=1) as packed:
            shutil.copyfileobj(text, packed, _PACKED_BYTES)
