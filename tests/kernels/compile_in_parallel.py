"""Launch kernels on CPU tensors with a driver that only pretends, and print as JSON what became of them.

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
    x = torch.zeros(4, 256, dtype=torch.bfloat16)
    for _ in range(2):
        triton_norm.rms_norm(x, x[0], 1e-6)
        triton_norm.add_rms_norm(x, x, x[0], 1e-6)
        triton_activation.gated_silu(x)


def main() -> None:
    compiled = []
    driver.set_active(Driver())
    compilation._use_device = lambda device: None
    triton.knobs.compilation.listener = lambda src, **_: compiled.append(src.name)
    together = compilation.ParallelCompilation(torch.device("cpu"))
    with together:
        launch_all()
        skipped = not launched
    together.wait()
    num_compiled = len(compiled)
    launch_all()
    json.dump(
        {
            "skipped": skipped,
            "kernels": together.num_kernels,
            "compiled": sorted(compiled[:num_compiled]),
            "compiled again": len(compiled) - num_compiled,
            "launched": launched,
            "threads": sorted(compiling_threads),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
