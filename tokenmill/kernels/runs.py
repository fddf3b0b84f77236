"""The keys of decoding rows in runs, as kernels are told of them, and what the runs leave.

Made in `triton_balanced.py`; letters as in `attention/base.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RunShape:
    """How keys are cut, and which kernel takes them."""

    tile_keys: int  # the last tile of a row may be partly empty
    num_programs: int  # for each key head: as many as run at the same time; each takes a long run first
    num_runs: int  # for each key head: the long ones, then short ones, for programs that are done sooner
    for_hopper: bool

    @property
    def has_short(self) -> bool:
        """Whether there may be short runs."""
        return self.num_runs > self.num_programs


@dataclass(frozen=True, slots=True)
class Runs:
    """The keys of a step's rows in tiles, the rows one after the other, and the runs that programs take."""

    shape: RunShape
    tiles_3N: torch.Tensor  # int32: row, first key, length of the row; the rest is not written
    cuts_P: torch.Tensor  # int32: the first tile of each run, and at last the number of tiles
    # int32: row, the runs with its first and its last tile; all zero where nothing is to be put together.
    joins_3J: torch.Tensor
    # int32: how often programs have asked for a short run, of any key head; zero before each launch.
    taken_1: torch.Tensor


@dataclass(frozen=True, slots=True)
class RunPieces:
    """Of each key head and run, pieces of its first row and its last one, if they do not lie in it whole."""

    parts_KP2GD: torch.Tensor  # float32, attention over the piece's keys; G has room for a head's queries
    logs_KP2G: torch.Tensor  # float32, log2 of the sum of their weights
