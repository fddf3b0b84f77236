"""How many pages the pool gets: measured on the device, not guessed, unless the user says a number."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from tokenmill.attention.base import StepLayout
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument
from tokenmill.kvcache.pool import PagePool
from tokenmill.models import Model, ModelSpec
from tokenmill.runner.executor import Executor, layer_shapes
from tokenmill.runner.hardware import Placement

_log = logging.getLogger("tokenmill")
# What stays free for the allocator's fragmentation and for others on the same GPU.
_GUARD_SHARE = 0.08
# A pool on a CPU takes at most this share of the free memory; untouched pages cost nothing.
_CPU_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The pool as it was built."""

    num_pages: int
    num_bytes: int


def build_executor(
    model: Model, spec: ModelSpec, *, config: EngineConfig, placement: Placement
) -> tuple[Executor, PoolSize]:
    """Measure what a full step needs, then give the pool what is left (or what the user asked for)."""
    step_bytes = 0
    if placement.device.type == "cuda":
        step_bytes = _measure_step(model, spec, config=config, placement=placement)
    num_pages = _num_pages(spec, step_bytes, config=config, placement=placement)
    # One page more than the books know of: padding rows of a step write there.
    pool = _pool(spec, num_pages + 1, config=config, placement=placement)
    _log.info(
        "pool of %d pages, %d tokens, %.2f GB", num_pages, num_pages * config.page_size, pool.num_bytes / 1e9
    )
    executor = Executor(model, spec.attention, backend=placement.attention_backend, pool=pool)
    return executor, PoolSize(num_pages, pool.num_bytes)


def _pool(spec: ModelSpec, num_pages: int, *, config: EngineConfig, placement: Placement) -> PagePool:
    return PagePool(
        layer_shapes(spec.attention),
        num_pages=num_pages,
        page_size=config.page_size,
        dtype=placement.dtype,
        device=placement.device,
    )


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
    free, total = torch.cuda.mem_get_info(placement.device)
    if config.mem_fraction_static is not None:
        return int(config.mem_fraction_static * total) - (total - free) - step_bytes
    return free - step_bytes - int(_GUARD_SHARE * total)


def _free_host_bytes() -> int:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return page_bytes * os.sysconf("SC_AVPHYS_PAGES")
    return page_bytes * os.sysconf("SC_PHYS_PAGES") // 2  # macOS does not say what is free


def _measure_step(model: Model, spec: ModelSpec, *, config: EngineConfig, placement: Placement) -> int:
    """Peak bytes of the largest step beyond the weights; compiles the prefill kernels on the way."""
    device = placement.device
    pool = _pool(spec, 1, config=config, placement=placement)
    executor = Executor(model, spec.attention, backend=placement.attention_backend, pool=pool)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    layout = _full_prefill(spec, config=config, placement=placement)
    token_ids = torch.zeros(placement.max_step_tokens, dtype=torch.int64, device=device)
    hidden = executor.forward(token_ids, layout)
    logits = executor.logits(hidden[: placement.max_running_requests])
    logits.float()  # sampling widens them
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del hidden, logits, pool, executor
    torch.cuda.empty_cache()
    return peak


def _full_prefill(spec: ModelSpec, *, config: EngineConfig, placement: Placement) -> StepLayout:
    """Prompts that fill a step; all of them read and write page 0."""
    device, tokens = placement.device, placement.max_step_tokens
    longest = min(spec.context_length, tokens)
    lengths = [longest] * (tokens // longest) + [tokens % longest] * bool(tokens % longest)
    groups = 1 + max(layer.group for layer in spec.attention)
    columns = -(-longest // config.page_size)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return StepLayout(
        positions_T=torch.cat([torch.arange(length) for length in lengths]).to(device),
        slot_mapping_T=(torch.zeros(tokens, dtype=torch.int64, device=device),) * groups,
        page_table_RP=(torch.zeros((len(lengths), columns), dtype=torch.int32, device=device),) * groups,
        query_starts=starts.to(device),
        lengths_R=torch.tensor(lengths, dtype=torch.int32, device=device),
        num_decodes=0,
        host_query_lengths=lengths,
        host_lengths=lengths,
    )
