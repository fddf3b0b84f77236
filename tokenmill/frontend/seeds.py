"""The seeds of samples, made from the seed of a prompt."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

_64_BITS = 2**64 - 1


class Seeds:
    """Gives samples their seeds. Thread-safe."""

    def __init__(self, random_seed: int | None) -> None:
        """`random_seed` decides the seeds of prompts that bring none; None: drawn anew in every process."""
        self._random = random.Random(None if random_seed is None else random_seed & _64_BITS)
        self._lock = threading.Lock()

    def of(self, given: Iterable[int | None], n: int) -> list[int]:
        """A seed for each sample of each prompt, unsigned 64 bit; those not given are drawn, in order.

        One is drawn for each sample, needed or not: a seed of one prompt changes nothing for those after it.
        """
        with self._lock:
            drawn = [(seed, sample, self._random.getrandbits(64)) for seed in given for sample in range(n)]
        return [
            random_seed if seed is None else sample_seed(seed, sample) for seed, sample, random_seed in drawn
        ]


def sample_seed(seed: int, sample: int) -> int:
    """The seed of the j-th sample: the first takes the seed as it is, the others a mix of both."""
    return seed & _64_BITS if sample == 0 else _scramble(_scramble(seed & _64_BITS) ^ sample)


def _scramble(number: int) -> int:
    """A bijection of 64-bit numbers without visible pattern (the finalizer of SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _64_BITS
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return number ^ (number >> 31)
