"""Prefixes that several decoding rows share, as the kernels are told of them; who found them lies elsewhere.

A segment is a run of keys that a group of rows has in common, in the same pages. Its work is cut into items:
some of the group's rows against some of its keys. An item leaves one piece of the answer in each of its
rows; pieces are numbered within a row, segments in the order of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Columns of an item: row whose page table leads to the keys, positions [first, stop) of the keys,
# members [first, stop) of the list of rows, number of the piece.
ITEM_FIELDS = 6


# Heads of all rows of a step from which on their pieces are put together by programs of one warp, and by such
# that take several heads.
MANY_HEADS, MOST_HEADS = 2048, 4096


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The forest of a step, int32 on the device, for R decoding rows."""

    num_items: torch.Tensor  # [1]
    items_IF: torch.Tensor  # F = ITEM_FIELDS; the longest first, as programs take them by turns
    members_M: torch.Tensor  # rows of the step, group after group
    own_starts_R: torch.Tensor  # from here on a row reads its keys alone: whole pages, before its last token
    num_pieces_R: torch.Tensor  # pieces that shared segments leave in the row
    max_pieces: int  # bound of `num_pieces_R`
    longest_own: int  # bound of the keys a row reads alone
    rows_per_item: int


@dataclass(frozen=True, slots=True)
class SharingCosts:
    """What decides whether sharing pays, and how it is cut, for the layer that gains least from it."""

    rows_per_item: int
    key_heads: int  # programs that an item makes
    programs: int  # that fill the device
    shortest_split: int  # fewest keys of an item, but for what is left at the end of a segment
    piece_keys: int  # a further piece costs a row about as much as reading so many keys
    worthwhile_keys: int  # keys not read in a step that pay for the kernels launched in addition


def most_pieces(num_rows: int) -> int:
    """Pieces there is room for in each row of a step: more where rows are few, whose keys are cut finer.

    The same for all numbers of rows up to the next power of two, so that steps padded to it are alike.
    """
    return max(8, min(64, 1024 >> max(0, num_rows - 1).bit_length()))
