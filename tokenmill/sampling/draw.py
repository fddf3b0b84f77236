"""The two calls of the runner, and the choice between the Triton kernels and the torch path."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from tokenmill.sampling import torch_draw
from tokenmill.sampling.columns import Draw, SamplingColumns, SamplingNeeds


def sample(logits_RV: torch.Tensor, columns: SamplingColumns, needs: SamplingNeeds) -> Draw:
    """Draw one token per row.

    `logits_RV` is float32, bfloat16 or float16 and is only read. A draw depends on the row's logits and
    parameters, its seed and its position: never on the other rows, bit for bit. Never returns a token
    that was filtered out or whose logit is -inf; a row with a NaN, or where all are -inf, draws nothing.
    On CUDA with Triton nothing is synchronised and the launches can be captured in a graph.
    """
    kernels = _triton_kernels() if logits_RV.is_cuda else None
    if kernels is None:
        return torch_draw.sample(logits_RV, columns, needs)
    return Draw(*kernels.sample(logits_RV, columns, filters=needs.random and needs.filters))


def mask_stops(logits_RV: torch.Tensor, stop_ids_RK: torch.Tensor, masked_R: torch.Tensor) -> torch.Tensor:
    """Set the stop ids (int32 [R, K], padded by -1) of rows where `masked_R` is True to -inf, in place.

    Ids outside the vocabulary are ignored. Nothing is synchronised. Returns `logits_RV`.
    """
    valid_RK = (stop_ids_RK >= 0) & (stop_ids_RK < logits_RV.shape[1]) & masked_R[:, None]
    # Entries that hide nothing write min(logit, +inf) to token 0: no branch, no order of writes to rely on.
    ids_RK = stop_ids_RK.masked_fill(~valid_RK, 0).to(torch.int64)
    ceilings_RK = logits_RV.new_full(valid_RK.shape, torch.inf).masked_fill_(valid_RK, -torch.inf)
    return logits_RV.scatter_reduce_(1, ids_RK, ceilings_RK, "amin", include_self=True)


@cache
def _triton_kernels() -> ModuleType | None:
    """The kernels, or None where Triton is not installed."""
    try:
        from tokenmill.kernels import triton_sampling
    except ImportError:
        return None
    return triton_sampling
