"""Numbers of tiles and sizes of blocks, reckoned on the host.

Triton has functions for both, which also work inside kernels; a call of one takes several microseconds, and
launching a step takes hundreds.
"""

from __future__ import annotations


def ceil_div(number: int, size: int) -> int:
    """How many pieces of a size hold so many."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
