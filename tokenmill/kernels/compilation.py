"""Compiles Triton kernels side by side instead of one after the other, each when it is first launched."""

from __future__ import annotations

import logging
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from triton import AsyncCompileMode, knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime import cache

from tokenmill.kernels.compilers import Compilers, kernel_files
from tokenmill.kernels.function_keys import settle_keys
from tokenmill.kernels.launchers import keep_apart

_log = logging.getLogger("tokenmill")
# Assembler, C compiler and Triton's passes run beside each other. The rest of a kernel's time is Python, for
# which threads wait for each other, and the one that starts the engine for all of them. With 16 threads on 16
# cores an engine was there after 7.1 s instead of 3.5, the last of its 38 kernels after 8.1 instead of 7.2.
_MAX_THREADS = 6
_LONG_SECONDS = 1.0  # a wait that is worth a line


class ParallelCompilation:
    """In a `with` block, a launch on this thread of a kernel that is not compiled yet does not run.

    The kernel is compiled, with exactly the arguments and alignments of the launch: from the end of the block
    on if threads do that, because they slow down the one that finds what there is to do. There may be several
    blocks, until `wait` or `cancel`. Launches of compiled kernels run. What skipped kernels should have
    written stays as it was: do not use it as an index. Other threads launch and compile as ever; one that
    needs what is compiled here launches within `awaited`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        compilers: Compilers | None = None,
        facts: str | None = None,
        after: ParallelCompilation | None = None,
    ) -> None:
        """With `compilers`, closed in the end, threads only load what processes compile; that all is compiled
        that the `facts` ask for is remembered. With another one to come `after`, nothing that is compiled
        there is compiled here, and nothing at all before `start`."""
        keep_apart()
        settle_keys()
        self._compilers = compilers or Compilers()
        self._facts = facts
        count = self._compilers.num_processes or min(_MAX_THREADS, os.cpu_count() or 1)
        # The threads are free; they only start when there is work.
        self._threads = ThreadPoolExecutor(count, "tokenmill-compile", _use_device, (device,))
        known = {} if after is None else after._mode.jobs
        self._mode: _Mode = _Mode(self._threads, self._compilers, known)
        self._starts_at_once = after is None
        self._is_done = False

    def __enter__(self) -> ParallelCompilation:
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, traceback)
        if self._starts_at_once:
            self._mode.start()

    def start(self) -> None:
        """Compile what was found so far."""
        self._mode.start()

    @contextmanager
    def held(self) -> Iterator[None]:
        """What blocks within find is compiled from the end of them all on, if threads do that."""
        self._starts_at_once = False
        yield
        self._starts_at_once = True
        self.start()

    @property
    def jobs(self) -> list[Future[Any]]:
        """Kernels whose compilation was started so far."""
        return list(self._mode.jobs.values())

    @property
    def num_kernels(self) -> int:
        """Kernels that were not compiled when they were launched."""
        return self._mode.num_kernels

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        return self._is_done or all(job.done() for job in self._mode.jobs.values())

    def awaited(self) -> AbstractContextManager[object]:
        """Launches within, on this thread, run: each waits for its own kernel, or compiles what is queued."""
        if self.is_over:
            self.wait()
        return nullcontext() if self._is_done else _Awaiting(self._threads, self._mode.jobs)

    def wait(self) -> None:
        """Return when all kernels are compiled and loaded; one that cannot be says so when it is launched."""
        if self._is_done:
            return
        began = time.perf_counter()
        self._threads.shutdown()
        self._is_done = True
        jobs = [job for job in self.jobs if not job.cancelled()]
        errors = [error for job in jobs if (error := job.exception()) is not None]
        for error in errors:
            _log.debug("a kernel could not be compiled ahead of its launch: %s", error)
        is_kept = not knobs.compilation.always_compile  # else what is on the disk is never used
        if self._facts is not None and jobs and not errors and is_kept:
            with suppress(Exception):  # the disk is full, or kernels are kept by something else
                files = [kernel_files(job.result().hash, job.result().name) for job in jobs]
                if all(files):
                    self._compilers.remember(self._facts, chain.from_iterable(files))
        self._compilers.close()
        if (seconds := time.perf_counter() - began) > _LONG_SECONDS:
            _log.info("waited %.1f s for kernels; later starts find them on the disk", seconds)

    @contextmanager
    def cancelled_by_failure(self) -> Iterator[None]:
        """A block whose failure leaves nobody who would launch the kernels."""
        try:
            yield
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Begin with no more kernels: nobody is going to launch them."""
        if self.is_over:
            self.wait()
            return
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._compilers.close()
        self._is_done = True


class _Mode(AsyncCompileMode):  # type: ignore[misc]  # triton is typed in part only
    """Triton hands a kernel that it lacks to the mode that is active in the thread's context."""

    def __init__(
        self, threads: ThreadPoolExecutor, compilers: Compilers, known: Mapping[str, Future[Any]]
    ) -> None:
        super().__init__(threads)
        self.jobs: dict[str, Future[Any]] = {}
        self._compilers = compilers
        self._known = known
        self._found: dict[str, Callable[[], None]] = {}  # not started yet

    @property
    def num_kernels(self) -> int:
        """Started, or not yet."""
        return len(self.jobs) + len(self._found)

    def submit(self, key: str, compile_kernel: Callable[[], Any], keep: Callable[[Any], None]) -> None:
        """Take note of what is to be compiled; returning no kernel makes Triton skip the launch."""
        if key not in self.jobs and key not in self._known:
            self._found.setdefault(key, partial(self._compile, key, compile_kernel, keep))
        if self._compilers.num_processes:  # whose work holds up nobody
            self.start()

    def start(self) -> None:
        """Compile what was found, in that order."""
        self.jobs |= {key: self.executor.submit(job) for key, job in self._found.items()}
        self._found.clear()

    def _compile(self, key: str, compile_kernel: Callable[[], Any], keep: Callable[[Any], None]) -> Any:
        self._compilers.compile(key, compile_kernel)
        return _compile(compile_kernel, keep)


class _Awaiting(AsyncCompileMode):  # type: ignore[misc]
    """Launches take the kernels of jobs that are under way."""

    def __init__(self, threads: ThreadPoolExecutor, jobs: Mapping[str, Future[Any]]) -> None:
        super().__init__(threads)
        self._jobs = jobs

    def submit(self, key: str, compile_kernel: Callable[[], Any], keep: Callable[[Any], None]) -> Any:
        """The kernel. A job that failed is done again here, where the error has somebody to go to."""
        job = self._jobs.get(key)
        if job is None or job.cancel() or job.exception() is not None:
            return _compile(compile_kernel, keep)
        kernel = job.result()
        keep(kernel)
        return kernel


def _compile(compile_kernel: Callable[[], Any], keep: Callable[[Any], None]) -> Any:
    began = time.perf_counter()
    kernel = compile_kernel()
    kernel.run  # noqa: B018  # builds the launcher and loads the machine code
    keep(kernel)
    _log.debug("compiled %s in %.2f s", kernel.name, time.perf_counter() - began)
    return kernel


def compiler_facts() -> list[str]:
    """What Triton is, and what it heeds: with others, kernels that are on the disk may be of no use.

    What launches them is on the disk, too, for one version of Python.
    """
    names = ("TRITON_", "PTXAS_", "DISABLE_PTXAS")
    heeded = [item for item in os.environ.items() if item[0].startswith(names)]
    heeded += get_cache_invalidating_env_vars().items()
    return [cache.triton_key(), str(sysconfig.get_config_var("EXT_SUFFIX")), *sorted(map("=".join, heeded))]


def _use_device(device: torch.device) -> None:
    torch.cuda.set_device(device)
