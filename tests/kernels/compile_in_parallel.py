"""Launch kernels on CPU tensors with a driver that only pretends, and print as JSON what became of them.

    python compile_in_parallel.py afterwards | meanwhile

Run as a script, because Triton cannot compile in a process that uses its interpreter.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tokenmill.kernels import compilation, triton_activation, triton_norm

x = torch.zeros(4, 256, dtype=torch.bfloat16)
compiled: list[str] = []
launched: list[str] = []
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


def launch_all() -> None:
    for _ in range(2):
        triton_norm.rms_norm(x, x[0], 1e-6)
        triton_norm.add_rms_norm(x, x, x[0], 1e-6)
        triton_activation.gated_silu(x)


def afterwards(together: compilation.ParallelCompilation) -> dict[str, Any]:
    """Launch again when all is compiled."""
    with together:
        launch_all()
        skipped = not launched
    together.wait()
    num_compiled = len(compiled)
    launch_all()
    return {
        "skipped": skipped,
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
    with together.awaited():
        triton_norm.add_rms_norm(x, x, x[0], 1e-6)  # queued
        triton_activation.gated_silu(x)  # nobody knows of it
        before = list(launched)
        threading.Timer(0.1, may_go_on.set).start()
        triton_norm.rms_norm(x, x[0], 1e-6)  # under way
    compilation._compile = compile_kernel
    together.wait()
    with together.awaited():
        launch_all()
    return {"before": before, "compiled": sorted(compiled), "launched": launched}


def main() -> None:
    driver.set_active(Driver())
    compilation._use_device = lambda device: None
    compilation._MAX_THREADS = 1 if sys.argv[1] == "meanwhile" else 16
    triton.knobs.compilation.listener = lambda src, **_: compiled.append(src.name)
    together = compilation.ParallelCompilation(torch.device("cpu"))
    json.dump({"afterwards": afterwards, "meanwhile": meanwhile}[sys.argv[1]](together), sys.stdout)


if __name__ == "__main__":
    main()
