"""The facade of the books that the scheduler uses: match, reserve, commit, release.

Rows ask for columns (one page in every group); which page that is, what may be evicted for it, and which
prefixes are remembered is decided here. Tensors and requests are unknown here.

        column      0      1      2      3      4
                 ┌──────┬──────┬──────┬──────┬──────┐
        a row's  │ tree │ tree │ dup. │ own  │ own  │
                 └──────┴──────┴──────┴──────┴──────┘
                 └── num_shared ─────┘└── private ──┘
    tree: the row reads a page of the tree (matched, or committed by itself)
    dup.: the tree already had these tokens from another row; the row's own page stays with the row
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from tokenmill.kvcache.pages import PageGroup
from tokenmill.kvcache.radix import ROOT, Edge, PrefixTree

_BYTES_PER_ID = 4
# Prefixes that are looked for in turns, as those of a shuffled job.
_MOST_PATHS = 64


@dataclass(slots=True, eq=False)
class RowPages:
    """The pages of one running row. Written by `Cache` only; others read `tables` and `num_shared`."""

    namespace: bytes
    tables: tuple[list[int], ...]  # per group: the page of each column
    num_shared: int = 0  # leading columns whose tokens the tree knows
    node: int = ROOT  # the tree's node of the last of them, pinned by this row
    duplicates: list[tuple[int, ...]] = field(default_factory=list)  # one page per group

    @property
    def num_columns(self) -> int:
        """Columns the row has, matched and reserved."""
        return len(self.tables[0])


@dataclass(frozen=True, slots=True)
class _Path:
    """A prefix that was found in the tree, remembered because the next one often begins like it."""

    token_ids: bytes
    nodes: list[int]
    tables: tuple[list[int], ...]  # the nodes' pages, one list per group
    edge: Edge | None  # of the last node: while the tree has this very one, it has all the nodes

    def num_common(self, token_ids: bytes, *, stride: int) -> int:
        """How many of its columns, of `stride` bytes of ids, these ids have, too, and one id to spare."""
        own, most = self.token_ids, min(len(self.nodes), (len(token_ids) - 1) // stride)
        if token_ids.startswith(own[: most * stride]):
            return most
        least, most = 0, most - 1  # the same up to `least` columns, not up to `most` + 1
        while least < most:
            middle = (least + most + 1) // 2
            part = slice(least * stride, middle * stride)
            if token_ids[part] == own[part]:
                least = middle
            else:
                most = middle - 1
        return least


class Cache:
    """The page books of one engine. Not thread-safe; owned by the scheduler.

    `num_pages` has one number per page group; a plain number is the one group of a model whose layers all
    attend to the whole sequence. `namespace` keeps apart what must not be shared although the tokens
    are the same.
    """

    def __init__(
        self, *, num_pages: int | Sequence[int], page_size: int, prefix_caching: bool = True
    ) -> None:
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        sizes = (num_pages,) if isinstance(num_pages, int) else num_pages
        self._groups = tuple(PageGroup(index, size) for index, size in enumerate(sizes))
        # Every column takes a page of each group, so the smallest group is always the one that runs out.
        self._smallest = min(self._groups, key=lambda group: group.num_pages)
        self._tree = PrefixTree()
        self._no_path = _Path(b"", [], tuple([] for _ in self._groups), None)
        self._paths: dict[int, _Path] = {}  # by their first nodes, the one asked for last at the end
        self._key_bytes = page_size * _BYTES_PER_ID

    @property
    def num_pages(self) -> int:
        """All pages, of all groups."""
        return sum(group.num_pages for group in self._groups)

    @property
    def num_free_pages(self) -> int:
        """Pages that hold nothing."""
        return sum(len(group.free) for group in self._groups)

    @property
    def num_cached_pages(self) -> int:
        """Pages that hold a remembered prefix and that no row uses now."""
        return self._tree.num_unpinned * len(self._groups)

    @property
    def num_used_pages(self) -> int:
        """Pages that running rows use."""
        return self.num_pages - self.num_free_pages - self.num_cached_pages

    @property
    def max_columns(self) -> int:
        """Columns that a single row can have when it is alone."""
        return self._smallest.num_pages

    @property
    def num_available_columns(self) -> int:
        """Columns that `reserve` can still hand out, evicting whatever no row uses."""
        return len(self._smallest.free) + self._tree.num_unpinned

    def columns(self, num_tokens: int) -> int:
        """Columns that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def count_cached(self, token_ids: bytes, *, namespace: bytes = b"") -> int:
        """Tokens that `match` would find for these ids, without taking hold of them."""
        return len(self._walk(token_ids, namespace).nodes) * self.page_size

    def match(self, token_ids: bytes, *, namespace: bytes = b"") -> RowPages:
        """Take hold of the longest remembered prefix, at page borders.

        `token_ids` are int32 ids as bytes. At least the last token is left to compute, because its
        logits are wanted. The caller owns the result until `release`.
        """
        path = self._walk(token_ids, namespace)
        row = RowPages(namespace, tuple(map(list, path.tables)), num_shared=len(path.nodes))
        if path.nodes:
            row.node = path.nodes[-1]
            self._tree.pin(row.node)
        return row

    def reserve(self, row: RowPages, num_tokens: int) -> bool:
        """Give the row columns for `num_tokens` tokens in all, evicting unused prefixes if needed.

        All or nothing: False, and nothing is changed, when there are not enough.
        """
        missing = -(-num_tokens // self.page_size) - len(row.tables[0])
        free = self._smallest.free
        if missing > len(free):
            if missing > len(free) + self._tree.num_unpinned:
                return False
            self._evict(missing - len(free))
        if missing > 0:
            for group, table in zip(self._groups, row.tables, strict=True):
                table += group.take(missing)
        return True

    def commit(self, row: RowPages, token_ids: array[int], *, num_tokens: int) -> None:
        """Remember the row's full pages among its first `num_tokens` tokens, from where it stopped last.

        The step that computes them must have been launched, and their ids must be in `token_ids`.
        """
        first, num_full = row.num_shared, num_tokens // self.page_size
        if num_full <= first or not self.prefix_caching:
            return
        assert num_tokens <= len(token_ids), "a page is remembered by its ids, and some are not known yet"
        ids, stride = token_ids[first * self.page_size : num_full * self.page_size].tobytes(), self._key_bytes
        keys = [ids[start : start + stride] for start in range(0, len(ids), stride)]
        if not first:
            keys[0] = row.namespace + keys[0]
        tables = [table[first:num_full] for table in row.tables]
        pages = list(zip(*tables, strict=True))
        row.node, num_found = self._tree.extend(row.node, keys, pages)
        if num_found:
            row.duplicates += pages[:num_found]
        for group, table in zip(self._groups, tables, strict=True):
            group.hand_to_tree(table[num_found:] if num_found else table)
        row.num_shared = num_full

    def release(self, row: RowPages) -> None:
        """Free the row's private pages; those of the tree stay until somebody needs the room."""
        if row.duplicates:
            self._give_back(row.duplicates)
            row.duplicates = []
        for group, table in zip(self._groups, row.tables, strict=True):
            group.give_back(table[row.num_shared :])
        self._tree.unpin(row.node)
        row.node = ROOT
        row.num_shared = 0
        row.tables = tuple([[] for _ in self._groups])

    def discard(self, row: RowPages) -> None:
        """As `release`, but nothing of the row is remembered that nobody else uses."""
        node = row.node
        self.release(row)
        while node != ROOT:
            parent = self._tree.parent(node)
            pages = self._tree.remove_unused(node)
            if pages is None:
                return
            self._give_back([pages])
            node = parent

    def uses(self, row: RowPages, pages: Set[int]) -> bool:
        """Whether a row has, or shares a prefix with, one of these pages of the first group."""
        if not pages.isdisjoint(row.tables[0]):
            return True
        node = row.node
        while node != ROOT:
            if self._tree.pages(node)[0] in pages:
                return True
            node = self._tree.parent(node)
        return False

    def forget(self, pages: Set[int]) -> None:
        """Forget all prefixes that lie in one of these pages of the first group; no row may use them."""
        if self._groups[0].are_shared(pages):
            self._give_back(self._tree.remove_below(pages))

    def count_released(self, rows: Sequence[RowPages]) -> int:
        """Columns that `release` of all these rows would make available; changes nothing."""
        private = sum(row.num_columns - row.num_shared + len(row.duplicates) for row in rows)
        return private + self._tree.count_unpinned(row.node for row in rows)

    def flush(self) -> int:
        """Forget every prefix that no row uses; returns the number of pages freed."""
        num_before = self.num_free_pages
        self._paths.clear()
        self._evict(self._tree.num_unpinned)
        return self.num_free_pages - num_before

    def check_invariants(self, rows: Iterable[RowPages]) -> None:
        """Assert that every page is in one place only. `rows` are all that were not released."""
        rows = list(rows)
        self._tree.check_invariants([row.node for row in rows])
        for index, group in enumerate(self._groups):
            private = [page for row in rows for page in row.tables[index][row.num_shared :]]
            private += [pages[index] for row in rows for pages in row.duplicates]
            group.check_invariants(row_pages=private, tree_pages=self._tree.tree_pages(index))
        assert min(self.num_free_pages, self.num_cached_pages, self.num_used_pages) >= 0

    def _walk(self, token_ids: bytes, namespace: bytes) -> _Path:
        """The longest remembered prefix that leaves one token to compute."""
        tree, stride = self._tree, self._key_bytes
        first = None
        if len(token_ids) > stride:
            first = tree.find(ROOT, namespace + token_ids[:stride])
        if first is None:
            return self._no_path
        path = self._paths.pop(first, self._no_path)
        if path.edge is None or tree.edge(path.nodes[-1]) is not path.edge:
            path = self._no_path
        known = path.num_common(token_ids, stride=stride)
        nodes = path.nodes[:known] or [first]
        later = range(len(nodes) * stride, len(token_ids) - stride, stride)
        nodes += tree.follow(nodes[-1], (token_ids[start : start + stride] for start in later))
        if not known == len(nodes) == len(path.nodes):  # else it is the very same path
            tables = tuple([table[:known] for table in path.tables])
            for index, table in enumerate(tables):
                table += [tree.pages(node)[index] for node in nodes[known:]]
            path = _Path(token_ids[: len(nodes) * stride], nodes, tables, tree.edge(nodes[-1]))
        self._paths[first] = path
        if len(self._paths) > _MOST_PATHS:
            del self._paths[next(iter(self._paths))]
        return path

    def _evict(self, num_columns: int) -> None:
        self._give_back(self._tree.evict(num_columns))

    def _give_back(self, columns: Sequence[tuple[int, ...]]) -> None:
        for index, group in enumerate(self._groups):
            group.give_back([pages[index] for pages in columns])
