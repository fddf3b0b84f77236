"""How many prompt tokens of many requests the prefix cache will serve: computed, with nothing run.

Follows the rules of `kvcache`: prefixes are shared in whole pages, within a namespace; the last token of a
prompt is always computed, and so is what something is to be shown of; what was not used for longest goes
first. Tokens to come are not known.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenmill.messages import LongArray, Request

_Hashes = NDArray[np.uint64]


def cached_tokens(requests: Sequence[Request], *, page_size: int, pool_tokens: int) -> LongArray:
    """[requests] Tokens of each prompt that are there when it starts, if they start in this order.

    The cache is taken to be empty at first, and to hold the newest `pool_tokens` tokens that were computed.
    """
    num_pages = np.array([len(request.prompt_ids) // page_size for request in requests], dtype=np.int64)
    if not num_pages.sum():
        return np.zeros(len(requests), dtype=np.int64)
    rows = np.repeat(np.arange(len(requests)), num_pages)
    prefixes = _prefix_hashes(requests, num_pages, page_size)
    before = _last_row_with(prefixes, rows)
    usable = np.array([request.most_cached for request in requests], dtype=np.int64) // page_size
    found = _leading(before >= 0, num_pages, usable)
    outputs = np.array([request.max_new_tokens for request in requests], dtype=np.int64)
    capacity = pool_tokens // page_size
    if int(np.sum(num_pages - found + 1 + outputs // page_size)) > capacity:
        found = _with_evictions(prefixes, num_pages, usable, outputs // page_size, capacity - 1)
    return found * page_size


def _with_evictions(
    prefixes: _Hashes, num_pages: LongArray, usable: LongArray, own: LongArray, capacity: int
) -> LongArray:
    """[requests] Pages found at each start, if the pool holds so many and the longest unused make way.

    `own` are the pages that each request fills with its output.
    """
    pool: OrderedDict[int, None] = OrderedDict()  # the longest unused first
    found = []
    ends = np.cumsum(num_pages)
    columns = zip((ends - num_pages).tolist(), ends.tolist(), usable.tolist(), own.tolist(), strict=True)
    fresh = itertools.count(-1, -1)  # names of pages that nobody looks for
    for start, end, most, num_own in columns:
        pages = prefixes[start:end].tolist()
        there = next((place for place, page in enumerate(pages) if page not in pool), len(pages))
        found.append(max(0, min(there, most)))
        # The end of a prefix makes way before its beginning, so the beginning counts as used later.
        for page in [*itertools.islice(fresh, num_own), *reversed(pages)]:
            pool[page] = None
            pool.move_to_end(page)
        while len(pool) > capacity:
            pool.popitem(last=False)
    return np.array(found, dtype=np.int64)


def _prefix_hashes(requests: Sequence[Request], num_pages: LongArray, page_size: int) -> _Hashes:
    """[pages of all] What stands for each full page of each prompt with everything before it."""
    draw = np.random.default_rng(5)
    most = int(num_pages.max())
    in_page, of_page = (
        draw.integers(2**64, size=size, dtype=np.uint64) | np.uint64(1) for size in (page_size, most)
    )
    ids = [each.prompt_ids[: count * page_size] for each, count in zip(requests, num_pages, strict=True)]
    pages = np.concatenate(ids).astype(np.uint64).reshape(-1, page_size)
    contents = _mixed((pages + np.uint64(1)) @ in_page)
    places = np.arange(len(contents)) - np.repeat(np.cumsum(num_pages) - num_pages, num_pages)
    sums = np.cumsum(contents * of_page[places], dtype=np.uint64)
    starts = np.cumsum(num_pages) - num_pages
    before = np.concatenate([np.zeros(1, dtype=np.uint64), sums])[starts]
    names = _namespaces(requests)
    return _mixed(sums - np.repeat(before, num_pages) + np.repeat(names, num_pages))


def _namespaces(requests: Sequence[Request]) -> _Hashes:
    """[requests] A number for the namespace of each."""
    numbers: dict[bytes, int] = {}
    found = [numbers.setdefault(request.cache_namespace, len(numbers)) for request in requests]
    return _mixed(np.array(found, dtype=np.uint64))


def _mixed(numbers: _Hashes) -> _Hashes:
    """A bijection of 64-bit numbers without visible pattern (the finalizer of SplitMix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _last_row_with(prefixes: _Hashes, rows: LongArray) -> LongArray:
    """[pages] The last row before its own that has the same prefix; -1: none has."""
    order = np.argsort(prefixes, kind="stable")  # equal ones stay in the order of their rows
    is_same = prefixes[order][1:] == prefixes[order][:-1]
    before = np.full(len(rows), -1, dtype=np.int64)
    before[order[1:]] = np.where(is_same, rows[order[:-1]], -1)
    return before


def _leading(is_there: NDArray[np.bool_], num_pages: LongArray, usable: LongArray) -> LongArray:
    """[rows] How many pages of each row are there from its first on, at most `usable`."""
    starts = np.cumsum(num_pages) - num_pages
    places = np.arange(len(is_there)) - np.repeat(starts, num_pages)
    found = num_pages.copy()
    np.minimum.at(found, np.repeat(np.arange(len(num_pages)), num_pages)[~is_there], places[~is_there])
    leading: LongArray = np.minimum(found, np.maximum(usable, 0))
    return leading
