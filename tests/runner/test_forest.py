"""Shared prefixes found in page tables: against a plain search over random forests of any depth."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from tokenmill.kernels.sharing import SharingCosts, most_pieces
from tokenmill.runner.forest import ITEM_KEYS, Cut, Forest, Found, RowTables, cut_segments, find_segments

pytestmark = pytest.mark.cpu
FREE = SharingCosts(
    rows_per_item=4, key_heads=2, programs=64, shortest_split=8, piece_keys=0, worthwhile_keys=0
)


def random_tables(draw: random.Random, num_rows: int, num_columns: int) -> tuple[list[list[int]], list[int]]:
    """Pages of each row, and how many of its columns are full. Rows branch off one another anywhere."""
    fresh = iter(range(10**6))
    rows: list[list[int]] = []
    for _ in range(num_rows):
        pages: list[int] = []
        if rows and draw.random() < 0.8:
            parent = draw.choice(rows)
            pages = parent[: draw.randint(0, len(parent))]
        rows.append((pages + [next(fresh) for _ in range(num_columns)])[: draw.randint(1, num_columns)])
    draw.shuffle(rows)
    # Private pages past the full columns are written to by their row, and shared by nobody.
    return rows, [len(pages) - draw.randint(0, 1) for pages in rows]


def tables_of(rows: list[list[int]], full: list[int], *, num_slots: int, seed: int) -> RowTables:
    """The rows at random slots; all other entries are noise that must not matter."""
    noise = np.random.default_rng(seed)
    table = noise.integers(0, 5, (num_slots, max(map(len, rows)) + 1)).astype(np.int32)
    slots = noise.permutation(num_slots)[: len(rows)].astype(np.int32)
    for slot, pages in zip(slots, rows, strict=True):
        table[slot, : len(pages)] = pages
    return RowTables(table, slots, np.asarray(full, dtype=np.int64))


def cut_of(tables: RowTables, *, page_size: int, costs: SharingCosts, max_pieces: int = 64) -> Cut | None:
    segments = find_segments(tables, page_size=page_size, costs=costs)
    if not segments:
        return None
    num_rows = len(tables.slots_R)
    return cut_segments(segments, num_rows=num_rows, max_pieces=max_pieces, page_size=page_size, costs=costs)


def check_cut(cut: Cut, rows: list[list[int]], full: list[int], page_size: int, costs: SharingCosts) -> None:
    """Every row gets each of its first keys from one item, with the pieces in order, through equal pages."""
    seen: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(len(rows))}
    for leader, start, stop, first, last, piece in cut.items_IF.tolist():
        assert 0 < last - first <= costs.rows_per_item
        assert 0 <= start < stop
        columns = slice(start // page_size, -(-stop // page_size))
        for row in cut.members_M[first:last].tolist():
            assert rows[row][columns] == rows[leader][columns]
            assert stop <= full[row] * page_size
            seen[row].append((piece, start, stop))
    for row, pieces in seen.items():
        pieces.sort()
        assert [piece for piece, _, _ in pieces] == list(range(int(cut.num_pieces_R[row])))
        reached = 0
        for _, start, stop in pieces:
            assert start == reached
            reached = stop
        assert reached == cut.own_starts_R[row]


def shared_columns(rows: list[list[int]], full: list[int], row: int) -> int:
    """Leading columns that some other row has as well."""
    most = 0
    for other in range(len(rows)):
        if other != row:
            common = 0
            while common < min(full[row], full[other]) and rows[row][common] == rows[other][common]:
                common += 1
            most = max(most, common)
    return most


@pytest.mark.parametrize("seed", range(60))
def test_random_forests(seed: int) -> None:
    draw = random.Random(seed)
    rows, full = random_tables(draw, draw.randint(1, 40), draw.choice((1, 3, 12)))
    page_size = draw.choice((1, 4, 16))
    tables = tables_of(rows, full, num_slots=50, seed=seed)
    cut = cut_of(tables, page_size=page_size, costs=FREE, max_pieces=draw.choice((8, 64)))
    wanted = [shared_columns(rows, full, row) * page_size for row in range(len(rows))]
    if cut is None:
        assert not any(wanted)
        return
    check_cut(cut, rows, full, page_size, FREE)
    assert (cut.own_starts_R <= wanted).all()
    levels = [len(group.starts_G) for group in find_segments(tables, page_size=page_size, costs=FREE)]
    if len(levels) <= 4:  # no row was cut off from what it shares further down
        assert cut.own_starts_R.tolist() == wanted
    assert cut.num_pieces_R.max() <= 64


@pytest.mark.parametrize("seed", range(20))
def test_few_pieces_are_enough_for_long_prefixes(seed: int) -> None:
    draw = random.Random(seed)
    rows, full = random_tables(draw, 30, 200)
    tables = tables_of(rows, full, num_slots=30, seed=seed)
    cut = cut_of(tables, page_size=16, costs=FREE, max_pieces=8)
    assert cut is not None
    check_cut(cut, rows, full, 16, FREE)
    assert cut.num_pieces_R.max() <= 8


def test_a_segment_that_does_not_pay_is_left_to_the_groups_below() -> None:
    """One common page for all, then ten pages for each pair: only the pairs are worth a piece."""
    rows = [[0, *range(100 * (row // 2) + 1, 100 * (row // 2) + 11), 1000 + row] for row in range(8)]
    costs = SharingCosts(
        rows_per_item=4,
        key_heads=1,
        programs=1,
        shortest_split=16,
        piece_keys=60,
        worthwhile_keys=0,
    )
    tables = tables_of(rows, [11] * 8, num_slots=8, seed=0)
    segments = find_segments(tables, page_size=16, costs=costs)
    assert [(each.first_G.tolist(), each.stop_G.tolist()) for each in segments] == [([0] * 4, [11] * 4)]
    cut = cut_of(tables, page_size=16, costs=costs)
    assert cut is not None
    check_cut(cut, rows, [11] * 8, 16, costs)
    assert cut.own_starts_R.tolist() == [11 * 16] * 8


def test_segments_are_whole_pages_of_keys() -> None:
    """Seven common pages, three more for two of the rows, whatever tiles kernels take."""
    rows = [[*range(10), 20], [*range(10), 30], [*range(7), 40]]
    tables = tables_of(rows, [10, 10, 7], num_slots=3, seed=0)
    segments = find_segments(tables, page_size=16, costs=FREE)
    assert [(each.first_G.tolist(), each.stop_G.tolist()) for each in segments] == [([0], [7]), ([7], [10])]


@pytest.mark.parametrize("seed", range(20))
def test_random_forests_of_many_page_sizes(seed: int) -> None:
    draw = random.Random(seed)
    rows, full = random_tables(draw, 30, 40)
    page_size = draw.choice((1, 4, 16, 48))
    costs = dataclasses.replace(FREE, shortest_split=64)
    cut = cut_of(tables_of(rows, full, num_slots=30, seed=seed), page_size=page_size, costs=costs)
    assert cut is not None
    check_cut(cut, rows, full, page_size, costs)


def test_too_little_is_not_worth_the_kernels() -> None:
    rows = [[0, 1, 2, 10 + row] for row in range(5)]
    tables = tables_of(rows, [3] * 5, num_slots=5, seed=0)
    for worthwhile, found in ((4 * 3 * 16 - 1, True), (4 * 3 * 16, False)):
        costs = dataclasses.replace(FREE, worthwhile_keys=worthwhile)
        assert bool(find_segments(tables, page_size=16, costs=costs)) == found


def test_work_is_cut_so_that_all_programs_have_some() -> None:
    """512 rows with 2,048 keys in common and 264 programs: 16 tiles of rows, twice 8 key heads each."""
    costs = SharingCosts(
        rows_per_item=32,
        key_heads=8,
        programs=264,
        shortest_split=128,
        piece_keys=8,
        worthwhile_keys=4096,
    )
    rows = [[*range(128), *range(1000 + 10 * row, 1004 + 10 * row)] for row in range(512)]
    cut = cut_of(
        tables_of(rows, [132] * 512, num_slots=512, seed=0),
        page_size=16, costs=costs, max_pieces=most_pieces(512),
    )  # fmt: skip
    assert cut is not None
    check_cut(cut, rows, [132] * 512, 16, costs)
    assert len(cut.items_IF) == 32
    assert cut.own_starts_R.tolist() == [2048] * 512


HOPPER = SharingCosts(
    rows_per_item=32, key_heads=8, programs=132, shortest_split=128, piece_keys=0, worthwhile_keys=0
)


def busiest_and_share(cut: Cut, costs: SharingCosts) -> tuple[int, float]:
    """Keys of the program that has most, and of each if all had the same. Heads of items go by turns."""
    keys_U = np.repeat(cut.items_IF[:, 2] - cut.items_IF[:, 1], costs.key_heads)
    program_U = np.arange(len(keys_U)) % costs.programs
    return int(np.bincount(program_U, weights=keys_U).max()), keys_U.sum() / costs.programs


@pytest.mark.parametrize("num_groups", [3, 6, 9, 12, 14, 17, 20, 24, 40])
def test_no_program_has_much_more_than_its_share(num_groups: int) -> None:
    """Groups of eight rows, 2,048 keys in common: an item each may be a few more than programs, or fewer."""
    rows = [[*range(1000 * group, 1000 * group + 128)] for group in range(num_groups) for _ in range(8)]
    tables = tables_of(rows, [128] * len(rows), num_slots=len(rows), seed=0)
    cut = cut_of(tables, page_size=16, costs=HOPPER, max_pieces=most_pieces(len(rows)))
    assert cut is not None
    check_cut(cut, rows, [128] * len(rows), 16, HOPPER)
    busiest, share = busiest_and_share(cut, HOPPER)
    assert busiest < 1.4 * share


@pytest.mark.parametrize("seed", range(30))
def test_long_items_come_first_and_short_ones_fill_up(seed: int) -> None:
    """Groups of any length, by turns: nobody has much more than a share and the half of the longest item."""
    draw = random.Random(seed)
    rows = []
    for group in range(draw.randint(20, 60)):
        pages = range(1000 * group, 1000 * group + draw.randint(8, 200))
        rows += [[*pages]] * draw.randint(2, 12)
    full = [len(pages) for pages in rows]
    tables = tables_of(rows, full, num_slots=len(rows), seed=seed)
    cut = cut_of(tables, page_size=16, costs=HOPPER, max_pieces=most_pieces(len(rows)))
    assert cut is not None
    check_cut(cut, rows, full, 16, HOPPER)
    keys_I = cut.items_IF[:, 2] - cut.items_IF[:, 1]
    assert (np.diff(keys_I) <= 0).all()
    busiest, share = busiest_and_share(cut, HOPPER)
    assert busiest < 1.1 * share + keys_I.max() / 2


@pytest.mark.parametrize("seed", range(20))
def test_no_other_length_of_items_is_better(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all lengths that cut the longest segment into equal parts: one segment above others."""
    draw = random.Random(seed)
    rows, above = [], range(10**6, 10**6 + draw.choice((0, 0, 64, 128)))
    for group in range(draw.randint(1, 40)):
        pages = [*above, *range(1000 * group, 1000 * group + draw.choice((32, draw.randint(8, 200))))]
        rows += [pages] * draw.randint(2, 12)
    full = [len(pages) for pages in rows]
    tables = tables_of(rows, full, num_slots=len(rows), seed=seed)

    def seconds() -> float:
        cut = cut_of(tables, page_size=16, costs=HOPPER, max_pieces=most_pieces(len(rows)))
        assert cut is not None
        turns = -(-len(cut.items_IF) * HOPPER.key_heads // HOPPER.programs)
        return busiest_and_share(cut, HOPPER)[0] + ITEM_KEYS * turns if turns <= 8 else np.inf

    chosen = seconds()
    least = max(full) * 16 // (most_pieces(len(rows)) - 4) + 1
    for parts in range(1, 17):
        longest = max(stop - first for each in found_in(tables) for first, stop in each)
        split = -(-max(-(-longest // parts), least) // 128) * 128
        monkeypatch.setattr("tokenmill.runner.forest._split_keys", lambda *_, split=split: split)
        assert chosen <= seconds() or chosen == np.inf


def found_in(tables: RowTables) -> list[list[tuple[int, int]]]:
    """The keys of each segment, level by level."""
    return [
        list(zip((16 * each.first_G).tolist(), (16 * each.stop_G).tolist(), strict=True))
        for each in find_segments(tables, page_size=16, costs=HOPPER)
    ]


def test_pieces_are_not_made_for_nothing() -> None:
    """A piece that costs as much as a thousand keys is worse than programs without work."""
    rows = [[*range(1000 * group, 1000 * group + 128)] for group in range(17) for _ in range(8)]
    tables = tables_of(rows, [128] * len(rows), num_slots=len(rows), seed=0)
    for piece_keys, is_cut in ((1, True), (1000, False)):
        costs = dataclasses.replace(HOPPER, piece_keys=piece_keys)
        cut = cut_of(tables, page_size=16, costs=costs, max_pieces=8)
        assert cut is not None
        assert (cut.num_pieces_R.max() > 1) == is_cut


def test_items_fit_their_place_on_the_device() -> None:
    """Few rows and many programs: segments are cut as finely as may be."""
    costs = dataclasses.replace(HOPPER, key_heads=1, programs=500)
    forest = Forest(costs, max_rows=4, page_size=16, device=torch.device("cpu"))
    pages = np.array([[*range(9000)], [*range(9000)]], dtype=np.int32)
    found = forest.update(pages, np.arange(2, dtype=np.int32), np.full(2, 16 * 9000 - 1, dtype=np.int32))
    assert found is not None
    shared = forest.shared(2, found)
    items = shared.items_IF[: int(shared.num_items)]
    assert int((items[:, 2] - items[:, 1]).sum()) == 16 * 8999
    assert int(shared.num_pieces_R.max()) <= shared.max_pieces


def test_a_forest_follows_the_rows() -> None:
    forest = Forest(FREE, max_rows=8, page_size=4, device=torch.device("cpu"))
    pages = np.array([[1, 2, 3, 9], [1, 2, 4, 9], [1, 5, 6, 9], [7, 8, 6, 9]], dtype=np.int32)
    slots = np.array([2, 0, 1, 3], dtype=np.int32)
    positions = np.array([13, 12, 14, 12], dtype=np.int32)
    found = forest.update(pages, slots, positions)
    assert found == Found(longest_own=13, max_pieces=64)
    shared = forest.shared(5, found)
    assert shared.own_starts_R.tolist() == [4, 8, 8, 0, 0]
    assert shared.num_pieces_R.tolist() == [1, 2, 2, 0, 0]
    items = shared.items_IF[: int(shared.num_items)].tolist()
    members = shared.members_M.tolist()
    assert sorted((item[1], item[2], sorted(members[item[3] : item[4]]), item[5]) for item in items) == [
        (0, 4, [0, 1, 2], 0),
        (4, 8, [1, 2], 1),
    ]
    pages[1, 1] = 9  # unseen until the forest is told that rows changed hands
    assert forest.update(pages, slots, positions + 1)
    assert shared.own_starts_R.tolist() == [4, 8, 8, 0, 0]
    forest.forget()
    assert forest.update(pages, slots, positions + 1)
    assert shared.own_starts_R.tolist() == [4, 4, 4, 0, 0]
    assert not forest.update(pages, slots[2:], positions[2:])


@pytest.mark.parametrize(
    ("num_rows", "pieces"), [(0, 64), (1, 64), (16, 64), (17, 32), (32, 32), (100, 8), (1024, 8)]
)
def test_few_rows_have_room_for_many_pieces(num_rows: int, pieces: int) -> None:
    assert most_pieces(num_rows) == pieces


def test_a_step_without_rows_shares_nothing() -> None:
    forest = Forest(FREE, max_rows=2, page_size=4, device=torch.device("cpu"))
    none = np.zeros(0, dtype=np.int32)
    assert not forest.update(np.zeros((2, 3), dtype=np.int32), none, none)
