"""Who owns which page."""

from __future__ import annotations

import pytest

from tokenmill.kvcache.pages import PageGroup

pytestmark = pytest.mark.unit


def test_pages_are_handed_out_once_and_come_back() -> None:
    group = PageGroup(0, 3)
    taken = group.take(3)
    assert sorted(taken) == [0, 1, 2]
    assert not group.free
    group.hand_to_tree(taken[:1])
    group.check_invariants(row_pages=taken[1:], tree_pages=taken[:1])
    group.give_back(taken)
    group.check_invariants(row_pages=[], tree_pages=[])
    assert sorted(group.free) == [0, 1, 2]


def test_no_more_pages_are_handed_out_than_there_are() -> None:
    group = PageGroup(0, 2)
    group.take(1)
    with pytest.raises(AssertionError, match="1 free pages, not 2"):
        group.take(2)


def test_a_page_cannot_be_given_back_twice() -> None:
    group = PageGroup(0, 2)
    pages = group.take(1)
    group.give_back(pages)
    with pytest.raises(AssertionError, match="free already"):
        group.give_back(pages)


def test_only_a_rows_page_goes_to_the_tree() -> None:
    group = PageGroup(0, 2)
    (page,) = group.take(1)
    group.hand_to_tree([page])
    for wrong in (page, 1 - page):
        with pytest.raises(AssertionError, match="belongs to no row"):
            group.hand_to_tree([wrong])


def test_the_check_sees_lost_shared_and_misplaced_pages() -> None:
    group = PageGroup(0, 3)
    page, other = group.take(2)
    group.check_invariants(row_pages=[page, other], tree_pages=[])
    with pytest.raises(AssertionError, match="lost page"):
        group.check_invariants(row_pages=[page], tree_pages=[])
    with pytest.raises(AssertionError, match="two places"):
        group.check_invariants(row_pages=[page, other, page], tree_pages=[])
    with pytest.raises(AssertionError, match="wrong owner"):
        group.check_invariants(row_pages=[page], tree_pages=[other])
