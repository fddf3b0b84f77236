"""Values that nobody should pass to an engine, of every kind; the generator of `test_hostile_calls.py`.

Every value is made anew by its maker, except for strings, so that a call which changed one is found out.
Nothing here loops for ever: what never ends in earnest, ends after some hundred thousand items.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import random
import re
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

Maker = Callable[[], Any]

LONG = "word " * 4_000
HUGE = "x" * 1_000_000
COMBINING = "e" + "\u0301" * 500_000
TEXTS = [
    "", " ", "\n", "\0", "a\0b", "\ud800", "a\udfffb", "\ufeff", "\u202e", "é", "日本", "🏳️‍🌈", "İ", "{}",
    "{{", "{% for %}", "None", "nan", "-1", "1e999", "a" * 300, "../..", "/dev/null", "<|im_end|>", "%s%n",
    "\x1b[2J", "١٢٣",
]  # fmt: skip


# ruff: noqa: E501, B905 (tables of oddities)

# ── objects that fail when somebody looks at them ─────────────────────────────────────────────


class Unspeakable(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __str__


ERRORS: list[Callable[[], Exception]] = [
    ValueError,
    KeyError,
    AttributeError,
    IndexError,
    RecursionError,
    MemoryError,
    StopIteration,
    ZeroDivisionError,
    AssertionError,
    RuntimeError,
    Unspeakable,
    lambda: OSError(28, "y" * 5_000),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "z" * 5_000),
]
_METHODS = [
    "__repr__",
    "__str__",
    "__len__",
    "__iter__",
    "__eq__",
    "__bool__",
    "__getitem__",
    "__contains__",
    "__int__",
    "__float__",
    "__index__",
    "__lt__",
    "__gt__",
    "__le__",
    "__ge__",
    "__call__",
    "__array__",
    "__fspath__",
    "__next__",
    "__getattr__",
    "tolist",
    "item",
    "keys",
    "get",
    "items",
    "encode",
    "lower",
    "strip",
    "startswith",
]
_BASES: list[tuple[type, Callable[[type], Any]]] = [
    (object, lambda kind: kind()),
    (list, lambda kind: kind([1, 2])),
    (tuple, lambda kind: kind((1, 2))),
    (dict, lambda kind: kind(temperature=0)),
    (str, lambda kind: kind("text")),
    (int, lambda kind: kind(1)),
    (float, lambda kind: kind(0.5)),
]


def trap(rng: random.Random) -> Any:
    """An object some of whose methods raise."""
    base, make = rng.choice(_BASES)
    error = rng.choice(ERRORS)

    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise error()

    body: dict[str, Any] = dict.fromkeys(rng.sample(_METHODS, rng.choice((1, 1, 2, 5, 12))), fail)
    if rng.random() < 0.1:
        body["__class__"] = property(fail)
    if rng.random() < 0.1:
        body["shape"] = property(fail)
    if "__eq__" in body:
        body["__hash__"] = base.__hash__
    name = rng.choice(["Trap", "list", "dict", "str", "int", "set", "T" * 10_000])
    return make(type(name, (base,), body))


class Endless:
    """Claims to hold more than there is in the world."""

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[int]:
        return iter(range(200_000))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index > 200_000:
            raise IndexError
        return self


class Selfish:
    """A scalar that holds itself."""

    shape = ()

    def item(self) -> Any:
        return self

    def tolist(self) -> Any:
        return self


class LongRow:
    shape = (200_000,)

    def tolist(self) -> Any:
        return [0.5] * 200_000


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1
    MANY = 10**9


class Word(enum.StrEnum):
    A = "a"


@dataclasses.dataclass
class Record:
    temperature: Any = 0
    max_new_tokens: Any = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    temperature: Any = "hot"


class Shouting(dict):  # type: ignore[type-arg]
    def __missing__(self, key: Any) -> Any:
        return HUGE


Pair = collections.namedtuple("Pair", "first second")


# ── containers ────────────────────────────────────────────────────────────────────────────────


def nested(depth: int, kind: type = list) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if kind is dict else kind([value])
    return value


def loop_list() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


def loop_dict() -> dict[str, Any]:
    value: dict[str, Any] = {"temperature": 0}
    value["custom_params"] = value
    return value


def wide() -> Any:
    """Short to write down, and long as text."""
    value: Any = "abc"
    for _ in range(7):
        value = [value] * 9
    return value


_CONTAINERS: list[Maker] = [
    list, dict, tuple, set, frozenset, lambda: [None], lambda: [[]], lambda: [[], []], lambda: {"": None},
    lambda: {None: 1}, lambda: {1: 2}, lambda: [1, "a"], lambda: [1, [2]], lambda: [[1], 2], lambda: [True],
    lambda: [1.0], lambda: [float("nan")], lambda: [-1], lambda: [10**30], lambda: ["a", 1], lambda: [b"a"],
    lambda: {"a", 1}, lambda: [Ellipsis], lambda: [1] * 100_000, lambda: ["a"] * 50, lambda: [{}] * 3,
    lambda: nested(10_000), lambda: nested(10_000, tuple), lambda: nested(10_000, dict), loop_list,
    loop_dict, wide, lambda: [wide()], lambda: collections.deque([1]), lambda: array.array("i", [1]),
    lambda: collections.defaultdict(list), lambda: collections.OrderedDict(temperature="x"), Shouting,
    lambda: collections.Counter("abc"), lambda: types.MappingProxyType({"temperature": 0}),
    lambda: collections.ChainMap({"n": 0}), lambda: collections.UserDict(n=1), lambda: Pair(1, 2),
    lambda: collections.UserList([1]), lambda: collections.UserString("a"), lambda: {1: {2: {3: loop_list()}}},
    lambda: {"a" * 100_000: 1}, lambda: {"temperature": nested(5_000)}, lambda: [Colour.RED],
]  # fmt: skip
_ODDITIES: list[Maker] = [
    object, lambda: object, lambda: int, lambda: type, lambda: (lambda: None), lambda: (lambda a, b: a),
    lambda: (i for i in range(200_000)), lambda: iter([1]), lambda: map(str, [1]), lambda: zip([1], [2]),
    lambda: range(0), lambda: range(5), lambda: range(10**12), lambda: range(10**5000), lambda: slice(1),
    lambda: Ellipsis, lambda: NotImplemented, lambda: sys, lambda: re.compile("a"), lambda: io.StringIO("a"),
    lambda: functools.partial(int), lambda: print, lambda: Exception("e"), lambda: pathlib.Path("x"),
    lambda: uuid.UUID(int=1), lambda: decimal.Decimal("NaN"), lambda: decimal.Decimal(1),
    lambda: fractions.Fraction(1, 3), lambda: datetime.datetime(2020, 1, 1), lambda: datetime.timedelta(1),
    lambda: Colour.RED, lambda: Colour, lambda: Number.ONE, lambda: Number.MANY, lambda: Word.A, Record,
    lambda: Record(temperature=nested(3_000)), Slotted, lambda: types.SimpleNamespace(temperature=0),
    lambda: types.SimpleNamespace(**{"a b": 1}), Endless, Selfish, LongRow, lambda: b"", lambda: b"\xff" * 9,
    lambda: bytearray(b"abc"), lambda: memoryview(b"abc"), lambda: 1j, lambda: HUGE.encode(),
]  # fmt: skip
NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 65_537, 2**31 - 1, 2**31, 2**32, -(2**31) - 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30,
    10**5000, -(10**5000), 0.0, -0.0, 0.5, 1.5, 5e-324, 1e-300, 1e300, 1e308, float("nan"), float("inf"),
    float("-inf"), True, False, None,
]  # fmt: skip


# ── arrays and tensors ────────────────────────────────────────────────────────────────────────

_DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
]
_DTYPES += ["complex128", "object", "S3", "U3", "M8[s]", "m8[s]", ">i4", "V5", "i4,f8"]
_SHAPES = [(), (0,), (1,), (3,), (0, 0), (2, 3), (3, 0), (1, 2, 3), (2, 0, 2)]


def some_array(rng: random.Random) -> Any:
    dtype, shape = np.dtype(rng.choice(_DTYPES)), rng.choice(_SHAPES)
    kind = rng.randrange(8)
    if kind == 0:
        return np.broadcast_to(np.zeros((), dtype), (2**40, 2)[: rng.randint(1, 2)])
    if kind == 1:
        size = max(1, int(np.prod(shape)))
        return np.ma.array(np.full(size, 10**6), mask=[rng.random() < 0.7 for _ in range(size)])
    if kind == 2:
        return np.matrix([[1, 2], [3, 4]])
    if kind == 3:
        return rng.choice(
            [np.float32("nan"), np.int64(-5), np.bool_(True), np.str_("a"), np.datetime64("NaT")]
        )
    made = np.zeros(shape, dtype)
    return made[::-1] if made.ndim and kind == 4 else made


_TENSORS: list[Maker] = [
    lambda: torch.empty(3, device="meta"), lambda: torch.empty(3, device="meta", dtype=torch.int64),
    lambda: torch.empty(0), lambda: torch.tensor(1), lambda: torch.tensor(True), lambda: torch.tensor(0.5),
    lambda: torch.zeros(3, dtype=torch.complex64), lambda: torch.zeros(3, requires_grad=True),
    lambda: torch.zeros(2, 3, dtype=torch.int64), lambda: torch.zeros(3, dtype=torch.bfloat16),
    lambda: torch.zeros(1).expand(2**40), lambda: torch.zeros(1, dtype=torch.int32).expand(2, 2**40),
    lambda: torch.eye(3).to_sparse(), lambda: torch.zeros(2, 2, 2), lambda: torch.tensor(float("nan")),
    lambda: torch.zeros(3, dtype=torch.bool), lambda: torch.tensor([1, 2]), lambda: torch.tensor([10**9]),
    lambda: torch.nn.Parameter(torch.zeros(2)), lambda: torch.zeros(2, dtype=torch.float8_e4m3fn),
    lambda: torch.float32, lambda: torch.device("cpu"), lambda: torch.Size([1, 2]),
    lambda: torch.tensor(1, device="meta"), lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8),
]  # fmt: skip


def value(rng: random.Random) -> Any:
    """Any of all these."""
    kind = rng.randrange(16)
    if kind < 4:
        return trap(rng)
    if kind < 6:
        return some_array(rng)
    if kind < 8:
        return rng.choice(_CONTAINERS)()
    if kind < 10:
        return rng.choice(_ODDITIES)()
    if kind < 12:
        return rng.choice(NUMBERS)
    if kind == 12:
        return rng.choice(_TENSORS)()
    if kind == 13:  # something hostile inside something usual
        inner = value(rng)
        return rng.choice(
            [lambda: [inner], lambda: {"a": inner}, lambda: (inner, inner), lambda: [1, inner]]
        )()
    if rng.random() < 0.02:
        return rng.choice([LONG, HUGE, COMBINING])
    return rng.choice(TEXTS)


# ── what must not change ──────────────────────────────────────────────────────────────────────


def print_of(thing: Any, depth: int = 5) -> Any:
    """Something that differs when a container, array or tensor was changed; looks at exact types only."""
    kind = type(thing)
    if depth and kind in (list, tuple):
        return id(thing), len(thing), [print_of(item, depth - 1) for item in thing[:20]]
    if depth and kind is dict:
        pairs = list(thing.items())[:20]
        return id(thing), len(thing), [(id(key), print_of(item, depth - 1)) for key, item in pairs]
    if kind in (set, collections.deque, collections.OrderedDict, collections.defaultdict):
        return id(thing), len(thing)
    if kind is np.ndarray and thing.size < 100:
        return id(thing), thing.shape, thing.tobytes() if thing.dtype != object else None
    if kind is torch.Tensor:
        return id(thing), thing.shape, thing._version, thing.requires_grad
    return id(thing)
