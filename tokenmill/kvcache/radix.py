"""The prefix tree: which pages hold the keys and values of which token prefix, and which go first.

One node is one full page of tokens in every page group. The tree says what to evict; it frees nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from heapq import heapify, heappop, heappush

# The place above all first pages. It is no node: it holds no pages and cannot be pinned.
ROOT = -1
Edge = tuple[int, bytes]  # (parent, page of ids)


class PrefixTree:
    """Nodes are small integers, their facts are columns: a large pool makes no work for Python's
    garbage collector.

    A row pins the deepest node it uses. A pinned node, or one with a pinned node below it, stays; the
    others are evicted leaves first, the longest unused first.
    """

    def __init__(self) -> None:
        self._children: dict[Edge, int] = {}
        # Columns, one entry per node
        self._edges: list[Edge | None] = []  # the node's key in `_children`, None: unused
        self._pages: list[tuple[int, ...]] = []  # one page per group
        self._num_children: list[int] = []
        self._pins: list[int] = []  # pins of its own, plus children that are pinned
        self._stamps: list[int] = []  # time of the last unpinning
        self._unused: list[int] = []
        # Leaves without pins by age; entries of nodes that changed since are skipped when they come up.
        self._leaves: list[tuple[int, int]] = []
        self._clock = 0
        self.num_unpinned = 0

    def __len__(self) -> int:
        return len(self._children)

    def find(self, parent: int, key: bytes) -> int | None:
        """The child of `parent` (or of ROOT) that holds the page of ids `key`."""
        return self._children.get((parent, key))

    def follow(self, parent: int, keys: Iterable[bytes]) -> list[int]:
        """The nodes that these keys lead to, one below the other, as far as there are any."""
        found, children = [], self._children
        for key in keys:
            child = children.get((parent, key))
            if child is None:
                break
            found.append(child)
            parent = child
        return found

    def edge(self, node: int) -> Edge | None:
        """Where the node hangs. The very same object as long as it does; None: it is in no use."""
        return self._edges[node]

    def pages(self, node: int) -> tuple[int, ...]:
        """The node's pages, one per group."""
        return self._pages[node]

    def extend(self, parent: int, keys: Sequence[bytes], pages: Sequence[tuple[int, ...]]) -> tuple[int, int]:
        """Follow these keys down from `parent`, one below the other, and add the nodes that miss.

        `pages` has the pages for each key. Moves the caller's pin from `parent` to the last node. Returns
        that node and how many nodes were there before: the tree took none of their pages.
        """
        found = self.follow(parent, keys)
        node, num_found = parent, len(found)
        if found:
            node = found[-1]
            self.pin(node)
            self.unpin(parent)
        for place in range(num_found, len(keys)):
            node = self._add(node, keys[place], pages[place])
        return node, num_found

    def pin(self, node: int) -> None:
        """Keep `node`, and with it everything above it, until `unpin`."""
        pins = self._pins
        while node != ROOT:
            pins[node] += 1
            if pins[node] > 1:
                return
            self.num_unpinned -= 1
            node = self.parent(node)

    def unpin(self, node: int) -> None:
        """Take back one `pin`; nodes that nobody needs now become the most recently used ones."""
        self._clock += 1
        pins, stamps, num_children, clock = self._pins, self._stamps, self._num_children, self._clock
        while node != ROOT:
            pins[node] -= 1
            if pins[node]:
                return
            self.num_unpinned += 1
            stamps[node] = clock
            if not num_children[node]:
                self._push_leaf(node)
            node = self.parent(node)

    def count_unpinned(self, nodes: Iterable[int]) -> int:
        """How many more nodes nobody would need after one `unpin` of each of these; changes nothing."""
        pins: dict[int, int] = {}
        count = 0
        for start in nodes:
            node = start
            while node != ROOT:
                pins[node] = pins.get(node, self._pins[node]) - 1
                if pins[node]:
                    break
                count += 1
                node = self.parent(node)
        return count

    def evict(self, count: int) -> list[tuple[int, ...]]:
        """Forget leaves, the longest unused first, and return their pages; so many must be unpinned."""
        evicted: list[tuple[int, ...]] = []
        while len(evicted) < count:
            stamp, node = heappop(self._leaves)
            if self._is_evictable(node) and self._stamps[node] == stamp:
                evicted.append(self._remove(node))
        return evicted

    def parent(self, node: int) -> int:
        """The node above, or ROOT."""
        edge = self._edges[node]
        assert edge is not None
        return edge[0]

    def remove_unused(self, node: int) -> tuple[int, ...] | None:
        """Forget this node and return its pages, unless somebody needs it or one below it."""
        return self._remove(node) if self._is_evictable(node) else None

    def remove_below(self, first_pages: Set[int]) -> list[tuple[int, ...]]:
        """Forget the nodes that hold one of these pages of the first group, and all below them.

        Nobody may need any of them. Returns their pages.
        """
        children: dict[int, list[int]] = {}
        found = []
        for (parent, _), node in self._children.items():
            children.setdefault(parent, []).append(node)
            if self._pages[node][0] in first_pages:
                found.append(node)
        doomed: dict[int, None] = {}  # a set that keeps the order: parents before their children
        while found:
            node = found.pop()
            doomed.pop(node, None)
            doomed[node] = None
            found += children.get(node, [])
        assert not any(self._pins[node] for node in doomed), "somebody needs a page that is lost"
        return [self._remove(node) for node in reversed(doomed)]

    def check_invariants(self, pinned: list[int]) -> None:
        """Assert that all counts follow from the edges and from `pinned`, the rows' nodes."""
        pins = [0] * len(self._edges)
        num_children = [0] * len(self._edges)
        nodes = [node for node, edge in enumerate(self._edges) if edge is not None]
        assert len(nodes) == len(self._children)
        assert sorted(nodes + self._unused) == list(range(len(self._edges)))
        for node in nodes:
            edge = self._edges[node]
            assert edge is not None
            assert self._children[edge] == node
            if edge[0] != ROOT:
                assert self._edges[edge[0]] is not None, f"node {node} lost its parent"
                num_children[edge[0]] += 1
        for start in pinned:
            node = start
            while node != ROOT:
                pins[node] += 1
                if pins[node] > 1:
                    break
                node = self.parent(node)
        leaves = set(self._leaves)
        for node in nodes:
            assert self._num_children[node] == num_children[node], f"children of node {node}"
            assert self._pins[node] == pins[node], f"pins of node {node}"
            if self._is_evictable(node):
                assert (self._stamps[node], node) in leaves, f"node {node} would never be evicted"
        assert self.num_unpinned == sum(1 for node in nodes if not pins[node])

    def tree_pages(self, group: int) -> list[int]:
        """All pages of one group that are in the tree."""
        return [self._pages[node][group] for node in self._children.values()]

    def _is_evictable(self, node: int) -> bool:
        return not self._pins[node] and not self._num_children[node] and self._edges[node] is not None

    def _push_leaf(self, node: int) -> None:
        heappush(self._leaves, (self._stamps[node], node))
        if len(self._leaves) > 64 + 2 * len(self._children):
            current = {(stamp, leaf) for stamp, leaf in self._leaves if self._stamps[leaf] == stamp}
            self._leaves = [entry for entry in current if self._is_evictable(entry[1])]
            heapify(self._leaves)

    def _add(self, parent: int, key: bytes, pages: tuple[int, ...]) -> int:
        """A new child, which takes over the caller's pin of `parent`."""
        edge = (parent, key)
        if self._unused:
            node = self._unused.pop()
            self._edges[node] = edge
            self._pages[node] = pages
            self._pins[node] = 1
        else:
            node = len(self._edges)
            self._edges.append(edge)
            self._pages.append(pages)
            self._pins.append(1)
            self._num_children.append(0)
            self._stamps.append(0)
        self._children[edge] = node
        # The parent trades the caller's pin for a pinned child, so its count stays.
        if parent != ROOT:
            self._num_children[parent] += 1
        return node

    def _remove(self, node: int) -> tuple[int, ...]:
        edge = self._edges[node]
        assert edge is not None
        del self._children[edge]
        self._edges[node] = None
        self._unused.append(node)
        self.num_unpinned -= 1
        parent = edge[0]
        if parent != ROOT:
            self._num_children[parent] -= 1
            if self._is_evictable(parent):
                self._push_leaf(parent)
        return self._pages[node]
