"""Where the model runs and in which numbers: every "auto" that depends on hardware is resolved here."""

from __future__ import annotations

import logging
import platform
from contextlib import suppress
from dataclasses import dataclass

import torch

from tokenmill.attention import BACKENDS, best_backend
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument
from tokenmill.models import ModelSpec

_log = logging.getLogger("tokenmill")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Steps are short on a CPU and its caches small, so fewer and smaller batches serve it best.
_MAX_RUNNING = {"cpu": 64, "cuda": 1024}
_MAX_STEP_TOKENS = {"cpu": 1024, "cuda": 8192}
# On a GPU the host prepares the next step while one runs; on a CPU they would share the cores.
_STEPS_IN_FLIGHT = {"cpu": 1, "cuda": 2}


@dataclass(frozen=True, slots=True)
class Placement:
    """The resolved hardware side of a configuration."""

    device: torch.device
    device_name: str
    dtype: torch.dtype
    attention_backend: str
    max_running_requests: int
    max_step_tokens: int
    steps_in_flight: int
    cuda_graphs: bool
    deterministic: bool


def place(config: EngineConfig, spec: ModelSpec) -> Placement:
    """Resolve device, dtype, attention backend and batch limits for a model."""
    device = choose_device(config)
    max_running = config.max_running_requests or _MAX_RUNNING[device.type]
    chunk = config.chunked_prefill_size
    if chunk == -1:  # no chunks: a step holds the longest prompt
        max_step_tokens = max(spec.context_length, _MAX_STEP_TOKENS[device.type])
    else:
        max_step_tokens = max(chunk or _MAX_STEP_TOKENS[device.type], max_running)
    dtype = _dtype(config, spec, device)
    attention_backend = _attention_backend(config, device, dtype)
    if config.enable_deterministic_inference and f"invariant {attention_backend}" not in BACKENDS:
        raise InvalidArgument(
            f"enable_deterministic_inference=True cannot go with attention_backend={attention_backend!r}, "
            f"the one for {dtype} on {device} here; it needs 'triton' (a GPU) or 'native' (a CPU, float32 or "
            "bfloat16, and a C compiler or the extra tokenmill[native])"
        )
    placement = Placement(
        device=device,
        device_name=_device_name(device),
        dtype=dtype,
        attention_backend=attention_backend,
        max_running_requests=max_running,
        max_step_tokens=max_step_tokens,
        steps_in_flight=config.steps_in_flight or _STEPS_IN_FLIGHT[device.type],
        # Only our kernels take their bounds from the device, so only they can be replayed.
        cuda_graphs=attention_backend == "triton" and not config.disable_cuda_graph,
        deterministic=config.enable_deterministic_inference,
    )
    _log.info("running on %s (%s) with %s", device, placement.device_name, placement)
    return placement


def choose_device(config: EngineConfig) -> torch.device:
    """The device of a configuration, without looking at the model."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidArgument("device='cuda', but torch sees no CUDA device; use device='cpu' or 'auto'")
    count = torch.cuda.device_count()
    if config.base_gpu_id >= count:
        raise InvalidArgument(
            f"base_gpu_id={config.base_gpu_id}, but there are {count} GPUs (0 to {count - 1})"
        )
    return torch.device("cuda", config.base_gpu_id)


def wake(device: torch.device) -> None:
    """Use a GPU with the current thread: what is used for the first time has to be loaded, and takes a while.

    First the driver, cuBLAS and Triton, then torch's own operators that steps launch, for up to 50 ms each.
    Most of it is not Python, so it goes well with other work in another thread.
    """
    torch.cuda.set_device(device)
    a = torch.zeros((16, 16), dtype=torch.bfloat16, device=device)
    with suppress(RuntimeError):  # where only deterministic operators are allowed, it may be refused
        torch.mm(a, a)
    from triton.runtime.driver import driver

    driver.active.get_current_target()
    table = torch.zeros((16, 16), dtype=torch.int32, device=device)
    numbers = torch.arange(16, device=device)
    places = table[numbers, numbers // 16].to(torch.int64) * 16 + numbers % 16
    torch.cat((torch.where(numbers < 0, numbers, places), numbers))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    stored = _DTYPES.get(spec.dtype, torch.float32)
    if device.type == "cuda":
        return torch.bfloat16 if stored == torch.float32 else stored
    if stored == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
        return stored
    return torch.float32  # without 16-bit instructions it is as fast, and more exact


def _attention_backend(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> str:
    best, wanted = best_backend(device, dtype), config.attention_backend
    if wanted == "auto":
        return best
    if wanted == "triton" and device.type == "cpu":
        raise InvalidArgument("attention_backend='triton' needs a GPU; use 'native' or 'torch' on a CPU")
    if wanted == "native" and best != "native":
        raise InvalidArgument(
            f"attention_backend='native' needs a CPU (here: {device}), float32 or bfloat16 (here: {dtype}), "
            "and a C compiler: install one, or the extra tokenmill[native]; or use 'torch'"
        )
    return wanted
