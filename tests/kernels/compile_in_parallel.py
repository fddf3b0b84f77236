"""Launch kernels on CPU tensors with a driver that only pretends, and print as JSON what became of them.

    python compile_in_parallel.py afterwards | meanwhile | in_vain | one_after_the_other | in_processes

Run as a script, because Triton cannot compile in a process that uses its interpreter.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tokenmill.kernels import compilation, compilers, triton_activation, triton_norm, triton_sampling

x = torch.zeros(4, 256, dtype=torch.bfloat16)
compiled: list[str] = []
launched: list[str] = []
hits: list[str] = []
compiling_threads: set[str] = set()


class Driver:
    """A Hopper that launches nothing."""

    class utils:
        @staticmethod
        def load_binary(name: str, *_: Any) -> tuple[Any, ...]:
            compiling_threads.add(threading.current_thread().name)
            return object(), name, 32, 0, 1024

        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 227 * 1024}

    @staticmethod
    def launcher_cls(source: Any, metadata: Any) -> Any:
        return lambda *_: launched.append(source.fn.__name__)

    @staticmethod
    def get_current_device() -> int:
        return 0

    @staticmethod
    def get_current_stream(device: int) -> int:
        return 0

    @staticmethod
    def get_current_target() -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def listen(src: Any, cache_hit: bool, **_: Any) -> None:
    """Triton tells of every kernel that this process compiles, or finds on the disk."""
    compiled.append(src.name)
    hits.extend([src.name] * cache_hit)


def launch_all() -> None:
    for _ in range(2):
        triton_norm.rms_norm(x, x[0], 1e-6)
        triton_norm.add_rms_norm(x, x, x[0], 1e-6)
        triton_activation.gated_silu(x)


def afterwards(together: compilation.ParallelCompilation) -> dict[str, Any]:
    """Launch again when all is compiled."""
    with together.held():
        with together:
            launch_all()
            skipped = not launched
        held = not together.jobs
    together.wait()
    num_compiled = len(compiled)
    launch_all()
    return {
        "skipped": skipped,
        "held": held,
        "kernels": together.num_kernels,
        "compiled": sorted(compiled[:num_compiled]),
        "compiled again": len(compiled) - num_compiled,
        "launched": launched,
        "threads": sorted(compiling_threads),
    }


def meanwhile(together: compilation.ParallelCompilation) -> dict[str, Any]:
    """Launch while one thread is held up in the first kernel."""
    begun, may_go_on = threading.Event(), threading.Event()
    compile_kernel = compilation._compile

    def held_up(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            may_go_on.wait()
        return compile_kernel(*arguments)

    compilation._compile = held_up
    with together:
        triton_norm.rms_norm(x, x[0], 1e-6)
        triton_norm.add_rms_norm(x, x, x[0], 1e-6)
    begun.wait()
    over = [together.is_over]
    with together.awaited():
        triton_norm.add_rms_norm(x, x, x[0], 1e-6)  # queued
        triton_activation.gated_silu(x)  # nobody knows of it
        before = list(launched)
        threading.Timer(0.1, may_go_on.set).start()
        triton_norm.rms_norm(x, x[0], 1e-6)  # under way
    compilation._compile = compile_kernel
    together.wait()
    over.append(together.is_over)
    with together.awaited():
        launch_all()
    return {"before": before, "compiled": sorted(compiled), "launched": launched, "over": over}


def in_vain(together: compilation.ParallelCompilation) -> dict[str, Any]:
    """Launch what a thread could not compile, and what none will any more."""
    compile_kernel, failed = compilation._compile, threading.Event()

    def failing(*arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return compile_kernel(*arguments)
        failed.wait()
        raise RuntimeError("no compiler")

    compilation._compile = failing
    with together:
        launch_all()
    try:
        with together.cancelled_by_failure():
            raise MemoryError
    except MemoryError:
        failed.set()
    with together.awaited():
        launch_all()
    together.wait()
    return {"compiled": sorted(compiled), "launched": launched, "threads": sorted(compiling_threads)}


def one_after_the_other(together: compilation.ParallelCompilation) -> dict[str, Any]:
    """Find what another compilation leaves out, and compile it when that is asked for."""
    with together:
        triton_norm.rms_norm(x, x[0], 1e-6)
    later = compilation.ParallelCompilation(torch.device("cpu"), after=together)
    with later:
        launch_all()
    together.wait()
    before = list(compiled)
    later.start()
    later.wait()
    launch_all()
    return {"before": before, "kernels": later.num_kernels, "compiled": compiled, "launched": launched}


def in_processes(_: compilation.ParallelCompilation) -> dict[str, Any]:
    """Start twice for one purpose, then with processes that are killed, stopped, closed, or edited."""
    compilers.may_use_gpu = lambda: True
    os.sched_getaffinity = lambda _: set(range(8))
    first = compilers.start_compilers("a model")
    together = compilation.ParallelCompilation(torch.device("cpu"), compilers=first, facts="facts")
    zeros = torch.zeros(4, dtype=torch.int64)
    columns = SimpleNamespace(top_ks_R=zeros.int(), seeds_R=zeros, positions_R=zeros)
    vars(columns).update(dict.fromkeys(("temperatures_R", "top_ps_R", "min_ps_R"), zeros.float()))
    with together:
        # The keys of functions that share others depend on which of them Triton read first.
        triton_sampling.sample(x, columns, filters=False)
        triton_norm.add_rms_norm(x, x, x[0], 1e-6)
    together.wait()
    launch_all()
    second = compilers.start_compilers("a model")
    remembered = [each.has_all(facts) for each in (first, second) for facts in ("facts", "others")]
    kept = [
        each for each in Path(os.environ["TRITON_CACHE_DIR"]).iterdir() if list(each.glob("_draw_*.json"))
    ]
    shutil.rmtree(kept[0])
    remembered.append(second.has_all("facts"))
    compilers._MOST_SECONDS = 1.0
    given_up = []
    for name, end, kinds in (("killed", signal.SIGKILL, x.float()), ("stopped", signal.SIGSTOP, x.double())):
        given_up.append(compilers.start_compilers(name))
        os.killpg(given_up[-1]._process.pid, end)
        lost = compilation.ParallelCompilation(torch.device("cpu"), compilers=given_up[-1])
        with lost:
            triton_activation.gated_silu(kinds)
        lost.wait()
    closed = compilers.start_compilers("a third model")
    held_up = compilation.ParallelCompilation(torch.device("cpu"), compilers=closed)
    with held_up:
        triton_activation.gated_silu(x.half())
    while closed._free.qsize() == closed.num_processes:  # until a thread waits for one
        time.sleep(0.01)
    held_up.cancel()
    (job,) = held_up.jobs
    edited = compilers.start_compilers("edited")
    compilers._sources = lambda: "other files than those that this process imported"
    compilation.kernel_files = lambda digest, name: digest.kept_by_something_else
    unused = compilation.ParallelCompilation(torch.device("cpu"), compilers=edited, facts="facts")
    with unused:
        triton_norm.rms_norm(x.double(), x[0].double(), 1e-6)
    unused.wait()
    return {
        "remembered": remembered,
        "processes": [each.num_processes for each in (first, second, *given_up)],
        "hits": {name: name in hits for name in compiled},
        "launched": launched,
        "failure": type(job.exception()).__name__,
        "status": [each._process.returncode for each in (first, *given_up, closed, edited)],
    }


def main() -> None:
    driver.set_active(Driver())
    compilation._use_device = lambda device: None
    compilation._MAX_THREADS = 16 if sys.argv[1] == "afterwards" else 1
    triton.knobs.compilation.listener = listen
    together = compilation.ParallelCompilation(torch.device("cpu"))
    cases = (afterwards, meanwhile, in_vain, one_after_the_other, in_processes)
    json.dump({case.__name__: case for case in cases}[sys.argv[1]](together), sys.stdout)


if __name__ == "__main__":
    main()
