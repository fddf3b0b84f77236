"""Who owns which page."""

from __future__ import annotations

import pytest

from tokenmill.kvcache.pages import PageGroup

pytestmark = pytest.mark.unit


def test_pages_are_handed_out_once_and_come_back() -> None:
    group = PageGroup(0, 3)
    taken = [group.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    assert not group.free
    group.hand_to_tree(taken[0])
    group.check_invariants(row_pages=taken[1:], tree_pages=taken[:1])
    for page in taken:
        group.give_back(page)
    group.check_invariants(row_pages=[], tree_pages=[])
    assert sorted(group.free) == [0, 1, 2]


def test_a_page_cannot_be_given_back_twice() -> None:
    group = PageGroup(0, 2)
    page = group.take()
    group.give_back(page)
    with pytest.raises(AssertionError, match="free already"):
        group.give_back(page)


def test_only_a_rows_page_goes_to_the_tree() -> None:
    group = PageGroup(0, 2)
    page = group.take()
    group.hand_to_tree(page)
    for wrong in (page, 1 - page):
        with pytest.raises(AssertionError, match="belongs to no row"):
            group.hand_to_tree(wrong)


def test_the_check_sees_lost_shared_and_misplaced_pages() -> None:
    group = PageGroup(0, 3)
    page, other = group.take(), group.take()
    group.check_invariants(row_pages=[page, other], tree_pages=[])
    with pytest.raises(AssertionError, match="lost page"):
        group.check_invariants(row_pages=[page], tree_pages=[])
    with pytest.raises(AssertionError, match="two places"):
        group.check_invariants(row_pages=[page, other, page], tree_pages=[])
    with pytest.raises(AssertionError, match="wrong owner"):
        group.check_invariants(row_pages=[page], tree_pages=[other])
