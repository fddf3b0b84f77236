"""The paged cache on the GPU: what the attention kernels read, and the kernel that writes it.

Letters as in `attention/base.py`; caches are [N, B, K, D] with any strides but a contiguous last dimension.
"""

# Triton rewrites these functions: their arguments are pointers and scalars of its own language.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from tokenmill.kernels.launching import given_processors
from tokenmill.kernels.sizes import next_power_of_2

LOG2_E = math.log2(math.e)  # weights are powers of two
ROWS_PER_SEARCH = 128  # rows a prefill program looks at, at once, to find its own
COPY_ALIGNMENT = 16  # bytes; of addresses and strides that a tile copy by descriptor can take


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The keys and values of some rows: caches, the rows' pages (int32), their lengths (int32)."""

    key_cache_NBKD: torch.Tensor
    value_cache_NBKD: torch.Tensor  # same strides as the keys
    page_table_RP: torch.Tensor
    lengths_R: torch.Tensor


def num_processors(device: torch.device) -> int:
    """Multiprocessors that there are for what is launched; a few where only an interpreter runs kernels."""
    return given_processors() or _all_processors(device)


@cache
def _all_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Whether `hopper_*.py` can be imported and used: a Hopper GPU, and the Gluon that they are written in.

    Gluon is another one in each Triton, and GPUs of other makers may give the same capability.
    """
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and triton.__version__.split(".")[:2] == ["3", "6"]
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def block_of(size: int) -> int:
    """The block that holds `size` numbers, and is large enough for a tensor core."""
    return max(16, next_power_of_2(size))


def store(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    *,
    slots_T: torch.Tensor,
    key_cache_NBKD: torch.Tensor,
    value_cache_NBKD: torch.Tensor,
) -> None:
    """Write token t's keys and values to slot `slots_T[t]` (int64, page * B + offset) of both caches."""
    num_tokens, num_heads, head_dim = k_TKD.shape
    page_size = key_cache_NBKD.shape[1]
    _store_kernel[(num_tokens,)](
        k_TKD,
        v_TKD,
        slots_T,
        key_cache_NBKD,
        value_cache_NBKD,
        k_TKD.stride(0),
        k_TKD.stride(1),
        v_TKD.stride(0),
        v_TKD.stride(1),
        *key_cache_NBKD.stride()[:3],
        PAGE_SIZE=page_size,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=next_power_of_2(num_heads),
        BLOCK_DIM=next_power_of_2(head_dim),
    )


# Slots are a slice of a step's tensor, and their address changes from step to step: compiling one variant for
# each alignment would stall the engine.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_kernel(
    k,
    v,
    slots,
    key_cache,
    value_cache,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_page,
    stride_token,
    stride_head,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    keep = (heads < NUM_HEADS) & (columns < HEAD_DIM)
    slot = tl.load(slots + token)
    target = (slot // PAGE_SIZE) * stride_page + (slot % PAGE_SIZE) * stride_token
    target = target + heads * stride_head + columns
    keys = tl.load(k + token * stride_kt + heads * stride_kh + columns, mask=keep)
    values = tl.load(v + token * stride_vt + heads * stride_vh + columns, mask=keep)
    tl.store(key_cache + target, keys, mask=keep)
    tl.store(value_cache + target, values, mask=keep)
