"""The facade: match, reserve, commit, release, and the numbers that must always add up."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from tokenmill.kvcache import Cache, RowPages
from tokenmill.kvcache.cache import _MOST_PATHS
from tokenmill.kvcache.radix import ROOT

pytestmark = pytest.mark.unit


def ids(*token_ids: int) -> array[int]:
    return array("i", token_ids)


def run(cache: Cache, token_ids: Sequence[int], namespace: bytes = b"") -> RowPages:
    """A row that has computed all its tokens."""
    tokens = array("i", token_ids)
    row = cache.match(tokens.tobytes(), namespace=namespace)
    assert cache.reserve(row, len(tokens))
    cache.commit(row, tokens, num_tokens=len(tokens))
    return row


def numbers(cache: Cache) -> tuple[int, int, int]:
    return cache.num_free_pages, cache.num_cached_pages, cache.num_used_pages


def test_only_full_pages_are_remembered() -> None:
    cache = Cache(num_pages=8, page_size=4)
    row = run(cache, range(10))
    assert numbers(cache) == (5, 0, 3)
    cache.release(row)
    assert numbers(cache) == (6, 2, 0)
    assert cache.count_cached(ids(*range(12)).tobytes()) == 8
    cache.check_invariants([])


def test_a_match_gives_the_same_pages_and_leaves_one_token() -> None:
    cache = Cache(num_pages=8, page_size=4)
    pages = list(run(cache, range(12)).tables[0])
    for length, columns in [(4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)]:
        tokens = ids(*range(length)).tobytes()
        row = cache.match(tokens)
        assert row.tables[0] == pages[:columns]
        assert cache.count_cached(tokens) == 4 * columns
        cache.release(row)
    assert cache.count_cached(ids(0, 1, 2, 9, 4).tobytes()) == 0


def test_namespaces_share_nothing() -> None:
    cache = Cache(num_pages=8, page_size=2)
    tokens = ids(1, 2, 3, 4, 5).tobytes()
    cache.release(run(cache, [1, 2, 3, 4, 5], namespace=b"adapter"))
    assert cache.count_cached(tokens) == 0
    assert cache.count_cached(tokens, namespace=b"other") == 0
    assert cache.count_cached(tokens, namespace=b"adapter") == 4


def test_reserve_is_all_or_nothing() -> None:
    cache = Cache(num_pages=4, page_size=2)
    cache.release(run(cache, [1, 2, 3]))
    row = cache.match(ids(9).tobytes())
    assert cache.reserve(row, 4)
    assert cache.reserve(row, 3), "what is there already is enough"
    assert row.num_columns == 2
    before = numbers(cache)
    assert not cache.reserve(row, 10)
    assert (numbers(cache), row.num_columns) == (before, 2)
    assert cache.reserve(row, 8)
    assert numbers(cache) == (0, 0, 4)
    cache.check_invariants([row])


def test_reserve_evicts_the_longest_unused_prefix() -> None:
    cache = Cache(num_pages=4, page_size=2)
    for first in (10, 20, 30):
        cache.release(run(cache, [first, first]))
    cache.release(cache.match(ids(10, 10, 0).tobytes()))
    row = cache.match(ids(1).tobytes())
    assert cache.reserve(row, 4)
    cached = [cache.count_cached(ids(first, first, 0).tobytes()) for first in (10, 20, 30)]
    assert cached == [2, 0, 2]


def test_a_matched_prefix_is_not_evicted() -> None:
    cache = Cache(num_pages=3, page_size=2)
    cache.release(run(cache, [1, 1, 2, 2]))
    row = cache.match(ids(1, 1, 5).tobytes())
    other = cache.match(ids(9).tobytes())
    assert cache.num_available_columns == 2
    assert not cache.reserve(other, 6)
    assert cache.reserve(other, 4)
    assert not set(row.tables[0]) & set(other.tables[0])
    cache.check_invariants([row, other])


def test_commit_goes_on_where_it_stopped() -> None:
    cache = Cache(num_pages=8, page_size=2)
    tokens = ids(1, 2, 3, 4, 5, 6)
    row = cache.match(tokens.tobytes())
    cache.reserve(row, 6)
    for num_tokens, num_cached in [(1, 0), (3, 2), (2, 2), (6, 6)]:
        cache.commit(row, tokens, num_tokens=num_tokens)
        assert cache.count_cached(ids(1, 2, 3, 4, 5, 6, 7).tobytes()) == num_cached
        cache.check_invariants([row])


def test_commit_needs_the_ids() -> None:
    cache = Cache(num_pages=8, page_size=2)
    row = run(cache, [1])
    cache.reserve(row, 4)
    with pytest.raises(AssertionError, match="not known"):
        cache.commit(row, ids(1, 2, 3), num_tokens=4)


def test_what_two_rows_computed_at_once_stays_private_to_the_second() -> None:
    cache = Cache(num_pages=12, page_size=2)
    tokens = ids(1, 2, 3, 4, 5, 6)
    first, second = cache.match(tokens.tobytes()), cache.match(tokens.tobytes())
    for row in (first, second):
        assert cache.reserve(row, 6)
    cache.commit(first, tokens, num_tokens=4)
    cache.commit(second, tokens, num_tokens=6)
    assert not set(first.tables[0]) & set(second.tables[0])
    cache.check_invariants([first, second])
    # The second row went further: its last page is in the tree, below pages of the first.
    cache.commit(first, tokens, num_tokens=6)
    cache.release(first)
    cache.check_invariants([second])
    assert cache.num_available_columns == 12 - 5, "the second row's path and its duplicates stay"
    cache.release(second)
    assert numbers(cache) == (9, 3, 0)
    cache.check_invariants([])


def test_release_can_be_repeated_and_reused() -> None:
    cache = Cache(num_pages=4, page_size=2)
    row = run(cache, [1, 2, 3])
    cache.release(row)
    cache.release(row)
    assert numbers(cache) == (3, 1, 0)


def test_flush_forgets_what_no_row_uses() -> None:
    cache = Cache(num_pages=8, page_size=2)
    cache.release(run(cache, [1, 1, 2, 2, 3]))
    row = run(cache, [1, 1, 7])
    assert cache.flush() == 1
    assert cache.count_cached(ids(1, 1, 2, 2, 3).tobytes()) == 2
    cache.release(row)
    assert cache.flush() == 1
    assert numbers(cache) == (8, 0, 0)
    assert cache.flush() == 0


def test_without_prefix_caching_nothing_is_remembered() -> None:
    cache = Cache(num_pages=4, page_size=2, prefix_caching=False)
    row = run(cache, [1, 2, 3, 4])
    cache.check_invariants([row])
    assert cache.count_cached(ids(1, 2, 3).tobytes()) == 0
    cache.release(row)
    assert numbers(cache) == (4, 0, 0)


def test_groups_have_their_own_pages() -> None:
    cache = Cache(num_pages=(4, 6), page_size=2)
    assert (cache.num_pages, cache.max_columns, cache.num_available_columns) == (10, 4, 4)
    row = run(cache, [1, 2, 3])
    assert [len(table) for table in row.tables] == [2, 2]
    assert numbers(cache) == (6, 0, 4)
    cache.release(row)
    assert numbers(cache) == (8, 2, 0)
    again = cache.match(ids(1, 2, 3).tobytes())
    assert [len(table) for table in again.tables] == [1, 1]
    assert cache.reserve(again, 8)
    assert not cache.reserve(again, 10)
    cache.check_invariants([again])


@pytest.mark.parametrize("num_pages", [12, (12, 14)])
def test_random_rows_keep_the_books_in_order(num_pages: int | tuple[int, int]) -> None:
    """Pages of a prefix always are those that were filled with it; nothing leaks."""
    choice = random.Random(5)
    cache = Cache(num_pages=num_pages, page_size=2)
    choice.shuffle(cache._groups[-1].free)  # so that groups differ in the pages of a column
    rows: list[tuple[RowPages, array[int]]] = []
    filled: dict[tuple[int, int], tuple[int, ...]] = {}  # group, page -> the tokens up to its end
    for _ in range(1500):
        if rows and choice.random() < 0.5:
            row, tokens = rows[choice.randrange(len(rows))]
            if choice.random() < 0.5:
                expected = cache.num_available_columns + cache.count_released([row])
                cache.release(row)
                assert cache.num_available_columns == expected
                rows = [each for each in rows if each[0] is not row]
            elif cache.reserve(row, len(tokens)):
                first = row.num_shared
                for group, table in enumerate(row.tables):
                    for column in range(first, len(tokens) // 2):
                        filled[group, table[column]] = tuple(tokens[: 2 * column + 2])
                cache.commit(row, tokens, num_tokens=len(tokens))
        else:
            tokens = array("i", [choice.randrange(2) for _ in range(choice.randrange(1, 14))])
            row = cache.match(tokens.tobytes())
            for group, table in enumerate(row.tables):
                for column, page in enumerate(table):
                    assert filled[group, page] == tuple(tokens[: 2 * column + 2])
            rows.append((row, tokens))
        cache.check_invariants([row for row, _ in rows])
    expected = cache.num_available_columns + cache.count_released([row for row, _ in rows])
    for row, _ in rows:
        cache.release(row)
    assert cache.num_available_columns == expected
    cache.flush()
    assert cache.num_free_pages == cache.num_pages


@pytest.mark.parametrize("num_pages", [30, 400, (35, 30)])
def test_a_match_is_the_longest_whatever_was_looked_for_before(num_pages: int | tuple[int, int]) -> None:
    """Step by step through the tree, among more beginnings than paths that are remembered."""
    choice = random.Random(8)
    cache = Cache(num_pages=num_pages, page_size=2)
    choice.shuffle(cache._groups[-1].free)
    heads = [[first, second] for first in range(10) for second in range(10)]
    num_found = 0
    for _ in range(3000):
        namespace = choice.choice([b"", b"n"])
        tokens = array("i", choice.choice(heads) + [choice.randrange(2) for _ in range(choice.randrange(10))])
        tables: list[list[int]] = [[] for _ in range(1 if isinstance(num_pages, int) else len(num_pages))]
        node: int | None = ROOT
        for column in range((len(tokens) - 1) // 2):
            key = tokens[2 * column : 2 * column + 2].tobytes()
            node = cache._tree.find(node, key if column else namespace + key)
            if node is None:
                break
            for table, page in zip(tables, cache._tree.pages(node), strict=True):
                table.append(page)
        row = cache.match(tokens.tobytes(), namespace=namespace)
        assert row.tables == tuple(tables)
        assert row.num_shared == len(tables[0])
        num_found += row.num_shared
        if cache.reserve(row, len(tokens)) and choice.random() < 0.8:
            cache.commit(row, tokens, num_tokens=len(tokens))
        (cache.discard if choice.random() < 0.1 else cache.release)(row)
        assert len(cache._paths) <= _MOST_PATHS
    cache.check_invariants([])
    assert num_found > 100


def test_many_pages_are_evicted_at_once() -> None:
    cache = Cache(num_pages=6, page_size=2)
    cache.release(run(cache, [1, 2, 3, 4, 5, 6]))
    cache.release(run(cache, [7, 8, 9]))
    row = cache.match(ids(7, 8, 0).tobytes())
    assert cache.reserve(row, 10)
    assert len(set(row.tables[0])) == 5
    cache.check_invariants([row])
    assert cache.count_cached(ids(1, 2, 3).tobytes()) == 2


def test_a_path_that_was_found_before_may_have_lost_its_end() -> None:
    cache = Cache(num_pages=4, page_size=2)
    cache.release(run(cache, [1, 2, 3, 4]))
    sought = ids(1, 2, 3, 4, 0).tobytes()
    reader = cache.match(ids(1, 2, 9).tobytes())
    assert cache.count_cached(sought) == 4
    other = cache.match(ids(8).tobytes())
    assert cache.reserve(other, 6)
    assert cache.count_cached(sought) == 2
    cache.release(other)
    again = run(cache, [1, 2, 3, 4])
    row = cache.match(sought)
    assert row.tables == again.tables
    cache.check_invariants([reader, again, row])


def test_a_path_that_was_found_before_may_have_gone_and_come_again_with_other_pages() -> None:
    cache = Cache(num_pages=4, page_size=2)
    cache.release(run(cache, [1, 2, 3, 4]))
    sought = ids(1, 2, 3, 4, 0).tobytes()
    assert cache.count_cached(sought) == 4
    other = cache.match(ids(9).tobytes())
    assert cache.reserve(other, 8)
    cache.release(other)
    taken = cache.match(ids(8).tobytes())
    assert cache.reserve(taken, 2)
    again = run(cache, [1, 2, 3, 4])
    assert cache.match(sought).tables == again.tables


def test_nothing_that_was_flushed_is_kept() -> None:
    cache = Cache(num_pages=4, page_size=2)
    cache.release(run(cache, [1, 2, 3, 4]))
    assert cache.count_cached(ids(1, 2, 3, 4, 0).tobytes()) == 4
    cache.flush()
    assert not cache._paths


class CountingDict(dict[Any, Any]):
    """Counts how often it is asked for something."""

    num_asked = 0

    def get(self, *arguments: Any) -> Any:
        self.num_asked += 1
        return super().get(*arguments)


@pytest.mark.parametrize("parts_at", range(1, 101, 9))
def test_a_prefix_is_looked_for_from_where_the_last_one_parts_from_it(parts_at: int) -> None:
    """The tree is asked for its first page, and for the one that is another: not page by page."""
    cache = Cache(num_pages=100, page_size=2)
    row = run(cache, range(200))
    sought = array("i", [*range(2 * parts_at), *([-1] * 100)]).tobytes()
    cache.count_cached(array("i", range(201)).tobytes())
    asked = cache._tree._children = CountingDict(cache._tree._children)
    assert cache.count_cached(sought) == 2 * parts_at
    assert asked.num_asked == 2
    assert cache.match(sought).tables == (row.tables[0][:parts_at],)
