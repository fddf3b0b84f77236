"""What is to be completed: from any accepted shape of `prompt` and `input_ids` to texts or rows of ids.

Owns what single and batch mean, and what a text and a token id may be.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenmill.errors import InvalidArgument, WrongType
from tokenmill.frontend.failures import RAISED, Faults
from tokenmill.messages import IntArray
from tokenmill.sampling_params import check_count, plain, show, unpacked
from tokenmill.texts import check_encodable, plain_text

# Python reads unsigned integers into an array three times as fast as signed ones (numpy reads slower than
# both); what is negative does not fit, and what is too large for int32 looks negative then.
_UNSIGNED = "I"
# Rows of ids that share one piece of memory, which stays until the last of them has gone.
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is to be completed, before tokenizing: texts, or rows of token ids."""

    name: str  # the argument that holds the tokens
    texts: Sequence[str]
    id_rows: Sequence[Any]
    single: bool

    def __len__(self) -> int:
        return len(self.texts) if self.name == "prompt" else len(self.id_rows)

    def place(self, index: int) -> str:
        """How a message names an item: `prompt[3]`, or `prompt` if there is only one."""
        return self.name if self.single else f"{self.name}[{index}]"


def read_prompts(prompt: Any, input_ids: Any, source: str, faults: Faults = RAISED) -> Prompts:
    """Whether the call is single or a batch, and its items; `prompt` decides, `input_ids` are what is run."""
    if prompt is None and input_ids is None:
        raise InvalidArgument("there is nothing to generate from; give prompt or input_ids")
    if prompt is None:
        rows, single = _read_id_rows(input_ids)
        return Prompts(source, (), rows, single)
    single = isinstance(prompt, str)
    items = [prompt] if single else _listed(prompt)
    texts = faults.each(
        "prompt", items, lambda index, item: _text(item, "prompt" if single else f"prompt[{index}]"), ""
    )
    if input_ids is None:
        return Prompts("prompt", texts, (), single)
    rows, is_flat = _read_id_rows(input_ids)
    if is_flat != single or len(rows) != len(texts):
        shape = "one row of ids" if is_flat else f"a batch of {len(rows)}"
        wanted = "a single string" if single else f"a batch of {len(texts)}"
        raise InvalidArgument(f"input_ids is {shape}, but prompt is {wanted}; give both in the same shape")
    return Prompts("input_ids", (), rows, single)


def _listed(prompt: Any) -> Sequence[Any]:
    items = unpacked("prompt", prompt)
    if not isinstance(items, list | tuple):
        raise WrongType(f"prompt must be a string or a list of strings, got {show(prompt)}")
    return items


def _text(item: Any, place: str) -> str:
    if not isinstance(item, str):
        hint = "; token ids go into input_ids" if isinstance(item, int | list | tuple) else ""
        raise WrongType(f"{place} must be a string, got {show(item)}{hint}")
    text = plain_text(item)
    check_encodable(text, place)
    return text


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple | range) or (
        callable(getattr(value, "tolist", None)) and getattr(value, "shape", None) != ()
    )


def _holds_rows(items: Sequence[Any]) -> bool:
    """Whether these are rows of ids, at least one of them; what else is among them is at fault."""
    if isinstance(items, range) or not items:
        return False
    # Ids are of one type as a rule, which is found out in C.
    return _is_row(items[0]) if len(set(map(type, items))) == 1 else any(map(_is_row, items))


def _out_of_encoding(value: Any) -> Any:
    """The ids in what a tokenizer or chat template of transformers gives; anything else as it is."""
    if not isinstance(value, Mapping) or "input_ids" not in value:
        return value
    mask = value.get("attention_mask")
    if mask is not None and not all(np.all(row) for row in unpacked("attention_mask", mask)):
        raise InvalidArgument(
            "input_ids has padding (zeros in its attention_mask), which would count as text; tokenize without"
        )
    return value["input_ids"]


def _read_id_rows(value: Any) -> tuple[Sequence[Any], bool]:
    """The rows of `input_ids`, and whether it is one flat row."""
    value = _out_of_encoding(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        check_count("input_ids", value.size)
        if value.ndim not in (1, 2):
            raise InvalidArgument(
                f"input_ids has {value.ndim} dimensions; give one (ids) or two (rows of ids)"
            )
        rows: Sequence[Any] = list(value) if value.ndim == 2 else [value]
        is_flat = value.ndim == 1
    else:
        items = unpacked("input_ids", value)
        if not isinstance(items, list | tuple | range):
            raise WrongType(
                f"input_ids must be a list of token ids or a list of such lists, got {show(value)}"
            )
        if items and isinstance(items[0], Mapping):
            items = [_out_of_encoding(item) for item in items]
        is_flat = not _holds_rows(items)
        rows = [items] if is_flat else items
    if not len(rows):
        raise InvalidArgument("input_ids is empty; give at least one token")
    return rows, is_flat


def plain_rows(rows: Sequence[Any], vocab_size: int) -> list[IntArray] | None:
    """Lists of plain ids of the vocabulary, as `token_ids` reads them one by one, in a quarter of its time.

    None if some row is anything else, or empty: reading them one by one finds out what.
    """
    if set(map(type, rows)) != {list}:
        return None
    read: list[IntArray] = []
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = _plain_block(rows[first : first + _ROWS_AT_ONCE], vocab_size)
        if some is None:
            return None
        read += some
    return read


def _plain_block(rows: Sequence[list[Any]], vocab_size: int) -> list[IntArray] | None:
    buffer = array(_UNSIGNED)
    try:
        for row in rows:
            buffer.fromlist(row)
    except Exception:  # of an item, which may raise anything: it is told with its row
        return None
    lengths = [len(row) for row in rows]
    ends = np.cumsum(lengths)
    if not all(lengths) or ends[-1] != len(buffer):
        return None
    ids = np.frombuffer(buffer, dtype=np.int32)
    if _exceeds(ids, vocab_size):
        return None
    starts = ends - lengths
    (doubtful,) = (ids <= 1).nonzero()
    holders = np.searchsorted(ends, doubtful, side="right")
    places = zip(holders.tolist(), (doubtful - starts[holders]).tolist(), strict=True)
    if not all(type(rows[row][at]) is int for row, at in places):  # only these can be booleans
        return None
    return [ids[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def token_ids(row: Any, place: str, vocab_size: int, *, may_be_empty: bool = False) -> IntArray:
    """One row of ids as a new int32 array [tokens], every id checked against the vocabulary."""
    if isinstance(row, np.ndarray) and row.dtype != object:
        return _checked_array(row, place, vocab_size, may_be_empty=may_be_empty)
    items = unpacked(place, row)
    if not isinstance(items, list | tuple | range):
        raise WrongType(f"{place} must be a list of token ids, got {show(row)}")
    if isinstance(items, range) and items:
        # The ends tell all, before anyone walks through an endless range.
        for position in (0, -1):
            if not 0 <= items[position] < vocab_size:
                raise _outside(f"{place}[{position}]", items[position], vocab_size)
    if not items:
        return _no_tokens(place, may_be_empty=may_be_empty)
    ids = _plain_ids(items)
    if ids is None:
        items = [_token_id(item, f"{place}[{position}]") for position, item in enumerate(items)]
        ids = _plain_ids(items)
    if ids is None or _exceeds(ids, vocab_size):
        position = next(at for at, item in enumerate(items) if not 0 <= item < vocab_size)
        raise _outside(f"{place}[{position}]", operator.index(items[position]), vocab_size)
    return ids


def _plain_ids(items: Sequence[Any]) -> IntArray | None:
    """The items as int32, which C finds out in one pass; None if not all of them are integers that small."""
    try:
        ids = np.frombuffer(array(_UNSIGNED, items), dtype=np.int32)
    except (OverflowError, TypeError):
        return None
    # Only these can be booleans, which count as integers there.
    return ids if all(type(items[at]) is int for at in (ids <= 1).nonzero()[0].tolist()) else None


def _exceeds(ids: IntArray, vocab_size: int) -> bool:
    """Whether an id is too large or negative: read as unsigned, the latter are the largest of all."""
    return bool(ids.view(np.uint32).max() >= vocab_size)


def _token_id(item: Any, place: str) -> int:
    number = plain(item)
    if not isinstance(number, bool):
        with suppress(TypeError):
            return operator.index(number)
    raise WrongType(f"{place} must be an integer (a token id), got {show(item)}")


def _no_tokens(place: str, *, may_be_empty: bool) -> IntArray:
    if not may_be_empty:
        raise InvalidArgument(f"{place} is empty; give at least one token")
    return np.empty(0, np.int32)


def _checked_array(row: np.ndarray[Any, Any], place: str, vocab_size: int, *, may_be_empty: bool) -> IntArray:
    check_count(place, row.size)
    row = np.asarray(row)  # a masked array compares as if what it hides were not there
    if row.ndim != 1:
        raise InvalidArgument(f"{place} has {row.ndim} dimensions; a row of token ids has one")
    if not row.size:
        return _no_tokens(place, may_be_empty=may_be_empty)
    if row.dtype.kind not in "iu":
        raise WrongType(f"{place} must hold integers (token ids), got an array of {row.dtype}")
    if row.min() < 0 or row.max() >= vocab_size:
        position = int(np.flatnonzero((row < 0) | (row >= vocab_size))[0])
        raise _outside(f"{place}[{position}]", int(row[position]), vocab_size)
    return row.astype(np.int32)


def _outside(place: str, value: int, vocab_size: int) -> InvalidArgument:
    return InvalidArgument(
        f"{place} is {show(value)}, but the vocabulary has {vocab_size} ids (0 to {vocab_size - 1})"
    )
