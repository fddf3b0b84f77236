"""Waiting requests as a tree of the prefixes that they share, and the walk through it that is best for all.

Owns no pages and no cache: it looks at prompts only. The policy `lpm` orders the queue with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tokenmill.core.request import RequestState

_NO_END = 2**62  # deeper than any branch; also longer than any known limit


@dataclass(frozen=True, slots=True)
class Leaf:
    """One request, with what decides its place."""

    request: RequestState
    longest: int  # new tokens that it may write
    num_cached: int  # tokens of its prompt that are cached

    @property
    def depth(self) -> int:
        """Deeper than any branch."""
        return _NO_END


@dataclass(slots=True)
class Branch:
    """Requests with the same beginning."""

    depth: int  # pages of the beginning
    longest: int = 0  # the most new tokens that one of them may write
    num_cached: int = 0  # the most cached tokens that one of them has
    children: list[Branch | Leaf] = field(default_factory=list)

    def adopt(self, child: Branch | Leaf) -> None:
        """Take in a branch whose own children are complete."""
        self.children.append(child)
        self.longest = max(self.longest, child.longest)
        self.num_cached = max(self.num_cached, child.num_cached)


def leaf_of(request: RequestState, num_cached: int) -> Leaf:
    """A request as a leaf. One whose caller named no limit may write longest of all."""
    limit = request.request.max_new_tokens
    longest = _NO_END if request.request.params.max_new_tokens is None else limit
    return Leaf(request, longest, num_cached)


def longest_first(leaves: list[Leaf], *, page_size: int) -> list[RequestState]:
    """Depth first through the tree of these leaves, which stand in the order of their namespaces and ids.

    At every fork the branch with the longest output goes first, of equals that with the most cached tokens.
    """
    root = Branch(0)
    path: list[Branch | Leaf] = [root]  # to the newest leaf; all but the root miss in their parent yet
    for before, leaf in zip([None, *leaves], leaves, strict=False):
        _fold(path, 0 if before is None else _shared_pages(before.request, leaf.request, page_size))
        path.append(leaf)
    _fold(path, 0)
    return _walk(root)


def _fold(path: list[Branch | Leaf], depth: int) -> None:
    """Complete all branches of the path that are deeper; its last one then has this depth."""
    while path[-1].depth > depth:
        child = path.pop()
        if path[-1].depth < depth:
            path.append(Branch(depth))
        parent = path[-1]
        assert isinstance(parent, Branch)
        parent.adopt(child)


def _shared_pages(one: RequestState, other: RequestState, page_size: int) -> int:
    """Full pages at the beginning of both prompts that are the same."""
    if one.request.cache_namespace != other.request.cache_namespace:
        return 0
    first, second = one.request.prompt_ids, other.request.prompt_ids
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    same = int(np.argmax(differs)) if differs.any() else length
    return same // page_size


def _walk(root: Branch) -> list[RequestState]:
    """The requests of all leaves. Without recursion: prompts that grow page by page make a deep tree."""
    found: list[RequestState] = []
    stack: list[Branch | Leaf] = [root]
    while stack:
        place = stack.pop()
        if isinstance(place, Leaf):
            found.append(place.request)
        else:
            # The stack gives back the last first; the sort is stable, so equals stay in the order of ids.
            stack.extend(reversed(sorted(place.children, key=lambda each: (-each.longest, -each.num_cached))))
    return found
