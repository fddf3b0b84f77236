"""Compiles Triton kernels side by side instead of one after the other, each when it is first launched."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

import torch
from triton import AsyncCompileMode

_log = logging.getLogger("tokenmill")
# Half of a kernel's time goes to the assembler and the C compiler of its launcher, which are processes, and
# most of the rest to Triton's passes, which run beside each other, too; Python itself takes about a tenth.
_MAX_THREADS = 16


class ParallelCompilation:
    """In a `with` block, a launch on this thread of a kernel that is not compiled yet does not run.

    The kernel is compiled, with exactly the arguments and alignments of the launch, from the end of the block
    on: threads that compile would slow down the one that finds out what there is to do. There may be several
    blocks. Launches of compiled kernels run. What skipped kernels should have written stays as it was: do not
    use it as an index. Other threads launch and compile as ever.
    """

    def __init__(self, device: torch.device) -> None:
        # The threads are free; they only start when there is work.
        self._threads = ThreadPoolExecutor(
            min(_MAX_THREADS, os.cpu_count() or 1), "tokenmill-compile", _use_device, (device,)
        )
        self._mode = _Mode(self._threads)

    def __enter__(self) -> ParallelCompilation:
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, traceback)
        self._mode.start()

    @property
    def num_kernels(self) -> int:
        """Kernels that were not compiled when they were launched."""
        return len(self._mode.jobs)

    def wait(self) -> None:
        """Return when all kernels are compiled and loaded; one that cannot be says so when it is launched."""
        self._threads.shutdown()
        for job in self._mode.jobs.values():
            if (error := job.exception()) is not None:
                _log.debug("a kernel could not be compiled ahead of its launch: %s", error)


class _Mode(AsyncCompileMode):  # type: ignore[misc]  # triton is typed in part only
    """Triton hands a kernel that it lacks to the mode that is active in the thread's context."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        super().__init__(threads)
        self.jobs: dict[str, Future[None]] = {}
        self._found: dict[str, Callable[[], None]] = {}  # not started yet

    def submit(self, key: str, compile_kernel: Callable[[], Any], keep: Callable[[Any], None]) -> None:
        """Take note of what is to be compiled; returning no kernel makes Triton skip the launch."""
        if key not in self.jobs:
            self._found.setdefault(key, partial(_compile, compile_kernel, keep))

    def start(self) -> None:
        """Compile what was found, in that order."""
        self.jobs |= {key: self.executor.submit(job) for key, job in self._found.items()}
        self._found.clear()


def _compile(compile_kernel: Callable[[], Any], keep: Callable[[Any], None]) -> None:
    began = time.perf_counter()
    kernel = compile_kernel()
    kernel.run  # noqa: B018  # builds the launcher and loads the machine code
    keep(kernel)
    _log.debug("compiled %s in %.2f s", kernel.name, time.perf_counter() - began)


def _use_device(device: torch.device) -> None:
    torch.cuda.set_device(device)
