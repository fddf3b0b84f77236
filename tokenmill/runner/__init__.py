"""The mill: one step of the model on one device. Its door is `messages.Runner`; `start` opens it.

On a CPU the threads of this process share its processors; `release_workers` is for those that rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.imports import quick_imports
from tokenmill.runner.early import early_compilers

if TYPE_CHECKING:
    from tokenmill.config import EngineConfig
    from tokenmill.messages import Runner

__all__ = ["release_workers", "start"]


def start(config: EngineConfig) -> Runner:
    """Load the model, size the page pool, and return a runner that is ready for its first plan."""
    compilers = early_compilers(config)
    gpu = None if config.device == "cpu" else config.base_gpu_id
    try:
        with quick_imports(gpu=gpu):
            from tokenmill.runner.runner import LocalRunner  # torch is imported here, not with the package

            return LocalRunner(config, compilers)
    except BaseException:  # nobody would compile any more
        compilers.close()
        raise


def release_workers() -> None:
    """End the workers that torch keeps for the calling thread; they come again when it computes again."""
    from tokenmill.kernels import openmp

    openmp.release_workers()
