"""Allowed tokens as bits: the torch reference and the choice of the kernel.

Shapes: R rows of logits, V vocabulary, M masked rows, W words of 32 bits.
"""

from __future__ import annotations

import torch


def apply_masks(logits_RV: torch.Tensor, rows_M: torch.Tensor, bits_MW: torch.Tensor) -> torch.Tensor:
    """Set the logits of forbidden tokens to -inf, in place; returns `logits_RV`.

    Bit i of word w of `bits_MW` (int32) allows token 32 * w + i in row `rows_M` (int64, no row twice); what
    lies past the last word is forbidden. Nothing is synchronised on CUDA.
    """
    if logits_RV.is_cuda:
        from tokenmill.kernels import triton_masks

        return triton_masks.apply_masks(logits_RV, rows_M, bits_MW)
    return apply_masks_torch(logits_RV, rows_M, bits_MW)


def apply_host_masks(logits_RV: torch.Tensor, place_3: torch.Tensor) -> torch.Tensor:
    """As `apply_masks` for the first rows, with masks that may stay in the memory of the host. On CUDA only.

    `place_3` (int64, on the device of the logits) says where: the address of the first row's words, which
    the device must be able to read, the words from one row to the next, and the number of rows. It is read
    when the kernel runs, so a captured one follows it.
    """
    from tokenmill.kernels import triton_masks

    return triton_masks.apply_host_masks(logits_RV, place_3)


def apply_masks_torch(logits_RV: torch.Tensor, rows_M: torch.Tensor, bits_MW: torch.Tensor) -> torch.Tensor:
    """The reference of `apply_masks`, on any device."""
    vocab_size = logits_RV.shape[1]
    places = torch.arange(32, dtype=torch.int32, device=bits_MW.device)
    allowed_MV = ((bits_MW[:, :, None] >> places) & 1).flatten(1).to(torch.bool)[:, :vocab_size]
    logits_MV = logits_RV[rows_M]
    logits_MV[:, : allowed_MV.shape[1]].masked_fill_(~allowed_MV, -torch.inf)
    logits_MV[:, allowed_MV.shape[1] :] = -torch.inf
    logits_RV[rows_M] = logits_MV
    return logits_RV
