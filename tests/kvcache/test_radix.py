"""The prefix tree: pins protect paths, the rest is evicted leaves first, the longest unused first."""

from __future__ import annotations

import random

import pytest

from tokenmill.kvcache.radix import ROOT, PrefixTree

pytestmark = pytest.mark.unit


def grow(tree: PrefixTree, path: str, first_page: int) -> int:
    """Insert the missing nodes of a path, one letter per node; returns the last node, pinned once."""
    pages = [(first_page + depth,) for depth in range(len(path))]
    return tree.extend(ROOT, [letter.encode() for letter in path], pages)[0]


def test_only_missing_nodes_are_added_and_the_pin_moves_to_the_last() -> None:
    tree = PrefixTree()
    keys = [letter.encode() for letter in "abc"]
    b, num_found = tree.extend(ROOT, keys[:2], [(0,), (1,)])
    assert num_found == 0
    c, num_found = tree.extend(ROOT, keys, [(10,), (11,), (12,)])
    assert num_found == 2
    assert tree.parent(c) == b
    assert (tree.pages(b), tree.pages(c)) == ((1,), (12,))
    tree.check_invariants([b, c])
    tree.unpin(b)
    assert tree.num_unpinned == 0
    again, num_found = tree.extend(ROOT, keys, [(20,), (21,), (22,)])
    assert (again, num_found) == (c, 3)
    tree.check_invariants([c, c])
    tree.unpin(c)
    tree.unpin(c)
    tree.check_invariants([])


def test_find_follows_the_path() -> None:
    tree = PrefixTree()
    grow(tree, "ab", 0)
    a = tree.find(ROOT, b"a")
    assert a is not None
    assert tree.pages(a) == (0,)
    assert tree.find(ROOT, b"b") is None
    b = tree.find(a, b"b")
    assert b is not None
    assert tree.pages(b) == (1,)
    assert len(tree) == 2


def test_a_pin_protects_everything_above() -> None:
    tree = PrefixTree()
    node = grow(tree, "abc", 0)
    assert tree.num_unpinned == 0
    tree.check_invariants([node])
    tree.pin(node)
    tree.unpin(node)
    assert tree.num_unpinned == 0
    tree.unpin(node)
    assert tree.num_unpinned == 3
    tree.check_invariants([])
    tree.pin(node)
    assert tree.num_unpinned == 0


def test_eviction_takes_leaves_first_and_spares_pinned_paths() -> None:
    tree = PrefixTree()
    kept = grow(tree, "ax", 0)
    tree.unpin(grow(tree, "abc", 10))
    assert tree.num_unpinned == 2
    assert tree.evict(2) == [(12,), (11,)]
    assert tree.num_unpinned == 0
    tree.check_invariants([kept])
    tree.unpin(kept)
    assert tree.evict(2) == [(1,), (0,)]
    assert len(tree) == 0


def test_the_longest_unused_goes_first() -> None:
    tree = PrefixTree()
    for index, letter in enumerate("abc"):
        tree.unpin(grow(tree, letter, index))
    a = tree.find(ROOT, b"a")
    assert a is not None
    tree.pin(a)
    tree.unpin(a)
    assert tree.evict(3) == [(1,), (2,), (0,)]


def test_a_node_is_new_when_it_comes_back() -> None:
    tree = PrefixTree()
    tree.unpin(grow(tree, "ab", 0))
    tree.evict(1)
    tree.evict(1)
    node = grow(tree, "zb", 5)
    assert tree.find(ROOT, b"a") is None
    tree.check_invariants([node])
    tree.unpin(node)
    assert tree.evict(2) == [(6,), (5,)]


def test_random_use_evicts_like_a_plain_list_does() -> None:
    """The model: all paths with the time of their last use; evict the oldest that is no prefix of another."""
    choice = random.Random(3)
    tree, last_used, clock, pages = PrefixTree(), dict[str, int](), 0, dict[str, int]()
    for _ in range(2000):
        if choice.random() < 0.6 or not last_used:
            path = "".join(choice.choice("ab") for _ in range(choice.randrange(1, 7)))
            before = {path[: depth + 1] for depth in range(len(path))} - set(pages)
            pages |= {prefix: clock * 10 + len(prefix) - 1 for prefix in before}
            tree.unpin(grow(tree, path, clock * 10))
            clock += 1
            last_used |= {path[: depth + 1]: clock for depth in range(len(path))}
        else:
            leaves = [path for path in last_used if not {path + "a", path + "b"} & set(last_used)]
            oldest = min(last_used[leaf] for leaf in leaves)
            ((evicted,),) = tree.evict(1)
            victim = next(path for path in leaves if pages[path] == evicted)
            assert last_used[victim] == oldest
            del last_used[victim], pages[victim]
        assert len(tree) == tree.num_unpinned == len(last_used)
    tree.check_invariants([])


def test_the_heap_stays_in_proportion_to_the_tree() -> None:
    tree = PrefixTree()
    nodes = [grow(tree, letter, index) for index, letter in enumerate("abcdefgh")]
    for _ in range(500):
        for node in nodes:
            tree.unpin(node)
            tree.pin(node)
    assert len(tree._leaves) <= 64 + 2 * len(tree) + 1
    for node in nodes:
        tree.unpin(node)
    assert tree.evict(len(nodes)) == [(index,) for index in range(8)]
