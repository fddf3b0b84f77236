"""Processes that compile kernels, for the first start of a model on a machine.

Threads that compile side by side wait for each other: Triton holds Python's interpreter for much of its time,
also while it reads a library of half a megabyte for each kernel. The thread that starts the engine waits for
all of them. Processes do not; what they compile is found in Triton's cache on the disk.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import pickle
import pkgutil
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenmill.cache_folder import digest_of_files, keep_text
from tokenmill.imports import kept_byte_code, may_use_gpu
from tokenmill.own_processes import start_module
from tokenmill.triton_key import recall_key

_log = logging.getLogger("tokenmill")
# With fewer processors, the processes take them from the one that starts.
_FEWEST_PROCESSORS = 6
_MOST_PROCESSES = 8  # with 12 on 16 processors the first kernels came later, and all of them no sooner
_MOST_SECONDS = 120.0  # for a kernel, before a process counts as lost
_SECONDS_TO_END = 0.2  # for processes that have nothing to do and are told to end
_IDLE_SECONDS = 60.0  # after which a process ends by itself: the engine may have been left alone


def _sources(folder: Path = Path(__file__).parent) -> str:
    """What kernels are made of on the disk, or all in a folder is; it changes with every file."""
    return digest_of_files(folder.rglob("*.py"))


# Before any kernel is imported: as long as files are like that, what another process imports is the same.
_SOURCES = _sources()


class Compilers:
    """Some processes, or none. They end by `close`, or by themselves with this process."""

    def __init__(
        self,
        process: subprocess.Popen[bytes] | None = None,
        connections: Sequence[Connection] = (),
        mark: Path | None = None,
    ) -> None:
        """Without a process, whoever asks is left to compile. `mark` is a file that `remember` makes."""
        self._process = process
        self._mark = mark
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self.num_processes = len(connections)  # kernels that are compiled at the same time
        for connection in connections:
            self._free.put(connection)
        self._lock = threading.Lock()
        self._is_closed = False

    def compile(self, key: str, compile_kernel: Callable[[], Any]) -> None:
        """Have a kernel put on the disk, if a process can. The caller compiles it next, or finds it there.

        Both arguments are what Triton hands to its `AsyncCompileMode`. May be called from as many threads as
        there are processes. Raises RuntimeError once closed.
        """
        if self.num_processes == 0 or _sources() != _SOURCES:
            return
        try:
            job = _Job.of(compile_kernel)
            if kernel_files(hashlib.sha256(key.encode()).hexdigest(), job.function):
                return
            pickled = pickle.dumps(job)
        except Exception as error:  # another Triton, or a kernel that another process has no name for
            _log.debug("a thread compiles what a process cannot: %s", error)
            return
        connection = self._free.get()
        try:
            connection.send_bytes(pickled)
            if not connection.poll(_MOST_SECONDS):
                raise TimeoutError
            connection.recv_bytes()
        except (EOFError, OSError):
            connection.close()  # so that the next one sees at once that nobody is there
            if self._is_closed:
                raise RuntimeError("nobody wants the kernel any more") from None
            _log.debug("a process that compiles is gone")
        finally:
            self._free.put(connection)

    def remember(self, facts: str, files: Iterable[str]) -> None:
        """All kernels are on the disk, in these files: later starts for this purpose need no processes.

        `facts` are what decides, beside the purpose, which kernels that are. Raises OSError if that cannot be
        written down.
        """
        if self._mark is not None:
            keep_text(self._mark, json.dumps([facts, *files]))

    def has_all(self, facts: str) -> bool:
        """Whether the kernels that a start with the same facts remembered are still on the disk."""
        with suppress(Exception):  # whatever became of the file
            if self._mark is not None:
                remembered, *files = json.loads(self._mark.read_text(encoding="utf-8"))
                return bool(remembered == facts and all(map(os.path.exists, files)))
        return False

    def close(self) -> None:
        """End the processes; what they compile is not waited for. Idempotent."""
        with self._lock:
            if self._process is None or self._is_closed:
                return
            self._is_closed = True
            free = []
            with suppress(queue.Empty):
                while True:
                    free.append(self._free.get_nowait())
            for connection in free:
                connection.close()
                self._free.put(connection)  # closed: for threads that were about to ask
            try:
                self._process.wait(_SECONDS_TO_END if len(free) == self.num_processes else 0)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def kernel_files(digest: str, name: str) -> list[str]:
    """Where a kernel of Triton's is on the disk, none if it is not; `digest` is that of its key."""
    from triton.runtime.cache import get_cache_manager

    kept, title = get_cache_manager(digest), f"{name[:150]}.json"
    group = kept.get_group(title)
    return [kept.get_file(f"__grp__{title}"), *group.values()] if group else []  # empty: files are gone


def start_compilers(purpose: str) -> Compilers:
    """Processes for a start whose kernels nobody has compiled yet here. Torch need not be imported.

    `purpose` is whatever tells starts apart that need other kernels. There are none where the disk is known
    to have the kernels (see `Compilers.remember`), without a GPU, and with few processors.
    """
    if not may_use_gpu() or importlib.util.find_spec("triton") is None:
        return Compilers()
    try:
        return _start(purpose)
    except Exception as error:
        _log.debug("kernels are compiled by threads: %s", error)
    return Compilers()


def _start(purpose: str) -> Compilers:
    with kept_byte_code("triton"):
        from triton import __version__, knobs

    cache = Path(knobs.cache.dir)
    cache.mkdir(parents=True, exist_ok=True)
    # Is there once all kernels are, and vanishes with them.
    asked = repr((purpose, _sources(Path(__file__).parents[1]), __version__))
    mark = cache / f"tokenmill-{hashlib.sha256(asked.encode()).hexdigest()[:32]}"
    num_processors = len(os.sched_getaffinity(0))
    can_start = bool(sys.executable) and not getattr(sys, "frozen", False) and os.access(cache, os.W_OK)
    if mark.exists() or num_processors < _FEWEST_PROCESSORS or not can_start:
        return Compilers(mark=mark)
    count = min(num_processors // 2, _MOST_PROCESSES)
    ours, theirs = zip(*(socket.socketpair() for _ in range(count)), strict=True)
    with ExitStack() as given:
        for end in (*ours, *theirs):
            given.enter_context(end)
        numbers = [end.fileno() for end in theirs]
        arguments = (_SOURCES, *map(str, numbers))
        process = start_module(
            "tokenmill.kernels.compilers", *arguments, passed=numbers, stdout=subprocess.DEVNULL
        )
        return Compilers(process, [Connection(end.detach()) for end in ours], mark)


# ── what they are told ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Job:
    """What Triton compiles, with the function by its name."""

    source_class: type[Any]
    module: str
    function: str
    function_key: str  # in Triton's cache, which the other side need not make again
    signature: Any
    constants: Any
    attributes: Any
    target: Any
    options: dict[str, Any]
    environment: dict[str, str]

    @classmethod
    def of(cls, compile_kernel: Callable[[], Any]) -> _Job:
        """Out of the function that would compile it here. KeyError: Triton's has other variables."""
        cells = compile_kernel.__closure__ or ()
        names = compile_kernel.__code__.co_freevars
        found = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
        source = found["src"]
        return cls(
            source_class=type(source),
            module=source.fn.__module__,
            function=source.fn.__name__,
            function_key=source.fn.cache_key,
            signature=source.signature,
            constants=source.constants,
            attributes=source.attrs,
            target=found["target"],
            options=found["options"].__dict__,
            environment=found["env_vars"],
        )

    def do(self) -> None:
        """Compile, and build what launches it."""
        from triton.compiler import compile as compile_source

        function = getattr(importlib.import_module(self.module), self.function)
        function.hash = self.function_key
        source = self.source_class(function, self.signature, self.constants, self.attributes)
        kernel = compile_source(source, self.target, self.options, self.environment)
        if self.target.backend == "cuda":
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(kernel.src, kernel.metadata)


# ── the processes' side ───────────────────────────────────────────────────────────────────────


def main(sources: str, numbers: Sequence[int]) -> None:
    """Import what compiles, and fork a process for each socket; none if files are not what they were."""
    _import_all()
    if _sources() != sources:
        return
    gc.freeze()
    with suppress(OSError):  # as many as there may be
        for number in numbers:
            if os.fork() == 0:
                for other in numbers:
                    if other != number:
                        os.close(other)
                _serve(Connection(number))
                os._exit(0)
    for number in numbers:
        os.close(number)
    with suppress(ChildProcessError):
        while True:
            os.wait()


class _NoTorch(ModuleType):
    """Stands in for torch, which takes seconds to import: what compiles a kernel computes nothing with it.

    Modules of kernels name types of torch, no more, while they are imported; each name is a class of its own.
    """

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _import_all() -> None:
    sys.modules["torch"] = _NoTorch("torch")
    from triton.runtime import cache

    from tokenmill import kernels

    with suppress(Exception):  # else it is made
        recall_key()
    with kept_byte_code("triton"):
        for module in pkgutil.iter_modules(kernels.__path__):
            if module.name.startswith(("triton_", "hopper_")):
                with suppress(Exception):  # which another Triton lacks something for
                    importlib.import_module(f"{kernels.__name__}.{module.name}")
    cache.triton_key()  # each process has it, then


def _serve(jobs: Connection) -> None:
    """Until the other side is gone, or has not asked for long."""
    with suppress(EOFError, OSError):
        while jobs.poll(_IDLE_SECONDS):
            job = jobs.recv_bytes()
            with suppress(Exception):  # the other side finds out what is missing, and why
                pickle.loads(job).do()
            jobs.send_bytes(b"")


if __name__ == "__main__":
    with suppress(Exception):  # the other side does without, and says why if it cannot either
        main(sys.argv[1], [int(number) for number in sys.argv[2:]])
    os._exit(0)
