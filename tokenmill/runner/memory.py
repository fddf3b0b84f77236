"""How many pages the pool gets: measured on the device, not guessed, unless the user says a number.

And memory that goes back to the system.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from dataclasses import dataclass

import torch

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument
from tokenmill.kvcache.pool import PagePool
from tokenmill.models import Model, ModelSpec
from tokenmill.runner.executor import Executor, layer_shapes
from tokenmill.runner.hardware import Placement

_log = logging.getLogger("tokenmill")
# What stays free for the allocator's fragmentation and for others on the same GPU.
_GUARD_SHARE = 0.08
# What may be taken for later needs leaves so much.
_LEAST_SHARE = 0.04
# A pool on a CPU takes at most this share of the free memory; untouched pages cost nothing.
_CPU_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The pool as it was built."""

    num_pages: int
    num_bytes: int


def return_freed() -> None:
    """Give the system what was freed: glibc keeps blocks, even as large as weights, for what may come."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
        if trim is not None:
            trim(0)


def build_executor(
    model: Model, spec: ModelSpec, *, step_bytes: int, config: EngineConfig, placement: Placement
) -> tuple[Executor, PoolSize]:
    """Give the pool what a full step leaves (or what the user asked for)."""
    num_pages = _num_pages(spec, step_bytes, config=config, placement=placement)
    pool = PagePool(
        layer_shapes(spec.attention),
        # One page more than the books know of: padding rows of a step write there.
        num_pages=num_pages + 1,
        page_size=config.page_size,
        dtype=placement.dtype,
        device=placement.device,
    )
    _log.info(
        "pool of %d pages, %d tokens, %.2f GB", num_pages, num_pages * config.page_size, pool.num_bytes / 1e9
    )
    executor = Executor(
        model,
        spec.attention,
        backend=placement.attention_backend,
        pool=pool,
        deterministic=placement.deterministic,
    )
    return executor, PoolSize(num_pages, pool.num_bytes)


def _num_pages(spec: ModelSpec, step_bytes: int, *, config: EngineConfig, placement: Placement) -> int:
    page_bytes = config.page_size * sum(
        layer.bytes_per_token(placement.dtype) for layer in layer_shapes(spec.attention)
    )
    if config.max_total_tokens is not None:
        num_pages = -(-config.max_total_tokens // config.page_size)
    else:
        pages_per_row = -(-spec.context_length // config.page_size)
        useful = placement.max_running_requests * pages_per_row
        num_pages = min(useful, _free_bytes(step_bytes, config, placement) // page_bytes)
    if num_pages < 1:
        raise InvalidArgument(
            f"no memory is left for keys and values on {placement.device}: a page of "
            f"{config.page_size} tokens takes {page_bytes} bytes; use a smaller model or "
            "chunked_prefill_size, or free the device"
        )
    return num_pages


def _free_bytes(step_bytes: int, config: EngineConfig, placement: Placement) -> int:
    if placement.device.type == "cpu":
        share = config.mem_fraction_static or _CPU_SHARE
        return int(share * _free_host_bytes())
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(placement.device)
    if config.mem_fraction_static is not None:
        return int(config.mem_fraction_static * total) - (total - free) - step_bytes
    # A share of what is free, not of all: a second engine on the device has little to begin with.
    return int((1 - _GUARD_SHARE) * free) - step_bytes


def _free_host_bytes() -> int:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return page_bytes * os.sysconf("SC_AVPHYS_PAGES")
    return page_bytes * os.sysconf("SC_PHYS_PAGES") // 2  # macOS does not say what is free


def has_room_to_spare(device: torch.device) -> bool:
    """Whether memory may be taken for what steps may need some time."""
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    return free > _LEAST_SHARE * total
