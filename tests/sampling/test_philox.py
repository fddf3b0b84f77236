"""The generator against the published vectors, and the numbers made of it."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from tokenmill.sampling.philox import philox4x32, uniforms

pytestmark = pytest.mark.cpu

# Known answers of the Random123 library: counter, key, output.
VECTORS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = [torch.tensor([word]) for word in (*counter, *key)]
    found = philox4x32((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    assert [int(word) for word in found] == expected


def test_uniforms_are_made_of_the_first_two_words_of_seed_and_position() -> None:
    zero = uniforms(torch.tensor([0]), torch.tensor([0]))
    assert float(zero) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_every_bit_of_seed_and_position_counts() -> None:
    bits = torch.tensor([0] + [1 << bit for bit in range(63)] + [-(2**63)])
    by_seed = uniforms(bits, torch.full_like(bits, 5))
    by_position = uniforms(torch.full_like(bits, 5), bits)
    assert len(by_seed.unique()) == len(bits)
    assert len(by_position.unique()) == len(bits)


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_numbers_are_uniform_and_do_not_follow_each_other(axis: str) -> None:
    count = torch.arange(50_000)
    fixed = torch.full_like(count, -7)
    numbers = uniforms(count, fixed) if axis == "seed" else uniforms(fixed, count)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > 1e-4
    pairs = (numbers[:-1] * 10).long() * 10 + (numbers[1:] * 10).long()
    assert stats.chisquare(torch.bincount(pairs, minlength=100).numpy()).pvalue > 1e-4
