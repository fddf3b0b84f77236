"""Random numbers that are a function of (seed, position) and of nothing else: Philox4x32-10.

Owns the generator in torch arithmetic; its Triton twin is `tl.philox`, and both are held to the same vectors.
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10 of Salmon et al. (2011). All words are int64 tensors that hold unsigned 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniforms(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) per row, float64 [R], a multiple of 2**-53. Key = seed, counter = position."""
    zero = torch.zeros_like(positions_R)
    counter = (positions_R & _WORD, (positions_R >> 32) & _WORD, zero, zero)
    first, second, _, _ = philox4x32(counter, (seeds_R & _WORD, (seeds_R >> 32) & _WORD))
    return ((first >> 5) * 2**26 + (second >> 6)).to(torch.float64) * 2.0**-53


def _multiply(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in two steps because int64 has 63 bits for it."""
    upper = word * (factor >> 16)
    lower = word * (factor & 0xFFFF) + ((upper & 0xFFFF) << 16)
    return (upper >> 16) + (lower >> 32), lower & _WORD
