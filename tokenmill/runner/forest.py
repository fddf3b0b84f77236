"""Which decoding rows share which keys: found in the rows' page tables when the set of rows changes.

Rows that hold the same page in the same column hold the same pages in all columns before it, because a page
that several rows read has one place in the prefix tree. So the rows of a step are the leaves of a forest:

        column   0     1     2     3     4     5
    row 0      │ 7   │ 3   │ 9   │ 4   │ 20  │ ·         segment A: columns [0, 2) of rows 0, 1, 2
    row 1      │ 7   │ 3   │ 9   │ 4   │ 21  │ 22        segment B: columns [2, 4) of rows 0, 1
    row 2      │ 7   │ 3   │ 5   │ 6   │ ·   │ ·         all others are read by their own rows

A segment is taken only if that pays; the columns of one that does not are left to the groups and rows below.

Shapes: R rows of a step, G groups, M members of groups, C columns, I items.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.kernels.sharing import ITEM_FIELDS, SharedPrefixes, SharingCosts, most_pieces
from tokenmill.messages import IntArray, LongArray

# Segments above each other that a row may be in, and branchings that are followed below each other. Rows
# read on their own what lies below, so both bound only the work of finding and cutting.
MAX_SEGMENTS = 4
MAX_BRANCHINGS = 16
# How segments are cut into items: into so many equal parts at most of the longest one, and so that no program
# takes more turns than that. Beginning an item costs a program as much as so many keys.
MAX_EQUAL_PARTS = 16
MAX_TURNS = 8
ITEM_KEYS = 128

_MAX_PAGES = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class RowTables:
    """The page tables of R rows, as far as they may be shared."""

    pages_SC: IntArray  # of all slots
    slots_R: IntArray
    columns_R: LongArray  # full columns of each row

    def pages(self, rows_M: LongArray, columns_M: LongArray) -> IntArray:
        """What the rows hold in these columns."""
        pages_M: IntArray = self.pages_SC[self.slots_R[rows_M], columns_M]
        return pages_M


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Disjoint groups of rows, the members of one after the other."""

    members_M: LongArray
    sizes_G: LongArray
    starts_G: LongArray  # where each group begins in `members_M`
    first_G: LongArray  # columns before this one are taken care of above the group
    stop_G: LongArray  # all rows of the group agree before this column
    segments_G: LongArray  # taken above the group

    def select(self, keep_G: NDArray[np.bool_]) -> Groups:
        """Only the groups for which `keep_G` is true."""
        if keep_G.all():
            return self
        kept_G = self.sizes_G[keep_G]
        return Groups(
            self.members_M[np.repeat(keep_G, self.sizes_G)],
            kept_G,
            np.cumsum(kept_G) - kept_G,
            self.first_G[keep_G],
            self.stop_G[keep_G],
            self.segments_G[keep_G],
        )


def find_segments(tables: RowTables, *, page_size: int, costs: SharingCosts) -> list[Groups]:
    """Segments [first, stop) that pay, from the roots down; the groups of one entry are disjoint."""
    found = []
    keys_spared = 0
    rows = np.flatnonzero(tables.columns_R)
    nothing = np.zeros(1, dtype=np.int64)
    groups = Groups(rows, np.array([len(rows)]), nothing, nothing, nothing, nothing)
    for _ in range(MAX_BRANCHINGS):
        if not len(groups.members_M):
            break
        members_M, runs, parents = _branches(groups, tables)
        readers_G = np.bincount(parents, minlength=len(groups.starts_G))
        columns_G = groups.stop_G - groups.first_G
        gains_G = (readers_G - 1) * columns_G * page_size - groups.sizes_G * costs.piece_keys
        takes_G = (gains_G > 0) & (groups.segments_G < MAX_SEGMENTS)
        if takes_G.any():
            found.append(groups.select(takes_G))
            keys_spared += int(gains_G[takes_G].sum())
        below = Groups(
            members_M,
            np.append(runs[1:], len(members_M)) - runs,
            runs,
            np.where(takes_G, groups.stop_G, groups.first_G)[parents],
            groups.stop_G[parents],
            (groups.segments_G + takes_G)[parents],
        )
        groups = _extended(below, tables, page_size=page_size, costs=costs)
    return found if keys_spared > costs.worthwhile_keys else []


def _branches(groups: Groups, tables: RowTables) -> tuple[LongArray, LongArray, LongArray]:
    """Each group parted by the page in the column after its last common one.

    Returns the members in their new order, where each part begins, and which group it is of.
    """
    group_M = np.repeat(np.arange(len(groups.starts_G)), groups.sizes_G)
    members_M, column_M = groups.members_M, groups.stop_G[group_M]
    last_column_M = tables.columns_R[members_M] - 1
    page_M = tables.pages(members_M, np.minimum(column_M, last_column_M))
    # A row that ends here is alone: no page has such a number.
    key_M = np.where(column_M <= last_column_M, page_M, _MAX_PAGES + members_M) + group_M * (2 * _MAX_PAGES)
    order = np.argsort(key_M, kind="stable")  # groups stay in their order, and so in their place
    key_M = key_M[order]
    is_first_M = np.ones(len(key_M), dtype=np.bool_)
    np.not_equal(key_M[1:], key_M[:-1], out=is_first_M[1:])
    runs = np.flatnonzero(is_first_M)
    return members_M[order], runs, group_M[runs]


def _extended(groups: Groups, tables: RowTables, *, page_size: int, costs: SharingCosts) -> Groups:
    """The groups that may still gain, each with all the columns that its rows agree in."""
    groups = groups.select(groups.sizes_G > 1)
    if not len(groups.members_M):
        return groups
    high_G = np.minimum.reduceat(tables.columns_R[groups.members_M], groups.starts_G)
    most_spared_G = (groups.sizes_G - 1) * (high_G - groups.first_G) * page_size
    may_gain_G = most_spared_G > groups.sizes_G * costs.piece_keys
    groups = groups.select(may_gain_G)
    if not len(groups.members_M):
        return groups
    return dataclasses.replace(groups, stop_G=_common_columns(groups, high_G[may_gain_G], tables))


def _common_columns(groups: Groups, high_G: LongArray, tables: RowTables) -> LongArray:
    """Columns that all rows of a group agree in: more than it knows already, at most `high_G`.

    Agreement in a column includes all columns before it. So the first row is compared with one that
    differs from it, by bisection, until there is none: that rarely takes more than one.
    """
    members_M, starts_G, sizes_G = groups.members_M, groups.starts_G, groups.sizes_G
    first_G = members_M[starts_G]
    while True:
        page_M = tables.pages(members_M, np.repeat(high_G - 1, sizes_G))
        differs_M = page_M != np.repeat(page_M[starts_G], sizes_G)
        if not differs_M.any():
            return high_G
        # The last member that differs; where none does, the first row itself, which changes nothing.
        position_M = np.where(differs_M, np.arange(len(members_M)), np.repeat(starts_G, sizes_G))
        other_G = members_M[np.maximum.reduceat(position_M, starts_G)]
        low_G = groups.stop_G + 1
        while (low_G < high_G).any():
            middle_G = (low_G + high_G + 1) // 2
            agrees_G = tables.pages(first_G, middle_G - 1) == tables.pages(other_G, middle_G - 1)
            low_G, high_G = np.where(agrees_G, middle_G, low_G), np.where(agrees_G, high_G, middle_G - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Segments cut into items: the host's side of `SharedPrefixes`, with its names."""

    items_IF: LongArray
    members_M: LongArray
    own_starts_R: LongArray
    num_pieces_R: LongArray


def cut_segments(
    segments: list[Groups], *, num_rows: int, max_pieces: int, page_size: int, costs: SharingCosts
) -> Cut:
    """Items that fill the device, the longest first; no row gets more than `max_pieces` pieces."""
    own_starts_R = np.zeros(num_rows, dtype=np.int64)
    num_pieces_R = np.zeros(num_rows, dtype=np.int64)
    for groups in segments:
        own_starts_R[groups.members_M] = np.repeat(groups.stop_G * page_size, groups.sizes_G)
    split_keys = _split_keys(segments, int(own_starts_R.max()), max_pieces, page_size, costs)
    items: list[LongArray] = []
    members: list[LongArray] = []
    num_members = 0
    for groups in segments:
        splits_G = -(-(groups.stop_G - groups.first_G) * page_size // split_keys)
        pieces_G = num_pieces_R[groups.members_M[groups.starts_G]]
        num_pieces_R[groups.members_M] += np.repeat(splits_G, groups.sizes_G)
        items.append(
            _items(groups, splits_G, pieces_G, split_keys=split_keys, page_size=page_size, costs=costs)
            + np.array([0, 0, 0, num_members, num_members, 0])
        )
        members.append(groups.members_M)
        num_members += len(groups.members_M)
    items_IF = np.concatenate(items)
    order = np.argsort(items_IF[:, 1] - items_IF[:, 2], kind="stable")
    return Cut(items_IF[order], np.concatenate(members), own_starts_R, num_pieces_R)


def _items(
    groups: Groups,
    splits_G: LongArray,
    pieces_G: LongArray,
    *,
    split_keys: int,
    page_size: int,
    costs: SharingCosts,
) -> LongArray:
    """The items [I, F] of some groups: each group's rows by tiles, times its keys by splits."""
    sizes_G = groups.sizes_G
    items_G = -(-sizes_G // costs.rows_per_item) * splits_G
    group_I = np.repeat(np.arange(len(sizes_G)), items_G)
    item_I = np.arange(len(group_I)) - np.repeat(np.cumsum(items_G) - items_G, items_G)
    tile_I, split_I = np.divmod(item_I, splits_G[group_I])
    key_I = groups.first_G[group_I] * page_size + split_I * split_keys
    member_I = groups.starts_G[group_I] + tile_I * costs.rows_per_item
    columns = (
        groups.members_M[groups.starts_G[group_I]],
        key_I,
        np.minimum(key_I + split_keys, groups.stop_G[group_I] * page_size),
        member_I,
        np.minimum(member_I + costs.rows_per_item, (groups.starts_G + sizes_G)[group_I]),
        pieces_G[group_I] + split_I,
    )
    return np.stack(columns, axis=1)


def _split_keys(
    segments: list[Groups], longest: int, max_pieces: int, page_size: int, costs: SharingCosts
) -> int:
    """Keys of an item: of those with which every row has room for its pieces, what takes least time."""
    keys_G = np.concatenate([groups.stop_G - groups.first_G for groups in segments]) * page_size
    sizes_G = np.concatenate([groups.sizes_G for groups in segments])
    work = _SharedWork(keys_G, sizes_G, -(-sizes_G // costs.rows_per_item), costs)
    # As if it were all one segment, which is cut into as many items as there are programs; and equal parts of
    # the longest segment.
    candidates = np.append(
        -(-int(work.tiles_G @ keys_G) * costs.key_heads // costs.programs),
        -(-keys_G.max() // np.arange(1, MAX_EQUAL_PARTS + 1)),
    )
    least = longest // (max_pieces - MAX_SEGMENTS) + 1
    even, *equal = dict.fromkeys(
        (-(-np.maximum(candidates, least) // costs.shortest_split) * costs.shortest_split).tolist()
    )
    possible: list[int] = [even, *(split for split in equal if work.num_turns(split) <= MAX_TURNS)]
    return min(possible, key=work.time)


@dataclass(frozen=True, slots=True, eq=False)
class _SharedWork:
    """The keys and rows of all segments, to be cut into items."""

    keys_G: LongArray
    sizes_G: LongArray
    tiles_G: LongArray  # of its rows, as many as an item takes
    costs: SharingCosts

    def num_turns(self, split: int) -> int:
        """How often the first program takes an item of so many keys."""
        num_items = int(self.tiles_G @ -(-self.keys_G // split))
        return -(-num_items * self.costs.key_heads // self.costs.programs)

    def time(self, split: int) -> float:
        """About how long items of so many keys take, as keys that a program goes through.

        Programs take items by turns, the longest first, so the first one has most. A few more items than
        programs take twice the time.
        """
        costs, num_turns = self.costs, self.num_turns(split)
        whole_G, rest_G = np.divmod(self.keys_G, split)
        order_G = np.argsort(-rest_G)
        length_L = np.append(split, rest_G[order_G])
        stop_L = np.cumsum(np.append(self.tiles_G @ whole_G, (self.tiles_G * (rest_G > 0))[order_G]))
        item_T = np.arange(num_turns) * costs.programs // costs.key_heads  # that the first program takes
        busiest = int(length_L[np.searchsorted(stop_L, item_T, side="right")].sum())
        # The cost of a piece is told in keys that a row reads alone. Those of an item go twice as fast.
        num_pieces = int(self.sizes_G @ (whole_G + (rest_G > 0)))
        pieces = 2 * costs.piece_keys * num_pieces * costs.key_heads / costs.programs
        return busiest + num_turns * ITEM_KEYS + pieces


@dataclass(frozen=True, slots=True)
class Found:
    """Bounds of what the rows of a step share."""

    longest_own: int  # the most keys that a row reads by itself
    max_pieces: int  # the most pieces that shared prefixes leave in a row


class Forest:
    """The shared prefixes of the current decoding rows, and their place on the device, which never moves."""

    def __init__(self, costs: SharingCosts, *, max_rows: int, page_size: int, device: torch.device) -> None:
        self._costs = costs
        self._page_size = page_size
        most_tiles = MAX_SEGMENTS * (-(-max_rows // costs.rows_per_item) + max_rows)
        max_items = most_tiles + MAX_TURNS * costs.programs
        sizes = (max_rows, max_rows, MAX_SEGMENTS * max_rows, max_items * ITEM_FIELDS, 1)
        # One tensor, so that one copy brings everything.
        self._packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._own_starts_R, self._num_pieces_R, self._members_M, items, self._num_items = self._packed.split(
            sizes
        )
        self._items_IF = items.view(max_items, ITEM_FIELDS)
        self._sizes = sizes
        self._slots_R: IntArray | None = None  # the rows that it was found for; None: it is out of date
        self._cut: Cut | None = None  # None: nothing is shared

    def forget(self) -> None:
        """Rows were given to other requests: the same slots may hold other pages now."""
        self._slots_R = None

    def update(self, pages_SC: IntArray, slots_R: IntArray, positions_R: IntArray) -> Found | None:
        """Follow the rows of a step, whose tokens to compute have these positions; None: they share nothing.

        While the rows stay the same, the forest does.
        """
        if self._slots_R is None or not np.array_equal(self._slots_R, slots_R):
            self._slots_R = slots_R.copy()
            tables = RowTables(pages_SC, slots_R, positions_R.astype(np.int64) // self._page_size)
            self._cut = self._find(tables)
        if self._cut is None:
            return None
        longest_own = int((positions_R - self._cut.own_starts_R).max()) + 1
        return Found(longest_own, most_pieces(len(slots_R)))

    def shared(self, num_rows: int, found: Found) -> SharedPrefixes:
        """The forest on the device, for a step of so many rows, padding included, within these bounds."""
        return SharedPrefixes(
            num_items=self._num_items,
            items_IF=self._items_IF,
            members_M=self._members_M,
            own_starts_R=self._own_starts_R[:num_rows],
            num_pieces_R=self._num_pieces_R[:num_rows],
            max_pieces=found.max_pieces,
            longest_own=found.longest_own,
            rows_per_item=self._costs.rows_per_item,
        )

    def _find(self, tables: RowTables) -> Cut | None:
        segments = find_segments(tables, page_size=self._page_size, costs=self._costs)
        if not segments:
            return None
        num_rows = len(tables.slots_R)
        cut = cut_segments(
            segments,
            num_rows=num_rows,
            max_pieces=most_pieces(num_rows),
            page_size=self._page_size,
            costs=self._costs,
        )
        self._send(cut)
        return cut

    def _send(self, cut: Cut) -> None:
        columns = (
            cut.own_starts_R,
            cut.num_pieces_R,
            cut.members_M,
            cut.items_IF.ravel(),
            np.array([len(cut.items_IF)]),
        )
        packed = torch.zeros(len(self._packed), dtype=torch.int32, pin_memory=self._packed.is_cuda)
        for place, column in zip(packed.split(self._sizes), columns, strict=True):
            place[: len(column)] = torch.from_numpy(column)
        self._packed.copy_(packed, non_blocking=True)
