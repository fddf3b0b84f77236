"""From documents to rows of tokens: worker processes make text, tokenize it and pack it.

Owns the row format; the trainer only sees arrays.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.tiny.recipe import PACKAGE_FOLDER, Recipe
from tools.tiny.tokenizer import PAD, SPECIAL_TOKENS
from tools.tiny.world import END_OF_TEXT, document

Rows = NDArray[np.int16]
"""[3, rows, context + 1]: token ids, document numbers within the row (0 for padding), 1 where learnt."""

Tokens = list[tuple[int, int]]
"""A document as (token id, 1 if learnt else 0)."""

_NUM_OPEN_ROWS = 8
_DOCUMENTS_AT_ONCE = 200


class RowPacker:
    """Packs documents into rows of fixed length. A document goes to the fullest open row with room for it."""

    def __init__(self, length: int, pad_id: int) -> None:
        self._length = length
        self._pad_id = pad_id
        self._open: list[list[Tokens]] = []

    def add(self, tokens: Tokens) -> Rows | None:
        """Place a document, cut to the row length. Returns the row [3, 1, length] that made room, if any."""
        tokens = tokens[: self._length]
        fitting = [row for row in self._open if self._room(row) >= len(tokens)]
        if fitting:
            min(fitting, key=self._room).append(tokens)
            return None
        self._open.append([tokens])
        if len(self._open) <= _NUM_OPEN_ROWS:
            return None
        fullest = min(self._open, key=self._room)
        self._open.remove(fullest)
        return self._closed(fullest)

    def _room(self, row: list[Tokens]) -> int:
        return self._length - sum(map(len, row))

    def _closed(self, row: list[Tokens]) -> Rows:
        packed = np.zeros((3, 1, self._length), np.int16)
        packed[0] = self._pad_id
        start = 0
        for number, tokens in enumerate(row, 1):
            end = start + len(tokens)
            packed[::2, 0, start:end] = np.array(tokens, np.int16).T
            packed[1, 0, start:end] = number
            start = end
        return packed


def rows(recipe: Recipe, worker: int, *, tokenizer_folder: Path = PACKAGE_FOLDER) -> Iterator[Rows]:
    """Endless packed rows of one worker; workers differ by their seed."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    rng = random.Random(f"{recipe.seed}-{worker}")
    packer = RowPacker(recipe.shape.context_length + 1, SPECIAL_TOKENS.index(PAD))
    while True:
        made = [[*document(rng), (END_OF_TEXT, True)] for _ in range(_DOCUMENTS_AT_ONCE)]
        encodings = iter(tokenizer.encode_batch([text for segments in made for text, _ in segments]))
        for segments in made:
            tokens = [(token, int(learnt)) for _, learnt in segments for token in next(encodings).ids]
            packed = packer.add(tokens)
            if packed is not None:
                yield packed


def _work(recipe: Recipe, worker: int, outbox: Queue[Rows]) -> None:
    source = rows(recipe, worker)
    while True:
        outbox.put(np.concatenate(list(itertools.islice(source, recipe.rows_per_step)), axis=1))


def batches(recipe: Recipe) -> Iterator[Rows]:
    """Endless batches [3, rows_per_step, context + 1], each made by one of the recipe's worker processes.

    The processes are daemons: they end with the trainer.
    """
    context = multiprocessing.get_context("spawn")
    outbox: Queue[Rows] = context.Queue(maxsize=4 * recipe.num_workers)
    for worker in range(recipe.num_workers):
        context.Process(target=_work, args=(recipe, worker, outbox), daemon=True).start()
    while True:
        yield outbox.get()
