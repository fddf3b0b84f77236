"""The orders in which waiting requests go: the core queues by them, and plans foresee them.

Owns no pages and no cache: it looks at prompts and limits only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenmill.frozen import lightly_frozen
from tokenmill.messages import Request

# Requests that are put into such an order at a time.
PREFIX_WINDOW, LENGTH_WINDOW = 1024, 65_536
_NO_END = 2**62  # deeper than any branch; also longer than any known limit


def short_tail_window(max_rows: int) -> int:
    """So large that one which is not full holds all that wait, and a full one more than the rows."""
    return max(PREFIX_WINDOW, max_rows + 1)


def can_run_at_once(requests: Sequence[Request], *, max_rows: int, num_pages: int, page_size: int) -> bool:
    """Whether there are rows for all, and pages for every token that they may have."""
    if len(requests) > max_rows:
        return False
    sizes = (len(each.prompt_ids) + each.max_new_tokens for each in requests)
    return sum(-(-size // page_size) for size in sizes) <= num_pages


def by_length(requests: Sequence[Request]) -> list[int]:
    """Places of the requests, those that may still draw most tokens first; equals as they stand."""
    return sorted(range(len(requests)), key=lambda place: -_draws_left(requests[place]))


def along_prefixes(requests: Sequence[Request], *, cached: Sequence[int], page_size: int) -> list[int]:
    """Places of the requests, depth first through the tree of their prefixes of whole pages.

    At every fork the branch with the longest output goes first, of equals that with the most `cached`
    tokens, which are told of each request, of these the one that stands first. A request without a limit
    may write longest of all.
    """
    leaves = [_Leaf(at, _longest(each), cached[at]) for at, each in enumerate(requests)]
    root = _Branch(0)
    for family in _families(requests, page_size):
        if len(family) == 1:
            root.children.append(leaves[family[0]])
        else:
            _grow(root, [leaves[place] for place in family], requests, page_size)
    return _walk(root)


@lightly_frozen()
class _Leaf:
    """One request, with what decides its place."""

    place: int  # among those given
    longest: int  # new tokens that it may write
    num_cached: int  # tokens of its prompt that are cached

    @property
    def depth(self) -> int:
        """Deeper than any branch."""
        return _NO_END


@dataclass(slots=True)
class _Branch:
    """Requests with the same beginning."""

    depth: int  # pages of the beginning
    longest: int = 0  # the most new tokens that one of them may write
    num_cached: int = 0  # the most cached tokens that one of them has
    place: int = _NO_END  # of the first of them
    children: list[_Branch | _Leaf] = field(default_factory=list)

    def adopt(self, child: _Branch | _Leaf) -> None:
        """Take in a branch whose own children are complete."""
        self.children.append(child)
        self.longest = max(self.longest, child.longest)
        self.num_cached = max(self.num_cached, child.num_cached)
        self.place = min(self.place, child.place)


def _families(requests: Sequence[Request], page_size: int) -> Iterable[list[int]]:
    """Places of the requests, those together whose prompts begin with the same full page.

    Only these need a closer look, and as a rule they are few.
    """
    families: dict[tuple[bytes, bytes], list[int]] = {}
    for place, request in enumerate(requests):
        first_page = request.prompt_ids[:page_size].tobytes()
        families.setdefault((request.cache_namespace, first_page), []).append(place)
    return families.values()


def _longest(request: Request) -> int:
    return _NO_END if request.params.max_new_tokens is None else _draws_left(request)


def _draws_left(request: Request) -> int:
    return request.max_new_tokens - len(request.output_ids)


def _grow(root: _Branch, family: list[_Leaf], requests: Sequence[Request], page_size: int) -> None:
    """Add the branch of requests that begin with the same page."""
    family.sort(key=lambda leaf: requests[leaf.place].prompt_ids.tobytes())
    path: list[_Branch | _Leaf] = [root]  # to the newest leaf; all but the root miss in their parent yet
    for before, leaf in zip([None, *family], family, strict=False):
        same = 0 if before is None else _shared_pages(requests[before.place], requests[leaf.place], page_size)
        _fold(path, same)
        path.append(leaf)
    _fold(path, 0)


def _fold(path: list[_Branch | _Leaf], depth: int) -> None:
    """Complete all branches of the path that are deeper; its last one then has this depth."""
    while path[-1].depth > depth:
        child = path.pop()
        if path[-1].depth < depth:
            path.append(_Branch(depth))
        parent = path[-1]
        assert isinstance(parent, _Branch)
        parent.adopt(child)


def _shared_pages(one: Request, other: Request, page_size: int) -> int:
    """Full pages at the beginning of both prompts that are the same."""
    first, second = one.prompt_ids, other.prompt_ids
    length = min(len(first), len(second))
    if not length:
        return 0
    differs = first[:length] != second[:length]
    same = int(differs.argmax())  # the first place where they do, or 0
    return (same if differs[same] else length) // page_size


def _rank(part: _Branch | _Leaf) -> tuple[int, int, int]:
    return -part.longest, -part.num_cached, part.place


def _walk(root: _Branch) -> list[int]:
    """The places of all leaves. Without recursion: prompts that grow page by page make a deep tree."""
    found: list[int] = []
    stack: list[_Branch | _Leaf] = [root]
    while stack:
        part = stack.pop()
        if isinstance(part, _Leaf):
            found.append(part.place)
        else:
            # The stack gives back the last first.
            stack.extend(sorted(part.children, key=_rank, reverse=True))
    return found
