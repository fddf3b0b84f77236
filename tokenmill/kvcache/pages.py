"""Who owns which page: every page of a group is free, held by one row, or held by the prefix tree.

Knows neither tokens nor requests; how many rows read a page of the tree is counted by the tree.
"""

from __future__ import annotations

from collections.abc import Iterable

_FREE, _ROW, _TREE = range(3)


class PageGroup:
    """The pages of all layers that keep the same tokens: `num_pages` pages, numbered from 0.

    A model whose layers all attend to the whole sequence has one group. A page moves from free to a row
    (`take`), to the tree (`hand_to_tree`), to free (`give_back`), or straight back from the row.
    """

    def __init__(self, index: int, num_pages: int) -> None:
        self.index = index
        self.num_pages = num_pages
        self.free = list(range(num_pages - 1, -1, -1))  # pages that nobody owns; others only count them
        self._owners = bytearray(num_pages)

    def take(self, count: int) -> list[int]:
        """So many free pages, now owned by a row; there must be as many."""
        first = len(self.free) - count
        assert first >= 0, f"group {self.index} has {len(self.free)} free pages, not {count}"
        pages = self.free[first:][::-1]
        del self.free[first:]
        owners = self._owners
        for page in pages:
            owners[page] = _ROW
        return pages

    def hand_to_tree(self, pages: Iterable[int]) -> None:
        """The rows that own these pages leave them to the prefix tree."""
        owners = self._owners
        for page in pages:
            assert owners[page] == _ROW, f"page {page} of group {self.index} belongs to no row"
            owners[page] = _TREE

    def give_back(self, pages: Iterable[int]) -> None:
        """The owners of these pages, rows or the tree, need them no more."""
        owners, free = self._owners, self.free
        for page in pages:
            assert owners[page] != _FREE, f"page {page} of group {self.index} is free already"
            owners[page] = _FREE
            free.append(page)

    def are_shared(self, pages: Iterable[int]) -> bool:
        """Whether the prefix tree owns one of these."""
        return any(self._owners[page] == _TREE for page in pages)

    def check_invariants(self, *, row_pages: Iterable[int], tree_pages: Iterable[int]) -> None:
        """Assert that free, row and tree pages are disjoint and together are all pages."""
        places = [(_FREE, self.free), (_ROW, list(row_pages)), (_TREE, list(tree_pages))]
        seen = bytearray(self.num_pages)
        for owner, pages in places:
            for page in pages:
                assert not seen[page], f"page {page} of group {self.index} is in two places"
                assert self._owners[page] == owner, f"page {page} of group {self.index} has a wrong owner"
                seen[page] = 1
        assert all(seen), f"group {self.index} lost page {seen.find(0)}"
